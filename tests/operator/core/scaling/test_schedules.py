"""When schedules are active: across midnight, across changes of the clock, and beside each other."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from slipway_api.schedules import Schedule
from slipway_operator.core.scaling.schedules import find_active, starts_around

BERLIN = ZoneInfo("Europe/Berlin")
HOUR = 3600


def a_schedule(start: str, hours: float, *, name="day", zone="Europe/Berlin", replicas=3) -> Schedule:
    return Schedule(name=name, time_zone=zone, start=start, duration_seconds=int(hours * HOUR), min_replicas=replicas)


def berlin(*moment: int, fold: int = 0) -> datetime:
    return datetime(*moment, tzinfo=BERLIN, fold=fold).astimezone(UTC)


DAY = a_schedule("0 8 * * 1-5", 10)  # Monday to Friday, 8:00 to 18:00
NIGHT = a_schedule("0 22 * * *", 8, name="night")


@pytest.mark.capability("AS-11")
@pytest.mark.parametrize(
    ("schedule", "now", "is_active", "changes_at"),
    [
        (DAY, berlin(2026, 5, 4, 7, 59, 59), False, berlin(2026, 5, 4, 8)),
        (DAY, berlin(2026, 5, 4, 8), True, berlin(2026, 5, 4, 18)),
        (DAY, berlin(2026, 5, 4, 17, 59, 59), True, berlin(2026, 5, 4, 18)),
        (DAY, berlin(2026, 5, 4, 18), False, berlin(2026, 5, 5, 8)),
        (DAY, berlin(2026, 5, 9, 12), False, berlin(2026, 5, 11, 8)),
        (NIGHT, berlin(2026, 5, 5, 2), True, berlin(2026, 5, 5, 6)),
        (NIGHT, berlin(2026, 3, 29, 6, 59), True, berlin(2026, 3, 29, 7)),
        (NIGHT, berlin(2026, 10, 25, 4, 59), True, berlin(2026, 10, 25, 5)),
        (NIGHT, berlin(2026, 10, 25, 5), False, berlin(2026, 10, 25, 22)),
    ],
    ids=[
        "a second too early",
        "the first second",
        "the last second",
        "over",
        "Saturday: until Monday",
        "past midnight",
        "eight hours of a night in which clocks are set forward end at 7:00",
        "eight hours of a night in which clocks are set back end at 5:00",
        "and not at 6:00",
    ],
)
def test_a_schedule_is_active_from_its_start_for_its_duration(schedule, now, is_active, changes_at):
    found = find_active([schedule], now)

    assert (found.schedule is schedule, found.changes_at) == (is_active, changes_at)


@pytest.mark.capability("AS-11")
def test_a_start_in_the_hour_that_is_skipped_happens_right_after_it():
    """2:30 does not exist on the 29th of March 2026 in Berlin: the old clock would show it when the new shows 3:30."""
    schedule = a_schedule("30 2 * * *", 1)
    start = datetime(2026, 3, 29, 1, 30, tzinfo=UTC)

    assert starts_around(schedule.start, schedule.time_zone, berlin(2026, 3, 29, 1))[1] == start
    assert find_active([schedule], start).schedule is schedule


@pytest.mark.capability("AS-11")
def test_a_start_in_the_hour_that_comes_twice_happens_once():
    schedule = a_schedule("30 2 * * *", 0.25)
    first, second = berlin(2026, 10, 25, 2, 30), berlin(2026, 10, 25, 2, 30, fold=1)
    assert second - first == timedelta(hours=1)

    assert find_active([schedule], first).schedule is schedule
    assert find_active([schedule], second).schedule is None
    following = berlin(2026, 10, 26, 2, 30)
    assert (
        starts_around(schedule.start, schedule.time_zone, first)
        == starts_around(schedule.start, schedule.time_zone, second)
        == (first, following)
    )


@pytest.mark.capability("AS-11")
def test_of_several_active_schedules_the_one_with_the_most_replicas_holds():
    peak = a_schedule("0 12 * * *", 1, name="peak", replicas=8)
    noon, evening = berlin(2026, 5, 4, 12, 30), berlin(2026, 5, 4, 17)

    assert find_active([DAY, peak], noon) == (peak, berlin(2026, 5, 4, 13))
    assert find_active([DAY, peak], evening).name == "day"
    assert find_active([], noon) == (None, None)


ZONES = ["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu"]
# Clocks change near these moments, in one zone or another.
CHANGES = [datetime(2026, *day, tzinfo=UTC) for day in ((3, 8, 7), (3, 29, 1), (4, 4, 15), (10, 3, 16), (10, 25, 1))]
MOMENTS = st.one_of(
    st.datetimes(datetime(2026, 1, 1), datetime(2028, 12, 31)).map(lambda one: one.replace(tzinfo=UTC)),
    st.builds(
        lambda change, offset: change + timedelta(seconds=offset),
        st.sampled_from(CHANGES),
        st.integers(-15_000, 15_000),
    ),
)
STARTS = ["0 8 * * 1-5", "30 2 * * *", "*/7 * * * *", "0 0 1 * *", "15 1,2,3 * * *", "0 0 29 2 *"]


@pytest.mark.capability("AS-11")
@settings(max_examples=300)
@given(
    zone=st.sampled_from(ZONES),
    start=st.sampled_from(STARTS),
    now=MOMENTS,
)
def test_nothing_starts_between_the_last_start_and_the_next(zone, start, now):
    schedule = a_schedule(start, 1, zone=zone)
    last, following = starts_around(schedule.start, schedule.time_zone, now)

    assert last is not None
    assert following is not None
    assert last <= now < following
    # Neither depends on where between them one asks: what is waited for arrives.
    assert starts_around(schedule.start, schedule.time_zone, last) == (last, following)
    assert starts_around(schedule.start, schedule.time_zone, following - timedelta(seconds=1)) == (last, following)
    assert starts_around(schedule.start, schedule.time_zone, following)[0] == following


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"time_zone": "Mars/Olympus"}, "is not a time zone"),
        ({"time_zone": "Europe"}, "is not a time zone"),
        ({"start": "0 0 30 2 *"}, "not a cron expression that ever starts"),
        ({"start": "61 * * * *"}, "should match pattern"),
        ({"start": "@daily"}, "should match pattern"),
    ],
)
def test_a_schedule_that_can_never_start_is_refused_with_its_reason(fields, message):
    valid = {"name": "day", "start": "0 8 * * *", "duration_seconds": 3600, "min_replicas": 2}

    with pytest.raises(ValidationError, match=message):
        Schedule(**{**valid, **fields})
