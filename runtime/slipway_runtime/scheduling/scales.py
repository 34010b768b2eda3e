"""Eviction cost of adapters and prefixes, in one unit, so that both share one memory budget. Pure.

With `apart`, adapters are a plain LRU and prefixes are none of its business: the baseline.
"""

from collections.abc import Iterable

from slipway_runtime.scheduling.adapter import Adapter
from slipway_runtime.scheduling.benefit import Costs, decay, worth_of_adapter, worth_of_block
from slipway_runtime.scheduling.block_pool import BlockPool
from slipway_runtime.scheduling.eviction import LeastWorth

CROWD_SHARE = 0.1  # of the half-life: over so long the number of those who wait is averaged


class Scales:
    """Weighs adapters against each other and, if they pay with blocks (`block_bytes` > 0), against prefixes."""

    def __init__(self, pool: BlockPool, costs: Costs, *, block_bytes: int, apart: bool) -> None:
        self.costs = costs
        self._pool = pool
        self._block_bytes = block_bytes
        self._apart = apart
        self._waiting, self._seen_at = 0.0, 0.0
        self._prefixes: LeastWorth | None = None
        if block_bytes and not apart:
            self._prefixes = LeastWorth(pool.total, costs.half_life_seconds)
            pool.evict_by(self._prefixes)

    def see_waiting(self, count: int, now: float) -> None:
        """So many requests wait for a row at this moment."""
        left = decay(now - self._seen_at, self.costs.half_life_seconds * CROWD_SHARE)
        self._waiting = self._waiting * left + count * (1.0 - left)
        self._seen_at = now

    def worst(self, adapters: Iterable[Adapter]) -> Adapter | None:
        """The one that will be missed least."""
        if self._apart:
            return min(adapters, key=lambda a: (a.last_used, a.digest), default=None)
        return min(adapters, key=lambda a: (a.requests > 0, self.worth(a), a.digest), default=None)

    def worth(self, adapter: Adapter) -> float:
        """Milliseconds per byte, with the prefixes that depend on it."""
        now, prefixes = self._pool.now, self._prefixes
        return worth_of_adapter(
            adapter.popularity_at(now, self.costs.half_life_seconds),
            adapter.num_bytes,
            self._waiting,
            prefix_blocks=0 if prefixes is None else self._pool.members(adapter.digest),
            prefix_popularity=0.0 if prefixes is None else prefixes.popularity_of_group(adapter.digest, now),
            block_size=self._pool.block_size,
            block_bytes=self._block_bytes,
            costs=self.costs,
        )

    def beats_next_prefix(self, adapter: Adapter) -> bool:
        """Whether an adapter should go before the prefix that is next."""
        assert self._prefixes is not None, "only who pays with blocks competes with prefixes"
        block = self._prefixes.next()
        if block is None:
            return True
        worth = worth_of_block(
            self._prefixes.popularity_of(block, self._pool.now),
            self._waiting,
            block_size=self._pool.block_size,
            block_bytes=self._block_bytes,
            costs=self.costs,
        )
        return self.worth(adapter) < worth
