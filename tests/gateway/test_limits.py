"""Limits of tenants in virtual time: never more than the limit in any minute, and exact about when to come back."""

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from slipway_gateway.limits import Denied, Grant, Limits, SlidingWindow, share
from slipway_gateway.tenants import Tenant

NOW = 10_000.0


def a_tenant(name: str = "research", **limits: int) -> Tenant:
    return Tenant(name=name, models=("*",), **limits)


moments = st.lists(st.floats(0, 300), min_size=1, max_size=120).map(sorted)


@pytest.mark.capability("RG-6")
@given(moments, st.integers(1, 20))
def test_no_minute_ever_has_more_requests_than_the_limit(times, limit):
    limits, tenant = Limits(), a_tenant(requests_per_minute=limit)
    admitted = [at for at in times if isinstance(limits.admit(tenant, 1, NOW + at), Grant)]

    for start in admitted:
        assert sum(start <= at < start + 60 for at in admitted) <= limit


@pytest.mark.capability("RG-6")
@given(moments, st.integers(1, 20))
def test_after_retry_after_the_request_is_admitted_if_nothing_else_came(times, limit):
    for at in times:
        limits, tenant = Limits(), a_tenant(requests_per_minute=limit)
        for earlier in times:
            if earlier <= at:
                limits.admit(tenant, 1, NOW + earlier)
        denied = limits.admit(tenant, 1, NOW + at)
        if isinstance(denied, Denied):
            assert denied.retry_after is not None
            assert 0 < denied.retry_after <= 61
            assert isinstance(limits.admit(tenant, 1, NOW + at + denied.retry_after), Grant)


@pytest.mark.capability("RG-6")
@given(moments, st.integers(1, 20), st.integers(1, 4), st.floats(0, 70))
def test_what_remains_is_let_through_and_nothing_counts_after_the_reset(times, limit, gateways, later):
    limits, tenant = Limits(), a_tenant(requests_per_minute=limit, tokens_per_minute=1000)
    for at in times:
        limits.admit(tenant, 1, NOW + at, gateways=gateways)
    now = NOW + times[-1] + later
    requests, tokens = limits.standing(tenant, now, gateways=gateways)
    admitted = 0
    while isinstance(limits.admit(tenant, 0, now, gateways=gateways), Grant):
        admitted += 1

    assert (requests.limit, requests.amount, requests.remaining) == ("requests", limit, admitted)
    assert (tokens.limit, tokens.amount) == ("tokens", 1000)
    fresh = limits.standing(tenant, now + limits.standing(tenant, now, gateways=gateways)[0].reset, gateways=gateways)
    assert fresh[0].remaining == share(limit, gateways)
    assert fresh[0].reset == 0


@given(moments, st.integers(10, 1000), st.lists(st.integers(1, 400), min_size=120, max_size=120))
def test_no_minute_ever_reserves_more_tokens_than_the_limit(times, limit, sizes):
    limits, tenant = Limits(), a_tenant(tokens_per_minute=limit)
    admitted = [
        (at, size)
        for at, size in zip(times, sizes, strict=False)
        if isinstance(limits.admit(tenant, size, NOW + at), Grant)
    ]

    for start, _ in admitted:
        assert sum(size for at, size in admitted if start <= at < start + 60) <= limit


def test_what_was_reserved_and_not_used_is_free_again():
    limits, tenant = Limits(), a_tenant(tokens_per_minute=1000)
    grant = limits.admit(tenant, 900, NOW)
    assert isinstance(grant, Grant)
    assert isinstance(limits.admit(tenant, 200, NOW + 1), Denied)

    limits.settle(tenant, grant, 300, NOW + 2)

    assert isinstance(limits.admit(tenant, 700, NOW + 3), Grant)
    assert isinstance(limits.admit(tenant, 1, NOW + 4), Denied)


def test_an_answer_that_is_longer_than_estimated_counts_whole():
    limits, tenant = Limits(), a_tenant(tokens_per_minute=1000)
    grant = limits.admit(tenant, 100, NOW)
    assert isinstance(grant, Grant)
    limits.settle(tenant, grant, 1000, NOW + 10)

    denied = limits.admit(tenant, 1, NOW + 11)
    assert isinstance(denied, Denied)
    assert denied.limit == "tokens"


def test_a_reservation_that_has_left_the_window_is_not_given_back_twice():
    window = SlidingWindow()
    window.add(NOW, 100)
    window.add(NOW + 70, 10)
    window.give_back(NOW, 100, NOW + 71)

    assert window.total(NOW + 71) in {0, 10}
    assert window.total(NOW + 200) == 0


def test_a_request_beyond_the_whole_limit_is_told_that_waiting_is_in_vain():
    denied = Limits().admit(a_tenant(tokens_per_minute=1000), 1001, NOW)

    assert isinstance(denied, Denied)
    assert denied.retry_after is None
    assert "1001" in denied.reason
    assert "1000" in denied.reason


def test_a_request_beyond_one_gateways_part_is_let_through_alone():
    limits, tenant = Limits(), a_tenant(tokens_per_minute=1000)

    assert isinstance(limits.admit(tenant, 800, NOW, gateways=4), Grant)
    assert isinstance(limits.admit(tenant, 800, NOW + 1, gateways=4), Denied)
    assert isinstance(limits.admit(tenant, 1, NOW + 1, gateways=4), Denied)


@pytest.mark.capability("RG-6", "MT-1")
@pytest.mark.parametrize(("limit", "gateways"), [(100, 1), (100, 3), (100, 7), (2, 3)])
def test_gateways_together_let_the_limit_through_to_the_documented_error(limit, gateways):
    """Floor of the division: never more than the limit, and at most N - 1 less; below N, one at each gateway."""
    tenant, total = a_tenant(requests_per_minute=limit), 0
    for _ in range(gateways):
        limits = Limits()
        total += sum(isinstance(limits.admit(tenant, 1, NOW, gateways=gateways), Grant) for _ in range(limit))

    assert total == max(gateways, gateways * (limit // gateways))
    assert total <= max(limit, gateways)
    assert share(limit, gateways) >= 1


def test_a_new_division_holds_at_once():
    limits, tenant = Limits(), a_tenant(concurrency=4)
    for _ in range(2):
        assert isinstance(limits.admit(tenant, 1, NOW, gateways=2), Grant)

    assert isinstance(limits.admit(tenant, 1, NOW, gateways=2), Denied)
    assert isinstance(limits.admit(tenant, 1, NOW, gateways=1), Grant)


class TenantsOverTime(RuleBasedStateMachine):
    """Requests of two tenants begin and end at any time; a model of plain lists knows what is allowed."""

    grants = Bundle("grants")

    def __init__(self) -> None:
        super().__init__()
        self.limits = Limits()
        self.now = NOW
        self.tenants = [
            a_tenant("a", requests_per_minute=5, tokens_per_minute=1000, concurrency=3),
            a_tenant("b", concurrency=2),
        ]
        self.began: dict[str, list[float]] = defaultdict(list)
        self.open: dict[str, int] = defaultdict(int)

    @rule(seconds=st.floats(0.01, 40))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(target=grants, which=st.integers(0, 1), tokens=st.integers(1, 600))
    def begin(self, which: int, tokens: int):
        tenant = self.tenants[which]
        granted = self.limits.admit(tenant, tokens, self.now)
        if isinstance(granted, Denied):
            if granted.limit == "concurrency":
                assert self.open[tenant.label] == tenant.concurrency
            else:
                assert tenant.label == "a", "the other tenant has no such limit, and takes nothing from this one"
            return (tenant, None)
        self.began[tenant.label].append(self.now)
        self.open[tenant.label] += 1
        return (tenant, granted)

    @rule(held=consumes(grants), used=st.integers(0, 1500))
    def end(self, held, used: int) -> None:
        tenant, granted = held
        if granted is not None:
            self.limits.settle(tenant, granted, used, self.now)
            self.open[tenant.label] -= 1

    @invariant()
    def limits_hold(self) -> None:
        for tenant in self.tenants:
            usage = self.limits.usage(tenant.label)
            assert usage.open == self.open[tenant.label] <= (tenant.concurrency or 0)
            assert usage.tokens.total(self.now) >= 0
        assert sum(self.now - 60 < at for at in self.began["a"]) <= 5


TestTenantsOverTime = TenantsOverTime.TestCase
TestTenantsOverTime.pytestmark = [pytest.mark.capability("MT-1", "RG-6")]
