"""Error budgets and burn rates: tables of numbers, and properties over any counts."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipway_api.gateway_api import OUTCOME_BUCKETS
from slipway_api.slo import MOST_PERIODS, SLO, SLOPeriod
from slipway_operator.core.observed import Outcomes
from slipway_operator.core.service.status.slo import (
    BURN_WINDOWS,
    Counts,
    Level,
    Objective,
    above,
    add_to_periods,
    count,
    find_burn,
    levels,
    most_spent,
    period_start,
    sum_periods,
)

T0 = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
HOURS_5M_30M_1H_6H = (timedelta(minutes=5), timedelta(minutes=30), timedelta(hours=1), timedelta(hours=6))


def a_slo(**fields) -> SLO:
    return SLO.model_validate(fields)


def histogram(**filled: int) -> tuple[int, ...]:
    """`le_0_5=3`: three observations in the bucket up to 0.5 s."""
    counts = [0] * (len(OUTCOME_BUCKETS) + 1)
    for name, number in filled.items():
        text = name.removeprefix("le_").replace("_", ".")
        counts[len(OUTCOME_BUCKETS) if text == "inf" else OUTCOME_BUCKETS.index(float(text))] = number
    return tuple(counts)


def errors(requests: int, failed: int, objective: str = "99.9") -> Level:
    return levels(a_slo(objectivePercent=objective), Counts(requests=requests, failed=failed))[0]


@pytest.mark.capability("OB-6")
@pytest.mark.parametrize(
    ("requests", "failed", "objective", "remaining", "burn_rate"),
    [
        (100_000, 0, "99.9", 1.0, 0.0),
        (100_000, 60, "99.9", 0.4, 0.6),
        (100_000, 100, "99.9", 0.0, 1.0),
        (100_000, 150, "99.9", -0.5, 1.5),
        (1_000, 14, "99", -0.4, 1.4),
        (100, 1, "99.9", 0.9, 10.0),  # a quiet service has a budget of ten
        (0, 0, "99.9", 1.0, 0.0),
    ],
)
def test_the_budget_is_the_number_of_requests_that_may_fail(requests, failed, objective, remaining, burn_rate):
    level = errors(requests, failed, objective)

    assert level.remaining == pytest.approx(remaining)
    assert level.burn_rate == pytest.approx(burn_rate)


@pytest.mark.capability("OB-6")
def test_99_9_percent_allow_43_2_minutes_of_outage_in_30_days():
    minutes_in_30_days, requests_a_minute = 30 * 24 * 60, 100
    outage = 43.2

    level = errors(minutes_in_30_days * requests_a_minute, round(outage * requests_a_minute))

    assert level.remaining == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.4, 8.0), (0.45, 4.0), (0.5, 0.0), (0.35, 8.0), (600.0, 0.0)],
)
def test_within_a_bucket_observations_are_taken_for_evenly_spread(seconds, expected):
    assert above(histogram(le_0_5=8), seconds) == pytest.approx(expected)


def test_what_is_beyond_the_last_bucket_is_above_every_limit():
    assert above(histogram(le_inf=3, le_0_1=5), 600.0) == 3


@pytest.mark.capability("OB-6")
def test_each_latency_has_a_budget_of_its_own_of_five_percent():
    slo = a_slo(ttftP95Seconds="1.0", itlP95Seconds="0.08")
    outcomes = Outcomes(
        requests=1000, ttft=histogram(le_0_5=960, le_2_0=40), itl=histogram(le_0_03=80_000, le_0_1=20_000)
    )

    by_objective = {level.objective: level for level in levels(slo, count(slo, outcomes))}

    assert by_objective[Objective.TTFT_P95].burn_rate == pytest.approx(0.8)
    assert by_objective[Objective.TTFT_P95].remaining == pytest.approx(0.2)
    # 20 percent of the tokens are late; they count as one observation a request: 200 of 1,000, where 50 may be late.
    assert by_objective[Objective.ITL_P95].observations == 1000
    assert by_objective[Objective.ITL_P95].burn_rate == pytest.approx(4.0)
    assert most_spent(list(by_objective.values())).objective is Objective.ITL_P95


@pytest.mark.capability("OB-6")
@pytest.mark.parametrize(
    ("rates", "bad", "expected"),
    [
        ((20.0, 20.0, 20.0, 20.0), 100, (14.4, "1h")),
        ((1.0, 20.0, 20.0, 20.0), 100, (6.0, "6h")),  # it is slow at present, and was for hours
        ((20.0, 7.0, 7.0, 7.0), 100, (6.0, "6h")),
        ((20.0, 20.0, 2.0, 2.0), 100, None),  # a short peak
        ((0.0, 0.0, 20.0, 20.0), 100, None),  # it is over
        ((20.0, 20.0, 20.0, 20.0), 3, None),  # three failures of a quiet service
    ],
    ids=["fast", "slow", "slow, with a peak now", "a peak", "over", "too few"],
)
def test_a_budget_burns_where_both_windows_agree(rates, bad, expected):
    by_window = {
        window: (Level(Objective.ERROR_RATE, bad / (rate * 0.001) if rate else 1000.0, bad if rate else 0, 0.001),)
        for window, rate in zip(HOURS_5M_30M_1H_6H, rates, strict=True)
    }
    burn = find_burn(by_window)

    assert HOURS_5M_30M_1H_6H == BURN_WINDOWS
    assert (burn is None) == (expected is None)
    if burn is not None:
        assert (burn.alert.rate, f"{burn.alert.long.total_seconds() / 3600:g}h") == expected


def test_periods_that_end_before_the_window_are_dropped():
    slo = a_slo(windowDays=30)
    old = [SLOPeriod(start_time=T0 - timedelta(days=days), requests=1) for days in (40, 31, 30, 2)]

    after = add_to_periods(slo, old, Counts(requests=5), T0)

    # Days begin at midnight: what began at noon 30 days ago belongs to a day that reaches into the window.
    assert [one.requests for one in after] == [1, 1, 5]
    assert after[-1].start_time == period_start(T0, timedelta(days=1)) == T0.replace(hour=0)


def test_another_length_of_the_window_keeps_the_counts_that_are_in_it():
    periods = add_to_periods(a_slo(windowDays=30), (), Counts(requests=5), T0)
    periods = add_to_periods(a_slo(windowDays=30), periods, Counts(requests=7), T0 + timedelta(days=1))

    longer = add_to_periods(a_slo(windowDays=90), periods, Counts(), T0 + timedelta(days=2))

    assert sum(one.requests for one in longer) == 12


@pytest.mark.capability("OB-6")
@given(
    st.lists(st.tuples(st.integers(0, 5 * 24 * 60), st.integers(0, 500), st.integers(0, 500)), max_size=80),
    st.integers(1, 90),
)
def test_however_traffic_comes_the_window_is_bounded_and_holds_what_happened_in_it(steps, days):
    """Requests come after pauses of any length; the window never forgets the newest 29 parts of 30."""
    slo, now, periods, happened = a_slo(windowDays=days), T0, (), []
    for pause, requests, failed in steps:
        now += timedelta(minutes=pause)
        more = Counts(requests=requests + failed, failed=failed)
        periods = add_to_periods(slo, periods, more, now)
        happened.append((now, more))
    counted = sum_periods(slo, periods, now)

    window = timedelta(days=days)
    inside = [one for at, one in happened if at > now - window * 29 / 30]
    at_most = [one for at, one in happened if at > now - window * 31 / 30]
    assert sum(one.requests for one in inside) <= counted.requests <= sum(one.requests for one in at_most)
    assert sum(one.failed for one in inside) <= counted.failed <= sum(one.failed for one in at_most)
    assert len(periods) <= MOST_PERIODS
    assert [one.start_time for one in periods] == sorted({one.start_time for one in periods})


@given(st.lists(st.integers(0, 1000), max_size=len(OUTCOME_BUCKETS) + 1), st.floats(0.001, 700), st.floats(0.001, 700))
def test_fewer_observations_are_above_a_higher_limit(counts, one, other):
    low, high = sorted((one, other))

    assert 0 <= above(counts, high) <= above(counts, low) + 1e-9 <= sum(counts) + 1e-9
