"""What a new pod is told about the callers of its admin port and of its serving port."""

from dataclasses import replace

import pytest

from slipway_operator.core.actions import CreatePod
from slipway_operator.core.observed import Observed
from slipway_operator.core.service.plan import plan
from slipway_operator.core.service.replicas.access import port_access
from slipway_operator.core.service.rollout.revision import load_revisions, resolve
from tests.builders import IMAGE, T0, a_service, seen, stored

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


def test_an_open_service_tells_its_replicas_of_no_serving_token():
    pod = created(seen(a_service(replicas=1)))

    assert "slipway.dev/serving-token-sha256" not in pod["metadata"]["annotations"]
    assert "--serving-token-sha256" not in pod["spec"]["containers"][0]["args"]


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
    (closed,) = load_revisions(a_service(), [stored(a_service(**CLOSED))])
    observed = seen(a_service())

    assert port_access(observed, closed.apply_to(observed.service), "p").serving_digests
    assert port_access(observed, observed.service, "p").serving_digests == ()


@pytest.mark.capability("RG-4")
@pytest.mark.parametrize("strategy", ["LeastLoad", "RoundRobin"])
def test_another_routing_strategy_is_no_new_revision(strategy):
    plain = resolve(a_service(), IMAGE).hash

    assert resolve(a_service(routing={"strategy": strategy}), IMAGE).hash == plain
    assert resolve(a_service(routing={"strategy": strategy, "directAccess": "GatewayOnly"}), IMAGE).hash != plain
