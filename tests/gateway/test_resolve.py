"""Which service a model name means, and that a change costs the same whatever the size of the fleet."""

from datetime import UTC, datetime

import pytest

from slipway_gateway.picker.endpoints import Adapter, Endpoint, Route, Service
from slipway_gateway.resolve import MayUse, RoutingTable
from slipway_gateway.tenants import Tenant

JANUARY = datetime(2026, 1, 1, tzinfo=UTC)
FEBRUARY = datetime(2026, 2, 1, tzinfo=UTC)


def an_endpoint(name: str, service: str = "ns/chat", **facts: str) -> Endpoint:
    return Endpoint(name=name, service=service, revision="r1", url="http://10.0.0.1:8000", **facts)


def a_table(*services: Service, endpoints: tuple[Endpoint, ...] = ()) -> RoutingTable:
    table = RoutingTable()
    for endpoint in endpoints:
        table.set_endpoint(endpoint.name, endpoint)
    for service in services:
        table.set_service(service.key, service)
    return table


def test_on_a_clash_of_names_the_older_service_serves_and_the_other_answers_to_its_full_name():
    younger = Service("a/chat", "chat", created=FEBRUARY)
    older = Service("b/chat", "chat", created=JANUARY)
    table = a_table(younger, older)

    assert table.resolve("chat") == Route(older)
    assert table.resolve("a/chat") == Route(younger)
    assert table.served_models() == [("a/chat", Route(younger)), ("chat", Route(older))]


def allowed(*patterns: str) -> MayUse:
    """What a tenant with these patterns may use."""
    return Tenant(name="t", models=patterns).may_use


@pytest.mark.capability("RG-12", "MT-1")
def test_a_name_means_the_callers_own_service_and_the_oldest_of_those_that_it_may_use():
    older, younger = Service("a/chat", "chat", created=JANUARY), Service("b/chat", "chat", created=FEBRUARY)
    table = a_table(older, younger)

    assert table.resolve("chat", may_use=allowed("b/*")) == Route(younger)
    assert table.resolve("chat", may_use=allowed("a/*")) == Route(older)
    assert table.resolve("chat", may_use=allowed("a/*", "b/*")) == Route(older)
    assert table.resolve("b/chat", may_use=allowed("a/*", "b/*")) == Route(younger)
    assert table.resolve("a/chat", may_use=allowed("b/*")) is None
    assert table.resolve("chat", may_use=allowed("c/*")) is None
    assert table.served_models(allowed("b/*")) == [("chat", Route(younger))]
    assert table.served_models(allowed("*")) == [("b/chat", Route(younger)), ("chat", Route(older))]
    assert table.served_models(allowed("chat")) == [("chat", Route(older))], "a full name is not in its patterns"


@pytest.mark.capability("RG-12", "ML-8", "MT-1")
def test_neither_an_adapter_nor_an_alias_nor_a_former_name_of_another_tenant_takes_a_name():
    services = [Service("a/chat", "base", created=JANUARY), Service("b/chat", "base", created=FEBRUARY)]
    loaded = tuple(
        an_endpoint(f"{service.key}-0", service.key, served_name="was", adapters=frozenset({"legal", "tax"}))
        for service in services
    )
    table = a_table(*services, endpoints=loaded)
    for namespace, created in (("a", JANUARY), ("b", FEBRUARY)):
        for name in ("legal", "tax"):
            key = f"{namespace}/{name}"
            table.set_adapter(key, Adapter(key, name, f"{namespace}/chat", alias=f"any-{name}", created=created))

    for namespace in ("a", "b"):
        own = allowed(f"{namespace}/*")
        assert table.resolve("was", may_use=own) is table.route(f"{namespace}/chat")
        assert table.resolve("legal", may_use=own) is table.adapter_route(f"{namespace}/legal")
        assert table.resolve("any-tax", may_use=own) is table.adapter_route(f"{namespace}/tax")
        assert [name for name, _ in table.served_adapters(own)] == ["legal", "tax"]
    assert table.resolve("a/legal", may_use=allowed("b/*")) is None
    assert [name for name, _ in table.served_adapters()] == ["b/legal", "b/tax", "legal", "tax"]


@pytest.mark.parametrize("reverse", [False, True])
def test_two_services_of_one_second_are_ordered_as_the_operator_orders_them(reverse):
    """Finding 20: by namespace and then by name, not by the joined string, in which "a-b/x" sorts before "a/x"."""
    services = [Service("a/x", "chat", created=JANUARY), Service("a-b/x", "chat", created=JANUARY)]
    table = a_table(*(reversed(services) if reverse else services))

    assert table.resolve("chat") == Route(services[0])


def test_when_the_older_service_goes_the_younger_one_gets_the_name():
    table = a_table(Service("a/chat", "chat", created=FEBRUARY), Service("b/chat", "chat", created=JANUARY))
    table.set_service("b/chat", None)

    assert table.resolve("chat") == table.resolve("a/chat")


def test_a_full_name_cannot_be_taken_by_the_served_name_of_another_service():
    victim = Service("a/chat", "chat", created=FEBRUARY)
    thief = Service("b/fake", "a/chat", created=JANUARY)
    table = a_table(victim, thief)

    assert table.resolve("a/chat") == Route(victim)
    assert table.resolve("b/fake") == Route(thief)
    assert table.served_models() == [("b/fake", Route(thief)), ("chat", Route(victim))]


def test_an_unknown_model_resolves_to_nothing():
    assert a_table(Service("a/chat", "chat")).resolve("") is None
    assert a_table(Service("a/chat", "chat")).resolve("other") is None


def test_a_changed_served_name_leaves_the_old_name_valid_while_a_replica_answers_to_it():
    """Finding 3: both names lead to the service until no replica answers to the old one."""
    table = a_table(
        Service("ns/chat", "new"),
        endpoints=(an_endpoint("p0", served_name="old"), an_endpoint("p1", served_name="new")),
    )

    assert table.resolve("old") is table.resolve("new") is not None
    table.set_endpoint("p0", None)
    assert table.resolve("old") is None
    assert table.resolve("new") is not None


def test_a_former_name_gives_way_to_the_service_that_is_called_so():
    table = a_table(
        Service("ns/chat", "new", created=JANUARY),
        Service("ns/heir", "old", created=FEBRUARY),
        endpoints=(an_endpoint("p0", served_name="old"),),
    )

    assert table.resolve("old") == table.resolve("ns/heir")


def test_a_pod_that_another_object_controls_is_no_endpoint_and_claims_no_name():
    """Security: labels alone would let anyone who may create pods receive the prompts of a service."""
    own = an_endpoint("own", owner_uid="uid-1", served_name="chat")
    table = a_table(
        Service("ns/chat", "chat", uid="uid-1"),
        endpoints=(own, an_endpoint("stranger", owner_uid="uid-2", served_name="bait")),
    )

    assert table.resolve("chat") == Route(Service("ns/chat", "chat", uid="uid-1"), (own,))
    assert table.resolve("bait") is None


def test_pods_of_a_deleted_service_do_not_serve_its_successor():
    table = a_table(Service("ns/chat", "chat", uid="old"), endpoints=(an_endpoint("p0", owner_uid="old"),))
    table.set_service("ns/chat", Service("ns/chat", "chat", uid="new"))

    assert table.resolve("chat") == Route(Service("ns/chat", "chat", uid="new"))


def test_a_change_builds_one_route_and_no_other():
    """Review §3: a status change of one of a thousand services rebuilt the routes of all."""
    table = RoutingTable()
    for number in range(1000):
        key = f"ns/s{number}"
        table.set_service(key, Service(key, f"m{number}"))
        for replica in range(10):
            name = f"ns/s{number}-{replica}"
            table.set_endpoint(name, an_endpoint(name, key))
    assert table.built_routes == 0, "nothing is built before it is asked for"
    for number in range(1000):
        table.resolve(f"m{number}")
    assert table.built_routes == 1000

    table.set_service("ns/s7", Service("ns/s7", "m7", weights={"r1": 100}))
    table.set_endpoint("ns/s8-0", None)
    table.set_endpoint("ns/s8-1", None)
    for number in range(1000):
        table.resolve(f"m{number}")
    assert table.built_routes == 1002


def test_a_change_that_says_nothing_new_builds_nothing():
    table = a_table(Service("ns/chat", "chat"), endpoints=(an_endpoint("p0"),))
    route = table.resolve("chat")

    assert not table.set_service("ns/chat", Service("ns/chat", "chat"))
    assert not table.set_endpoint("p0", an_endpoint("p0"))
    assert table.resolve("chat") is route


CHAT = Service("ns/chat", "chat", created=JANUARY)


def an_adapter(name: str, service: str = "ns/chat", *, created: datetime = JANUARY, **facts) -> Adapter:
    namespace = service.partition("/")[0]
    return Adapter(f"{namespace}/{name}", facts.pop("called", name), service, created=created, **facts)


def with_adapters(table: RoutingTable, *adapters: Adapter) -> RoutingTable:
    for adapter in adapters:
        table.set_adapter(adapter.key, adapter)
    return table


@pytest.mark.capability("ML-8", "RG-12")
def test_an_adapter_is_answered_by_the_replicas_of_its_base_that_have_loaded_it():
    loaded, other = an_endpoint("p0", adapters=frozenset({"a", "b"})), an_endpoint("p1")
    table = with_adapters(a_table(CHAT, endpoints=(loaded, other)), an_adapter("a"))

    assert table.resolve("a").endpoints == table.resolve("ns/a").endpoints == (loaded,)
    assert table.resolve("a").adapter == an_adapter("a")
    assert table.resolve("chat").endpoints == (loaded, other)
    assert [name for name, _ in table.served_adapters()] == ["a"]


@pytest.mark.capability("ML-8")
def test_an_adapter_follows_its_replicas_its_base_and_itself():
    table = with_adapters(a_table(CHAT), an_adapter("a"))
    assert (table.resolve("a").endpoints, table.resolve("a").has_base) == ((), False)
    table.set_endpoint("p0", an_endpoint("p0"))
    assert (table.resolve("a").endpoints, table.resolve("a").has_base) == ((), True)
    table.set_endpoint("p0", an_endpoint("p0", adapters=frozenset({"a"})))
    assert len(table.resolve("a").endpoints) == 1
    table.set_service("ns/chat", None)
    assert table.resolve("a") is None, "without its base nobody answers"
    assert table.served_adapters() == []
    table.set_service("ns/chat", CHAT)
    table.set_adapter("ns/a", an_adapter("a", called="renamed"))
    assert (table.resolve("a"), table.resolve("renamed") is not None) == (None, True)
    table.set_adapter("ns/a", None)
    assert table.resolve("renamed") is None


def test_a_service_keeps_its_name_from_an_adapter_and_the_older_adapter_from_the_younger():
    b = Service("b/chat", "other", created=FEBRUARY)
    table = with_adapters(
        a_table(CHAT, b),
        an_adapter("chat"),
        an_adapter("tune", "ns/chat", created=FEBRUARY),
        an_adapter("tune", "b/chat", created=JANUARY),
    )

    assert table.resolve("chat").adapter is None
    assert table.resolve("tune").service is b
    assert table.resolve("ns/tune").service is CHAT
    assert [name for name, _ in table.served_adapters()] == ["ns/tune", "tune"], "no name leads to the adapter ns/chat"


@pytest.mark.capability("RG-1", "ML-8")
def test_an_alias_divides_requests_between_its_adapters_by_weight():
    endpoint = an_endpoint("p0", adapters=frozenset({"old", "new"}))
    adapters = (
        an_adapter("old", alias="support", alias_weight=90),
        an_adapter("new", alias="support", alias_weight=10),
    )
    table = with_adapters(a_table(CHAT, endpoints=(endpoint,)), *adapters)
    chosen = [table.resolve("support", f"key-{number}").adapter.name for number in range(5000)]

    assert 0.08 < chosen.count("new") / 5000 < 0.12, "five standard deviations around a tenth"
    assert table.resolve("ns/support", "key-7").adapter.name == chosen[7], "one key, one choice"


@pytest.mark.capability("ML-8")
def test_an_adapter_that_no_replica_has_loaded_leaves_its_share_of_the_alias_to_the_others():
    adapters = (an_adapter("old", alias="support"), an_adapter("new", alias="support", alias_weight=1000))
    table = with_adapters(a_table(CHAT, endpoints=(an_endpoint("p0", adapters=frozenset({"old"})),)), *adapters)

    assert {table.resolve("support", str(number)).adapter.name for number in range(100)} == {"old"}
    table.set_endpoint("p0", None)
    assert table.resolve("support", "x").endpoints == (), "known, and not ready"


def test_an_alias_does_not_reach_into_another_namespace():
    b = Service("b/chat", "other", created=FEBRUARY)
    mine = an_adapter("mine", alias="support")
    theirs = an_adapter("theirs", "b/chat", alias="support", created=FEBRUARY)
    table = with_adapters(a_table(CHAT, b), mine, theirs)

    assert {table.resolve("support", str(number)).adapter.name for number in range(100)} == {"mine"}
    assert table.resolve("b/support", "x").adapter.name == "theirs"


@pytest.mark.capability("RG-12")
def test_a_change_of_one_adapter_or_replica_rebuilds_the_routes_of_its_service_only():
    table = a_table(*(Service(f"ns/s{number}", f"s{number}", created=JANUARY) for number in range(300)))
    for number in range(300):
        with_adapters(table, an_adapter(f"a{number}", f"ns/s{number}"))
        table.set_endpoint(f"p{number}", an_endpoint(f"p{number}", f"ns/s{number}", adapters=frozenset({f"a{number}"})))
    for number in range(300):
        table.resolve(f"a{number}")
    built = table.built_routes
    table.set_endpoint("p7", None)
    for number in range(300):
        table.resolve(f"a{number}")
    table.set_adapter("ns/a8", an_adapter("a8", "ns/s8", alias="x"))
    for number in range(300):
        table.resolve(f"a{number}")

    assert table.built_routes - built == 3, "the base and the adapter of p7, and the adapter a8"


@pytest.mark.capability("EV-6")
def test_replicas_that_only_get_copies_get_no_request_even_when_they_are_the_only_ones():
    shadow = Endpoint(name="p1", service="ns/chat", revision="new", url="http://10.0.0.2:8000")
    mirrored = Service("ns/chat", "chat", created=JANUARY, weights={"r1": 100, "new": 0}, mirrors={"new": 10})
    table = a_table(mirrored, endpoints=(an_endpoint("p0"), shadow))

    assert (table.resolve("chat").endpoints, table.resolve("chat").reserved) == ((an_endpoint("p0"),), (shadow,))
    table.set_endpoint("p0", None)
    assert table.resolve("chat").endpoints == ()
    assert table.resolve("chat").revisions == {"r1", "new"}
