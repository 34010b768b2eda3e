"""Names belong to their namespace: laws over random fleets, tenants and patterns, for the gateway and the operator."""

from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipway_api.model_names import AdapterNames, ModelNames, ObjectKind, ServiceNames
from slipway_api.names import GROUP, VERSION
from slipway_gateway.picker.endpoints import Adapter, Endpoint, Route, Service
from slipway_gateway.resolve import MayUse, RoutingTable
from slipway_gateway.tenants import Tenant
from slipway_operator.controller.kinds import Key
from slipway_operator.controller.store import ObjectStore
from slipway_operator.inputs.adapter_index import AdapterIndex
from slipway_operator.inputs.inference_services import served_name

pytestmark = pytest.mark.capability("SE-8")

JANUARY = datetime(2026, 1, 1, tzinfo=UTC)
NAMESPACES = ("team-a", "team-b", "qwen")
NAMES = ("base", "legal", "chat")
TEXTS = (
    *NAMES, *(f"{namespace}/{name}" for namespace in NAMESPACES for name in NAMES),
    "Qwen/base", "Qwen/Qwen2.5-7B", "team-z/base", "team-a/base/x",
)  # fmt: skip
PATTERNS = ("*", "team-a/*", "team-b/*", "*/chat", "team-a/legal", "qwen/*", "Qwen/*", "chat", "leg*", "team-a/base")

keys = st.builds("{}/{}".format, st.sampled_from(NAMESPACES), st.sampled_from(NAMES))
texts = st.sampled_from(TEXTS)
moments = st.integers(0, 3).map(lambda days: JANUARY + timedelta(days=days))
callers = st.lists(st.sampled_from(PATTERNS), max_size=4).map(lambda some: Tenant(name="t", models=tuple(some)))


@st.composite
def services(draw: st.DrawFn) -> dict[str, Service]:
    """Services whose served names may be anybody's."""
    found = {}
    for key in draw(st.lists(keys, unique=True, max_size=6)):
        found[key] = Service(key, draw(st.one_of(st.just(key.partition("/")[2]), texts)), created=draw(moments))
    return found


@st.composite
def adapters(draw: st.DrawFn, bases: dict[str, Service]) -> dict[str, Adapter]:
    found = {}
    for key in draw(st.lists(keys, unique=True, max_size=4)):
        base = f"{key.partition('/')[0]}/{draw(st.sampled_from(NAMES))}"
        alias = draw(st.sampled_from(("", *NAMES)))
        found[key] = Adapter(key, draw(st.sampled_from(NAMES)), base, alias, created=draw(moments))
    return found


@st.composite
def lives(draw: st.DrawFn) -> tuple[RoutingTable, set[str]]:
    """A table after a life: objects came, and some are gone again; and every namespace that ever had an object."""
    table, known = RoutingTable(), set()
    made = draw(services())
    tuned = draw(adapters(made))
    steps = [*made.values(), *tuned.values()]
    for step in draw(st.permutations(steps)):
        known.add(step.key.partition("/")[0])
        table.set_service(step.key, step) if isinstance(step, Service) else table.set_adapter(step.key, step)
        if isinstance(step, Service) and draw(st.booleans()):
            known.add(step.key.partition("/")[0])
            name = draw(st.sampled_from(("", *TEXTS)))
            table.set_endpoint(f"{step.key}-0", Endpoint(f"{step.key}-0", step.key, "r1", "http://x", served_name=name))
    for gone in draw(st.lists(st.sampled_from(steps), max_size=4)) if steps else []:
        table.set_service(gone.key, None) if isinstance(gone, Service) else table.set_adapter(gone.key, None)
    return table, known


def object_of(route: Route) -> str:
    return route.adapter.key if route.adapter is not None else route.service.key


def may_reach(tenant: Tenant, model: str, route: Route) -> bool:
    """The tenant's patterns, read from the documentation: with a slash of the object, else of a name without one."""
    objects = {route.service.key} | (set(route.adapter.names[1:]) if route.adapter is not None else set())
    return any(
        pattern == "*"
        or ("/" in pattern and any(fnmatchcase(one, pattern) for one in objects))
        or ("/" not in pattern and "/" not in model and fnmatchcase(model, pattern))
        for pattern in tenant.models
    )


@settings(max_examples=300, deadline=None)
@given(lives(), callers, texts)
def test_a_name_with_a_namespace_is_answered_by_that_namespace_alone(life, tenant, model):
    """review/control-plane.md 1: another team's served name, alias or adapter captured it, also while it was absent."""
    table, known = life
    for may_use in (tenant.may_use, Tenant(models=("*",)).may_use):
        route = table.resolve(model, may_use=may_use)
        if route is None:
            continue
        asked = model.partition("/")[0] if "/" in model else ""
        assert asked not in known or object_of(route).partition("/")[0] == asked
        assert may_reach(may_use.__self__, model, route)


@settings(max_examples=200, deadline=None)
@given(lives(), callers)
def test_what_a_caller_is_listed_is_what_it_gets_and_nothing_that_it_may_use_by_its_full_name_is_missing(life, tenant):
    table, _ = life
    for name, route in (*table.served_models(tenant.may_use), *table.served_adapters(tenant.may_use)):
        assert table.resolve(name, may_use=tenant.may_use) is route
    listed = {route.service.key for _, route in table.served_models(tenant.may_use)}
    assert {key for key in table.services if tenant.may_use(key, key)} <= listed


@settings(max_examples=200, deadline=None)
@given(lives(), callers, texts)
def test_the_answer_follows_from_the_objects_not_from_the_order_in_which_they_came(life, tenant, model):
    """Every answer comes from a cache that changes invalidate: a table that is built anew says the same."""
    table, known = life
    anew = RoutingTable()
    anew.know_namespaces(known)
    for adapter in table.adapters.values():
        anew.set_adapter(adapter.key, adapter)
    for endpoint in table.endpoints.values():
        anew.set_endpoint(endpoint.name, endpoint)
    for service in table.services.values():
        table.resolve(model, may_use=tenant.may_use)
        anew.set_service(service.key, service)
        anew.resolve(model, may_use=tenant.may_use)

    one, other = (each.resolve(model, may_use=tenant.may_use) for each in (table, anew))
    assert (one and object_of(one)) == (other and object_of(other))


def stored(kind: str, key: str, created: datetime, spec: dict) -> dict:
    namespace, _, name = key.partition("/")
    metadata = {"namespace": namespace, "name": name, "uid": key, "resourceVersion": "1"}
    metadata["creationTimestamp"] = created.strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": kind, "metadata": metadata, "spec": spec}


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_operator_reports_a_conflict_exactly_if_the_gateway_does_not_serve_the_service_under_its_name(data):
    made = data.draw(services())
    tuned = data.draw(adapters(made))
    table, names, index = RoutingTable(), ModelNames(), AdapterIndex()
    services_seen = ObjectStore("InferenceService", lambda *_: None)
    adapters_seen = ObjectStore("LoRAAdapter", lambda *_: None)
    for key, adapter in tuned.items():
        table.set_adapter(key, adapter)
        spec = {"baseRef": {"name": adapter.service.partition("/")[2]}, "adapterName": adapter.name}
        spec |= {"alias": {"name": adapter.alias}, "source": {"uri": "file:///x"}}
        adapters_seen.put(stored("LoRAAdapter", key, adapter.created, spec))
        place = Key("LoRAAdapter", *key.split("/"))
        index.saw(place, adapters_seen.get(place))
        names.set_adapter(key, index.names(place))
    for key, service in made.items():
        table.set_service(key, service)
        services_seen.put(
            stored("InferenceService", key, service.created, {"model": {"servedName": service.served_name}})
        )
        one = services_seen.get(Key("InferenceService", *key.split("/")))
        names.set_service(key, ServiceNames(served_name(one), one.created_at))

    for key, service in made.items():
        route = table.resolve(service.served_name)
        is_served = route is not None and route.adapter is None and route.service.key == key
        assert (names.conflict_of_service(key) is None) == is_served
    for key, adapter in tuned.items():
        if adapter.service in made and names.conflict_of_adapter(key) is None:
            own = Tenant(models=(f"{adapter.namespace}/*",)).may_use
            assert object_of(table.resolve(adapter.name, may_use=own)) == key


def test_a_full_name_stays_with_its_namespace_while_its_object_is_created_again():
    """review/control-plane.md 1, as it was seen: an adapter of team-a, and a service of team-b with its name."""
    table = RoutingTable()
    table.set_service("team-a/base", Service("team-a/base", "base", created=JANUARY))
    table.set_adapter("team-a/legal", Adapter("team-a/legal", "legal", "team-a/base", created=JANUARY))
    thief = Service("team-b/x", "team-a/legal", created=JANUARY - timedelta(days=1))
    table.set_service("team-b/x", thief)
    own = Tenant(models=("team-a/*",)).may_use

    assert table.resolve("team-a/legal", may_use=own) is table.adapter_route("team-a/legal")
    table.set_adapter("team-a/legal", None)
    table.set_service("team-a/base", None)
    for may_use in (own, Tenant(models=("*",)).may_use):
        assert table.resolve("team-a/legal", may_use=may_use) is None
        assert "team-a/legal" not in [name for name, _ in table.served_models(may_use)]


def test_a_name_of_hugging_face_is_served_until_its_first_part_is_a_namespace_of_ours():
    table = RoutingTable()
    table.set_service("models/q", Service("models/q", "Qwen/Qwen2.5-7B"))
    table.set_service("models/m", Service("models/m", "mistralai/Mistral-7B"))

    assert table.resolve("Qwen/Qwen2.5-7B").service.key == "models/q"
    assert table.resolve("mistralai/Mistral-7B").service.key == "models/m"
    table.know_namespaces(["mistralai"])
    assert table.resolve("mistralai/Mistral-7B") is None
    assert table.resolve("models/m").service.key == "models/m"
    assert table.resolve("Qwen/Qwen2.5-7B").service.key == "models/q"


class Counted:
    """A tenant of one team that counts how often its patterns are asked."""

    def __init__(self, team: str) -> None:
        self.asked = 0
        self._tenant = Tenant(models=(f"{team}/*",))

    def may_use(self, model: str, full_name: str) -> bool:
        self.asked += 1
        return self._tenant.may_use(model, full_name)


def steps_of(number: int) -> tuple[int, int]:
    """How often patterns are asked for one more lookup and one more list among so many services of one name."""
    table = RoutingTable()
    for index in range(number):
        table.set_service(f"t{index}/chat", Service(f"t{index}/chat", "chat", created=JANUARY + timedelta(index)))
    caller = Counted(f"t{number - 1}")
    may_use: MayUse = caller.may_use
    assert table.resolve("chat", may_use=may_use).service.key == f"t{number - 1}/chat"
    assert [name for name, _ in table.served_models(may_use)] == ["chat"]
    caller.asked = 0
    table.set_service("other/x", Service("other/x", "x"))  # a change of another name
    table.set_endpoint("p", Endpoint("p", "t0/chat", "r1", "http://x"))
    table.resolve("chat", may_use=may_use)
    lookup, caller.asked = caller.asked, 0
    table.served_models(may_use)
    return lookup, caller.asked


def test_a_lookup_costs_the_same_with_ten_and_with_two_thousand_services_of_one_name():
    """review/control-plane.md 9: it was linear, and a list of models quadratic, on the event loop."""
    few, many = steps_of(10), steps_of(2000)

    assert few[0] == many[0] == 0
    assert few[1] == many[1] <= 4, "of the list, only the new service is asked about"


def test_the_first_list_of_a_caller_asks_about_each_service_a_few_times_only():
    """review/control-plane.md 9: 400 services of one name cost 3.8 s."""
    table = RoutingTable()
    for index in range(2000):
        table.set_service(f"t{index}/chat", Service(f"t{index}/chat", "chat"))
    caller = Counted("t7")
    table.served_models(caller.may_use)

    assert caller.asked <= 2 * 2000


def test_an_object_is_woken_only_if_the_holder_of_its_name_changes():
    names = ModelNames()

    def service(key: str, day: int, name: str = "chat") -> set[tuple[ObjectKind, str]]:
        return names.set_service(key, ServiceNames(name, JANUARY + timedelta(day)))

    kind = ObjectKind.SERVICE
    assert service("a/one", 2) == set()
    assert service("b/two", 1) == {(kind, "a/one")}
    assert service("c/three", 3) == set()
    assert names.set_service("b/two", None) == {(kind, "a/one"), (kind, "c/three")}
    assert service("c/three", 3, "d/x") == set()
    assert names.set_adapter("d/tune", AdapterNames("tune", "d/base")) == {(kind, "c/three")}, "d is a namespace now"
    assert names.conflict_of_service("c/three").namespace == "d"
