"""Other rules for one budget of adapters and prefixes, as peers of the runtime's own in `bench.eviction`."""

from collections import OrderedDict
from collections.abc import Iterable

from slipway_runtime.scheduling.adapter_state import Adapter
from slipway_runtime.scheduling.block_pool import BlockPool
from slipway_runtime.scheduling.eviction import LrfuOrder
from slipway_runtime.scheduling.trace import Machine


class _LruOrder:
    """Evicts the block that was referenced longest ago."""

    def __init__(self) -> None:
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.used_at: dict[int, float] = {}

    def published(self, block: int, key: bytes, group: str, now: float) -> None:
        self.used_at[block] = now

    def used(self, block: int, now: float) -> None:
        self.used_at[block] = now

    def add(self, block: int) -> None:
        self._idle[block] = None

    def remove(self, block: int) -> None:
        del self._idle[block]

    def forgotten(self, block: int, key: bytes, now: float) -> None:
        pass

    def next(self) -> int | None:
        return next(iter(self._idle), None)

    def blocks(self) -> list[int]:
        return list(self._idle)

    def __len__(self) -> int:
        return len(self._idle)


class OneLru:
    """LRU over adapters and prefix blocks together."""

    def __init__(self, pool: BlockPool, machine: Machine) -> None:
        self._prefixes = _LruOrder()
        pool.evict_by(self._prefixes)

    def next(self, adapters: Iterable[Adapter]) -> Adapter | None:
        return min(adapters, key=lambda a: (a.requests > 0, a.last_used, a.digest), default=None)

    def is_below_next_prefix(self, adapter: Adapter) -> bool:
        block = self._prefixes.next()
        return block is None or adapter.last_used < self._prefixes.used_at[block]


class PrefixesFirst(OneLru):
    """LRU of prefix blocks; an adapter is evicted only when there is no block to evict, by LRU."""

    def is_below_next_prefix(self, adapter: Adapter) -> bool:
        return self._prefixes.next() is None


class CostPerByte:
    """Popularity times the milliseconds to bring it back, for each byte (the size-aware GDSF, with a half-life)."""

    def __init__(self, pool: BlockPool, machine: Machine) -> None:
        self._pool, self._machine = pool, machine
        self._prefixes = LrfuOrder(pool.total, machine.half_life_seconds)
        pool.evict_by(self._prefixes)

    def next(self, adapters: Iterable[Adapter]) -> Adapter | None:
        return min(adapters, key=lambda a: (a.requests > 0, self._of(a), a.digest), default=None)

    def is_below_next_prefix(self, adapter: Adapter) -> bool:
        block, machine = self._prefixes.next(), self._machine
        if block is None:
            return True
        popularity = self._prefixes.popularity_of(block, self._pool.now)
        return self._of(adapter) < popularity * machine.block_size * machine.prefill_ms_per_token / machine.block_bytes

    def _of(self, adapter: Adapter) -> float:
        popularity = adapter.popularity_at(self._pool.now, self._machine.half_life_seconds)
        return popularity * self._machine.adapter_load_ms / max(adapter.num_bytes, 1)
