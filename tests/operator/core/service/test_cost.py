"""What a million output tokens cost: tables of marks, and what status shows of it."""

from datetime import timedelta
from decimal import Decimal

import pytest

from slipway_api.slo import CostStatus
from slipway_operator.core.observed import CostMark
from slipway_operator.core.service.status.cost import MARK_EVERY, add_mark, cost_status, measure_cost
from tests.builders import T0, a_service, minutes

PRICE = {"gpuHourCost": "2.50", "currency": "EUR"}


def a_priced_service(gpus: int = 1, **budget):
    return a_service(
        resources={"gpu": {"count": gpus}}, runtime={"tensorParallelSize": max(1, gpus)}, budget=PRICE | budget
    )


def after(time: float, gpus: int, tokens: int) -> tuple[CostMark, ...]:
    """So many GPUs held for `time` minutes, in which so many tokens came."""
    return (
        CostMark(at=T0),
        CostMark(at=T0 + minutes(time), gpu_seconds=gpus * time * 60, output_tokens=tokens),
    )


@pytest.mark.capability("CO-1", "PF-23")
@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        (after(60, 2, 4_000_000), 1.25),
        (after(60, 2, 2_000_000), 2.50),  # half the load costs twice as much: idle time is included
        (after(30, 2, 2_000_000), 1.25),
        (after(60, 2, 0), None),
        (after(4, 2, 1_000_000), None),  # too short to tell
    ],
    ids=["full", "half the load", "half an hour", "no tokens", "four minutes"],
)
def test_a_million_output_tokens_cost_all_gpu_time_by_the_tokens_that_came(marks, expected):
    cost = measure_cost(a_priced_service(), marks, gpus=2)

    assert cost.per_million_output_tokens == (None if expected is None else pytest.approx(expected))
    assert cost.currency == "EUR"


def test_without_a_price_or_without_gpus_there_is_no_cost():
    assert measure_cost(a_service(budget={"maxGPUs": 4}), after(60, 1, 1), gpus=1) is None
    assert measure_cost(a_priced_service(gpus=0), after(60, 1, 1), gpus=0) is None


def test_gpu_time_is_summed_from_pass_to_pass_and_an_hour_is_kept():
    marks, now = (), T0
    before = None
    for _ in range(1000):
        marks = add_mark(marks, gpus=3, output_tokens=10, before=before, now=now)
        before, now = now, now + timedelta(seconds=7)

    assert len(marks) <= 60 * 60 / MARK_EVERY.total_seconds() + 3
    assert marks[-1].gpu_seconds == pytest.approx(3 * 999 * 7)
    assert marks[-1].output_tokens == 10_000
    assert timedelta(minutes=59) <= marks[-1].at - marks[0].at <= timedelta(minutes=62)


@pytest.mark.capability("CO-1")
def test_status_shows_a_new_price_of_tokens_at_most_once_a_minute_and_where_it_moved_by_a_tenth():
    service = a_priced_service()

    def shown(before, tokens, *, refreshed=None, at=T0):
        return cost_status(before, measure_cost(service, after(60, 2, tokens), gpus=2), refreshed, at)

    first = shown(None, 4_000_000)
    assert first == CostStatus(
        gpus=2, per_hour=Decimal("5.00"), per_million_output_tokens=Decimal("1.25"), currency="EUR"
    )
    assert shown(first, 3_900_000, at=T0 + minutes(9), refreshed=T0) == first, "less than a tenth"
    assert shown(first, 2_000_000, at=T0 + timedelta(seconds=59), refreshed=T0) == first, "too soon"
    later = shown(first, 2_000_000, at=T0 + timedelta(seconds=61), refreshed=T0)
    assert later.per_million_output_tokens == Decimal("2.50")
    assert shown(first, 0, at=T0 + minutes(9)) == first, "what was measured last stays while no tokens come"
