"""Tells what autoscaling decided: status.autoscaling, condition ScalingActive, and the events of scaling.

Values change all the time, so they are written with a decision, otherwise at most every 60 s and only when they moved
by a tenth of their target. In mode Advisory the advice takes the place of the decision, and follows the same rule:
advice that hovers between two numbers is written once a minute.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Final

from slipway_api.autoscaling import Autoscaling, ScaleToZero, ScalingMode
from slipway_api.conditions import ConditionStatus, ConditionType, EventReason, Reason, find_condition
from slipway_api.inference_service import InferenceService
from slipway_api.inference_status import AutoscalingStatus, InferenceServiceStatus, ScalingDecision, SignalStatus
from slipway_operator.core.actions import Event
from slipway_operator.core.health import Member
from slipway_operator.core.observed import Observed
from slipway_operator.core.scaling.autoscaling import Recommendation, with_change
from slipway_operator.core.scaling.target import ScaleTarget
from slipway_operator.core.words import REFUSED_KEY, count

REFRESH_VALUES_AFTER: Final = timedelta(seconds=60)


def autoscaling_status(service: InferenceService, target: ScaleTarget, now: datetime) -> AutoscalingStatus | None:
    """status.autoscaling after this pass."""
    policy, before, scaling = service.spec.autoscaling, service.status, target.recommendation
    if policy is None or policy.mode is ScalingMode.EXTERNAL:
        return None
    if scaling is None:  # paused: what was decided last is kept
        known = before.autoscaling
        return known.model_copy(update={"active_schedule": ""}) if known is not None else None
    known = before.autoscaling or AutoscalingStatus()
    was = before.desired_replicas
    history = known.history
    if was is not None and was != target.desired:
        reason = scaling.reason if policy.mode is ScalingMode.ACTIVE else _by_spec(was, target.desired)
        change = ScalingDecision(time=now.replace(microsecond=0), from_=was, to=target.desired, reason=reason[:1024])
        history = with_change(history, change, policy)
    if history is known.history and not _moved(policy, known, scaling, now):
        return known.model_copy(update={"active_schedule": scaling.active_schedule})
    is_advice = policy.mode is ScalingMode.ADVISORY
    return AutoscalingStatus(
        recommended_replicas=scaling.desired if is_advice else scaling.recommended,
        limited_by=scaling.limited_by or "",
        active_schedule=scaling.active_schedule,
        signals=_signals(policy, known, scaling, now),
        history=history,
    )


def _moved(policy: Autoscaling, known: AutoscalingStatus, scaling: Recommendation, now: datetime) -> bool:
    """Whether the values changed by so much that status is written for them."""
    is_advice = policy.mode is ScalingMode.ADVISORY
    if is_advice and not scaling.values and scaling.is_activation:
        return known.recommended_replicas != scaling.desired
    if not scaling.values:
        return False
    shown = {signal.type: signal for signal in known.signals}
    measured, asked = {value.type.value for value in scaling.values}, {one.type.value for one in policy.metrics}
    if not measured <= set(shown) <= asked:
        return True
    times = [signal.sampled_time for signal in shown.values() if signal.sampled_time]
    if times and now - max(times) < REFRESH_VALUES_AFTER:
        return False
    if is_advice and known.recommended_replicas != scaling.desired:
        return True
    return any(
        abs(value.value - float(shown[value.type.value].value or 0)) >= value.target / 10 for value in scaling.values
    )


def _signals(
    policy: Autoscaling, known: AutoscalingStatus, scaling: Recommendation, now: datetime
) -> tuple[SignalStatus, ...]:
    """The values of now; a metric that cannot be measured now keeps its last value, with the time of that."""
    measured = tuple(
        SignalStatus(
            type=value.type.value,
            value=Decimal(f"{value.value:.2f}"),
            target=Decimal(f"{value.target:.2f}"),
            samples=value.samples,
            sampled_time=now.replace(microsecond=0),
        )
        for value in scaling.values
    )
    missing = {one.type.value for one in policy.metrics} - {one.type for one in measured}
    return measured + tuple(one for one in known.signals if one.type in missing)


# --- condition ScalingActive ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Told:
    """A value of the condition."""

    status: ConditionStatus
    reason: Reason
    message: str


def scaling_condition(
    service: InferenceService, target: ScaleTarget, after: AutoscalingStatus | None, members: Sequence[Member] = ()
) -> tuple[ConditionStatus, Reason, str] | None:
    """Condition ScalingActive: its message is the last decision's sentence, or why none is possible."""
    policy = service.spec.autoscaling
    if policy is None:
        return None
    refusing = sum(one.is_ready and one.replica.refuses_token for one in members)
    if refusing and target.recommendation is not None:
        who = count(refusing, "ready replica refuses", "ready replicas refuse")
        return ConditionStatus.FALSE, Reason.KEY_REFUSED, f"{who} {REFUSED_KEY}"
    told = _told(service, policy, target, after)
    return told.status, told.reason, told.message


def _told(
    service: InferenceService, policy: Autoscaling, target: ScaleTarget, after: AutoscalingStatus | None
) -> _Told:
    if policy.mode is ScalingMode.PAUSED:
        return _Told(ConditionStatus.FALSE, Reason.PAUSED, f"autoscaling.mode is Paused: {target.desired} stay")
    if target.over_budget:
        return _Told(ConditionStatus.TRUE, Reason.LIMITED_BY_BUDGET, target.over_budget)
    scaling, before = target.recommendation, service.status
    if scaling is None:
        return _Told(ConditionStatus.TRUE, Reason.EXTERNAL, "spec.replicas decides, written through /scale")
    status = ConditionStatus.UNKNOWN if scaling.is_active is None else ConditionStatus(str(scaling.is_active))
    verdict = scaling.verdict
    is_advice = policy.mode is ScalingMode.ADVISORY
    if is_advice and verdict is not Reason.METRICS_MISSING:
        verdict = Reason.ADVISORY
    was = find_condition(before.conditions, ConditionType.SCALING_ACTIVE)
    if was is not None and scaling.keeps_condition:
        return _Told(was.status, Reason(was.reason), was.message)
    advised = after.recommended_replicas if after else None
    known = before.autoscaling.recommended_replicas if before.autoscaling else None
    is_same = (
        was is not None
        and was.reason == verdict
        and was.status == status
        and before.desired_replicas == target.desired
        and (not is_advice or advised == known)
    )
    if was is not None and is_same:
        return _Told(status, verdict, was.message)
    message = _advice(advised, target.desired, scaling) if verdict is Reason.ADVISORY else scaling.reason
    return _Told(status, verdict, message)


def _advice(advised: int | None, held: int, scaling: Recommendation) -> str:
    if advised is None or advised == held:
        return f"Slipway would keep {count(held, 'replica')}; it only advises"
    return f"Slipway would set {count(advised, 'replica')} instead of {held}; it only advises: {scaling.reason}"


# --- events -----------------------------------------------------------------------------------------------------------


def scaling_events(
    observed: Observed, after: InferenceServiceStatus, target: ScaleTarget, *, ready: int
) -> list[Event]:
    """The events of scaling: changes of the number, advice, and requests that gave up waiting for a first replica."""
    service, before = observed.service, observed.service.status
    policy, scaling = service.spec.autoscaling, target.recommendation
    events = []
    was = before.desired_replicas
    if was is not None and was != target.desired:
        decides = scaling is not None and policy is not None and policy.mode is ScalingMode.ACTIVE
        message = scaling.reason if scaling is not None and decides else _by_spec(was, target.desired)
        events.append(Event(reason=_of_change(was, target), action="Scale", message=message))
    if policy is not None and policy.mode is ScalingMode.ADVISORY and after.autoscaling is not None:
        advised = after.autoscaling.recommended_replicas
        known = before.autoscaling.recommended_replicas if before.autoscaling else None
        told = find_condition(after.conditions, ConditionType.SCALING_ACTIVE)
        if advised not in (None, known, target.desired) and told is not None:
            events.append(Event(reason=EventReason.ADVICE, action="Advise", message=told.message))
    if policy is not None and policy.scale_to_zero is not None and not ready:
        events += _given_up(observed, target) + _refused(observed, policy.scale_to_zero)
    return events


def _of_change(was: int, target: ScaleTarget) -> EventReason:
    if target.recommendation is not None and target.desired == 0:
        return EventReason.SCALED_TO_ZERO
    if target.recommendation is not None and target.recommendation.is_activation:
        return EventReason.ACTIVATED
    return EventReason.SCALED_UP if target.desired > was else EventReason.SCALED_DOWN


def _by_spec(was: int, desired: int) -> str:
    return f"{was}→{desired}: spec.replicas"


def _given_up(observed: Observed, target: ScaleTarget) -> list[Event]:
    """Requests waited for the first replica of an activated service, none became ready, and none waits any more."""
    history = (observed.service.status.autoscaling or AutoscalingStatus()).history
    was_activated = bool(history) and history[0].from_ == 0 and bool(target.desired)
    left = observed.demand.waiting_requests if observed.demand is not None else None
    many = observed.scaling_memory.waiting
    if not was_activated or left != 0 or not many:
        return []
    since = f"{history[0].time:%H:%M:%S} UTC"
    message = f"{count(many, 'request')} waited for the first replica since {since}, and gave up: none is ready"
    return [Event(reason=EventReason.ACTIVATION_TIMED_OUT, action="Activate", message=message)]


def _refused(observed: Observed, policy: ScaleToZero) -> list[Event]:
    """More requests were refused since the last pass, because a gateway may hold no more of this service."""
    demand, limits = observed.demand, policy.activation
    if demand is None or demand.refused_requests <= observed.scaling_memory.refused:
        return []
    refused = count(demand.refused_requests, "request was", "requests were")
    limit = f"{count(limits.max_queued_requests, 'request')} and {limits.max_queued_bytes}"
    message = (
        f"{refused} refused while {demand.waiting_requests} wait for the first replica: each gateway holds at most "
        f"{limit} (scaleToZero.activation)"
    )
    return [Event(reason=EventReason.ACTIVATION_QUEUE_FULL, action="Activate", message=message)]
