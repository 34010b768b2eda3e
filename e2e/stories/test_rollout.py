"""A new revision takes over without a gap."""

import pytest

from e2e.manifests import as_yaml, static
from e2e.slipway import Slipway, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.mark.capability("OP-7", "RD-1", "PF-7")
def test_a_spec_edit_surges_one_drains_one_and_drops_no_stream(clean: Slipway) -> None:
    clean.apply(as_yaml(static("roll", 2)))
    before = clean.wait_ready("roll", replicas=2)["status"]["currentRevision"]
    load = clean.load("roll", concurrency=4, seconds=150, max_tokens=48)
    wait_for("streams are running", lambda: load.progress.finished >= 4)
    most: list[int] = []

    changed = static("roll", 2)
    changed["spec"].setdefault("runtime", {})["maxNumSeqs"] = 24
    clean.apply(as_yaml(changed))

    def done() -> bool:
        serving = [p for p in clean.pods("roll") if p.metadata.labels["slipway.dev/state"] == "serving"]
        most.append(len([p for p in serving if p.metadata.deletion_timestamp is None]))
        status = clean.service("roll")["status"]
        return status["currentRevision"] != before and status["updatedReplicas"] == status["replicas"] == 2

    wait_for("both replicas are of the new revision", done, timeout=150)
    report = load.stop()

    assert report.failed == 0, report.failures
    assert max(most) <= 3, "never more than desired + maxSurge"
    assert {"RolloutStarted", "RolloutCompleted"} <= {event.reason for event in clean.events("roll")}
    assert len(report.revisions) == 2
