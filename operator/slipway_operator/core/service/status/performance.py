"""Measures where the time of a cold start went: schedule, pull, download, load, warm-up.

The first two are read from the pod, the others are what its runtime reports. Status shows the newest replica that was
started cold and is ready, so it changes at most once for each new replica.
"""

from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal

from slipway_api.inference_status import ColdStart, PerformanceStatus
from slipway_operator.core.health import Member
from slipway_operator.core.observed import Capacity, Replica


def newest_cold_start(members: Sequence[Member]) -> tuple[Replica, Capacity] | None:
    """The newest replica that was started cold and has reported its capacity; None where none has.

    A replica that was claimed from a WarmPool, or whose container was started again, tells nothing about a cold start.
    """
    measured = [
        (one.replica, one.replica.sample.capacity)
        for one in members
        if one.is_ready and not one.replica.claimed_at and not one.replica.restarts
        if one.replica.sample is not None and one.replica.sample.capacity is not None
    ]
    return max(measured, key=lambda one: (one[0].created_at, one[0].name), default=None)


def measure_performance(members: Sequence[Member]) -> PerformanceStatus | None:
    """The cold start of the newest replica that has reported it; None where none has."""
    newest = newest_cold_start(members)
    if newest is None:
        return None
    replica, capacity = newest
    startup = capacity.startup
    if startup.load_seconds is None:
        return None
    cold = ColdStart(
        schedule_seconds=_between(replica.created_at, replica.scheduled_at),
        pull_seconds=_between(replica.scheduled_at, replica.running_since),
        download_seconds=_rounded(startup.download_seconds),
        load_seconds=_rounded(startup.load_seconds),
        warmup_seconds=_rounded(startup.warmup_seconds),
    )
    return PerformanceStatus(cold_start=cold)


def _between(start: datetime | None, end: datetime | None) -> Decimal | None:
    """Whole seconds, because the API server writes times so."""
    if start is None or end is None:
        return None
    return _rounded(max(0.0, (end - start).total_seconds()))


def _rounded(seconds: float | None) -> Decimal | None:
    return None if seconds is None else Decimal(f"{seconds:.2f}")
