"""Error budgets, burn rates and limits of `spec.slo`, computed from counts of requests. Pure arithmetic.

| objective | an observation is        | it is bad if it             | share that may be bad  |
|-----------|--------------------------|-----------------------------|------------------------|
| ErrorRate | a request                | failed                      | 100 - objectivePercent |
| TTFTP95   | a stream                 | is later than ttftP95Seconds | 5 percent             |
| ITLP95    | a token, one per request | is later than itlP95Seconds | 5 percent              |

The budget of an objective is the number of observations of the window that may be bad; a quiet service has a budget of
LEAST_BUDGET, so that its first failure does not exhaust it. The burn rate is the bad share divided by the share that
may be bad: at 1 the budget lasts exactly the window.

99.9 percent, 100,000 requests in 30 days: the budget is 100 failures. 60 failed: 40 percent are left. 1.44 percent of
the last hour failed: burn rate 14.4, which spends 2 percent of the budget in this hour.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final

from slipway_api.gateway_api import OUTCOME_BUCKETS
from slipway_api.slo import MOST_PERIODS, SLO, SLOPeriod
from slipway_operator.core.observed import Outcomes

LATE_SHARE: Final = 0.05  # of a P95: one in twenty may be later
LEAST_BUDGET: Final = 10.0  # bad observations
PERIODS: Final = 30  # of a window
HOUR: Final = timedelta(hours=1)


class Objective(StrEnum):
    """What is measured, as the metrics name it."""

    ERROR_RATE = "ErrorRate"
    TTFT_P95 = "TTFTP95"
    ITL_P95 = "ITLP95"


@dataclass(frozen=True, slots=True)
class Counts:
    """Requests, streams and tokens, and how many of each were bad."""

    requests: int = 0
    failed: int = 0
    streams: int = 0
    slow_streams: float = 0.0
    tokens: int = 0
    slow_tokens: float = 0.0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.requests + other.requests,
            self.failed + other.failed,
            self.streams + other.streams,
            self.slow_streams + other.slow_streams,
            self.tokens + other.tokens,
            self.slow_tokens + other.slow_tokens,
        )


@dataclass(frozen=True, slots=True)
class Level:
    """How one objective was kept over some time."""

    objective: Objective
    observations: float
    bad: float
    allowed: float
    """Share of the observations that may be bad."""

    @property
    def share(self) -> float:
        """Share of the observations that were bad."""
        return self.bad / self.observations if self.observations else 0.0

    @property
    def burn_rate(self) -> float:
        """How fast the budget is spent: at 1 it lasts exactly the window."""
        return self.share / self.allowed

    @property
    def remaining(self) -> float:
        """Share of the budget that is left; below 0: more than the budget is spent."""
        return 1.0 - self.bad / max(LEAST_BUDGET, self.allowed * self.observations)


def count(slo: SLO, outcomes: Outcomes) -> Counts:
    """The counts of outcomes under these limits."""
    ttft, itl = slo.ttft_p95_seconds, slo.itl_p95_seconds
    return Counts(
        requests=outcomes.requests,
        failed=outcomes.errors,
        streams=sum(outcomes.ttft),
        slow_streams=0.0 if ttft is None else above(outcomes.ttft, float(ttft)),
        tokens=sum(outcomes.itl),
        slow_tokens=0.0 if itl is None else above(outcomes.itl, float(itl)),
    )


def levels(slo: SLO, counts: Counts) -> tuple[Level, ...]:
    """The level of each objective that the spec has."""
    found = [
        Level(Objective.ERROR_RATE, counts.requests, counts.failed, 1.0 - float(slo.objective_percent) / 100),
    ]
    if slo.ttft_p95_seconds is not None:
        found.append(Level(Objective.TTFT_P95, counts.streams, counts.slow_streams, LATE_SHARE))
    if slo.itl_p95_seconds is not None:
        # Tokens of one stream are slow together: they count as one observation a request.
        observations = min(counts.tokens, counts.requests)
        slow = counts.slow_tokens * observations / counts.tokens if counts.tokens else 0.0
        found.append(Level(Objective.ITL_P95, observations, slow, LATE_SHARE))
    return tuple(found)


def most_spent(of: Sequence[Level]) -> Level:
    """The level of the objective that has the least of its budget left."""
    return min(of, key=lambda level: level.remaining)


def above(counts: Sequence[int], seconds: float) -> float:
    """How many observations of a histogram are above a limit; within a bucket they are taken for evenly spread.

    8 observations between 0.4 and 0.5 s: 4 of them are above 0.45 s. A limit at a bound of a bucket is exact.
    """
    found = 0.0
    for index, number in enumerate(counts):
        lower = OUTCOME_BUCKETS[index - 1] if index else 0.0
        if index >= len(OUTCOME_BUCKETS) or lower >= seconds:
            found += number
        elif OUTCOME_BUCKETS[index] > seconds:
            upper = OUTCOME_BUCKETS[index]
            found += number * (upper - seconds) / (upper - lower)
    return found


# --- the window -------------------------------------------------------------------------------------------------------


def period_length(slo: SLO) -> timedelta:
    """The length of one period: a day of a window of 30 days."""
    return timedelta(days=slo.window_days) / PERIODS


def period_start(moment: datetime, length: timedelta) -> datetime:
    """When the period of a moment began; periods begin at multiples of their length."""
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    return epoch + (moment - epoch) // length * length


def add_to_periods(slo: SLO, periods: Sequence[SLOPeriod], more: Counts, now: datetime) -> tuple[SLOPeriod, ...]:
    """The periods of the window with new counts in the present one; those that ended before the window are dropped."""
    length = period_length(slo)
    sums: dict[datetime, Counts] = {}
    for period in periods:
        # The window may have had another length when they were written.
        start = period_start(period.start_time, length)
        if start + length > now - timedelta(days=slo.window_days):
            sums[start] = sums.get(start, Counts()) + _counts_of(period)
    if more != Counts():
        start = period_start(now, length)
        sums[start] = sums.get(start, Counts()) + more
    return tuple(_period_of(start, sums[start]) for start in sorted(sums))[-MOST_PERIODS:]


def sum_periods(slo: SLO, periods: Sequence[SLOPeriod], now: datetime) -> Counts:
    """The counts of the window."""
    total = Counts()
    for period in add_to_periods(slo, periods, Counts(), now):
        total += _counts_of(period)
    return total


def _counts_of(period: SLOPeriod) -> Counts:
    return Counts(
        period.requests, period.failed, period.streams, period.slow_streams, period.tokens, period.slow_tokens
    )


def _period_of(start: datetime, counts: Counts) -> SLOPeriod:
    return SLOPeriod(
        start_time=start,
        requests=counts.requests,
        failed=counts.failed,
        streams=counts.streams,
        slow_streams=round(counts.slow_streams),
        tokens=counts.tokens,
        slow_tokens=round(counts.slow_tokens),
    )


# --- burn rates -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BurnAlert:
    """A budget burns where its rate is this high over both windows: the long one is evidence, the short one is now."""

    rate: float
    long: timedelta
    short: timedelta


# From the SRE workbook: 2 percent of a budget of 30 days in an hour, 5 percent in six hours.
BURN_ALERTS: Final = (
    BurnAlert(14.4, timedelta(hours=1), timedelta(minutes=5)),
    BurnAlert(6.0, timedelta(hours=6), timedelta(minutes=30)),
)
BURN_WINDOWS: Final = tuple(sorted({window for alert in BURN_ALERTS for window in (alert.long, alert.short)}))


@dataclass(frozen=True, slots=True)
class Burn:
    """A budget that is spent too fast."""

    alert: BurnAlert
    long: Level
    short: Level


def find_burn(by_window: dict[timedelta, tuple[Level, ...]]) -> Burn | None:
    """The first alert that holds for an objective; None: no budget is spent too fast.

    At least LEAST_BUDGET bad observations are needed: a single failure of a quiet service is no trend.
    """
    for alert in BURN_ALERTS:
        for long, short in zip(by_window[alert.long], by_window[alert.short], strict=True):
            if min(long.burn_rate, short.burn_rate) >= alert.rate and long.bad >= LEAST_BUDGET:
                return Burn(alert, long, short)
    return None
