"""Conditions and events of a WarmPool, each with its meaning, for the operator, the reference page and tests."""

from enum import StrEnum
from typing import Final

from slipway_api.causes import Cause, Helper, Row, condition_table
from slipway_api.conditions import ConditionStatus, Reason
from slipway_api.stalled_causes import STALLED_CAUSES as SERVICE_CAUSES

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
    QUOTA_EXCEEDED = "QuotaExceeded"
    REFUSED = "Refused"
    NAME_CONFLICT = "NameConflict"
    CACHE_NOT_PERMITTED = "CacheNotPermitted"
    MOUNT_FAILED = "MountFailed"
    CERTIFICATE_UNAVAILABLE = "CertificateUnavailable"
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
    INVALID_SPEC = "InvalidSpec"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    QUOTA_EXCEEDED = "QuotaExceeded"
    REFUSED = "Refused"
    NAME_CONFLICT = "NameConflict"
    CACHE_NOT_PERMITTED = "CacheNotPermitted"
    MOUNT_FAILED = "MountFailed"
    CERTIFICATE_UNAVAILABLE = "CertificateUnavailable"
    LABELS_RESTORED = "LabelsRestored"

    @property
    def type(self) -> str:
        """`Normal` or `Warning`, the types of events.k8s.io/v1."""
        is_warning = self in (PoolEvent.POOL_EXHAUSTED, PoolEvent.LABELS_RESTORED) or self.value in STALLED_CAUSES
        return "Warning" if is_warning else "Normal"


# Stalled=True has one of these; the causes that a pool shares with services have the same words.
STALLED_CAUSES: Final = {
    **{
        PoolReason(reason.value): SERVICE_CAUSES[reason]
        for reason in (
            *(Reason.INVALID_SPEC, Reason.QUOTA_EXCEEDED, Reason.REFUSED, Reason.NAME_CONFLICT),
            *(Reason.CACHE_NOT_PERMITTED, Reason.MOUNT_FAILED, Reason.CERTIFICATE_UNAVAILABLE),
        )
    },
    PoolReason.IMAGE_PULL_FAILED: Cause(
        "The kubelet cannot pull the image.", Helper.AUTHOR, "Check spec.image and imagePullSecrets."
    ),
    PoolReason.WARM_FAILED: Cause(
        "Pods end again and again before they can be claimed.",
        Helper.AUTHOR,
        "Read the events of the pool and the logs of its pods.",
    ),
}

CONDITIONS: Final = tuple(
    Row(*row)
    for row in (
        (PoolCondition.READY, _TRUE, PoolReason.AVAILABLE, Cause("All pods that should wait for a claim do.")),
        (PoolCondition.READY, _TRUE, PoolReason.WARMING, Cause("Some pods wait for a claim, others start.")),
        (PoolCondition.READY, _TRUE, PoolReason.SUSPENDED, Cause("spec.suspend is set, or no pods are requested.")),
        (PoolCondition.READY, _UNKNOWN, PoolReason.WARMING, Cause("No pod waits for a claim yet; pods start.")),
        (PoolCondition.READY, _FALSE, PoolReason.NO_READY_PODS, Cause("No pod waits for a claim, and none starts.")),
        *((PoolCondition.READY, _FALSE, reason, cause) for reason, cause in STALLED_CAUSES.items()),
        (PoolCondition.RECONCILING, _TRUE, PoolReason.WARMING, Cause("Pods that should wait do not yet.")),
        (
            PoolCondition.RECONCILING,
            _TRUE,
            PoolReason.WAITING_FOR_CAPACITY,
            Cause("No node has room for a pod of the pool.", Helper.CLUSTER, "Free a GPU, or add a node with one."),
        ),
        *((PoolCondition.STALLED, _TRUE, reason, cause) for reason, cause in STALLED_CAUSES.items()),
        (
            PoolCondition.EXHAUSTED,
            _TRUE,
            PoolReason.NO_READY_PODS,
            Cause("Pods were claimed, and none is left.", Helper.AUTHOR, "Raise spec.size if this happens often."),
        ),
    )
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
    **{
        PoolEvent(reason.value): cause.meaning
        for reason, cause in STALLED_CAUSES.items()
        if reason is not PoolReason.WARM_FAILED
    },
    PoolEvent.POOL_RESIZED: "autosize asks for another number of pods; the evidence in numbers.",
    PoolEvent.LABELS_RESTORED: "Labels of a waiting pod were edited, and are restored; which.",
}


def vocabulary_section() -> str:
    """The part of the reference page that lists conditions and events."""
    lines = [
        "## Conditions",
        "",
        *condition_table(CONDITIONS),
        "",
        "## Events",
        "",
        "| type | reason | what it tells |",
        "|---|---|---|",
        *(f"| {reason.type} | {reason.value} | {meaning} |" for reason, meaning in EVENTS.items()),
        "",
    ]
    return "\n".join(lines)
