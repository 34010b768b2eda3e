"""When a replica is ejected, when it is tried again, and how often requests are retried."""

from hypothesis import given
from hypothesis import strategies as st

from slipway_gateway.health import (
    TRUSTED,
    AttemptFailure,
    BreakerPolicy,
    RetryBudget,
    RetryPolicy,
    after_failure,
    after_probe,
    after_unavailable,
    after_unreachable,
)

POLICY = BreakerPolicy(failures=3, first_seconds=1.0, max_seconds=30.0)


def failed(*times: float):
    health = TRUSTED
    for now in times:
        health = after_failure(health, now, POLICY)
    return health


def test_two_failures_are_forgiven_and_the_third_ejects():
    assert not failed(0, 0).is_ejected(0)
    assert failed(0, 0, 0).is_ejected(0.9)
    assert not failed(0, 0, 0).is_ejected(1.0)


def test_on_probation_one_failure_ejects_for_twice_as_long():
    health = failed(0, 0, 0, 5)

    assert health.is_ejected(6.9)
    assert not health.is_ejected(7.0)


def test_failures_of_requests_that_were_already_running_do_not_prolong_the_ejection():
    assert failed(0, 0, 0, 0.1, 0.2, 0.3, 0.4).ejected_until == 1.0


def test_a_replica_that_cannot_be_reached_is_ejected_at_once():
    """Chaos C9: each further try would cost a whole connect timeout."""
    health = after_unreachable(TRUSTED, 0.0, POLICY)

    assert health.is_ejected(0.9)
    assert not health.is_ejected(1.0)
    assert after_unreachable(health, 1.0, POLICY).ejected_until == 3.0


def test_on_probation_one_request_at_a_time_tries_the_replica():
    health = after_unreachable(TRUSTED, 0.0, POLICY)
    probed = after_probe(health, 1.5, POLICY)

    assert probed.is_ejected(2.4)
    assert not probed.is_ejected(2.5)
    assert after_probe(TRUSTED, 1.5, POLICY) == TRUSTED, "a trusted replica takes any number of requests"


def test_a_replica_that_says_503_is_left_alone_without_a_failure():
    health = after_unavailable(TRUSTED, 10.0, 2.0)

    assert health.is_ejected(11.9)
    assert not after_failure(health, 12.0, POLICY).is_ejected(12.0)


@given(st.lists(st.floats(0, 100), max_size=60))
def test_no_run_of_failures_ejects_for_longer_than_the_most(gaps):
    health, now = TRUSTED, 0.0
    for gap in gaps:
        now += gap
        health = after_failure(health, now, POLICY)
        assert health.ejected_until <= now + POLICY.max_seconds


def test_one_request_is_tried_three_times_at_most():
    policy = RetryPolicy(tries=3)

    assert policy.allows([AttemptFailure.SHED, AttemptFailure.SHED])
    assert not policy.allows([AttemptFailure.SHED, AttemptFailure.SHED, AttemptFailure.UNAVAILABLE])


def test_attempts_that_never_arrived_are_bounded_apart():
    policy = RetryPolicy(tries=3, unreachable_tries=8)

    assert policy.allows([AttemptFailure.UNREACHABLE] * 7)
    assert not policy.allows([AttemptFailure.UNREACHABLE] * 8)


def test_a_request_that_may_have_killed_a_replica_gets_one_more_chance():
    policy = RetryPolicy(tries=5)

    assert policy.allows([AttemptFailure.LOST])
    assert not policy.allows([AttemptFailure.LOST, AttemptFailure.MOVED])


def test_a_hundred_requests_pay_for_twenty_retries():
    budget = RetryBudget(ratio=0.25, burst=2.0)
    assert [budget.spend() for _ in range(3)] == [True, True, False]
    spent = 0
    for _ in range(100):
        budget.add_request()
        spent += budget.spend()

    assert spent == 25
