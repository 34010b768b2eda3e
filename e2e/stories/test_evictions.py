"""Replicas are evicted, and a node is drained, while clients stream: no accepted request is lost."""

from collections.abc import Callable

import pytest

from e2e import checks
from e2e.cluster.launch import Cluster
from e2e.ledger import Ledger
from e2e.manifests import as_yaml, static
from e2e.slipway import Slipway, wait_for
from slipway_api import names

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.mark.full
@pytest.mark.capability("PL-1", "PL-2", "RD-1", "RD-5", "PF-7")
def test_an_eviction_and_a_drain_of_a_node_under_load_lose_no_request(
    clean: Slipway, breakable: Cluster, open_ledger: Callable[[str], Ledger]
) -> None:
    clean.apply(as_yaml(static("moved", 2, drain={"timeoutSeconds": 60, "endpointPropagationSeconds": 1})))
    clean.wait_ready("moved", replicas=2)
    homes = {node: pod for pod, node in checks.nodes_of(clean, "moved").items()}
    assert sorted(homes) == ["node-a", "node-b"], "replicas are spread over nodes"
    before = checks.uids(clean.pods("moved"))
    ledger = open_ledger("moved")
    load = clean.load("moved", concurrency=4, seconds=240, max_tokens=48)
    wait_for("streams are running", lambda: load.progress.finished >= 4)

    (evicted,) = [pod for pod in clean.pods("moved") if pod.metadata.name == homes["node-a"]]
    wait_for("the eviction is admitted", lambda: checks.evict(clean, evicted), timeout=60)
    wait_for("it is gone", lambda: evicted.metadata.uid not in checks.uids(clean.pods("moved")), timeout=90)
    clean.wait_ready("moved", replicas=2)
    # Of the node only the replicas are drained: a gateway that goes takes its counters along.
    clean.access.kubectl(
        "drain", "node-b", f"--pod-selector={names.LABEL_SERVICE}=moved", "--delete-emptydir-data", "--timeout=100s"
    )
    clean.wait_ready("moved", replicas=2)
    report = load.stop()

    assert report.failed == 0, report.failures
    checks.no_request_lost(report, ledger)
    assert set(checks.nodes_of(clean, "moved").values()) == {"node-a"}
    assert not before & checks.uids(clean.pods("moved")), "both were replaced"
