"""Decides how many replicas a service should have, and why. Pure: samples, past decisions and the time are arguments.

The rules and words are those of the Horizontal Pod Autoscaler: the metric that wants most wins; a tolerance around the
target; stabilisation windows that look back over recommendations; rate policies that look back over changes.

What survives the operator is in status: the number decided last, and the last changes with their times. The window of
recommendations is handed in and out by the caller; after a takeover it is empty, and the number decided last counts
as recommended now, so that a scale-down waits one whole window.

Times of the past may lie ahead of `now`, because a clock was set back or another leader's clock is fast. A
recommendation then counts as made now; a change that lies more than its period ahead is ignored.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from slipway_api.autoscaling import Autoscaling, Limit, ScalingRules
from slipway_api.conditions import Reason
from slipway_api.inference_status import ScalingDecision
from slipway_api.words import count
from slipway_operator.core.actions import earliest
from slipway_operator.core.observed import PastRecommendation
from slipway_operator.core.scaling.limits import LIMIT_NAMES, Bounds, bounds_of
from slipway_operator.core.scaling.signals import (
    TIME_TO_ANSWER,
    Readings,
    Value,
    live_demand,
    measure,
    replicas_for,
)

HISTORY_LENGTH: Final = 5  # changes that status keeps

SEVERAL_CHANGES: Final = (
    "several changes, the last one: "  # begins the reason of an entry that stands for more than one
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """The earlier decisions that this one depends on."""

    current: int  # the number decided last; 0: none yet, or scaled to zero
    history: tuple[ScalingDecision, ...] = ()  # changes, newest first
    recommendations: tuple[PastRecommendation, ...] = ()  # oldest first; () after a takeover
    silent_since: datetime | None = None  # since when no replica has answered
    verdict: str = ""  # reason of condition ScalingActive in status


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """How many replicas there should be, and why."""

    desired: int
    reason: str  # the evidence, in one sentence: `2→4: KVCacheUtilization 0.93 > 0.80 (3/3 pods, 4s old)`
    recommended: int  # what the metrics ask for, before windows and limits
    limited_by: Limit | None = None  # the limit because of which `desired` differs from `recommended`
    verdict: Reason = Reason.METRICS_FRESH  # of condition ScalingActive
    is_active: bool | None = True  # its status; None: unknown, nothing to measure yet
    keeps_condition: bool = False  # no sample can have arrived yet: the condition stays as it is
    is_activation: bool = False  # requests wait for a service without replicas
    active_schedule: str = ""  # whose minReplicas holds
    values: tuple[Value, ...] = ()
    recommendations: tuple[PastRecommendation, ...] = ()  # the window, an argument of the next decision
    again_at: datetime | None = None  # when time alone may change the answer


def decide(
    policy: Autoscaling,
    readings: Readings,
    past: Past,
    *,
    max_num_seqs: int,
    capacity_shortage: str,
    now: datetime,
    bounds: Bounds | None = None,
) -> Recommendation:
    """Decides the number of replicas, which is at least 1: `core.scaling.zero` decides about none.

    `capacity_shortage` is why the last ones could not be placed: none is added. `bounds` are the limits that hold now,
    where a schedule or a budget sets others than the policy's own.
    """
    bounds = bounds or bounds_of(policy)
    bounded = bounds.clamp(past.current)
    if bounded != past.current:
        # New limits hold at once, without evidence and without windows: the user has decided.
        return _within_new_limits(policy, bounds, readings, past, bounded, now)
    if readings.ready == 0:
        return _hold(policy, past, now, reason=f"no replica is ready yet: holding {bounded}", is_active=None)
    if not readings.metered and readings.unasked:
        return _before_the_first_answers(policy, readings, past, now)
    if not readings.metered:
        return _without_metrics(policy, bounds, readings, past, now)
    return _with_metrics(
        policy, bounds, readings, past, max_num_seqs=max_num_seqs, capacity_shortage=capacity_shortage, now=now
    )


def with_change(
    history: Sequence[ScalingDecision], change: ScalingDecision, policy: Autoscaling
) -> tuple[ScalingDecision, ...]:
    """The history with one more change, newest first, in a length that keeps what the rate policies count.

    Where it grows too long, changes of the same quarter of a period become one: 2→4 and 4→6 are 2→6 at the time of the
    second, so they count a little longer than they should, and never too short. Any period touches five quarters, so
    five entries always suffice. A step back within a quarter is counted against the steps around it.
    """
    known = [change, *history]
    period = max(policy.behavior.scale_up.period_seconds, policy.behavior.scale_down.period_seconds)
    while len(known) > HISTORY_LENGTH:
        forgettable = [n for n, one in enumerate(known) if not _is_recent(one, period, change.time)]
        if forgettable:
            del known[forgettable[-1]]
            continue
        quarters = [int(one.time.timestamp() / (period / 4)) for one in known]
        in_one_quarter = [n for n in range(len(known) - 1) if quarters[n] == quarters[n + 1]]
        n = in_one_quarter[-1] if in_one_quarter else len(known) - 2
        known[n : n + 2] = [_joined(known[n], known[n + 1])]
    return tuple(known)


def _joined(newer: ScalingDecision, older: ScalingDecision) -> ScalingDecision:
    last = newer.reason.removeprefix(SEVERAL_CHANGES)
    reason = f"{SEVERAL_CHANGES}{last}"[:1024]
    return ScalingDecision(time=newer.time, from_=older.from_, to=newer.to, reason=reason)


def _within_new_limits(
    policy: Autoscaling, bounds: Bounds, readings: Readings, past: Past, bounded: int, now: datetime
) -> Recommendation:
    why = "there are no replicas yet" if past.current == 0 else f"it was {past.current}"
    return Recommendation(
        desired=bounded,
        reason=f"{past.current}→{bounded}: {bounds}, and {why}",
        recommended=bounded,
        verdict=Reason.METRICS_FRESH if readings.metered else Reason.METRICS_MISSING,
        is_active=True if readings.metered else None,
        recommendations=_remember(past, policy, bounded, now),
    )


def _with_metrics(
    policy: Autoscaling,
    bounds: Bounds,
    readings: Readings,
    past: Past,
    *,
    max_num_seqs: int,
    capacity_shortage: str,
    now: datetime,
) -> Recommendation:
    current, up, down = past.current, policy.behavior.scale_up, policy.behavior.scale_down
    values = tuple(value for metric in policy.metrics if (value := measure(metric, readings)))
    wanted_by = {
        value: replicas_for(
            value,
            readings,
            current=current,
            tolerance_up=float(up.tolerance),
            tolerance_down=float(down.tolerance),
        )
        for value in values
    }
    # Latency asks for more or holds; without a metric of load nothing could say that fewer would do.
    has_load = any(not value.is_latency for value in wanted_by)
    recommended = max([*wanted_by.values(), *(() if has_load else (current,))])

    within = bounds.clamp(recommended)
    window = _remember(past, policy, within, now)
    stabilised = _stabilise(within, current, window, up, down, now)
    paced = _pace(stabilised, current, past.history, up, down, now)
    desired, limited_by = paced, None
    if desired > current and capacity_shortage:
        desired, limited_by = current, Limit.LIMITED_BY_CAPACITY
    elif desired < current and (floor := live_demand(values, readings, max_num_seqs=max_num_seqs)) > desired:
        desired, limited_by = min(current, floor), Limit.LIVE_DEMAND
    elif paced != stabilised:
        limited_by = Limit.SCALE_UP_RATE if stabilised > current else Limit.SCALE_DOWN_RATE
    elif stabilised != within:
        limited_by = Limit.STABILIZATION_WINDOW
    elif recommended > bounds.ceiling:
        limited_by = bounds.ceiling_limit
    elif recommended < bounds.floor:
        limited_by = Limit.MIN_REPLICAS

    return Recommendation(
        desired=desired,
        reason=_evidence(desired, current, wanted_by, readings, limited_by, recommended, capacity_shortage, now),
        recommended=recommended,
        limited_by=limited_by,
        verdict=_verdict(bounds, past, readings, limited_by, recommended, capacity_shortage),
        values=values,
        recommendations=window,
        again_at=_next_decision_at(policy, window, past.history, now) if desired != within else None,
    )


def _before_the_first_answers(policy: Autoscaling, readings: Readings, past: Past, now: datetime) -> Recommendation:
    """Holds the number while the first answers may still be on their way; the condition does not change."""
    pods = count(readings.ready, "ready pod is", "ready pods are")
    return Recommendation(
        desired=past.current,
        reason=f"{pods} polled for the first time: holding {past.current}",
        recommended=past.current,
        verdict=Reason.METRICS_MISSING,
        is_active=None,
        keeps_condition=True,
        recommendations=_remember(past, policy, past.current, now),
        again_at=now + TIME_TO_ANSWER,
    )


def _without_metrics(
    policy: Autoscaling, bounds: Bounds, readings: Readings, past: Past, now: datetime
) -> Recommendation:
    """Holds the number while no ready replica answers; after a long time the fallback counts, if it is more."""
    missing = policy.missing_metrics
    since = past.silent_since or now
    patience = timedelta(seconds=missing.max_hold_seconds)
    fallback = min(missing.fallback_replicas or 0, bounds.ceiling)
    if now >= since + patience and fallback > past.current:
        reason = (
            f"{past.current}→{fallback}: no sample from {count(readings.ready, 'ready pod')} "
            f"for {missing.max_hold_seconds}s, so fallbackReplicas counts"
        )
        window = _remember(past, policy, fallback, now)
        return Recommendation(
            desired=fallback,
            reason=reason,
            recommended=fallback,
            verdict=Reason.METRICS_MISSING,
            is_active=False,
            recommendations=window,
        )
    reason = f"none of {count(readings.ready, 'ready pod')} reports its load: holding {past.current}"
    again_at = since + patience if fallback > past.current else None
    return _hold(policy, past, now, reason=reason, is_active=False, again_at=again_at)


def _hold(
    policy: Autoscaling,
    past: Past,
    now: datetime,
    *,
    reason: str,
    is_active: bool | None,
    again_at: datetime | None = None,
) -> Recommendation:
    return Recommendation(
        desired=past.current,
        reason=reason,
        recommended=past.current,
        verdict=Reason.METRICS_MISSING,
        is_active=is_active,
        recommendations=_remember(past, policy, past.current, now),
        again_at=again_at,
    )


def _stabilise(
    wanted: int,
    current: int,
    window: Sequence[PastRecommendation],
    up: ScalingRules,
    down: ScalingRules,
    now: datetime,
) -> int:
    """Up to the lowest recommendation of the up window, down to the highest of the down window."""
    lowest = min((one.desired for one in _within(window, up, now)), default=wanted)
    highest = max((one.desired for one in _within(window, down, now)), default=wanted)
    if wanted > current:
        return max(current, min(wanted, lowest))
    return min(current, max(wanted, highest))


def _within(window: Sequence[PastRecommendation], rules: ScalingRules, now: datetime) -> tuple[PastRecommendation, ...]:
    horizon = now - timedelta(seconds=rules.stabilization_window_seconds)
    return tuple(one for one in window if one.at > horizon)


def _pace(
    wanted: int,
    current: int,
    history: Sequence[ScalingDecision],
    up: ScalingRules,
    down: ScalingRules,
    now: datetime,
) -> int:
    """At most `maxPods` within the period, counting what was changed already: 2 of 3 added leave 1."""
    if wanted > current:
        return min(wanted, current + _allowance(history, up, now, direction=1))
    return max(wanted, current - _allowance(history, down, now, direction=-1))


def _allowance(history: Sequence[ScalingDecision], rules: ScalingRules, now: datetime, *, direction: int) -> int:
    """How many replicas may still be added (direction 1) or removed (-1) within the period."""
    recent = [change for change in history if _is_recent(change, rules.period_seconds, now)]
    moved = sum(max(0, direction * (change.to - change.from_)) for change in recent)
    return max(0, rules.max_pods - moved)


def _is_recent(change: ScalingDecision, period_seconds: int, now: datetime) -> bool:
    """Whether a change lies within the period. One that lies further ahead has a wrong time, and is ignored."""
    return abs(now - change.time) < timedelta(seconds=period_seconds)


def _remember(past: Past, policy: Autoscaling, recommended: int, now: datetime) -> tuple[PastRecommendation, ...]:
    """The window with this recommendation, without those that are too old for every window.

    Of a run of equal recommendations only the first and the last are kept: a window begins inside the run or not, and
    both answers can be read from its ends.
    """
    known = past.recommendations or ((PastRecommendation(now, past.current),) if past.current else ())
    behavior = policy.behavior
    reach = max(behavior.scale_up.stabilization_window_seconds, behavior.scale_down.stabilization_window_seconds)
    horizon = now - timedelta(seconds=reach)
    window = [PastRecommendation(min(one.at, now), one.desired) for one in known if one.at > horizon]
    if len(window) >= 2 and window[-1].desired == window[-2].desired == recommended:
        window.pop()
    return (*window, PastRecommendation(now, recommended))


def _next_decision_at(
    policy: Autoscaling, window: Sequence[PastRecommendation], history: Sequence[ScalingDecision], now: datetime
) -> datetime | None:
    """When the next recommendation or change of the past leaves its window, which may allow another number."""
    moments: list[datetime] = []
    for rules in (policy.behavior.scale_up, policy.behavior.scale_down):
        length, period = rules.stabilization_window_seconds, rules.period_seconds
        moments += [one.at + timedelta(seconds=length) for one in _within(window[:-1], rules, now)]
        recent = [change for change in history if _is_recent(change, period, now)]
        moments += [change.time + timedelta(seconds=period) for change in recent]
    return earliest(*(moment for moment in moments if moment > now))


def _verdict(
    bounds: Bounds,
    past: Past,
    readings: Readings,
    limited_by: Limit | None,
    recommended: int,
    capacity_shortage: str,
) -> Reason:
    """The reason of ScalingActive. A limit that was reached stays until it no longer matters, so that load that
    hovers around a target does not repeat the warning: until fewer replicas are wanted, or there is capacity again.
    """
    if limited_by in (Limit.LIMITED_BY_MAX, Limit.LIMITED_BY_BUDGET, Limit.LIMITED_BY_CAPACITY):
        return Reason(limited_by.value)
    is_at_max = past.current == bounds.ceiling and recommended >= past.current
    if is_at_max and past.verdict == bounds.ceiling_limit.value:
        return Reason(bounds.ceiling_limit.value)
    if past.verdict == Reason.LIMITED_BY_CAPACITY and capacity_shortage and recommended >= past.current:
        return Reason.LIMITED_BY_CAPACITY
    return Reason.METRICS_STALE if readings.silent else Reason.METRICS_FRESH


def _evidence(
    desired: int,
    current: int,
    wanted_by: dict[Value, int],
    readings: Readings,
    limited_by: Limit | None,
    recommended: int,
    capacity_shortage: str,
    now: datetime,
) -> str:
    """`2→4: KVCacheUtilization 0.93 > 0.80 (3/3 pods, 4s old)`; downwards every metric is evidence."""
    change = f"{current}→{desired}" if desired != current else f"holding {current}"
    deciding = [value for value, wanted in wanted_by.items() if desired < current or wanted == recommended]
    measured = ", ".join(str(value) for value in deciding)
    age = max(0, int((now - (readings.oldest or now)).total_seconds()))
    named = LIMIT_NAMES[limited_by] if limited_by and desired != recommended else ""
    limit = f"; {recommended} wanted, limited by {named}" if named else ""
    shortage = f": {capacity_shortage}" if limited_by is Limit.LIMITED_BY_CAPACITY else ""
    return f"{change}: {measured} ({len(readings.metered)}/{count(readings.ready, 'pod')}, {age}s old){limit}{shortage}"
