"""Chooses what to evict from memory: the adapter or the prefix block with the lowest popularity. Pure.

    popularity = number of uses, each halved for every half-life since then (LRFU)

Adapters and prefix blocks are compared by this one number. Sizes, load times and the cost of a prefill are not in it:
on the traces of `python -m bench eviction` a model with all of them was no better (ADR 91), and the half-life is the
only constant: 2, 10 and 60 s differ by less than 2 %.

An adapter is used when a request for it arrives, and a prefix block when a sequence finds it; a first use of a block
counts half. So an adapter is about as popular as its most popular prefix, and most prefixes are evicted before it.

`LeastRecentlyUsed` knows adapters only: the baseline of the benchmark, for which prefixes have a memory of their own.
"""

from collections.abc import Iterable
from typing import Final, Protocol

from slipway_runtime.scheduling.adapter import Adapter
from slipway_runtime.scheduling.block_pool import BlockPool
from slipway_runtime.scheduling.eviction import LrfuOrder

HALF_LIFE_SECONDS: Final = 60.0


class EvictionRule(Protocol):
    """Orders adapters for eviction and, where they occupy KV blocks, compares them with prefixes."""

    def next(self, adapters: Iterable[Adapter]) -> Adapter | None:
        """The adapter to evict first; one without requests comes before all others."""

    def is_below_next_prefix(self, adapter: Adapter) -> bool:
        """Whether this adapter is evicted before the next prefix block."""


class LeastPopular:
    """LRFU over adapters and, with `shares_blocks`, prefix blocks: the pool then evicts in the same order."""

    def __init__(self, pool: BlockPool, *, half_life_seconds: float, shares_blocks: bool) -> None:
        self._pool = pool
        self._half_life = half_life_seconds
        self._prefixes = LrfuOrder(pool.total, half_life_seconds) if shares_blocks else None
        if self._prefixes is not None:
            pool.evict_by(self._prefixes)

    def next(self, adapters: Iterable[Adapter]) -> Adapter | None:  # noqa: D102  see the protocol
        return min(adapters, key=lambda a: (a.requests > 0, self._popularity(a), a.digest), default=None)

    def is_below_next_prefix(self, adapter: Adapter) -> bool:  # noqa: D102  see the protocol
        assert self._prefixes is not None, "only adapters that occupy KV blocks compete with prefixes"
        block = self._prefixes.next()
        return block is None or self._popularity(adapter) < self._prefixes.popularity_of(block, self._pool.now)

    def _popularity(self, adapter: Adapter) -> float:
        return adapter.popularity_at(self._pool.now, self._half_life)


class LeastRecentlyUsed:
    """LRU of adapters alone."""

    def next(self, adapters: Iterable[Adapter]) -> Adapter | None:  # noqa: D102  see the protocol
        return min(adapters, key=lambda a: (a.last_used, a.digest), default=None)

    def is_below_next_prefix(self, adapter: Adapter) -> bool:  # noqa: D102  see the protocol
        raise AssertionError("prefixes have a memory of their own")
