"""Keeps `status.slo` and condition WithinSLO: what is recorded of the error budget, and when. Pure.

| error budget, burn rate, last hour                     | WithinSLO                  | it ends                     |
|--------------------------------------------------------|----------------------------|-----------------------------|
| a budget of the window is spent                        | False ErrorBudgetExhausted | with 5 percent left again   |
| a burn rate is too high over a long and a short window | False ErrorBudgetBurning   | below 1 over the last hour  |
| the last hour is above a limit                         | False LimitExceeded        | below 80 percent of it      |
| otherwise, with requests in the window                 | True WithinLimits          |                             |
| no request in the window                               | Unknown NoRequests         |                             |

The counts of the window stand in status, so a new leader knows the budget. It does not know the last hour: what was
said about that holds for an hour more, or until enough requests tell another thing. Counts are written at most once a
minute, when they grew by a tenth or the budget moved by a percent, and after an hour at the latest; what an operator
that is killed had not written is lost.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Final

from slipway_api import names
from slipway_api.conditions import Condition, ConditionStatus, ConditionType, Reason, find_condition
from slipway_api.inference_service import InferenceService
from slipway_api.slo import SLO, SLOStatus
from slipway_operator.core import words
from slipway_operator.core.observed import AccountingMemory, Observed, Outcomes
from slipway_operator.core.service.rollout.analysis import P95, quantile
from slipway_operator.core.service.status.slo import (
    BURN_WINDOWS,
    HOUR,
    LEAST_BUDGET,
    Burn,
    Counts,
    Level,
    Objective,
    add_to_periods,
    count,
    find_burn,
    levels,
    most_spent,
    sum_periods,
)

RECORD_AFTER: Final = timedelta(seconds=60)
RECORD_LATENCIES_AFTER: Final = timedelta(minutes=5)
RECORD_AT_LATEST: Final = HOUR
GROWTH: Final = 0.1
BUDGET_STEP: Final = 1.0  # percent of the budget
ENOUGH: Final = 20  # observations of the last hour, for a word about it
BUDGET_BACK: Final = 0.05
LIMIT_BACK: Final = 0.8

SLOCondition = tuple[ConditionStatus, Reason, str]
Recorded = tuple[tuple[datetime | None, Outcomes], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLevels:
    """The objectives of one service in this pass."""

    window: tuple[Level, ...]
    by_time: Mapping[timedelta, tuple[Level, ...]]
    """The levels of the burn rates' windows."""
    hour: Outcomes
    counted: Counts
    """Of the whole window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """status.slo after this pass, the condition, and what the next pass has to remember."""

    status: SLOStatus | None
    condition: SLOCondition
    levels: ServiceLevels
    recorded: Recorded


def exhausted_budget(service: InferenceService) -> str:
    """Why new revisions wait, by the condition that status has; empty: the error budget holds none up."""
    condition = find_condition(service.status.conditions, ConditionType.WITHIN_SLO)
    if service.spec.slo is None or condition is None or condition.reason != Reason.ERROR_BUDGET_EXHAUSTED:
        return ""
    return f"the exhausted error budget ({condition.message.partition(':')[0]})"


def record(slo: SLO, observed: Observed, total: Outcomes, memory: AccountingMemory, now: datetime) -> Recording:
    """Count what is new since status was written, judge it, and decide whether status is written again."""
    service, recorded = observed.service, memory.recorded
    before = service.status.slo or SLOStatus()
    base = next((counts for time, counts in reversed(recorded) if time == before.recorded_time), recorded[-1][1])
    new = count(slo, minus(total, base))
    counted = sum_periods(slo, before.periods, now) + new
    found = _measure(slo, observed, counted, memory.objectives_from, now)
    condition = _judge(slo, service, found, now)

    remaining = _percent_left(found)
    due = _is_due(slo, service, found, new, condition, remaining, now)
    after = service.status.slo
    if due:
        time = now.replace(microsecond=0)
        after = SLOStatus(
            ttft_p95_seconds=_seconds(quantile(found.hour.ttft, P95)) or before.ttft_p95_seconds,
            itl_p95_seconds=_seconds(quantile(found.hour.itl, P95)) or before.itl_p95_seconds,
            error_budget_remaining_percent=remaining,
            recorded_time=time,
            periods=add_to_periods(slo, before.periods, new, now),
        )
        # Until the write is seen, and where it failed, the next pass counts from the entry before.
        recorded = ((before.recorded_time, base), *recorded[-2:], (time, total))
    return Recording(status=after, condition=condition, levels=found, recorded=recorded)


def minus(total: Outcomes, before: Outcomes) -> Outcomes:
    """What was counted after `before`."""

    def less(of: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(map(int.__sub__, of, other)) if other else of

    return Outcomes(
        requests=total.requests - before.requests,
        errors=total.errors - before.errors,
        good=total.good - before.good,
        output_tokens=total.output_tokens - before.output_tokens,
        ttft=less(total.ttft, before.ttft),
        itl=less(total.itl, before.itl),
    )


def _measure(
    slo: SLO, observed: Observed, counted: Counts, not_before: datetime | None, now: datetime
) -> ServiceLevels:
    outcomes, known = observed.service_outcomes, {}
    for window in BURN_WINDOWS:
        begin = max(now - window, not_before or now - window)
        known[window] = outcomes.since(begin) if outcomes is not None else Outcomes()
    return ServiceLevels(
        window=levels(slo, counted),
        by_time={one: levels(slo, count(slo, outcomes)) for one, outcomes in known.items()},
        hour=known[HOUR],
        counted=counted,
    )


# --- when status is written -------------------------------------------------------------------------------------------


def _is_due(
    slo: SLO,
    service: InferenceService,
    found: ServiceLevels,
    new: Counts,
    condition: SLOCondition,
    remaining: Decimal | None,
    now: datetime,
) -> bool:
    before = service.status.slo
    if before is None or before.recorded_time is None:
        return new != Counts()
    age = now - before.recorded_time
    if age < timedelta(seconds=1):
        return False  # one second has one time to be known by
    was = find_condition(service.status.conditions, ConditionType.WITHIN_SLO)
    if new != Counts() and (was is None or was.reason != condition[1]):
        return True
    if age < RECORD_AFTER:
        return False
    shown = before.error_budget_remaining_percent
    if (shown is None) != (remaining is None) or abs(float(shown or 0) - float(remaining or 0)) >= BUDGET_STEP:
        return True
    if new == Counts():
        return False
    present = add_to_periods(slo, before.periods, new, now)[-1].requests
    if new.requests >= GROWTH * (present - new.requests) or age >= RECORD_AT_LATEST:
        return True
    if age < RECORD_LATENCIES_AFTER:
        return False
    return _has_moved(before.ttft_p95_seconds, quantile(found.hour.ttft, P95)) or _has_moved(
        before.itl_p95_seconds, quantile(found.hour.itl, P95)
    )


def _has_moved(shown: Decimal | None, value: float | None) -> bool:
    was = float(shown or 0)
    return value is not None and abs(value - was) > GROWTH * was


def _percent_left(found: ServiceLevels) -> Decimal | None:
    if not found.counted.requests:
        return None
    return Decimal(f"{max(0.0, 100 * most_spent(found.window).remaining):.1f}")


def _seconds(value: float | None) -> Decimal | None:
    return None if value is None else Decimal(f"{value:.3f}")


# --- condition WithinSLO ----------------------------------------------------------------------------------------------


def _judge(slo: SLO, service: InferenceService, found: ServiceLevels, now: datetime) -> SLOCondition:
    """By the table above. While the reason stays, so does the sentence: it tells of the moment of the decision."""
    was = find_condition(service.status.conditions, ConditionType.WITHIN_SLO)
    status, reason, message = _find(slo, found, was, now)
    is_known = was is not None and was.observed_generation == service.metadata.generation
    if was is not None and is_known and (was.status, was.reason) == (status, reason):
        return status, reason, was.message
    return status, reason, message


def _find(slo: SLO, found: ServiceLevels, was: Condition | None, now: datetime) -> SLOCondition:
    reason = was.reason if was is not None else ""
    if not found.counted.requests:
        return ConditionStatus.UNKNOWN, Reason.NO_REQUESTS, "no gateway has counted a request in the window"
    worst = most_spent(found.window)
    if worst.remaining <= 0 or (reason == Reason.ERROR_BUDGET_EXHAUSTED and worst.remaining < BUDGET_BACK):
        return ConditionStatus.FALSE, Reason.ERROR_BUDGET_EXHAUSTED, _exhausted(slo, worst)
    hour = found.by_time[HOUR]
    is_unknown = found.hour.requests < ENOUGH
    was_recent = was is not None and now < was.last_transition_time + HOUR
    if burn := find_burn(dict(found.by_time)):
        return ConditionStatus.FALSE, Reason.ERROR_BUDGET_BURNING, _burning(slo, burn, found)
    still_burns = max(level.burn_rate for level in hour) >= 1
    if was is not None and reason == Reason.ERROR_BUDGET_BURNING and (still_burns or (is_unknown and was_recent)):
        return ConditionStatus.FALSE, Reason.ERROR_BUDGET_BURNING, was.message
    factor = LIMIT_BACK if reason == Reason.LIMIT_EXCEEDED else 1.0
    exceeded = [sentence for level in hour if (sentence := _exceeded(slo, level, found.hour, factor))]
    if exceeded:
        return ConditionStatus.FALSE, Reason.LIMIT_EXCEEDED, "; ".join(exceeded)
    if was is not None and reason == Reason.LIMIT_EXCEEDED and is_unknown and was_recent:
        return ConditionStatus.FALSE, Reason.LIMIT_EXCEEDED, was.message
    message = "error budget is left, and the last hour is within the limits of spec.slo"
    return ConditionStatus.TRUE, Reason.WITHIN_LIMITS, message


def _exceeded(slo: SLO, level: Level, hour: Outcomes, factor: float) -> str:
    """The sentence about a limit that the last hour exceeds; empty: it does not, or there are too few requests."""
    if level.observations < ENOUGH:
        return ""
    if level.objective is Objective.ERROR_RATE:
        limit = slo.max_error_percent
        if limit is None or 100 * level.share <= float(limit) * factor:
            return ""
        many = f"{level.bad:.0f} of {words.count(round(level.observations), 'request')}"
        return f"ErrorRate {100 * level.share:.3g} % > {limit} % over the last hour ({many})"
    if level.share <= level.allowed * factor:
        return ""
    is_ttft = level.objective is Objective.TTFT_P95
    value = quantile(hour.ttft if is_ttft else hour.itl, P95) or 0.0
    limit = slo.ttft_p95_seconds if is_ttft else slo.itl_p95_seconds
    noun = "streams" if is_ttft else "requests"
    late = f"{100 * level.share:.3g} % of {level.observations:.0f} {noun} are later"
    return f"{level.objective} {value:.3g} s > {limit} s over the last hour ({late})"


def _exhausted(slo: SLO, level: Level) -> str:
    budget = max(LEAST_BUDGET, level.allowed * level.observations)
    return (
        f"{_bad_of(level)} in {slo.window_days} days, {budget:.0f} may: the error budget is exhausted; a new revision "
        f"waits until some is left, unless the annotation {names.ANNOTATION_PROMOTE} names it"
    )


def _burning(slo: SLO, burn: Burn, found: ServiceLevels) -> str:
    left = next(one for one in found.window if one.objective is burn.long.objective).remaining
    lasts = timedelta(days=slo.window_days) * max(0.0, left) / burn.long.burn_rate
    return (
        f"{burn.long.objective}: burn rate {burn.long.burn_rate:.1f} over {_short(burn.alert.long)} and "
        f"{burn.short.burn_rate:.1f} over {_short(burn.alert.short)}, both above {burn.alert.rate:g}: the "
        f"{100 * left:.0f} % of the error budget that are left last {lasts / HOUR:.1f} hours"
    )


def _bad_of(level: Level) -> str:
    nouns = {
        Objective.ERROR_RATE: "requests failed",
        Objective.TTFT_P95: "streams started late",
        Objective.ITL_P95: "requests had late tokens",
    }
    return f"{level.objective} {level.bad:.0f} of {level.observations:.0f} {nouns[level.objective]}"


def _short(time: timedelta) -> str:
    """`5m`, `1h`."""
    minutes = round(time.total_seconds() / 60)
    return f"{minutes // 60}h" if minutes % 60 == 0 else f"{minutes}m"


def window_name(time: timedelta) -> str:
    """The window as metrics name it: `5m`, `1h`."""
    return _short(time)
