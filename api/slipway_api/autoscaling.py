"""The field `spec.autoscaling` of an InferenceService: limits, metrics and behavior, named as in autoscaling/v2."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from slipway_api.types import DecimalString, Rule, Struct, bounded_list, cel_rules, decimal, decimal_rule


class ScalingMode(StrEnum):
    """The owner of the number of replicas: Slipway's autoscaler, or an external one."""

    ACTIVE = "Active"
    EXTERNAL = "External"


class MetricType(StrEnum):
    """The load metrics; CPU, GPU and memory utilization are not among them."""

    KV_CACHE_UTILIZATION = "KVCacheUtilization"
    QUEUE_DEPTH = "QueueDepth"


class Limit(StrEnum):
    """The limit that the decision hit: status.autoscaling.limitedBy."""

    LIMITED_BY_MAX = "LimitedByMax"
    MIN_REPLICAS = "MinReplicas"
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
    """KVCacheUtilization: live share of the KV cache, mean over replicas. QueueDepth: waiting requests per replica."""
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


class Autoscaling(Struct):
    """The autoscaler's limits, metrics and behavior."""

    model_config = cel_rules(
        Rule("self.minReplicas <= self.maxReplicas", "minReplicas must not exceed maxReplicas", ".minReplicas"),
        Rule("self.mode != 'Active' || size(self.metrics) > 0", "mode Active needs at least one metric", ".metrics"),
    )

    mode: ScalingMode = ScalingMode.ACTIVE
    """Active: Slipway decides. External: spec.replicas decides, written by kubectl scale, an HPA or KEDA."""
    min_replicas: int = Field(default=1, ge=1, le=1000)
    """Lower limit of the number of replicas."""
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
