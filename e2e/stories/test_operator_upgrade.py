"""`helm upgrade` to a newer installation replaces the operator, offers its runtime image, and changes no pod."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from e2e import checks
from e2e.ledger import Ledger
from e2e.slipway import EXAMPLES, RELEASE_NAMESPACE, USER_NAMESPACE, Slipway, wait_for
from slipway_api import names

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

OFFERED = "slipway/runtime:newer"  # the local cluster cannot pull it, so a pod that asked for it would never run
SETTLED_SECONDS = 4.0


@pytest.fixture
def upgraded(clean: Slipway) -> Iterator[Callable[[], None]]:
    """Upgrades the installation inside the test; the values of before are back afterwards, and its pool is gone."""
    yield lambda: clean.install(f"runtime.image.tag={OFFERED.partition(':')[2]}", "operator.logLevel=DEBUG")
    clean.access.kubectl("delete", "wpool", "standby", "-n", USER_NAMESPACE, "--ignore-not-found")
    clean.install("runtime.image.tag=", "operator.logLevel=INFO")


def versions(slipway: Slipway, service: str) -> dict[str, tuple[str, int, str]]:
    """uid -> (resourceVersion, restarts, container) of each pod of the service."""
    pods = slipway.pods(service)
    servers = {pod.metadata.uid: (pod.metadata.resource_version, pod.status.container_statuses[0]) for pod in pods}
    return {uid: (version, server.restart_count, server.container_id) for uid, (version, server) in servers.items()}


def wait_settled(slipway: Slipway, service: str) -> dict[str, tuple[str, int, str]]:
    """Wait until nobody has written the service's pods for a while; their versions."""

    def look() -> dict[str, tuple[str, int, str]] | None:
        before = versions(slipway, service)
        time.sleep(SETTLED_SECONDS)
        return before if versions(slipway, service) == before else None

    return wait_for(f"the pods of {service} are settled", look, timeout=60)


def operators(slipway: Slipway) -> set[str]:
    """The uids of the operator's pods."""
    selector = "app.kubernetes.io/component=operator"
    pods = slipway.core.list_namespaced_pod(RELEASE_NAMESPACE, label_selector=selector).items
    return checks.uids([pod for pod in pods if pod.metadata.deletion_timestamp is None])


def pool_and_service() -> list[dict[str, Any]]:
    """examples/warm-pool.yaml with two replicas, of which the pool has a pod for one; it makes no second one."""
    pool, service = yaml.safe_load_all((EXAMPLES / "warm-pool.yaml").read_text())
    pool["spec"]["refill"] = {"maxConcurrent": 1, "delaySeconds": 3600}
    service["spec"]["replicas"] = 2
    return [pool, service]


@pytest.mark.full
@pytest.mark.capability("OP-7", "OP-13", "RD-1")
def test_an_upgrade_of_the_operator_changes_no_pod_and_offers_its_runtime_image(
    clean: Slipway, upgraded: Callable[[], None], open_ledger: Callable[[str], Ledger]
) -> None:
    pool, service = pool_and_service()
    clean.apply(yaml.safe_dump(pool))
    wait_for("a pod to claim", lambda: clean.custom("WarmPool", "standby").get("status", {}).get("ready"), timeout=120)
    clean.apply(yaml.safe_dump(service))
    revision = clean.wait_ready("warm", replicas=2)["status"]["currentRevision"]
    claimed = {names.ANNOTATION_CLAIMED_AT in (pod.metadata.annotations or {}) for pod in clean.pods("warm")}
    assert claimed == {True, False}, "one replica was claimed, one was made"
    before = wait_settled(clean, "warm")
    images = {pod.spec.containers[0].image for pod in clean.pods("warm")}
    old_operators = operators(clean)
    ledger = open_ledger("warm")
    load = clean.load("warm", concurrency=2, seconds=240, max_tokens=32)

    upgraded()
    assert not operators(clean) & old_operators, "other values, other operator pods"
    pending = wait_for(
        "the offer in status",
        lambda: clean.service("warm")["status"].get("pendingUpgrade"),
        timeout=60,
    )
    after = wait_settled(clean, "warm")
    report = load.stop()

    assert images == {pending["fromImage"]}
    assert pending["image"] == OFFERED
    assert "OnSpecChange" in pending["reason"]
    assert after == before, "no pod was made, restarted or written"
    status = clean.service("warm")["status"]
    assert (status["currentRevision"], status["updateRevision"]) == (revision, revision)
    assert "RolloutStarted" not in {event.reason for event in clean.events("warm")}
    assert report.failed == 0, report.failures
    checks.no_request_lost(report, ledger)
