"""Eviction cost: what dropping an adapter or a prefix from memory would cost, in milliseconds per freed byte. Pure.

    eviction cost = popularity x milliseconds to bring it back / bytes

Adapters and prefixes share one memory budget, so both are measured in this unit, and the lowest cost is evicted first.
Worked numbers, with the default costs, no request waiting, and blocks of 16 tokens and 64 KiB: a prefix block used a
moment ago, and before only long ago, costs 1.0 x 16 ms / 64 KiB = 0.25 ms per KiB; after a half-life 0.125; computed
for the first time 0.125. An adapter of 4 MiB that loads in 60 ms and is as popular costs 0.015 ms per KiB: it is
evicted first, together with the prefixes computed with it.

A millisecond of prefill delays every request behind it, a millisecond of loading only the requests for that adapter:
steps go on meanwhile. With three requests waiting on average, prefill counts 1 + 3 = 4 times.

With `apart`, adapters are a plain LRU and prefixes are not compared with them: the baseline of the benchmark.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from slipway_runtime.scheduling.adapter import Adapter
from slipway_runtime.scheduling.block_pool import BlockPool
from slipway_runtime.scheduling.eviction import LrfuOrder, decay

CROWD_SHARE = 0.1  # of the half-life, over which the number of waiting requests is averaged


@dataclass(frozen=True)
class Costs:
    """Costs of computing a prefix again and of loading an adapter again; the defaults are estimates."""

    prefill_ms_per_token: float = 1.0
    load_ms: float = 20.0  # of any adapter: opening, checking
    load_ms_per_mib: float = 10.0
    half_life_seconds: float = 60.0  # after so long without a use, the next one is half as likely


class EvictionCost:
    """Compares adapters with each other and, if they occupy KV blocks (`block_bytes` > 0), with prefixes."""

    def __init__(self, pool: BlockPool, costs: Costs, *, block_bytes: int, apart: bool) -> None:
        self.costs = costs
        self._pool = pool
        self._block_bytes = block_bytes
        self._apart = apart
        self._waiting, self._seen_at = 0.0, 0.0
        self._prefixes: LrfuOrder | None = None
        if block_bytes and not apart:
            self._prefixes = LrfuOrder(pool.total, costs.half_life_seconds)
            pool.evict_by(self._prefixes)

    def record_waiting(self, count: int, now: float) -> None:
        """Record how many requests wait for a row now."""
        left = decay(now - self._seen_at, self.costs.half_life_seconds * CROWD_SHARE)
        self._waiting = self._waiting * left + count * (1.0 - left)
        self._seen_at = now

    def cheapest(self, adapters: Iterable[Adapter]) -> Adapter | None:
        """The adapter with the lowest eviction cost."""
        if self._apart:
            return min(adapters, key=lambda a: (a.last_used, a.digest), default=None)
        return min(adapters, key=lambda a: (a.requests > 0, self.of(a), a.digest), default=None)

    def of(self, adapter: Adapter) -> float:
        """The eviction cost of an adapter and its prefixes, in milliseconds per byte."""
        now, prefixes = self._pool.now, self._prefixes
        return cost_of_adapter(
            adapter.popularity_at(now, self.costs.half_life_seconds),
            adapter.num_bytes,
            self._waiting,
            prefix_blocks=0 if prefixes is None else self._pool.members(adapter.digest),
            prefix_popularity=0.0 if prefixes is None else prefixes.popularity_of_group(adapter.digest, now),
            block_size=self._pool.block_size,
            block_bytes=self._block_bytes,
            costs=self.costs,
        )

    def is_below_next_prefix(self, adapter: Adapter) -> bool:
        """Whether evicting an adapter costs less than evicting the next prefix block."""
        assert self._prefixes is not None, "only adapters that pay with blocks compete with prefixes"
        block = self._prefixes.next()
        if block is None:
            return True
        cost = cost_of_block(
            self._prefixes.popularity_of(block, self._pool.now),
            self._waiting,
            block_size=self._pool.block_size,
            block_bytes=self._block_bytes,
            costs=self.costs,
        )
        return self.of(adapter) < cost


def cost_of_block(popularity: float, waiting: float, *, block_size: int, block_bytes: int, costs: Costs) -> float:
    """The eviction cost of a cached prefix block, in milliseconds per byte, while so many requests wait."""
    return popularity * _prefill_ms(waiting, block_size, costs) / block_bytes


def cost_of_adapter(
    popularity: float,
    num_bytes: int,
    waiting: float = 0.0,
    *,
    prefix_blocks: int = 0,
    prefix_popularity: float = 0.0,
    block_size: int,
    block_bytes: int,
    costs: Costs,
) -> float:
    """The eviction cost of an adapter and of the prefixes that cannot be used without it, in milliseconds per byte.

    `popularity`: its uses, each halved per half-life since then, in proportion to how soon it is needed again.
    `prefix_popularity`: the sum of the popularities of its prefix blocks.
    """
    load = popularity * (costs.load_ms + costs.load_ms_per_mib * num_bytes / 2**20)
    prefill = prefix_popularity * _prefill_ms(waiting, block_size, costs)
    return (load + prefill) / max(num_bytes + prefix_blocks * block_bytes, 1)


def _prefill_ms(waiting: float, block_size: int, costs: Costs) -> float:
    return block_size * costs.prefill_ms_per_token * (1.0 + waiting)
