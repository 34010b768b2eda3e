"""Nodes lose power or the network, and return; the service keeps its replicas, and no running one is deleted."""

import time
from datetime import UTC, datetime

import pytest

from e2e import checks
from e2e.cluster.launch import Cluster
from e2e.manifests import STAYS_FIVE_MINUTES, as_yaml, static
from e2e.slipway import Slipway, wait_for
from slipway_api import names

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

CUT_SECONDS = 60  # longer than it takes to count a node as lost and to replace its pods


@pytest.mark.capability("OP-7", "RD-1", "RD-10")
def test_the_replicas_of_a_killed_node_are_replaced_and_its_return_makes_no_double(
    clean: Slipway, breakable: Cluster
) -> None:
    clean.apply(as_yaml(static("pair", 2)))
    clean.wait_ready("pair", replicas=2)
    homes = checks.nodes_of(clean, "pair")
    assert sorted(homes.values()) == ["node-a", "node-b"], "replicas are spread over nodes"
    survivors = checks.uids([pod for pod in clean.pods("pair") if pod.spec.node_name == "node-a"])

    breakable.kill_node("node-b")
    wait_for("node-b counts as lost", lambda: not checks.node_is_ready(clean, "node-b"), timeout=90)
    wait_for(
        "both replicas are ready on node-a",
        lambda: [pod.spec.node_name for pod in checks.ready_pods(clean, "pair")] == ["node-a"] * 2,
        timeout=180,
    )
    checks.wait_serving(clean, "pair")
    breakable.start_node("node-b")
    breakable.wait_for_nodes(limit=120)
    clean.wait_ready("pair", replicas=2, timeout=180)

    assert survivors <= checks.uids(checks.ready_pods(clean, "pair")), "the replica on the other node was left alone"
    assert len(set(checks.slots(clean, "pair"))) == len(checks.slots(clean, "pair")) == 2
    assert checks.orphans(clean) == []
    assert checks.first_attempts(clean, "pair", 10) == []


@pytest.mark.full
@pytest.mark.capability("OP-7", "RD-1", "RD-10")
def test_a_node_off_the_network_is_replaced_and_its_return_leaves_the_wanted_replicas(
    clean: Slipway, breakable: Cluster
) -> None:
    clean.apply(as_yaml(static("apart", 2)))
    clean.wait_ready("apart", replicas=2)

    breakable.cut_node("node-b")
    wait_for("node-b counts as lost", lambda: not checks.node_is_ready(clean, "node-b"), timeout=90)
    wait_for(
        "both replicas are ready on node-a",
        lambda: [pod.spec.node_name for pod in checks.ready_pods(clean, "apart")] == ["node-a"] * 2,
        timeout=180,
    )
    checks.wait_serving(clean, "apart")
    served_meanwhile = checks.first_attempts(clean, "apart", 10)
    breakable.cut_node("node-b", cut=False)
    breakable.wait_for_nodes(limit=120)
    clean.wait_ready("apart", replicas=2, timeout=180)

    assert served_meanwhile == []
    assert len(set(checks.slots(clean, "apart"))) == len(checks.slots(clean, "apart")) == 2
    assert checks.orphans(clean) == []
    checks.wait_serving(clean, "apart")


@pytest.mark.full
@pytest.mark.capability("OP-7", "RD-1", "RD-10")
def test_all_nodes_cut_off_for_a_minute_lose_no_replica(clean: Slipway, breakable: Cluster) -> None:
    """Finding 1.5: after a partition of all nodes the original replicas serve on, and no second fleet is made."""
    clean.apply(as_yaml(static("island", 3, template={"spec": {"tolerations": STAYS_FIVE_MINUTES}})))
    clean.wait_ready("island", replicas=3)
    originals = {pod.metadata.uid: restarts(pod) for pod in clean.pods("island")}

    for node in breakable.nodes:
        breakable.cut_node(node)
    wait_for(
        "every node counts as lost",
        lambda: not any(checks.node_is_ready(clean, node) for node in breakable.nodes),
        timeout=90,
    )
    time.sleep(CUT_SECONDS)
    for node in breakable.nodes:
        breakable.cut_node(node, cut=False)
    breakable.wait_for_nodes(limit=120)
    wait_for("the originals are ready again", lambda: len(checks.ready_pods(clean, "island")) >= 3, timeout=120)
    checks.mend(breakable, clean)
    clean.wait_ready("island", replicas=3)

    assert {pod.metadata.uid: restarts(pod) for pod in clean.pods("island")} == originals
    checks.wait_serving(clean, "island")
    created = [event.note for event in clean.events("island") if event.reason == "ReplicaCreated"]
    assert len(created) == 3, created


@pytest.mark.full
@pytest.mark.capability("OP-7", "RD-1", "OP-13")
def test_an_old_revision_that_loses_a_node_is_rebuilt_while_the_new_one_is_broken(
    clean: Slipway, breakable: Cluster
) -> None:
    """Finding 1.2: replicas of the revision that serves are replaced although the spec names another one."""
    clean.apply(as_yaml(static("keeps", 2)))
    before = clean.wait_ready("keeps", replicas=2)["status"]["currentRevision"]
    clean.apply(as_yaml(static("keeps", 2) | {"spec": broken_spec()}))
    wait_for("the new image cannot be pulled", lambda: has_pull_error(clean, "keeps"), timeout=120)

    breakable.kill_node("node-b")

    def rebuilt() -> bool:
        ready = checks.ready_pods(clean, "keeps")
        return [(pod.metadata.labels["slipway.dev/revision"], pod.spec.node_name) for pod in ready] == [
            (before, "node-a")
        ] * 2

    wait_for("two replicas of the old revision are ready on node-a", rebuilt, timeout=180)
    checks.wait_serving(clean, "keeps")

    breakable.start_node("node-b")
    clean.apply(as_yaml(static("keeps", 2)))
    service = clean.wait_ready("keeps", replicas=2, timeout=180)
    assert service["status"]["currentRevision"] == before
    assert checks.double_slots(clean, "keeps") == []


@pytest.mark.capability("PL-1", "PL-2", "RD-5", "PL-10")
def test_one_replica_survives_kubectl_drain_and_a_suspension_and_a_restart_keep_their_word(
    clean: Slipway, breakable: Cluster
) -> None:
    """`kubectl drain` cordons and evicts: the PodDisruptionBudget answers 429 until the replacement is ready."""
    clean.apply(as_yaml(static("single", 1)))
    clean.wait_ready("single", replicas=1)
    (old,) = checks.ready_pods(clean, "single")
    wait_for(
        "node scalers may evict the replica that is ready",
        lambda: clean.pods("single")[0].metadata.annotations.get(names.ANNOTATION_SAFE_TO_EVICT) == "true",
        timeout=30,
    )

    clean.access.kubectl("cordon", old.spec.node_name)
    assert not checks.evict(clean, old), "there is no other replica yet"
    wait_for("the eviction is admitted, or the operator has drained it", lambda: checks.evict(clean, old), timeout=120)
    assert len(checks.ready_pods(clean, "single")) >= 1, "the replacement serves before the old one leaves"
    wait_for("the old one is gone", lambda: old.metadata.uid not in checks.uids(clean.pods("single")), timeout=90)
    (new,) = checks.ready_pods(clean, "single")
    assert new.spec.node_name != old.spec.node_name
    assert checks.first_attempts(clean, "single", 3) == []
    clean.access.kubectl("uncordon", old.spec.node_name)

    restart_at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    clean.apply(as_yaml(static("single", 1, restartAt=restart_at)))
    wait_for(
        "another pod serves, of the same revision",
        lambda: (
            [
                pod.metadata.labels[names.LABEL_REVISION] == new.metadata.labels[names.LABEL_REVISION]
                for pod in clean.pods("single")
                if checks.is_ready(pod) and pod.metadata.uid != new.metadata.uid
            ]
            == [True]
        ),
        timeout=120,
    )

    clean.apply(as_yaml(static("single", 1, suspend=True)))
    wait_for("no replica is left", lambda: clean.pods("single") == [], timeout=120)
    clean.wait_condition("single", "Suspended", "True")
    clean.wait_condition("single", "Ready", "True", "ScaledToZero")


def broken_spec() -> dict[str, object]:
    """The spec of `static(…, 2)` with an image that does not exist."""
    spec: dict[str, object] = static("keeps", 2)["spec"]
    return spec | {"runtime": static("keeps", 2)["spec"]["runtime"] | {"image": "slipway/runtime:none"}}


def has_pull_error(slipway: Slipway, service: str) -> bool:
    """Whether the blocker of the service is its image."""
    conditions = slipway.service(service).get("status", {}).get("conditions", [])
    waiting = {
        status.state.waiting.reason
        for pod in slipway.pods(service)
        for status in pod.status.container_statuses or []
        if status.state.waiting
    }
    return bool(waiting & {"ErrImagePull", "ImagePullBackOff"}) and bool(conditions)


def restarts(pod: object) -> int:
    """How often the pod's server was restarted."""
    return int(sum(status.restart_count for status in pod.status.container_statuses or []))  # type: ignore[attr-defined]
