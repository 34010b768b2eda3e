"""When a replica is left out, and when it gets another chance."""

from hypothesis import given
from hypothesis import strategies as st
from slipway_gateway.breaker import TRUSTED, BreakerPolicy, after_failure, after_success, asked_to_stay_away

POLICY = BreakerPolicy(failures=3, first_seconds=1.0, most_seconds=30.0)


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


def test_a_success_restores_trust():
    assert after_success(failed(0, 0, 0)) == TRUSTED


def test_staying_away_on_request_is_not_a_failure():
    health = asked_to_stay_away(TRUSTED, 10.0, 2.0)

    assert health.is_ejected(11.9)
    assert not after_failure(health, 12.0, POLICY).is_ejected(12.0)


@given(st.lists(st.floats(0, 100), max_size=60))
def test_no_run_of_failures_ejects_for_longer_than_the_most(gaps):
    health, now = TRUSTED, 0.0
    for gap in gaps:
        now += gap
        health = after_failure(health, now, POLICY)
        assert health.ejected_until <= now + POLICY.most_seconds
