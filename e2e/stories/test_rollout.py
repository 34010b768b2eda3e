"""A rollout replaces a revision without failed requests; a broken revision leaves the old one serving."""

import signal
import time
from collections.abc import Callable

import pytest

from e2e import checks
from e2e.cluster.launch import Cluster
from e2e.ledger import Ledger
from e2e.manifests import as_yaml, static
from e2e.slipway import USER_NAMESPACE, Slipway, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

STARTUP_SECONDS = 20  # of the old replicas, which are older than that when they become unready


@pytest.mark.capability("OP-7", "RD-1", "PF-7")
def test_a_spec_edit_surges_one_drains_one_and_drops_no_stream(
    clean: Slipway, open_ledger: Callable[[str], Ledger]
) -> None:
    clean.apply(as_yaml(static("roll", 2)))
    before = clean.wait_ready("roll", replicas=2)["status"]["currentRevision"]
    ledger = open_ledger("roll")
    load = clean.load("roll", concurrency=4, seconds=150, max_tokens=48)
    wait_for("streams are running", lambda: load.progress.finished >= 4)
    most: list[int] = []

    changed = static("roll", 2)
    changed["spec"].setdefault("runtime", {})["maxNumSeqs"] = 24
    clean.apply(as_yaml(changed))

    def done() -> bool:
        most.append(len(clean.pods("roll")))  # draining ones and those being deleted hold a GPU too
        status = clean.service("roll")["status"]
        return status["currentRevision"] != before and status["updatedReplicas"] == status["replicas"] == 2

    wait_for("both replicas are of the new revision", done, timeout=150)
    report = load.stop()

    assert report.failed == 0, report.failures
    checks.no_request_lost(report, ledger)
    assert max(most) <= 3, "never more than desired + maxSurge"
    clean.wait_events("roll", "RolloutStarted", "RolloutCompleted")
    assert len(report.revisions) == 2


@pytest.mark.full
@pytest.mark.capability("OP-7", "RD-1", "RD-10")
def test_replicas_that_are_unready_for_a_moment_during_a_rollout_are_not_drained(
    clean: Slipway, cluster: Cluster
) -> None:
    """Finding 1.1: a replica that has served before is not hopeless because it is unready and older than its start."""
    steady = static("flap", 2)
    steady["spec"]["runtime"]["startupTimeoutSeconds"] = STARTUP_SECONDS
    clean.apply(as_yaml(steady))
    clean.wait_ready("flap", replicas=2)
    ready_at = time.monotonic()
    old = clean.pods("flap")

    steady["spec"]["runtime"]["image"] = "slipway/runtime:none"  # a rollout that cannot end: only the old ones serve
    clean.apply(as_yaml(steady))
    wait_for("the new revision has a pod", lambda: len(clean.pods("flap")) == 3)
    time.sleep(max(0.0, ready_at + STARTUP_SECONDS + 2 - time.monotonic()))
    for pod in old:
        cluster.kill_container(USER_NAMESPACE, pod.metadata.name, how=signal.SIGSTOP)
    try:
        wait_for("both are unready", lambda: not checks.ready_pods(clean, "flap"), every=0.2)
        time.sleep(3)  # the operator has seen it, and has decided
    finally:
        for pod in old:
            cluster.kill_container(USER_NAMESPACE, pod.metadata.name, how=signal.SIGCONT)
    wait_for("both are ready again", lambda: checks.uids(checks.ready_pods(clean, "flap")) == checks.uids(old))

    checks.wait_serving(clean, "flap")
    assert checks.uids(checks.serving_pods(clean, "flap")) >= checks.uids(old), "none of them was drained"
    assert not {"ReplicaDraining", "ReplicaDrained"} & {event.reason for event in clean.events("flap")}
