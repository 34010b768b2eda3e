"""Waiting queue, ordered by priority class, then least served tenant, then its least served adapter, then arrival.

Sequences of one tenant and adapter do not overtake each other: a preempted one returns to its place by arrival.
"""

import math
from bisect import insort
from collections import Counter
from collections.abc import Iterator

from slipway_runtime.scheduling.fairness import Share, class_rank
from slipway_runtime.scheduling.sequence import Sequence

Line = list[Sequence]  # of one tenant and adapter, by arrival


class _Class:
    """The sequences of one priority."""

    def __init__(self, priority: int, now: float) -> None:
        self.priority = priority
        self.served_at = now  # or when the first came
        self.tenants: dict[Share, dict[Share, Line]] = {}


class WaitingQueue:
    """Sequences that wait for a row."""

    def __init__(self, aging_seconds: float) -> None:
        self._aging_seconds = aging_seconds
        self._classes: dict[int, _Class] = {}
        self._tokens: dict[Sequence, int] = {}  # its number of tokens when it was queued
        self.num_tokens = 0
        self.by_tenant: Counter[str] = Counter()
        self.by_adapter: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._tokens)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._tokens

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._tokens)

    def push(self, sequence: Sequence, now: float) -> None:
        """Add a sequence to the queue."""
        self._tokens[sequence] = sequence.num_tokens
        self.num_tokens += sequence.num_tokens
        priority, tenant = sequence.request.priority, sequence.share.owner
        assert tenant is not None
        self.by_tenant[tenant.name] += 1
        self.by_adapter[sequence.adapter] += 1
        if priority not in self._classes:
            self._classes[priority] = _Class(priority, now)
        line = self._classes[priority].tenants.setdefault(tenant, {}).setdefault(sequence.share, [])
        insort(line, sequence, key=_arrival)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that was not served."""
        self.num_tokens -= self._tokens.pop(sequence)
        priority, share, tenant = sequence.request.priority, sequence.share, sequence.share.owner
        assert tenant is not None
        _count_down(self.by_tenant, tenant.name)
        _count_down(self.by_adapter, sequence.adapter)
        lines = self._classes[priority].tenants[tenant]
        lines[share].remove(sequence)
        if not lines[share]:
            del lines[share]
        if not lines:
            del self._classes[priority].tenants[tenant]
        if not self._classes[priority].tenants:
            del self._classes[priority]

    def serve(self, sequence: Sequence, now: float) -> None:
        """Remove a sequence that gets a row, and note when its class was served."""
        self._classes[sequence.request.priority].served_at = now
        self.remove(sequence)

    def in_turn(self, now: float, least_rank: float = -math.inf) -> Iterator[Sequence]:
        """The first sequence of each tenant and adapter, in the order of service, of classes of `least_rank` or above.

        Valid until the queue changes.
        """
        for kind in self._in_order(list(self._classes.values()), now):
            if self._rank(kind, now) < least_rank:
                return
            for tenant in _least_served(list(kind.tenants)):
                for share in _least_served(list(kind.tenants[tenant])):
                    yield kind.tenants[tenant][share][0]

    def _in_order(self, classes: list[_Class], now: float) -> list[_Class]:
        if len(classes) > 1:
            classes.sort(key=lambda c: -self._rank(c, now))
        return classes

    def _rank(self, kind: _Class, now: float) -> float:
        return class_rank(kind.priority, now - kind.served_at, self._aging_seconds)


def _least_served(shares: list[Share]) -> Iterator[Share]:
    """The least served share first; the others are sorted only when they are asked for."""
    if len(shares) > 1:
        first = min(shares, key=_served)
        yield first
        shares = sorted((share for share in shares if share is not first), key=_served)
    yield from shares


def _count_down(counter: Counter[str], name: str) -> None:
    counter[name] -= 1
    if counter[name] == 0:
        del counter[name]


def _served(share: Share) -> float:
    return share.served


def _arrival(sequence: Sequence) -> int:
    return sequence.serial
