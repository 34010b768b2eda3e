"""The field `spec.autoscaling.schedules` of an InferenceService: times at which more replicas are kept.

A start is a cron expression of five fields in the schedule's time zone. What only a calendar can tell, such as the 30th
of February or a time zone that does not exist, is not checked by the schema: a stored schedule that cannot be followed
makes the spec invalid, and the condition says why.
"""

from functools import lru_cache
from typing import Final
from zoneinfo import ZoneInfo

from croniter import croniter
from pydantic import Field, field_validator

from slipway_api.types import Struct

_MONTHS: Final = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec"
_DAYS: Final = "sun|mon|tue|wed|thu|fri|sat"


def _field(value: str) -> str:
    """The pattern of one field: `*`, `*/5`, `1`, `1-5`, `1-5/2`, and lists of these."""
    item = rf"(\*|({value})(-({value}))?)(/[1-9][0-9]?)?"
    return f"{item}(,{item})*"


CRON_PATTERN: Final = "^" + " ".join(
    (
        _field("[0-9]|[1-5][0-9]"),
        _field("[0-9]|1[0-9]|2[0-3]"),
        _field("[1-9]|[12][0-9]|3[01]"),
        _field(f"[1-9]|1[0-2]|{_MONTHS}"),
        _field(f"[0-7]|{_DAYS}"),
    )
) + "$"  # fmt: skip

TIME_ZONE_PATTERN: Final = r"^[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*$"


class Schedule(Struct):
    """A time that returns, at which the service keeps at least so many replicas."""

    name: str = Field(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", max_length=63)
    """Name of the schedule, which is in status.autoscaling.activeSchedule while it is active."""
    time_zone: str = Field(default="UTC", pattern=TIME_ZONE_PATTERN, max_length=64)
    """Time zone of the start, such as Europe/Berlin; changes of daylight saving time are followed."""
    start: str = Field(pattern=CRON_PATTERN, max_length=64)
    """Cron expression of five fields: minute, hour, day of month, month, day of week. "0 8 * * 1-5" is 8:00 from Monday
    to Friday."""
    duration_seconds: int = Field(ge=60, le=604_800)
    """How long it stays active after each start; it may pass midnight."""
    min_replicas: int = Field(ge=1, le=1000)
    """Fewest replicas while it is active."""

    @field_validator("time_zone")
    @classmethod
    def _exists(cls, name: str) -> str:
        return checked_time_zone(name)

    @field_validator("start")
    @classmethod
    def _occurs(cls, expression: str) -> str:
        return checked_expression(expression)


def checked_time_zone(name: str) -> str:
    """The name of a time zone; raises ValueError where there is none of that name."""
    if not _is_time_zone(name):
        raise ValueError(f"{name} is not a time zone such as Europe/Berlin")
    return name


def checked_expression(expression: str) -> str:
    """A cron expression; raises ValueError where it never starts."""
    if not _occurs_at_all(expression):
        raise ValueError(f"{expression!r} is not a cron expression that ever starts")
    return expression


@lru_cache(maxsize=1024)
def _is_time_zone(name: str) -> bool:
    try:
        ZoneInfo(name)
    except (ValueError, LookupError, OSError):  # not a name; not there; a folder of zones
        return False
    return True


@lru_cache(maxsize=1024)
def _occurs_at_all(expression: str) -> bool:
    """Whether it can be read, and starts within the eight years in which every date occurs."""
    try:
        croniter(expression, 0.0, max_years_between_matches=8).get_next(float)
    except (ValueError, ArithmeticError, KeyError):  # croniter's own errors are ValueErrors
        return False
    return True
