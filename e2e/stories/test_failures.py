"""Pods and operators are killed; the service gets its replicas back, and requests are answered."""

from collections.abc import Callable

import pytest
from kubernetes import client

from e2e import checks
from e2e.cluster.launch import Cluster
from e2e.ledger import Ledger
from e2e.manifests import as_yaml, static
from e2e.slipway import RELEASE_NAMESPACE, Slipway, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def slots_in_use(slipway: Slipway, name: str) -> list[str]:
    """revision-slot of each pod that is neither draining nor being deleted."""
    return [
        "-".join(pod.metadata.labels[f"slipway.dev/{label}"] for label in ("revision", "slot"))
        for pod in slipway.pods(name)
        if pod.metadata.deletion_timestamp is None and pod.metadata.labels["slipway.dev/state"] == "serving"
    ]


@pytest.mark.capability("RD-1", "RG-2", "PF-10")
def test_a_replica_deleted_under_load_finishes_its_streams_and_is_replaced(
    clean: Slipway, open_ledger: Callable[[str], Ledger]
) -> None:
    clean.apply(as_yaml(static("pair", 2)))
    clean.wait_ready("pair", replicas=2)
    ledger = open_ledger("pair")
    load = clean.load("pair", concurrency=6, seconds=120, max_tokens=64)
    wait_for("streams are running", lambda: load.progress.finished >= 6)

    victim = clean.pods("pair")[0].metadata.name
    clean.core.delete_namespaced_pod(victim, "default")
    wait_for(f"{victim} gone", lambda: victim not in [p.metadata.name for p in clean.pods("pair")], timeout=90)
    clean.wait_ready("pair", replicas=2)
    report = load.stop()

    assert report.failed == 0, report.failures
    checks.no_request_lost(report, ledger)


@pytest.mark.full
@pytest.mark.capability("OP-7", "OB-3")
def test_a_leader_killed_while_scaling_out_leaves_no_double_and_no_orphan(clean: Slipway, cluster: Cluster) -> None:
    clean.apply(as_yaml(static("grow", 1)))
    clean.wait_ready("grow", replicas=1)
    leader = clean.leader()

    clean.apply(as_yaml(static("grow", 3)))
    cluster.kill_container(RELEASE_NAMESPACE, leader)
    clean.wait_ready("grow", replicas=3, timeout=120)

    slots = slots_in_use(clean, "grow")
    assert len(slots) == len(set(slots)) == 3
    uid = clean.service("grow")["metadata"]["uid"]
    assert {pod.metadata.owner_references[0].uid for pod in clean.pods("grow")} == {uid}


@pytest.mark.capability("OP-7", "AS-6", "RD-1")
def test_a_leader_killed_while_draining_does_not_cut_the_drain_short(
    clean: Slipway, cluster: Cluster, open_ledger: Callable[[str], Ledger]
) -> None:
    clean.apply(as_yaml(static("shrink", 2)))
    clean.wait_ready("shrink", replicas=2)
    ledger = open_ledger("shrink")
    load = clean.load("shrink", concurrency=8, seconds=120, max_tokens=96)
    wait_for("streams are running", lambda: load.progress.finished >= 4)

    clean.apply(as_yaml(static("shrink", 1)))
    wait_for(
        "a replica drains",
        lambda: any(p.metadata.labels["slipway.dev/state"] == "draining" for p in clean.pods("shrink")),
        every=0.1,
    )
    cluster.kill_container(RELEASE_NAMESPACE, clean.leader())
    clean.wait_ready("shrink", replicas=1, timeout=120)
    report = load.stop()

    assert report.failed == 0, report.failures
    checks.no_request_lost(report, ledger)


@pytest.mark.capability("OP-7", "RG-2")
def test_clients_are_served_while_the_api_server_is_away(clean: Slipway, cluster: Cluster) -> None:
    clean.apply(as_yaml(static("steady", 1)))
    clean.wait_ready("steady", replicas=1)

    with clean.api_server_away(cluster):
        answer = clean.openai().chat.completions.create(
            model="steady", messages=[{"role": "user", "content": "Hello"}], max_tokens=8
        )

    assert answer.choices[0].message.content
    clean.apply(as_yaml(static("steady", 2)))
    clean.wait_ready("steady", replicas=2, timeout=120)


@pytest.mark.full
@pytest.mark.capability("AS-6")
def test_a_deleted_service_drains_before_it_goes(clean: Slipway) -> None:
    clean.apply(as_yaml(static("leaving", 1)))
    clean.wait_ready("leaving", replicas=1)
    stream = clean.openai().chat.completions.create(
        model="leaving",
        messages=[{"role": "user", "content": "Tell me a long story."}],
        stream=True,
        max_tokens=400,
        extra_body={"ignore_eos": True},
    )
    first = next(iter(stream))

    clean.access.kubectl("delete", "infsvc", "leaving", "--wait=false")
    chunks = [first, *stream]
    wait_for("the service is gone", lambda: clean.is_gone("leaving"), timeout=90)

    assert chunks[-1].choices[0].finish_reason == "length"
    with pytest.raises(client.ApiException):
        clean.core.read_namespaced_service("leaving", "default")
