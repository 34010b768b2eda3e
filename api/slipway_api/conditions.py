"""Condition types, their reasons and the reasons of events; their meanings are in `vocabulary`.

A condition's message is the sentence of the last decision; numbers that change all the time are metrics.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from slipway_api.types import Struct, Time, bounded_list


class ConditionType(StrEnum):
    """The conditions of a service. Reconciling, Stalled and Suspended are present only while they are True."""

    READY = "Ready"
    RECONCILING = "Reconciling"
    STALLED = "Stalled"
    WORKLOAD_AVAILABLE = "WorkloadAvailable"
    ROUTE_READY = "RouteReady"
    SCALING_ACTIVE = "ScalingActive"
    SUSPENDED = "Suspended"
    CANARY_HEALTHY = "CanaryHealthy"
    ROLLOUT_HEALTHY = "RolloutHealthy"
    ADAPTERS_READY = "AdaptersReady"
    WITHIN_SLO = "WithinSLO"
    MODEL_CACHED = "ModelCached"
    GATEWAY_ONLY = "GatewayOnly"
    OUTPUT_VALID = "OutputValid"
    ENGINE_FIELDS_HONOURED = "EngineFieldsHonoured"


class ConditionStatus(StrEnum):
    """Kubernetes' three-valued truth."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Reason(StrEnum):
    """Why a condition has its status; grouped by the condition that uses it first."""

    # Reconciling
    SCALING_UP = "ScalingUp"
    ROLLING_OUT = "RollingOut"
    # Stalled: a person has to act; reason and message are copied into Ready
    INVALID_SPEC = "InvalidSpec"
    DOES_NOT_FIT = "DoesNotFit"
    CACHE_NOT_PERMITTED = "CacheNotPermitted"
    CERTIFICATE_UNAVAILABLE = "CertificateUnavailable"
    ENGINE_WITHOUT_TLS = "EngineWithoutTLS"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    MODEL_NOT_FOUND = "ModelNotFound"
    CREDENTIALS_INVALID = "CredentialsInvalid"
    POOL_NOT_FOUND = "PoolNotFound"
    PROGRESS_DEADLINE_EXCEEDED = "ProgressDeadlineExceeded"
    QUOTA_EXCEEDED = "QuotaExceeded"
    REVISION_MISSING = "RevisionMissing"
    INTERNAL_ERROR = "InternalError"
    REFUSED = "Refused"
    NO_SUITABLE_NODE = "NoSuitableNode"
    MOUNT_FAILED = "MountFailed"
    HUB_UNREACHABLE = "HubUnreachable"
    CRASH_LOOPING = "CrashLooping"
    ENGINE_NOT_FOUND = "EngineNotFound"
    TEMPLATE_NOT_FOUND = "TemplateNotFound"
    # Ready=True, and WorkloadAvailable
    AVAILABLE = "Available"
    DEGRADED = "Degraded"  # below desired, but serving
    SCALED_TO_ZERO = "ScaledToZero"
    # Ready=False
    NO_READY_REPLICAS = "NoReadyReplicas"
    # Ready=Unknown: a three-minute load is progress, not degradation
    LOADING = "Loading"
    DOWNLOADING_MODEL = "DownloadingModel"
    WAITING_FOR_GPU = "WaitingForGPU"
    UNSCHEDULABLE = "Unschedulable"
    # Being deleted: Ready, WorkloadAvailable and RouteReady are False, Reconciling is True
    TERMINATING = "Terminating"
    # RouteReady
    ROUTED = "Routed"
    FALLBACK_NOT_FOUND = "FallbackNotFound"
    CANNOT_START = "CannotStart"
    NO_GATEWAY = "NoGateway"
    NAME_CONFLICT = "NameConflict"
    # Suspended
    SUSPENDED = "Suspended"
    # ScalingActive
    METRICS_FRESH = "MetricsFresh"
    METRICS_STALE = "MetricsStale"
    METRICS_MISSING = "MetricsMissing"
    KEY_REFUSED = "KeyRefused"
    ADVISORY = "Advisory"
    EXTERNAL = "External"
    PAUSED = "Paused"
    LIMITED_BY_MAX = "LimitedByMax"
    LIMITED_BY_BUDGET = "LimitedByBudget"
    LIMITED_BY_CAPACITY = "LimitedByCapacity"
    # CanaryHealthy with strategy Canary, RolloutHealthy with any other
    ANALYZING = "Analyzing"
    PASSED = "Passed"
    FAILED = "Failed"
    INCONCLUSIVE = "Inconclusive"
    ROLLED_BACK = "RolledBack"
    # AdaptersReady
    ADAPTERS_LOADED = "AdaptersLoaded"
    ADAPTERS_MISSING = "AdaptersMissing"
    ADAPTERS_FAILED = "AdaptersFailed"
    # WithinSLO
    WITHIN_LIMITS = "WithinLimits"
    LIMIT_EXCEEDED = "LimitExceeded"
    ERROR_BUDGET_BURNING = "ErrorBudgetBurning"
    ERROR_BUDGET_EXHAUSTED = "ErrorBudgetExhausted"
    NO_REQUESTS = "NoRequests"
    # ModelCached
    CACHED = "Cached"
    CACHING = "Caching"
    CACHING_FAILED = "CachingFailed"
    # GatewayOnly
    OPEN_TO_DIRECT_CALLERS = "OpenToDirectCallers"
    # OutputValid
    INVALID_LOGITS = "InvalidLogits"
    # EngineFieldsHonoured
    ENGINE_IGNORES = "EngineIgnores"


class EventReason(StrEnum):
    """Why an event is posted; `type` says whether it is a warning."""

    REPLICA_CREATED = "ReplicaCreated"
    REPLICA_READY = "ReplicaReady"
    REPLICA_DRAINING = "ReplicaDraining"
    REPLICA_DRAINED = "ReplicaDrained"
    SCALED_UP = "ScaledUp"
    SCALED_DOWN = "ScaledDown"
    SCALED_TO_ZERO = "ScaledToZero"
    ACTIVATED = "Activated"
    ROLLOUT_STARTED = "RolloutStarted"
    CANARY_STEP_COMPLETED = "CanaryStepCompleted"
    CANARY_PROMOTED = "CanaryPromoted"
    GATES_PASSED = "GatesPassed"
    ROLLOUT_PROMOTED = "RolloutPromoted"
    ROLLOUT_COMPLETED = "RolloutCompleted"
    SUSPENDED = "Suspended"
    RESUMED = "Resumed"
    WARM_POD_CLAIMED = "WarmPodClaimed"
    MODEL_CACHED = "ModelCached"
    TEMPLATE_APPLIED = "TemplateApplied"
    WARM_POOL_MISS = "WarmPoolMiss"
    INVALID_SPEC = "InvalidSpec"
    DOES_NOT_FIT = "DoesNotFit"
    CACHE_NOT_PERMITTED = "CacheNotPermitted"
    CERTIFICATE_UNAVAILABLE = "CertificateUnavailable"
    ENGINE_WITHOUT_TLS = "EngineWithoutTLS"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    MODEL_NOT_FOUND = "ModelNotFound"
    CREDENTIALS_INVALID = "CredentialsInvalid"
    FALLBACK_NOT_FOUND = "FallbackNotFound"
    POOL_NOT_FOUND = "PoolNotFound"
    INTERNAL_ERROR = "InternalError"
    REVISION_MISSING = "RevisionMissing"
    QUOTA_EXCEEDED = "QuotaExceeded"
    REFUSED = "Refused"
    NO_SUITABLE_NODE = "NoSuitableNode"
    MOUNT_FAILED = "MountFailed"
    HUB_UNREACHABLE = "HubUnreachable"
    CRASH_LOOPING = "CrashLooping"
    ENGINE_NOT_FOUND = "EngineNotFound"
    TEMPLATE_NOT_FOUND = "TemplateNotFound"
    NO_GATEWAY = "NoGateway"
    METRICS_STALE = "MetricsStale"
    KEY_REFUSED = "KeyRefused"
    SCALING_HELD = "ScalingHeld"
    SCALING_LIMITED = "ScalingLimited"
    WAITING_FOR_GPU = "WaitingForGPU"
    UNSCHEDULABLE = "Unschedulable"
    MODEL_DOWNLOAD_FAILED = "ModelDownloadFailed"
    REPLICA_UNHEALTHY = "ReplicaUnhealthy"
    INVALID_LOGITS = "InvalidLogits"
    ADAPTERS_FAILED = "AdaptersFailed"
    REPLICA_REPLACED = "ReplicaReplaced"
    LABELS_RESTORED = "LabelsRestored"
    CHILD_RESTORED = "ChildRestored"
    GPU_FAULT = "GPUFault"
    NODE_DRAIN_FORCED = "NodeDrainForced"
    DRAIN_TIMED_OUT = "DrainTimedOut"
    NAME_CONFLICT = "NameConflict"
    ACTIVATION_TIMED_OUT = "ActivationTimedOut"
    ACTIVATION_QUEUE_FULL = "ActivationQueueFull"
    BUDGET_EXCEEDED = "BudgetExceeded"
    CANARY_ANALYSIS_FAILED = "CanaryAnalysisFailed"
    CANARY_INCONCLUSIVE = "CanaryInconclusive"
    CANARY_ROLLED_BACK = "CanaryRolledBack"
    ROLLOUT_ROLLED_BACK = "RolloutRolledBack"
    PROGRESS_DEADLINE_EXCEEDED = "ProgressDeadlineExceeded"
    SLO_EXCEEDED = "SLOExceeded"
    ERROR_BUDGET_BURNING = "ErrorBudgetBurning"
    ERROR_BUDGET_EXHAUSTED = "ErrorBudgetExhausted"
    ADVICE = "Advice"

    @property
    def type(self) -> str:
        """`Normal` or `Warning`, the types of events.k8s.io/v1."""
        return "Normal" if self in _NORMAL_EVENTS else "Warning"


_NORMAL_EVENTS = frozenset(
    {
        EventReason.REPLICA_CREATED,
        EventReason.REPLICA_READY,
        EventReason.REPLICA_DRAINING,
        EventReason.REPLICA_DRAINED,
        EventReason.SCALED_UP,
        EventReason.SCALED_DOWN,
        EventReason.SCALED_TO_ZERO,
        EventReason.ACTIVATED,
        EventReason.ROLLOUT_STARTED,
        EventReason.CANARY_STEP_COMPLETED,
        EventReason.CANARY_PROMOTED,
        EventReason.GATES_PASSED,
        EventReason.ROLLOUT_PROMOTED,
        EventReason.CANARY_INCONCLUSIVE,  # so is every analysis until it has enough requests
        EventReason.ROLLOUT_COMPLETED,
        EventReason.SUSPENDED,
        EventReason.RESUMED,
        EventReason.WARM_POD_CLAIMED,
        EventReason.MODEL_CACHED,
        EventReason.TEMPLATE_APPLIED,
    }
)


class Condition(Struct):
    """One condition of the service: its status, since when, and why."""

    type: str = Field(max_length=64)
    """Type of the condition, such as Ready."""
    status: ConditionStatus
    """True, False or Unknown."""
    observed_generation: int = Field(default=0, ge=0)
    """The generation of the spec that the condition is about."""
    last_transition_time: Time
    """When the status last changed."""
    reason: str = Field(max_length=128)
    """The reason in one CamelCase word."""
    message: str = Field(default="", max_length=4096)
    """The reason in one sentence, which is that of the last decision."""


PENDING_REASON = "Pending"
PENDING: Mapping[str, Any] = {
    "type": ConditionType.READY.value,
    "status": ConditionStatus.UNKNOWN.value,
    "reason": PENDING_REASON,
    "message": (
        "waiting for the operator; if this lasts, check that an operator leads (kubectl get lease in its namespace), "
        "and that this namespace is among the chart's watchNamespaces"
    ),
    "lastTransitionTime": "1970-01-01T00:00:00Z",
}
"""The Ready condition of an object that the operator has not seen, which the CRDs have as a default.

kstatus, by which Flux and Helm wait, calls an object without conditions Current: Flux looks 0.1 s after it applied,
before the operator has written anything, and would report a fleet healthy that does not exist yet (ADR 84).
"""


def _without_pending(conditions: tuple[Condition, ...]) -> tuple[Condition, ...]:
    """The conditions that the operator wrote: it reads a new object as one without conditions."""
    return tuple(condition for condition in conditions if condition.reason != PENDING_REASON)


# The conditions of an object, in a list that server-side apply merges by type.
Conditions = Annotated[tuple[Condition, ...], bounded_list(at_most=16, key="type"), AfterValidator(_without_pending)]


def find_condition(conditions: Iterable[Condition], type: str) -> Condition | None:
    """The condition of that type, if present."""
    return next((condition for condition in conditions if condition.type == type), None)


def set_condition(
    conditions: Iterable[Condition],
    type: StrEnum,
    status: ConditionStatus | bool,
    reason: str,
    message: str,
    *,
    generation: int,
    now: datetime,
) -> tuple[Condition, ...]:
    """The conditions with this one set, in a stable order; its time moves only when its status flips."""
    kept = tuple(conditions)
    status = ConditionStatus(str(status))
    before = find_condition(kept, type)
    since = before.last_transition_time if before and before.status == status else now.replace(microsecond=0)
    after = Condition(
        type=type.value,
        status=status,
        observed_generation=generation,
        last_transition_time=since,
        reason=reason,
        message=message,
    )
    if before is None:
        return (*kept, after)
    return tuple(after if condition is before else condition for condition in kept)


def remove_condition(conditions: Iterable[Condition], type: StrEnum) -> tuple[Condition, ...]:
    """The conditions without this one: how Reconciling and Stalled stop being True."""
    return tuple(condition for condition in conditions if condition.type != type)
