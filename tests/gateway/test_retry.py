"""How often a request, and all requests together, may be tried again."""

from slipway_gateway.retry import RetryBudget, RetryPolicy, Setback


def test_one_request_is_tried_three_times_at_most():
    policy = RetryPolicy(tries=3)

    assert policy.allows([Setback.UNREACHABLE, Setback.SHED])
    assert not policy.allows([Setback.UNREACHABLE, Setback.SHED, Setback.UNAVAILABLE])


def test_a_request_that_may_have_killed_a_replica_gets_one_more_chance():
    policy = RetryPolicy(tries=5, lost=1)

    assert policy.allows([Setback.LOST])
    assert not policy.allows([Setback.LOST, Setback.LOST])


def test_a_hundred_requests_pay_for_twenty_retries():
    budget = RetryBudget(ratio=0.2, burst=0.0)
    spent = 0
    budget = RetryBudget(ratio=0.25, burst=2.0)
    assert [budget.spend() for _ in range(3)] == [True, True, False]
    for _ in range(100):
        budget.request()
        spent += budget.spend()

    assert spent == 25
