"""Which replicas' load is known: fresh, late, missing and impossible samples."""

from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipway_operator.core.health import Member, Stage
from slipway_operator.core.observed import Sample
from slipway_operator.core.scaling.signals import TIME_TO_ANSWER, Readings, read
from tests.builders import T0, a_pod, minutes, seconds

STALE_AFTER = seconds(30)
LONG_AGO = T0 - minutes(10)


def a_ready(*, sampled: datetime | None = None, since: datetime = LONG_AGO) -> Member:
    replica = a_pod("old").ready(since).replica
    sample = Sample(at=sampled, kv_usage=0.5, running=1, waiting=0) if sampled else None
    return Member(replace(replica, sample=sample), Stage.READY)


def reading(*members: Member, wanted: int = 1, asking_since: datetime | None = None, now: datetime = T0) -> Readings:
    return read(members, wanted=wanted, slots_in_backoff=0, stale_after=STALE_AFTER, asking_since=asking_since, now=now)


def counts(readings: Readings) -> tuple[int, int, int]:
    return len(readings.metered), readings.silent, readings.unasked


@pytest.mark.capability("AS-4")
@pytest.mark.parametrize(
    ("age", "expected"),
    [(0, (1, 0, 0)), (30, (1, 0, 0)), (31, (0, 1, 0)), (-30, (1, 0, 0)), (-3600, (0, 1, 0))],
    ids=["now", "just fresh", "late", "a little ahead", "an hour ahead, by a clock that was set back"],
)
def test_a_sample_counts_while_it_is_fresh_in_both_directions(age, expected):
    assert counts(reading(a_ready(sampled=T0 - seconds(age)))) == expected


@pytest.mark.capability("AS-4")
@pytest.mark.parametrize(
    ("ready_since", "asking_since", "expected"),
    [
        (T0 - minutes(10), None, (0, 1, 0)),
        (T0 - seconds(3), None, (0, 0, 1)),
        (T0 - minutes(10), T0 - seconds(3), (0, 0, 1)),
        (T0 - minutes(10), T0 - TIME_TO_ANSWER, (0, 1, 0)),
        (T0 - seconds(3), T0 - minutes(10), (0, 0, 1)),
    ],
    ids=["long silent", "ready just now", "a new leader", "a leader that has asked", "new under an old leader"],
)
def test_a_replica_without_a_sample_is_silent_once_it_had_the_time_to_answer(ready_since, asking_since, expected):
    """C5: a new leader called every replica silent."""
    assert counts(reading(a_ready(since=ready_since), asking_since=asking_since)) == expected


MEMBERS = st.lists(
    st.builds(
        lambda age, stage, since: Member(
            a_ready(sampled=None if age is None else T0 - seconds(age), since=T0 - seconds(since)).replica, stage
        ),
        st.none() | st.integers(-7200, 7200),
        st.sampled_from(Stage),
        st.integers(-60, 7200),
    ),
    max_size=12,
)


@given(members=MEMBERS, wanted=st.integers(0, 20), asked=st.none() | st.integers(-60, 60), late=st.integers(0, 60))
def test_every_replica_is_counted_once_whatever_it_says_and_however_the_clock_runs(members, wanted, asked, late):
    asking_since = None if asked is None else T0 - seconds(asked)
    readings = reading(*members, wanted=wanted, asking_since=asking_since, now=T0 + timedelta(seconds=late))

    assert readings.ready == sum(member.is_ready for member in members)
    assert min(readings.silent, readings.unasked, readings.pending, readings.broken) >= 0
    assert readings.ready + readings.broken + readings.pending >= wanted
