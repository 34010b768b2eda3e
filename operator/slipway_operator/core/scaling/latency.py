"""Latency as a reason to scale: the 95th percentile of the time to first token, from the gateways' histograms. Pure.

Latency says that replicas are too few, never that they are too many: a short wait is as short with half of them idle.
So it asks for more, or holds the number while the value is near its target; below that it asks for nothing.

How many more does not follow from how late the answers are, because a queue grows without bound while the load is a
little above what the replicas can do. So one step at most doubles the replicas, and the next one waits for evidence
from after that step: only requests that ended since the newest replica became ready are counted.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from math import ceil
from typing import Final

from slipway_api.gateway_api import OUTCOME_BUCKETS
from slipway_operator.core.observed import Outcomes, OutcomesSince

WINDOW: Final = timedelta(seconds=60)
FEWEST_REQUESTS: Final = 20  # of fewer, the 95th percentile is the slowest one
MOST_GROWTH: Final = 2.0  # of one step


@dataclass(frozen=True, slots=True)
class Latency:
    """A percentile of a latency over a number of requests."""

    seconds: float
    requests: int


def ttft_p95(outcomes_since: OutcomesSince | None, ready_since: Iterable[datetime], now: datetime) -> Latency | None:
    """The time to first token of the last minute, since the newest of the ready replicas; None: not enough requests."""
    if outcomes_since is None:
        return None
    begin = max((now - WINDOW, *(moment for moment in ready_since if moment <= now)))
    return percentile(outcomes_since(begin).values(), 0.95)


def percentile(outcomes: Iterable[Outcomes], share: float) -> Latency | None:
    """The value that this share of the times to first token does not exceed, interpolated within its bucket."""
    counts = _added_up([one.ttft for one in outcomes])
    total = sum(counts)
    if total < FEWEST_REQUESTS:
        return None
    rank, seen, below = share * total, 0, 0.0
    for count, bound in zip(counts, OUTCOME_BUCKETS, strict=False):
        if count and seen + count >= rank:
            return Latency(below + (bound - below) * (rank - seen) / count, total)
        seen, below = seen + count, bound
    return Latency(OUTCOME_BUCKETS[-1], total)  # beyond the last bound: at least that


def replicas_for_latency(
    ratio: float, *, ready: int, pending: int, broken: int, current: int, tolerance_up: float, tolerance_down: float
) -> int:
    """How many replicas the latency asks for; 0: it does not ask. `ratio` is its value by its target.

    2 ready ones at 1.3 times the target: ceil(2 × 1.3) = 3. With one loading: no more, before that one has served.
    """
    if ratio <= 1 - tolerance_down:
        return 0
    if ratio <= 1 + tolerance_up or pending:
        return current
    wanted = ceil(ready * min(ratio, MOST_GROWTH)) + min(broken, ready)
    return max(current, wanted)


def _added_up(histograms: Sequence[Sequence[int]]) -> list[int]:
    length = len(OUTCOME_BUCKETS) + 1
    return [sum(one[n] for one in histograms if n < len(one)) for n in range(length)]
