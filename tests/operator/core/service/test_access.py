"""What a new pod is told about the callers of its admin port and of its serving port."""

from dataclasses import replace

import pytest

from slipway_api.inference_service import DirectAccess
from slipway_operator.core.actions import CreatePod
from slipway_operator.core.observed import Observed
from slipway_operator.core.service.plan import plan
from slipway_operator.core.service.replicas.access import port_access, with_recorded_access
from slipway_operator.core.service.rollout.revision import load_revisions, resolve
from tests.builders import IMAGE, T0, a_service, seen, stored
from tests.operator.core.simulated_cluster import SimulatedCluster

CLOSED = {"routing": {"directAccess": "GatewayOnly"}}


def created(observed: Observed) -> dict:
    """The manifest of the pod that the second pass creates, once status says what it is about to do."""
    first = plan(observed, T0)
    assert first.status is not None
    told = observed.service.model_copy(update={"status": first.status})
    (action,) = [one for one in plan(replace(observed, service=told), T0).actions if isinstance(one, CreatePod)]
    return action.manifest


@pytest.mark.capability("SE-2")
def test_the_digest_in_the_pod_is_that_of_its_own_nonce():
    pod = created(seen(a_service(replicas=1)))

    nonce = pod["metadata"]["annotations"]["slipway.dev/admin-nonce"]
    env = {one["name"]: one.get("value") for one in pod["spec"]["containers"][0]["env"]}
    name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
    assert len(nonce) == 32
    assert env["SLIPWAY_ADMIN_TOKEN_SHA256"] == f"digest-of-{namespace}/{name}/{nonce}"


def test_a_pod_that_is_made_again_under_its_name_gets_another_nonce():
    """Security finding: the admin token was bound to the pod's name only."""
    observed = seen(a_service(replicas=1))

    def nonce(pod: str, seed: bytes) -> str:
        return port_access(replace(observed, nonce_seed=seed), observed.service, pod).nonce

    assert nonce("chat-abcde-0-0", b"one pass") == nonce("chat-abcde-0-0", b"one pass")
    assert nonce("chat-abcde-0-0", b"one pass") != nonce("chat-abcde-0-0", b"another pass")
    assert nonce("chat-abcde-0-0", b"one pass") != nonce("chat-abcde-1-0", b"one pass")


@pytest.mark.capability("SE-11")
def test_a_replica_of_an_open_service_requires_no_token_and_recognises_its_gateway():
    """review/shipping.md 1: any pod could set tenant and priority; a flag would end runtimes that do not know it."""
    pod = created(seen(a_service(replicas=1)))
    env = {one["name"]: one.get("value") for one in pod["spec"]["containers"][0]["env"]}

    assert "--serving-token-sha256" not in pod["spec"]["containers"][0]["args"]
    assert env["SLIPWAY_GATEWAY_TOKEN_SHA256"] == "digest-of-demo/chat"
    assert pod["metadata"]["annotations"]["slipway.dev/serving-token-sha256"] == "digest-of-demo/chat"


NEW, GATEWAY_ONLY, OPEN = "", DirectAccess.GATEWAY_ONLY, DirectAccess.OPEN


@pytest.mark.capability("SE-11")
@pytest.mark.parametrize(
    ("spec", "recorded", "has_served", "default", "expected"),
    [
        (None, NEW, False, GATEWAY_ONLY, GATEWAY_ONLY),
        (None, NEW, False, OPEN, OPEN),
        (None, NEW, True, GATEWAY_ONLY, OPEN),
        (None, "Open", True, GATEWAY_ONLY, OPEN),
        (None, "GatewayOnly", True, OPEN, GATEWAY_ONLY),
        ("Open", "GatewayOnly", True, GATEWAY_ONLY, OPEN),
        ("GatewayOnly", "Open", True, OPEN, GATEWAY_ONLY),
    ],
    ids=["new, tenants", "new, no tenants", "from before", "tenants came", "tenants went", "opened", "closed"],
)
def test_the_default_of_the_installation_is_for_new_services_and_is_recorded(
    spec, recorded, has_served, default, expected
):
    """review/shipping.md 1"""
    status = {"directAccess": recorded, "currentRevision": "r1" if has_served else ""}
    service = a_service(status=status, **({"routing": {"directAccess": spec}} if spec else {}))

    filled = with_recorded_access(service, default)

    assert filled.direct_access is expected
    assert plan(seen(filled), T0).status.direct_access == expected


@pytest.mark.capability("SE-11")
@pytest.mark.parametrize("default", [OPEN, GATEWAY_ONLY])
@pytest.mark.parametrize("access", [OPEN, GATEWAY_ONLY])
def test_an_open_service_beside_tenants_is_visible_in_a_condition_and_one_event(access, default):
    """review/shipping.md 1"""
    observed = seen(a_service(routing={"directAccess": access}))
    observed = replace(observed, defaults=replace(observed.defaults, direct_access=default))
    first = plan(observed, T0)
    found = [one for one in first.status.conditions if one.type == "GatewayOnly"]
    events = [one for one in first.events if "without an API key" in one.message]
    told = observed.service.model_copy(update={"status": first.status})
    again = [one for one in plan(replace(observed, service=told), T0).events if "without an API key" in one.message]

    is_visible = access is OPEN and default is GATEWAY_ONLY
    assert [(one.status, one.reason) for one in found] == [("False", "OpenToDirectCallers")] * is_visible
    assert (len(events), len(again)) == (is_visible, 0)


def test_a_closed_service_tells_its_replicas_and_the_gateway_of_every_valid_token():
    service = a_service(replicas=1, **CLOSED)
    observed = replace(seen(service), serving_digests=lambda namespace, name: (f"new-{name}", f"old-{name}"))

    pod = created(observed)

    args = pod["spec"]["containers"][0]["args"]
    assert args[-4:] == ["--serving-token-sha256", "new-chat", "--serving-token-sha256", "old-chat"]
    assert pod["metadata"]["annotations"]["slipway.dev/serving-token-sha256"] == "new-chat,old-chat"


def test_closing_a_service_is_a_new_revision_and_saying_open_is_none():
    """A running replica keeps its flags, so it has to be replaced."""
    plain = resolve(a_service(), IMAGE).hash

    assert resolve(a_service(**CLOSED), IMAGE).hash != plain
    assert resolve(a_service(routing={"directAccess": "Open"}), IMAGE).hash == plain
    assert resolve(a_service(routing={}), IMAGE).hash == plain


def test_status_names_the_way_past_the_gateway_only_where_there_is_one():
    def addresses(service):
        status = plan(seen(service), T0).status
        return [address.name for address in status.addresses]

    assert addresses(a_service()) == ["gateway", "service"]
    assert addresses(a_service(**CLOSED)) == ["gateway"]


def test_a_replica_of_a_stored_revision_is_built_as_closed_as_that_revision_was():
    """Opening a service does not open the replacements of replicas that the rollout has not reached yet."""
    (closed,) = load_revisions(a_service(), [stored(a_service(**CLOSED))]).readable
    observed = seen(a_service())

    assert port_access(observed, closed.apply_to(observed.service), "p").serving_digests
    assert port_access(observed, observed.service, "p").serving_digests == ()


@pytest.mark.capability("RG-4")
@pytest.mark.parametrize("strategy", ["LeastLoad", "RoundRobin"])
def test_another_routing_strategy_is_no_new_revision(strategy):
    plain = resolve(a_service(), IMAGE).hash

    assert resolve(a_service(routing={"strategy": strategy}), IMAGE).hash == plain
    assert resolve(a_service(routing={"strategy": strategy, "directAccess": "GatewayOnly"}), IMAGE).hash != plain


@pytest.mark.capability("RD-12", "SE-11")
@pytest.mark.parametrize(
    ("access", "accepted", "is_replaced"),
    [
        ("GatewayOnly", ("digest-of-a-lost-key",), True),
        ("GatewayOnly", ("digest-of-a-lost-key", "digest-of-demo/chat"), False),  # made during a rotation
        ("GatewayOnly", (), False),  # its annotation was removed: nothing is known of it
        ("Open", ("digest-of-a-lost-key",), False),  # it needs no token
    ],
)
def test_a_replica_that_no_gateway_key_opens_is_replaced_before_a_new_gateway_meets_it(access, accepted, is_replaced):
    """ADR 172, seen in `make chaos`: a replaced key, then restarted gateways, and 401 for every request."""
    world = SimulatedCluster(a_service(replicas=1, routing={"directAccess": access}), nodes=2, gpus=8, load_seconds=10)
    world.reconcile()
    world.run(30)
    (old,) = world.ready
    old.replica = replace(old.replica, serving_digests=accepted)
    world.faults += 1
    serving = []
    for _ in range(60):
        world.run(1)
        serving.append(len(world.ready))

    (now,) = world.ready
    assert (now.replica.name != old.replica.name) is is_replaced
    assert min(serving) == 1, "the replacement comes first"
