"""Limits of tenants: requests and tokens in a minute, and requests at once. Pure: the caller brings the time.

Each of N gateways enforces 1/N of a limit, and no gateway asks another one. The error of that:

- A client whose connections all end at one gateway gets 1/N of the limit; all gateways together never let more through
  than the limit, except as follows.
- A limit below N lets one request through at each gateway.
- A request of more tokens than 1/N of the limit, but not than the limit, is let through alone: at most one a minute at
  each gateway.
- For a minute after N changed, what was counted under the old N still stands.
- Tokens are reserved when a request is admitted, by an estimate, and settled when its answer has ended; running answers
  can exceed the limit by what they are longer than estimated.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

from slipway_api.words import count
from slipway_gateway.tenants import Tenant

WINDOW_SECONDS: Final = 60
BUCKET_SECONDS: Final = 1  # amounts of one second are kept as one, and leave the window together


class SlidingWindow:
    """The sum of the amounts of the last minute; each counts for 60 to 61 seconds, so no minute ever has more."""

    __slots__ = ("_buckets", "_sum")

    def __init__(self) -> None:
        self._buckets: deque[list[int]] = deque()  # [second, amount], the oldest first
        self._sum = 0

    def total(self, now: float) -> int:
        """The sum now."""
        while self._buckets and now >= self._buckets[0][0] + BUCKET_SECONDS + WINDOW_SECONDS:
            self._sum -= self._buckets.popleft()[1]
        return self._sum

    def add(self, now: float, amount: int) -> None:
        """Count `amount` now."""
        second = math.floor(now)
        if self._buckets and self._buckets[-1][0] >= second:
            self._buckets[-1][1] += amount
        else:
            self._buckets.append([second, amount])
        self._sum += amount

    def give_back(self, added_at: float, amount: int, now: float) -> None:
        """Of what was counted at `added_at`, `amount` was not used; nothing happens once it has left the window."""
        self.total(now)
        second = math.floor(added_at)
        for bucket in self._buckets:
            if bucket[0] >= second:
                returned = min(amount, bucket[1])
                bucket[1] -= returned
                self._sum -= returned
                return

    def seconds_until(self, now: float, at_most: int) -> float:
        """How long until the sum is `at_most` or less, if nothing is added."""
        left = self.total(now)
        for second, amount in self._buckets:
            if left <= at_most:
                break
            left -= amount
            expiry = second + BUCKET_SECONDS + WINDOW_SECONDS
            if left <= at_most:
                return expiry - now
        return 0.0


@dataclass(frozen=True, slots=True)
class Denied:
    """The limit that a request would exceed; `retry_after` None: it exceeds it whatever the time."""

    limit: str  # requests, tokens or concurrency
    reason: str
    retry_after: float | None
    amount: int = 0  # of the tenant, at all gateways together


@dataclass(frozen=True, slots=True)
class Standing:
    """One limit of a tenant after a request was admitted."""

    limit: str  # requests or tokens
    amount: int  # of the tenant in a minute, at all gateways together
    remaining: int  # that this gateway would still let through: with N gateways, at most 1/N of the amount
    reset: float  # seconds until nothing counts here any more


@dataclass(slots=True)
class Grant:
    """An admitted request: what it has reserved."""

    tokens: int
    at: float


class Usage:
    """What one tenant has used through this gateway."""

    __slots__ = ("open", "requests", "tokens")

    def __init__(self) -> None:
        self.open = 0
        self.requests = SlidingWindow()
        self.tokens = SlidingWindow()


class Limits:
    """The usage of all tenants."""

    def __init__(self) -> None:
        self._usages: dict[str, Usage] = {}

    def usage(self, tenant: str) -> Usage:
        """The usage of one tenant."""
        usage = self._usages.get(tenant)
        if usage is None:
            usage = self._usages[tenant] = Usage()
        return usage

    def admit(self, tenant: Tenant, tokens: int, now: float, *, gateways: int = 1) -> Grant | Denied:
        """Reserve one request of about `tokens`, or name the limit that forbids it. A denied one counts for nothing."""
        usage = self.usage(tenant.label)
        denied = self.over_requests(tenant, now, gateways=gateways) or _over_tokens(
            tenant, usage, tokens, now, gateways
        )
        if denied is not None:
            return denied
        usage.open += 1
        if tenant.requests_per_minute is not None:
            usage.requests.add(now, 1)
        if tenant.tokens_per_minute is not None:
            usage.tokens.add(now, tokens)
        return Grant(tokens, now)

    def over_requests(self, tenant: Tenant, now: float, *, gateways: int = 1) -> Denied | None:
        """The limit that one more request would exceed, whatever its size; reserves nothing."""
        usage = self.usage(tenant.label)
        return _over_concurrency(tenant, usage, gateways) or _over_rate(tenant, usage, now, gateways)

    def standing(self, tenant: Tenant, now: float, *, gateways: int = 1) -> list[Standing]:
        """The limits of a tenant for a minute, and what is left of them."""
        usage = self.usage(tenant.label)
        windows = (
            ("requests", tenant.requests_per_minute, usage.requests),
            ("tokens", tenant.tokens_per_minute, usage.tokens),
        )
        return [
            Standing(name, amount, max(0, share(amount, gateways) - used.total(now)), used.seconds_until(now, 0))
            for name, amount, used in windows
            if amount is not None
        ]

    def settle(self, tenant: Tenant, grant: Grant, used_tokens: int, now: float) -> None:
        """The request has ended and used so many tokens: what it reserved beyond them is free again."""
        usage = self.usage(tenant.label)
        usage.open -= 1
        assert usage.open >= 0, "more requests ended than started"
        if tenant.tokens_per_minute is None:
            return
        if used_tokens < grant.tokens:
            usage.tokens.give_back(grant.at, grant.tokens - used_tokens, now)
        elif used_tokens > grant.tokens:
            usage.tokens.add(now, used_tokens - grant.tokens)

    def forget_others(self, tenants: frozenset[str]) -> None:
        """Forget tenants that are gone and have no open request."""
        for name in [name for name, usage in self._usages.items() if name not in tenants and not usage.open]:
            del self._usages[name]


def share(limit: int, gateways: int) -> int:
    """The part of a limit that one gateway enforces: at least 1, or a small limit would let nobody through."""
    return max(1, limit // max(1, gateways))


def _over_concurrency(tenant: Tenant, usage: Usage, gateways: int) -> Denied | None:
    limit = tenant.concurrency
    if limit is None or usage.open < share(limit, gateways):
        return None
    return Denied("concurrency", f"the limit is {count(limit, 'concurrent request')}", 1.0, limit)


def _over_rate(tenant: Tenant, usage: Usage, now: float, gateways: int) -> Denied | None:
    limit = tenant.requests_per_minute
    if limit is None:
        return None
    part, used = share(limit, gateways), usage.requests.total(now)
    if used < part:
        return None
    reason = f"the limit is {count(limit, 'request')} a minute"
    return Denied("requests", reason, usage.requests.seconds_until(now, part - 1), limit)


def _over_tokens(tenant: Tenant, usage: Usage, tokens: int, now: float, gateways: int) -> Denied | None:
    limit = tenant.tokens_per_minute
    if limit is None or not tokens:
        return None
    part, used = share(limit, gateways), usage.tokens.total(now)
    reason = f"this request needs about {count(tokens, 'token')}; the limit is {count(limit, 'token')} a minute"
    if tokens > limit:
        return Denied("tokens", reason, None)
    # One that is larger than this gateway's part is let through alone, or N gateways would refuse what one would take.
    if used + tokens <= part or used == 0:
        return None
    return Denied("tokens", reason, usage.tokens.seconds_until(now, max(0, part - tokens)), limit)
