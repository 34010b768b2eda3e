"""Sums over gateways: demand, and outcomes since a moment. Tables and properties in given time."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipway_api.gateway_api import (
    DemandReport,
    OutcomesReport,
    RevisionOutcomes,
    ServiceDemand,
    ServiceOutcomes,
)
from slipway_api.types import ServiceKey
from slipway_operator.inputs.demand import Changed, DemandTable
from slipway_operator.inputs.outcomes import KEPT, OutcomeSums

T0 = datetime(2026, 1, 1, tzinfo=UTC)
CHAT = ServiceKey("ns", "chat")


def at(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


def a_report(**chat) -> DemandReport:
    services = (ServiceDemand(service="ns/chat", **chat),) if chat else ()
    return DemandReport(boot_id="b", version=1, services=services)


@pytest.mark.capability("AS-9")
def test_demand_is_the_sum_over_gateways():
    table = DemandTable()
    table.receive("g1", a_report(waiting_requests=2, waiting_bytes=10, longest_wait_seconds=4, idle_seconds=0), at(0))
    table.receive("g2", a_report(waiting_requests=1, waiting_bytes=5, longest_wait_seconds=9, idle_seconds=0), at(1))
    demand = table.of(CHAT, at(2), required={"g1", "g2"})

    assert (demand.waiting_requests, demand.waiting_bytes) == (3, 15)
    assert demand.longest_wait == timedelta(seconds=9)
    assert demand.at == at(0)
    assert demand.complete


@pytest.mark.capability("AS-9")
def test_without_a_report_nothing_is_known_and_with_a_silent_gateway_nothing_is_complete():
    table = DemandTable()
    assert table.of(CHAT, at(0), required={"g1"}) is None
    table.receive("g1", a_report(), at(0))

    assert table.of(CHAT, at(1), required={"g1"}).complete
    assert not table.of(CHAT, at(1), required={"g1", "g2"}).complete, "g2 may hold requests"
    assert not table.of(CHAT, at(20), required={"g1"}).complete, "its last report is too old"
    assert table.of(CHAT, at(90), required={"g1"}) is None


def test_the_last_request_is_remembered_over_restarts_of_gateways_and_does_not_flutter():
    table = DemandTable()
    table.receive("g1", a_report(idle_seconds=10.0), at(0))
    table.receive("g1", a_report(idle_seconds=29.3), at(20))  # the same moment, computed a little later
    assert table.of(CHAT, at(20), required=()).idle_since == at(-10)
    table.receive("g1", a_report(), at(30))  # it restarted
    assert table.of(CHAT, at(30), required=()).idle_since == at(-10)
    table.receive("g1", a_report(idle_seconds=0.0, open_requests=1), at(40))
    assert table.of(CHAT, at(40), required=()).idle_since == at(40)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({}, {"waiting_requests": 1}, True),
        ({"waiting_requests": 1}, {"waiting_requests": 900}, None),
        ({"waiting_requests": 1}, {"open_requests": 0}, False),
        ({}, {"open_requests": 1}, True),
        ({"open_requests": 3}, {"open_requests": 5}, None),
        ({"open_requests": 3}, {"open_requests": 6}, True),
        ({"open_requests": 3}, {"open_requests": 0}, None),
    ],
)
def test_a_service_needs_a_pass_when_its_demand_begins_doubles_or_when_nothing_waits_any_more(before, after, expected):
    table = DemandTable()
    table.receive("g1", a_report(**before), at(0))
    changes = table.receive("g1", a_report(**after), at(1))

    assert changes == ([] if expected is None else [Changed(CHAT, has_grown=expected)])


def test_a_gateway_that_is_gone_takes_its_waiting_requests_with_it():
    table = DemandTable()
    table.receive("g1", a_report(waiting_requests=1), at(0))

    assert table.forget("g1") == [Changed(CHAT, has_grown=False)]
    assert table.of(CHAT, at(1), required=()) is None


def outcomes(requests: int, errors: int = 0, *, boot: str = "b", revision: str = "r1", uptime: float = 0.0):
    one = RevisionOutcomes(service="ns/chat", revision=revision, requests=requests, errors=errors, ttft=(0, requests))
    return OutcomesReport(boot_id=boot, uptime_seconds=uptime, revisions=(one,))


def requests_since(sums: OutcomeSums, moment: datetime) -> int:
    return sums.since(CHAT, moment)["r1"].requests


@pytest.mark.capability("EV-1")
def test_outcomes_are_the_increases_of_all_gateways_since_a_moment():
    sums = OutcomeSums(T0)
    for step, (first, second) in enumerate([(0, 0), (10, 1), (25, 5)]):
        sums.receive("g1", outcomes(first, uptime=5.0 * step), at(5 * step))
        sums.receive("g2", outcomes(second, uptime=5.0 * step), at(5 * step))

    assert requests_since(sums, at(0)) == 30
    assert requests_since(sums, at(5)) == 19
    assert requests_since(sums, at(10)) == 0
    assert sums.since(CHAT, at(0))["r1"].ttft[:2] == (0, 30)


def test_what_a_gateway_counted_before_this_operator_began_is_not_added():
    sums = OutcomeSums(T0)
    sums.receive("g1", outcomes(1000, uptime=3600.0), at(1))
    sums.receive("g1", outcomes(1007, uptime=3605.0), at(6))

    assert requests_since(sums, at(-1000)) == 7


def test_counters_that_begin_anew_are_added_whole():
    sums = OutcomeSums(T0)
    sums.receive("g1", outcomes(0, uptime=3600.0), at(0))
    sums.receive("g1", outcomes(8, uptime=3605.0), at(5))
    sums.receive("g1", outcomes(3, boot="another", uptime=2.0), at(10))
    sums.receive("g2", outcomes(4, boot="new", uptime=4.0), at(12))  # a gateway that started after the operator
    sums.receive("g1", outcomes(1, boot="another", uptime=7.0), at(15))  # it had forgotten the revision for a while

    assert requests_since(sums, at(0)) == 16


def test_what_may_have_happened_before_the_moment_is_left_out_and_what_came_after_is_not_lost():
    sums = OutcomeSums(T0)
    for second, count in ((0, 0), (5, 10), (10, 10), (100, 10), (105, 30)):
        sums.receive("g1", outcomes(count, uptime=3600.0 + second), at(second))

    assert requests_since(sums, at(2)) == 20, "the ten of the first five seconds may be older"
    assert requests_since(sums, at(99)) == 20, "at 100 there were still ten: the twenty came later"


def test_a_long_history_takes_constant_memory_and_stays_right_within_a_tenth():
    sums = OutcomeSums(T0)
    for second in range(0, 7200, 5):
        sums.receive("g1", outcomes(second, uptime=float(second)), at(second))
    now = 7195

    assert len(sums._histories[CHAT]["r1"]) <= 160
    for age in (30, 60, 300, 900, 1800, 3500):
        assert 0.9 * age - 5 <= requests_since(sums, at(now - age)) <= age


def test_a_revision_that_no_gateway_counts_is_forgotten_after_a_while():
    sums = OutcomeSums(T0)
    sums.receive("g1", outcomes(1, revision="gone"), at(0))
    empty = OutcomesReport(boot_id="b")
    sums.receive("g1", empty, at(100))
    assert set(sums.since(CHAT, at(0))) == {"gone"}
    sums.receive("g1", empty, at(KEPT.total_seconds() + 100))
    assert sums.since(CHAT, at(0)) == {}


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 5), st.booleans(), st.integers(1, 90)), min_size=1, max_size=60
    ),
    st.integers(0, 3000),
)
def test_no_outcome_is_counted_twice_and_none_from_before_the_moment(steps, moment):
    """Gateways a and b count requests at known times, restart at will, and report at will."""
    sums = OutcomeSums(T0)
    second, counts, boots, happened = 0.0, {"a": 0, "b": 0}, {"a": 0, "b": 0}, []
    for name in "ab":
        sums.receive(name, outcomes(0, boot=f"{name}0", uptime=0.0), at(0))
    for name, more, restarts, pause in steps:
        if restarts:
            counts[name], boots[name] = 0, boots[name] + 1
        happened += [(second, 1)] * more
        second += pause
        counts[name] += more
        sums.receive(name, outcomes(counts[name], boot=f"{name}{boots[name]}", uptime=float(pause)), at(second))

    assert requests_since(sums, at(0)) <= len(happened)
    assert requests_since(sums, at(moment)) <= sum(1 for when, _ in happened if when + 90 >= moment)
    assert requests_since(sums, at(-1)) == len(happened)


def whole(requests: int, *, good: int = 0, boot: str = "b", uptime: float = 0.0) -> OutcomesReport:
    one = ServiceOutcomes(service="ns/chat", requests=requests, errors=requests - good, good=good, output_tokens=7)
    return OutcomesReport(boot_id=boot, uptime_seconds=uptime, services=(one,))


@pytest.mark.capability("OB-6")
def test_the_outcomes_of_a_service_are_the_sum_over_gateways_and_never_those_of_a_revision():
    sums = OutcomeSums(T0)
    assert sums.of_service(CHAT) is None
    sums.receive("g1", whole(10, good=9, uptime=1.0), at(5))
    sums.receive("g2", whole(4, good=4, uptime=1.0), at(6))
    sums.receive("g1", whole(3, good=3, boot="another", uptime=1.0), at(10))
    outcomes = sums.of_service(CHAT)

    assert (outcomes.total.requests, outcomes.total.errors, outcomes.total.good) == (17, 1, 16)
    assert outcomes.since(at(6)).requests == 3
    assert sums.since(CHAT, at(0)) == {}, "autoscaling and canaries add up revisions: a service is none"


@pytest.mark.capability("OB-6")
def test_six_hours_are_known_for_the_slow_burn_rate():
    sums = OutcomeSums(T0)
    for minute in range(8 * 60):
        sums.receive("g1", whole(minute, uptime=60.0 * minute), at(60 * minute))
    now = at(60 * (8 * 60 - 1))

    for hours in (1, 3, 6):
        found = sums.of_service(CHAT).since(now - timedelta(hours=hours)).requests
        assert 0.9 * 60 * hours - 1 <= found <= 60 * hours
