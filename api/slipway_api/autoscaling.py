"""The field `spec.autoscaling` of an InferenceService: limits, metrics and behavior, named as in autoscaling/v2."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from slipway_api.schedules import Schedule
from slipway_api.types import (
    BYTES_PATTERN,
    ByteQuantity,
    DecimalString,
    Rule,
    Struct,
    bounded_list,
    cel_rules,
    decimal,
    decimal_rule,
)


class ScalingMode(StrEnum):
    """What decides the number of replicas: Slipway's autoscaler, the spec, or nothing for the moment."""

    ACTIVE = "Active"
    ADVISORY = "Advisory"
    EXTERNAL = "External"
    PAUSED = "Paused"


class MetricType(StrEnum):
    """The metrics: load and latency of requests; CPU, GPU and memory utilization are not among them."""

    KV_CACHE_UTILIZATION = "KVCacheUtilization"
    QUEUE_DEPTH = "QueueDepth"
    RUNNING_REQUESTS = "RunningRequests"
    TTFT_P95_SECONDS = "TTFTP95Seconds"


class Limit(StrEnum):
    """The limit that the decision hit: status.autoscaling.limitedBy."""

    LIMITED_BY_MAX = "LimitedByMax"
    MIN_REPLICAS = "MinReplicas"
    LIMITED_BY_BUDGET = "LimitedByBudget"
    LIMITED_BY_CAPACITY = "LimitedByCapacity"
    SCALE_UP_RATE = "ScaleUpRate"
    SCALE_DOWN_RATE = "ScaleDownRate"
    STABILIZATION_WINDOW = "StabilizationWindow"
    LIVE_DEMAND = "LiveDemand"


class Metric(Struct):
    """A metric and its target value."""

    model_config = cel_rules(
        decimal_rule("target", "value > 0.0", "target must be above 0"),
        decimal_rule(
            "target",
            "self.type != 'KVCacheUtilization' || value <= 1.0",
            'the target of KVCacheUtilization is a share of the cache, such as "0.80": at most 1',
        ),
    )

    type: MetricType
    """KVCacheUtilization: live share of the KV cache, mean over replicas. QueueDepth: waiting requests per replica,
    and requests that gateways hold. RunningRequests: running requests per replica. TTFTP95Seconds: 95th percentile of
    the time to first token over the last minute, as gateways measure it; it asks for more replicas, never for fewer."""
    target: DecimalString
    """The target value, such as "0.80"."""


class ScalingRules(Struct):
    """How fast the number of replicas may change in one direction."""

    stabilization_window_seconds: int = Field(ge=0, le=3600)
    """How far back recommendations count: the most cautious one of the window wins."""
    max_pods: int = Field(ge=1, le=1000)
    """Most replicas added or removed within periodSeconds."""
    period_seconds: int = Field(ge=1, le=1800)
    """The period that maxPods counts in."""
    tolerance: DecimalString = decimal("0.10")
    """The number stays while the metric differs from its target by at most this share of the target."""


class ScaleUpRules(ScalingRules):
    """Rules for adding replicas; by default without delay, two in 30 s."""

    stabilization_window_seconds: int = Field(default=0, ge=0, le=3600)
    """How far back recommendations count: the lowest one of the window wins."""
    max_pods: int = Field(default=2, ge=1, le=1000)
    """Most replicas added within periodSeconds."""
    period_seconds: int = Field(default=30, ge=1, le=1800)
    """The period that maxPods counts in."""


class ScaleDownRules(ScalingRules):
    """Rules for removing replicas; by default after a window of five minutes, one in 60 s."""

    stabilization_window_seconds: int = Field(default=300, ge=0, le=3600)
    """How far back recommendations count: the highest one of the window wins."""
    max_pods: int = Field(default=1, ge=1, le=1000)
    """Most replicas removed within periodSeconds."""
    period_seconds: int = Field(default=60, ge=1, le=1800)
    """The period that maxPods counts in."""


class ScalingBehavior(Struct):
    """How fast the number of replicas may change, with the field names of autoscaling/v2."""

    scale_up: ScaleUpRules = ScaleUpRules()
    """Rules for adding replicas; by default without delay, two in 30 s."""
    scale_down: ScaleDownRules = ScaleDownRules()
    """Rules for removing replicas; by default after a window of five minutes, one in 60 s."""


class MissingMetricsPolicy(StrEnum):
    """The load that is assumed of a ready replica without a sample."""

    CONSERVATIVE = "Conservative"


class MissingMetrics(Struct):
    """How the autoscaler decides when ready replicas report no load."""

    stale_after_seconds: int = Field(default=30, ge=4, le=3600)
    """A sample older than this is missing."""
    policy: MissingMetricsPolicy = MissingMetricsPolicy.CONSERVATIVE
    """Conservative: a silent replica counts as at target when scaling down and as idle when scaling up."""
    max_hold_seconds: int = Field(default=600, ge=0, le=86_400)
    """With all replicas silent the number is held; after this long fallbackReplicas counts."""
    fallback_replicas: int | None = Field(default=None, ge=1, le=1000)
    """Replicas to have after maxHoldSeconds without any sample, only if that is more."""


class Activation(Struct):
    """How many requests gateways hold while the first replica of a service that was scaled to zero starts."""

    model_config = cel_rules(
        Rule(
            f"self.maxQueuedBytes.matches('{BYTES_PATTERN}')",
            "maxQueuedBytes must be a quantity such as 256Mi",
            ".maxQueuedBytes",
        ),
    )

    max_queued_requests: int = Field(default=1000, ge=1, le=100_000)
    """Most requests that one gateway holds; more are refused with 503 and Retry-After."""
    max_queued_bytes: ByteQuantity = "256Mi"
    """Most memory of their bodies at one gateway."""
    max_wait_seconds: int = Field(default=600, ge=1, le=3600)
    """How long a request may be held; then it is refused with 503 and Retry-After."""


class ScaleToZero(Struct):
    """When a service has no replicas, and how the first request gets one."""

    idle_seconds: int = Field(default=900, ge=60, le=86_400)
    """With no request at any gateway and at any replica for this long, the last replicas are drained."""
    activation: Activation = Activation()
    """How many requests gateways hold while the first replica starts."""


class Autoscaling(Struct):
    """The autoscaler's limits, metrics and behavior."""

    model_config = cel_rules(
        Rule("self.minReplicas <= self.maxReplicas", "minReplicas must not exceed maxReplicas", ".minReplicas"),
        Rule(
            "!(self.mode in ['Active', 'Advisory']) || size(self.metrics) > 0",
            "modes Active and Advisory need at least one metric",
            ".metrics",
        ),
        Rule(
            "size(self.metrics) == 0 || self.metrics.exists(metric, metric.type != 'TTFTP95Seconds')",
            "TTFTP95Seconds needs another metric beside it: a short time to first token does not say that fewer "
            "replicas would do",
            ".metrics",
        ),
        Rule(
            "self.minReplicas > 0 || has(self.scaleToZero)",
            "minReplicas 0 needs scaleToZero, which says when a service is idle",
            ".minReplicas",
        ),
        Rule(
            "self.minReplicas == 0 || !has(self.scaleToZero)",
            "scaleToZero needs minReplicas: 0",
            ".minReplicas",
        ),
        Rule(
            "!has(self.schedules) || self.schedules.all(schedule, schedule.minReplicas <= self.maxReplicas)",
            "minReplicas of a schedule must not exceed maxReplicas",
            ".schedules",
        ),
    )

    mode: ScalingMode = ScalingMode.ACTIVE
    """Active: Slipway decides. Advisory: Slipway computes and says what it would do, and changes nothing; the number is
    spec.replicas where it is set, else the present one. External: spec.replicas decides, written by kubectl scale, an
    HPA or KEDA. Paused: the present number stays."""
    min_replicas: int = Field(default=1, ge=0, le=1000)
    """Lower limit of the number of replicas; 0 only with scaleToZero."""
    max_replicas: int = Field(ge=1, le=1000)
    """Upper limit of the number of replicas."""
    metrics: Annotated[tuple[Metric, ...], bounded_list(at_most=8, key="type")] = (
        Metric(type=MetricType.KV_CACHE_UTILIZATION, target=decimal("0.80")),
        Metric(type=MetricType.QUEUE_DEPTH, target=decimal("2")),
    )
    """Metrics with their targets; the metric that needs the most replicas decides."""
    behavior: ScalingBehavior = ScalingBehavior()
    """How fast the number of replicas may change, with the field names of autoscaling/v2."""
    missing_metrics: MissingMetrics = MissingMetrics()
    """How the autoscaler decides when ready replicas report no load."""
    scale_to_zero: ScaleToZero | None = None
    """When a service has no replicas, and how the first request gets one; absent: it always keeps one."""
    schedules: Annotated[tuple[Schedule, ...], bounded_list(at_most=16, key="name")] | None = None
    """Times at which more replicas are kept, whatever the load."""
