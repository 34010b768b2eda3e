"""Decides which schedule is active, and when that changes. Pure.

A start is a wall-clock time of the schedule's zone; the duration is real time. So a night from 22:00 that lasts eight
hours ends at 5:00 when clocks are set back in it, and at 7:00 when they are set forward. A start in the hour that is
skipped happens right after it, by the old clock; one in the hour that comes twice happens the first time.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import takewhile
from typing import Final, NamedTuple
from zoneinfo import ZoneInfo

from croniter import croniter

from slipway_api.schedules import Schedule
from slipway_operator.core.actions import earliest

LONGEST_SHIFT: Final = timedelta(hours=3)  # by which a change of the clock moves wall-clock times, and some more


class Scheduled(NamedTuple):
    """The schedule whose number holds at a moment, and until when nothing about that changes."""

    schedule: Schedule | None
    changes_at: datetime | None

    @property
    def min_replicas(self) -> int:
        """Fewest replicas by the active schedule; 0 without one."""
        return self.schedule.min_replicas if self.schedule else 0

    @property
    def name(self) -> str:
        """Name of the active schedule; empty without one."""
        return self.schedule.name if self.schedule else ""


def find_active(schedules: Sequence[Schedule], now: datetime) -> Scheduled:
    """The active schedule with the most replicas, of equals the first, and the next start or end of any of them."""
    active: list[Schedule] = []
    moments: list[datetime] = []
    for schedule in schedules:
        last, following = starts_around(schedule.start, schedule.time_zone, now)
        if last is not None and now < (end := last + timedelta(seconds=schedule.duration_seconds)):
            active.append(schedule)
            moments.append(end)
        if following is not None:
            moments.append(following)
    return Scheduled(max(active, key=lambda one: one.min_replicas, default=None), earliest(*moments))


def starts_around(start: str, time_zone: str, now: datetime) -> tuple[datetime | None, datetime | None]:
    """The last start up to now, and the first one after it, of a cron expression in a time zone."""
    # Expressions start at whole minutes, so the answer holds for the whole minute of `now`.
    return _starts_around(start, time_zone, now.replace(second=0, microsecond=0))


@lru_cache(maxsize=4096)
def _starts_around(start: str, time_zone: str, minute: datetime) -> tuple[datetime | None, datetime | None]:
    zone = ZoneInfo(time_zone)
    last = next((one for one in _starts(start, zone, minute, forward=False) if one <= minute), None)
    following = next((one for one in _starts(start, zone, minute, forward=True) if one > minute), None)
    return last, following


def _starts(start: str, zone: ZoneInfo, now: datetime, *, forward: bool) -> Iterator[datetime]:
    """Starts in one direction of time; the first ones lie on the other side of `now` where a clock changes nearby.

    The expression is read on the wall clock, which runs evenly, and each start is then converted to real time. Where
    the clock changes, starts of the skipped time fall among others, so those hours are read as a whole, and sorted.
    """
    local = now.astimezone(zone).replace(tzinfo=None)
    offsets = {(now + shift).astimezone(zone).utcoffset() for shift in (-LONGEST_SHIFT, timedelta(), LONGEST_SHIFT)}
    second = timedelta(seconds=1)
    far = local if forward else local + second  # going back, a start at this very minute counts
    if len(offsets) > 1:
        begin, end = local - LONGEST_SHIFT, local + LONGEST_SHIFT
        near = takewhile(lambda one: one <= end, _wall_clock_times(start, begin - second, forward=True))
        yield from sorted({_real_time(one, zone) for one in near}, reverse=not forward)
        far = end if forward else begin
    for one in _wall_clock_times(start, far, forward=forward):
        yield _real_time(one, zone)


def _wall_clock_times(start: str, begin: datetime, *, forward: bool) -> Iterator[datetime]:
    """The starts after the beginning, or before it."""
    expression = croniter(start, begin, max_years_between_matches=8)
    while True:
        yield expression.get_next(datetime) if forward else expression.get_prev(datetime)


def _real_time(wall_clock: datetime, zone: ZoneInfo) -> datetime:
    return wall_clock.replace(tzinfo=zone).astimezone(UTC)
