"""The number of replicas that a service should have, by its autoscaling mode. Pure.

| mode         | the number                                  | the autoscaler's recommendation        |
|--------------|---------------------------------------------|----------------------------------------|
| any, suspend | 0                                           | none                                   |
| none         | spec.replicas, else 1                       | none                                   |
| Active       | what is recommended                         | decides                                |
| Advisory     | spec.replicas, else the present one         | status, condition and event Advice     |
| External     | spec.replicas, else the present one; budget | none                                   |
| Paused       | the present one                             | none                                   |

The present number is the one in status. A service that never had one starts with minReplicas, and with 1 where that is
0: a spec shows at once whether it works, and goes to zero when nobody asks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from slipway_api.autoscaling import Autoscaling, MetricType, ScalingMode
from slipway_api.conditions import ConditionStatus, ConditionType, Reason, find_condition
from slipway_api.inference_service import InferenceService
from slipway_api.inference_status import AutoscalingStatus
from slipway_api.words import count
from slipway_operator.core.actions import SetReplicas, Steps, earliest
from slipway_operator.core.health import Member
from slipway_operator.core.observed import Observed, ScalingMemory
from slipway_operator.core.profiles import apply_profile
from slipway_operator.core.scaling import autoscaling, signals, zero
from slipway_operator.core.scaling.autoscaling import Past, Recommendation
from slipway_operator.core.scaling.latency import ttft_p95
from slipway_operator.core.scaling.limits import bounds_of, replicas_within_budget
from slipway_operator.core.scaling.schedules import find_active
from slipway_operator.core.scaling.wake import wakes_at, woken_at


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleTarget:
    """How many replicas there should be."""

    desired: int
    recommendation: Recommendation | None = None  # None: the spec fixes the number, or scaling is paused
    over_budget: str = ""  # why `desired` is below spec.replicas
    memory: ScalingMemory = field(default_factory=ScalingMemory)  # an argument of the next pass


def find_target(observed: Observed, members: Sequence[Member], *, capacity_shortage: str, now: datetime) -> ScaleTarget:
    """Finds the number of replicas. `capacity_shortage` is why the last ones could not be placed."""
    service, policy = observed.service, observed.service.spec.autoscaling
    held = _held(service)
    if service.spec.suspend:
        return ScaleTarget(desired=0)
    if policy is None:
        return ScaleTarget(desired=held)
    if policy.mode is ScalingMode.PAUSED:
        return ScaleTarget(desired=held)
    within_budget = replicas_within_budget(service.spec)
    if within_budget is not None and service.fixed_replicas is not None:
        held = min(held, within_budget)
    if policy.mode is ScalingMode.EXTERNAL:
        return ScaleTarget(desired=held, over_budget=_over_budget(service, held))
    memory = zero.remember(observed.demand, members, observed.scaling_memory, now)
    recommendation = _recommend(observed, policy, members, memory, held, within_budget, capacity_shortage, now)
    desired = recommendation.desired if policy.mode is ScalingMode.ACTIVE else held
    return ScaleTarget(desired=desired, recommendation=recommendation, memory=memory)


def set_replicas(service: InferenceService, target: ScaleTarget) -> Steps:
    """Writes spec.replicas once in mode External if the manifest omits it: an HPA cannot read a scale without it."""
    policy = service.spec.autoscaling
    is_external = policy is not None and policy.mode is ScalingMode.EXTERNAL
    if not is_external or service.spec.replicas is not None or service.spec.suspend:
        return Steps()
    reason = "autoscaling.mode is External and spec.replicas is absent"
    return Steps(actions=(SetReplicas(replicas=target.desired, reason=reason),))


def _held(service: InferenceService) -> int:
    """The number where nothing is decided anew: the one that the spec fixes, the one in status, or the first one."""
    if service.fixed_replicas is not None:
        return service.fixed_replicas
    known, policy = service.status.desired_replicas, service.spec.autoscaling
    was_suspended = find_condition(service.status.conditions, ConditionType.SUSPENDED) is not None
    if known is not None and not was_suspended:
        return known
    return max(1, policy.min_replicas) if policy else 1


def _over_budget(service: InferenceService, held: int) -> str:
    budget, asked = service.spec.budget, service.fixed_replicas or 0
    if budget is None or held >= asked:
        return ""
    each = service.spec.resources.gpu.count
    gpus = count(budget.max_gpus or 0, "GPU")
    return f"spec.replicas is {asked}; a budget of {gpus}, {each} for each replica, allows {held}"


def _recommend(
    observed: Observed,
    policy: Autoscaling,
    members: Sequence[Member],
    memory: ScalingMemory,
    held: int,
    within_budget: int | None,
    capacity_shortage: str,
    now: datetime,
) -> Recommendation:
    """What the autoscaler would set, from metrics, schedules, the budget and the gateways' demand."""
    service = observed.service
    is_advisory = policy.mode is ScalingMode.ADVISORY
    was_decided = is_advisory or service.status.desired_replicas is not None
    condition = find_condition(service.status.conditions, ConditionType.SCALING_ACTIVE)
    past = Past(
        current=held if was_decided else 0,
        history=(service.status.autoscaling or AutoscalingStatus()).history,
        recommendations=observed.recommendations,
        silent_since=_silent_since(service),
        verdict=condition.reason if condition else "",
    )
    scheduled = find_active(policy.schedules or (), now)
    bounds = bounds_of(
        policy,
        scheduled=scheduled,
        within_budget=within_budget,
        gpus=(service.spec.budget.max_gpus or 0) if service.spec.budget else 0,
    )
    woken = woken_at(service, now)
    if was_decided and past.current == 0 and bounds.may_be_zero:
        made = zero.at_zero(observed.demand, bounds, past, memory, now, woken=woken)
    else:
        readings = _read(observed, policy, members, current=past.current, now=now)
        made = autoscaling.decide(
            policy,
            readings,
            past,
            max_num_seqs=apply_profile(service.spec).runtime.max_num_seqs,
            capacity_shortage=capacity_shortage,
            now=now,
            bounds=bounds,
        )
        if policy.scale_to_zero is not None and bounds.may_be_zero and past.current:
            made = zero.down_to_zero(policy.scale_to_zero, made, readings, past, memory, now, woken=woken)
    again_at = earliest(made.again_at, scheduled.changes_at, wakes_at(service, now))
    return replace(made, active_schedule=scheduled.name, again_at=again_at)


def _read(
    observed: Observed, policy: Autoscaling, members: Sequence[Member], *, current: int, now: datetime
) -> signals.Readings:
    resting = [one for one in observed.service.status.attempts if one.not_before and now < one.not_before]
    readings = signals.read(
        members,
        wanted=current,
        slots_in_backoff=len(resting),
        stale_after=timedelta(seconds=policy.missing_metrics.stale_after_seconds),
        asking_since=observed.asking_since,
        now=now,
    )
    ready_since = [one.replica.ready_since for one in members if one.is_ready and one.replica.ready_since]
    asks_for_latency = any(metric.type is MetricType.TTFT_P95_SECONDS for metric in policy.metrics)
    return replace(
        readings,
        held_by_gateways=_held_by_gateways(observed, ready_since),
        ttft_p95=ttft_p95(observed.outcomes_since, ready_since, now) if asks_for_latency else None,
    )


def _held_by_gateways(observed: Observed, ready_since: Sequence[datetime]) -> int:
    """Requests that gateways hold although a replica is ready.

    A report from before the first of them was ready tells of the time without: those requests are at a replica by now,
    and counted there.
    """
    demand = observed.demand
    if demand is None or not ready_since or demand.at <= min(ready_since):
        return 0
    return demand.waiting_requests


def _silent_since(service: InferenceService) -> datetime | None:
    condition = find_condition(service.status.conditions, ConditionType.SCALING_ACTIVE)
    if condition is None or condition.status is not ConditionStatus.FALSE:
        return None
    return condition.last_transition_time if condition.reason == Reason.METRICS_MISSING else None
