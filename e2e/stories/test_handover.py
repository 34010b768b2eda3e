"""Fifty live streams outlive their replica: it is killed, hangs, drains past its deadline, or its node is cut off."""

import json
import signal
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from e2e import checks
from e2e.chaos.stage import ENGINE
from e2e.cluster.launch import Cluster
from e2e.live_streams import Streams, disturbances
from e2e.manifests import as_yaml, deterministic
from e2e.slipway import RELEASE_NAMESPACE, USER_NAMESPACE, Slipway, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

NAME = "sturdy"
COUNT = 50
TOKENS = 300  # long enough to continue for seconds after a disturbance, which takes one or two
DRAIN = {"timeoutSeconds": 1, "endpointPropagationSeconds": 0}  # much shorter than the streams
GATEWAYS = "app.kubernetes.io/component=gateway"


def streams(slipway: Slipway) -> Streams:
    """Fifty streams of the service."""
    return Streams(slipway.base_url, NAME, COUNT, TOKENS)


def handed_over(slipway: Slipway) -> Counter[str]:
    """Number of handed-over streams by reason, in the logs of the gateways."""
    lines = [line for line in slipway.logs(GATEWAYS).splitlines() if '"stream handed over"' in line]
    return Counter(json.loads(line)["reason"] for line in lines)


def assert_none_is_broken(slipway: Slipway, disturb: Callable[[], object], reasons: set[str]) -> None:
    """Fifty streams say what they say undisturbed, and at least a quarter of them was handed over for these reasons."""
    undisturbed = streams(slipway).read()
    assert [stream.error for stream in undisturbed if stream.error] == []
    before = handed_over(slipway)
    disturbed = streams(slipway).read(disturb, run="disturbed")

    assert disturbances(disturbed, undisturbed) == []
    moved = handed_over(slipway) - before
    assert moved.keys() <= reasons
    assert COUNT // 4 <= moved.total() <= COUNT, "both replicas had live streams, each of which moved once at most"


@pytest.mark.capability("RD-4", "API-19", "RD-1", "RD-2", "RD-9", "PF-11")
def test_fifty_streams_of_a_killed_a_hung_and_a_drained_replica_are_the_undisturbed_ones(
    clean: Slipway, cluster: Cluster
) -> None:
    """Chaos C10: streams of a killed replica ended with an error event."""
    clean.apply(as_yaml(deterministic(NAME, 2, drain=DRAIN)))
    clean.wait_ready(NAME, replicas=2)

    def first() -> str:
        return str(checks.ready_pods(clean, NAME)[0].metadata.name)

    def kill() -> None:
        assert cluster.kill_container(USER_NAMESPACE, first())

    def hang() -> None:
        assert cluster.kill_container(USER_NAMESPACE, first(), how=signal.SIGSTOP, only=ENGINE)

    def drain() -> None:
        clean.core.delete_namespaced_pod(first(), USER_NAMESPACE)

    for disturb, reason in ((kill, "lost"), (hang, "hung"), (drain, "drained")):
        before = servers(clean)
        hanging = first()
        assert_none_is_broken(clean, disturb, {reason})
        if disturb is hang:
            cluster.kill_container(USER_NAMESPACE, hanging)
        wait_for(
            "two replicas are ready, one of them new",
            lambda before=before: len(servers(clean)) == 2 and servers(clean) != before,  # type: ignore[misc]
            timeout=120,
        )
        clean.wait_ready(NAME, replicas=2)


def servers(slipway: Slipway) -> set[tuple[str, int]]:
    """The ready replicas: a pod, and how often its server was restarted."""
    ready = checks.ready_pods(slipway, NAME)
    return {(pod.metadata.uid, sum(one.restart_count for one in pod.status.container_statuses)) for pod in ready}


@pytest.fixture
def gateways_on_node_a(clean: Slipway, breakable: Cluster) -> Iterator[None]:
    """Both gateways are on node-a: a client's own connection through a node that is cut off is lost with any server."""
    move_gateways_from(clean, "node-b")
    yield
    checks.mend(breakable, clean)
    move_gateways_from(clean, "node-a", at_most=1)


@pytest.mark.full
@pytest.mark.capability("RD-4", "RD-10", "API-19")
@pytest.mark.usefixtures("gateways_on_node_a")
def test_fifty_streams_of_a_replica_whose_node_is_cut_off_are_the_undisturbed_ones(
    clean: Slipway, breakable: Cluster
) -> None:
    clean.apply(as_yaml(deterministic(NAME, 2, drain=DRAIN)))
    clean.wait_ready(NAME, replicas=2)
    assert sorted(checks.nodes_of(clean, NAME).values()) == ["node-a", "node-b"]

    # Nothing comes from it any more: the gateway takes that for a hang, or TCP for a loss, whichever is noticed first.
    assert_none_is_broken(clean, lambda: breakable.cut_node("node-b"), {"hung", "lost"})


def move_gateways_from(slipway: Slipway, node: str, at_most: int = 2) -> None:
    """Delete gateways of a node while it takes no new pods; return when others are up elsewhere."""
    pods = slipway.core.list_namespaced_pod(RELEASE_NAMESPACE, label_selector=GATEWAYS).items
    slipway.access.kubectl("cordon", node)
    try:
        for pod in [pod for pod in pods if pod.spec.node_name == node][:at_most]:
            slipway.core.delete_namespaced_pod(pod.metadata.name, RELEASE_NAMESPACE, grace_period_seconds=1)
        wait_for("every gateway is up", lambda: checks.deployment_is_up(slipway, "slipway-gateway"), timeout=120)
    finally:
        slipway.access.kubectl("uncordon", node)
