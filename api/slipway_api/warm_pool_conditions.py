"""Conditions and events of a WarmPool, each with its meaning, for the operator, the reference page and tests."""

from enum import StrEnum
from typing import Final

from slipway_api.conditions import ConditionStatus

_TRUE, _FALSE, _UNKNOWN = ConditionStatus.TRUE, ConditionStatus.FALSE, ConditionStatus.UNKNOWN


class PoolCondition(StrEnum):
    """The conditions of a pool. All but Ready are present only while they are True."""

    READY = "Ready"
    RECONCILING = "Reconciling"
    STALLED = "Stalled"
    EXHAUSTED = "Exhausted"


class PoolReason(StrEnum):
    """Why a condition of a pool has its status."""

    AVAILABLE = "Available"
    WARMING = "Warming"
    SUSPENDED = "Suspended"
    NO_READY_PODS = "NoReadyPods"
    INVALID_SPEC = "InvalidSpec"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    WARM_FAILED = "WarmFailed"
    WAITING_FOR_CAPACITY = "WaitingForCapacity"


class PoolEvent(StrEnum):
    """Why an event is posted about a pool."""

    POD_WARMED = "PodWarmed"
    POD_CLAIMED = "PodClaimed"
    POD_RETURNED = "PodReturned"
    POOL_EXHAUSTED = "PoolExhausted"
    POD_RECYCLED = "PodRecycled"
    WARM_FAILED = "WarmFailed"
    YIELDED_TO_WORKLOAD = "YieldedToWorkload"
    POOL_RESIZED = "PoolResized"
    LABELS_RESTORED = "LabelsRestored"

    @property
    def type(self) -> str:
        """`Normal` or `Warning`, the types of events.k8s.io/v1."""
        return (
            "Warning"
            if self in (PoolEvent.POOL_EXHAUSTED, PoolEvent.WARM_FAILED, PoolEvent.LABELS_RESTORED)
            else "Normal"
        )


CONDITIONS: Final = (
    (PoolCondition.READY, _TRUE, PoolReason.AVAILABLE, "All pods that should wait for a claim do."),
    (PoolCondition.READY, _TRUE, PoolReason.WARMING, "Some pods wait for a claim, others start."),
    (PoolCondition.READY, _TRUE, PoolReason.SUSPENDED, "spec.suspend is set, or no pods are asked for."),
    (PoolCondition.READY, _UNKNOWN, PoolReason.WARMING, "No pod waits for a claim yet; pods start."),
    (PoolCondition.READY, _FALSE, PoolReason.NO_READY_PODS, "No pod waits for a claim, and none starts."),
    (PoolCondition.READY, _FALSE, PoolReason.INVALID_SPEC, "As Stalled."),
    (PoolCondition.READY, _FALSE, PoolReason.IMAGE_PULL_FAILED, "As Stalled."),
    (PoolCondition.READY, _FALSE, PoolReason.WARM_FAILED, "As Stalled."),
    (PoolCondition.RECONCILING, _TRUE, PoolReason.WARMING, "Pods that should wait do not yet."),
    (PoolCondition.RECONCILING, _TRUE, PoolReason.WAITING_FOR_CAPACITY, "No node has room for a pod of the pool."),
    (PoolCondition.STALLED, _TRUE, PoolReason.INVALID_SPEC, "The spec cannot be followed; what is wrong."),
    (PoolCondition.STALLED, _TRUE, PoolReason.IMAGE_PULL_FAILED, "The kubelet cannot pull the image."),
    (PoolCondition.STALLED, _TRUE, PoolReason.WARM_FAILED, "Pods end again and again before they can be claimed."),
    (PoolCondition.EXHAUSTED, _TRUE, PoolReason.NO_READY_PODS, "Pods were claimed, and none is left."),
)

EVENTS: Final = {
    PoolEvent.POD_WARMED: "A pod can be claimed; how many can.",
    PoolEvent.POD_CLAIMED: "A pod became a replica of a service.",
    PoolEvent.POD_RETURNED: "A replica that has drained is a pod of the pool again, and can be claimed; how many can.",
    PoolEvent.POOL_EXHAUSTED: "The last pod was claimed.",
    PoolEvent.POD_RECYCLED: "A waiting pod was deleted, and another one replaces it; because of its age, because the"
    " pool asks for other pods now (in what they differ), or because it has returned and cannot be claimed.",
    PoolEvent.WARM_FAILED: "A pod ended before it could be claimed; why, and when the next one starts.",
    PoolEvent.YIELDED_TO_WORKLOAD: "A waiting pod was deleted, because a replica found no node; which.",
    PoolEvent.POOL_RESIZED: "autosize asks for another number of pods; the evidence in numbers.",
    PoolEvent.LABELS_RESTORED: "Labels of a waiting pod were edited, and are restored; which.",
}


def vocabulary_section() -> str:
    """The part of the reference page that lists conditions and events."""
    lines = [
        "## Conditions",
        "",
        "| condition | status | reason | meaning |",
        "|---|---|---|---|",
        *(f"| {type.value} | {status.value} | {reason.value} | {text} |" for type, status, reason, text in CONDITIONS),
        "",
        "## Events",
        "",
        "| type | reason | what it tells |",
        "|---|---|---|",
        *(f"| {reason.type} | {reason.value} | {meaning} |" for reason, meaning in EVENTS.items()),
        "",
    ]
    return "\n".join(lines)
