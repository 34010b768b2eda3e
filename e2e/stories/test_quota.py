"""A ResourceQuota of the user's namespace forbids a replica: the others serve, the status says what to do."""

import time
from datetime import UTC, datetime
from typing import Any

import pytest

from e2e import checks
from e2e.manifests import as_yaml, static
from e2e.slipway import RELEASE_NAMESPACE, USER_NAMESPACE, Slipway, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

OPERATOR = f"system:serviceaccount:{RELEASE_NAMESPACE}:slipway-operator"
REFUSED_SECONDS = 8.0
MOST_ATTEMPTS = 10  # in that time; the pauses between them grow, while a loop without pauses makes hundreds
WHAT_TO_DO = "raise the quota or lower the number of replicas"


def quota(gpus: int) -> dict[str, Any]:
    """A ResourceQuota for so many GPUs of the namespace."""
    hard = {"requests.nvidia.com/gpu": str(gpus)}
    return {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "gpus"}, "spec": {"hard": hard}}


def is_counted(slipway: Slipway) -> bool:
    """Whether the quota's use is known; until then the API server refuses pods for another reason."""
    return bool(slipway.core.read_namespaced_resource_quota("gpus", USER_NAMESPACE).status.used)


def refused_creations(slipway: Slipway, since: datetime) -> int:
    """How often the API server refused the operator a pod of the user's namespace."""
    return sum(
        entry["verb"] == "create"
        and entry["user"].get("username") == OPERATOR
        and (ref := entry.get("objectRef", {})).get("resource") == "pods"
        and (ref.get("namespace"), ref.get("subresource")) == (USER_NAMESPACE, None)
        and entry.get("responseStatus", {}).get("code") == 403
        and datetime.fromisoformat(entry["requestReceivedTimestamp"]) >= since
        for entry in slipway.access.audit()
    )


@pytest.mark.capability("AS-7", "OP-7")
def test_a_quota_stops_the_second_replica_says_so_and_it_comes_when_the_quota_is_raised(clean: Slipway) -> None:
    began = datetime.now(UTC)
    clean.apply(as_yaml(quota(1)))
    try:
        wait_for(
            "the quota counts", lambda: clean.core.read_namespaced_resource_quota("gpus", USER_NAMESPACE).status.used
        )
        clean.apply(as_yaml(static("within", 2)))
        stalled = wait_for(
            "the quota is named beside a replica that serves",
            lambda: (
                checks.ready_pods(clean, "within")
                and (found := clean.condition("within", "Stalled"))
                and found["reason"] == "QuotaExceeded"
                and found
            ),
        )
        assert "exceeded quota: gpus" in stalled["message"]
        assert WHAT_TO_DO in stalled["message"]
        checks.wait_serving(clean, "within", count=3)
        clean.wait_condition("within", "Ready", "True", "Degraded")  # one of two
        notes = clean.notes("within", "QuotaExceeded")
        assert any("exceeded quota: gpus" in note and WHAT_TO_DO in note for note in notes), notes

        before = refused_creations(clean, began)
        time.sleep(REFUSED_SECONDS)
        attempts = refused_creations(clean, began) - before
        assert before >= 1
        assert attempts <= MOST_ATTEMPTS
        assert len(clean.pods("within")) == 1
        (first,) = checks.uids(clean.pods("within"))

        clean.apply(as_yaml(quota(2)))
        clean.wait_ready("within", replicas=2, timeout=120)
        assert first in checks.uids(clean.pods("within"))
        assert clean.condition("within", "Stalled") is None
    finally:
        clean.access.kubectl("delete", "resourcequota", "gpus", "-n", USER_NAMESPACE)
    print(
        f"{before} refused creations until the first replica served, {attempts} in {REFUSED_SECONDS:.0f} s after that"
    )
