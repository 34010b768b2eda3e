"""Residency of adapters: on disk, in host memory or in a device slot. Decides which to load and which to evict.

    disk ──(a request wants it, and there is room)──> loading ──> host ──(a slot is idle)──> slot
    slot ──(another adapter needs the slot)──> host ──(another needs the memory)──> disk
    any  ──(unload)──> draining: no new requests; gone when the last one has ended

- A slot is idle when no row computes with it. An adapter that loses its slot stays in host memory, so its prefixes stay
  usable, and returning to a slot costs one copy.
- Memory is bounded by `max_cpu_adapters`, and with `block_bytes` also by bytes: adapters then occupy blocks of the KV
  pool, at most `most_blocks`. The least popular adapter or prefix is evicted first: each use counts one and is halved
  for every half-life since then (LRFU). Sizes and load times are not counted: on the traces of `python -m bench
  eviction` a model with all of them was no better (ADR 91). An adapter is used when a request for it arrives, a prefix
  block when a sequence finds it; a block's first use counts half, so most prefixes are evicted before their adapter.
- KV depends on its adapter. Before an adapter is evicted from memory, the prefixes computed with it are: KV that no
  request can use never takes memory. With `dependency_aware=False` adapters and prefixes are two independent LRUs, and
  `most_blocks` of the pool are reserved for adapters from the start: the baseline of the benchmark.
- A request that gets no slot is skipped. After `CLAIM_AFTER` attempts its adapter claims a place: of the adapters in
  the way, the one with the fewest requests starts no request younger than the claimant. So no adapter starves.

engine/adapter_loader.py reads the files and holds the host copies; this says which (`take_wanted`, `take_dropped`).
Pure.
"""

from collections.abc import Iterable
from typing import Final, Protocol

from slipway_runtime.messages import ADAPTERS_MAY_TAKE, AdapterLoad, AdapterState, AdapterStatus
from slipway_runtime.scheduling.adapter_state import (
    BASE_SLOT,
    Adapter,
    choose_victim,
    holds_memory,
    idle_block_holders,
    is_evictable,
    is_in_memory,
)
from slipway_runtime.scheduling.block_pool import BlockPool
from slipway_runtime.scheduling.eviction import LrfuOrder

CLAIM_AFTER = 16
STAGED = 2  # adapters in memory that wait for a slot: the next one, and one that loads meanwhile
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
    """LRU of adapters alone, for prefixes that have a memory of their own: the baseline of the benchmark."""

    def next(self, adapters: Iterable[Adapter]) -> Adapter | None:  # noqa: D102  see the protocol
        return min(adapters, key=lambda a: (a.last_used, a.digest), default=None)

    def is_below_next_prefix(self, adapter: Adapter) -> bool:  # noqa: D102  see the protocol
        raise AssertionError("prefixes have a memory of their own")


class Residency:
    """Slots, host memory and the requests that use them."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_adapters: int,
        max_cpu_adapters: int = 0,
        block_bytes: int = 0,
        most_blocks: int | None = None,
        dependency_aware: bool = True,
        half_life_seconds: float = HALF_LIFE_SECONDS,
        rule: EvictionRule | None = None,
    ) -> None:
        assert max_adapters >= 1
        self.max_adapters = max_adapters
        self.most_in_memory = max(max_cpu_adapters, max_adapters)
        self.most_blocks = 0 if block_bytes == 0 else pool.total // 2 if most_blocks is None else most_blocks
        self.dependency_aware = dependency_aware
        self.version = 0  # grows with each change of an adapter's status
        self._pool = pool
        self._block_bytes = block_bytes
        self._half_life = half_life_seconds
        self._rule: EvictionRule
        if not dependency_aware:
            self._rule = LeastRecentlyUsed()
        else:
            self._rule = rule or LeastPopular(pool, half_life_seconds=half_life_seconds, shares_blocks=block_bytes > 0)
        self._adapters: dict[str, Adapter] = {}
        self._slots: list[str | None] = [None] * max_adapters
        self._reserved_blocks = 0
        self._loads: list[AdapterLoad] = []
        self._wanted: list[str] = []
        self._dropped: list[str] = []
        self._claimant: str | None = None  # the adapter for which another one is closed; one at a time
        if not dependency_aware:
            pool.reserve(self.most_blocks)

    # --- called by the loader of adapters

    def register(self, digest: str, *, pinned: bool = False) -> bool:
        """Register an adapter. True: the caller must read it from storage; False: it is known already."""
        adapter = self._adapters.get(digest)
        self.version += 1
        if adapter is not None and adapter.state is not AdapterState.FAILED:
            adapter.draining = False
            adapter.pinned |= pinned
            return False
        self._adapters[digest] = Adapter(digest, pinned=pinned)
        return True

    def note_loaded(self, digest: str, *, num_bytes: int, rank: int) -> None:
        """Note that an adapter was read. Without memory for it now, it is known as on disk and its copy is dropped."""
        adapter = self._adapters.get(digest)
        if adapter is None:  # unloaded while it was read
            self._dropped.append(digest)
            return
        if adapter.state is not AdapterState.LOADING:
            return
        reserved = adapter.num_bytes > 0  # a request wanted it: memory was reserved before it was read again
        adapter.num_bytes, adapter.rank = num_bytes, rank
        if adapter.cost(self._block_bytes) > self.most_blocks:
            most = self.most_blocks * self._block_bytes
            self.note_failed(digest, f"it takes {num_bytes} bytes; {ADAPTERS_MAY_TAKE} {most}")
            self._dropped.append(digest)
        elif reserved or self._make_room_for(adapter):
            self._move(adapter, AdapterState.HOST)
        else:
            self._move(adapter, AdapterState.DISK)
            self._dropped.append(digest)

    def note_failed(self, digest: str, error: str) -> None:
        """Note that an adapter could not be read."""
        adapter = self._adapters.get(digest)
        if adapter is not None and adapter.state is AdapterState.LOADING:
            self._give_back_memory(adapter)
            adapter.error = error
            self._move(adapter, AdapterState.FAILED)
            self._forget_if_drained(adapter)

    def unload(self, digest: str) -> bool:
        """Drop an adapter when its last request has ended; False if it is not known."""
        adapter = self._adapters.get(digest)
        if adapter is None:
            return False
        adapter.draining = True
        self.version += 1
        self._forget_if_drained(adapter)
        return True

    # --- called by the scheduler

    def refusal(self, digest: str) -> str:
        """Why a new request for an adapter is refused; empty: it is accepted."""
        adapter = self._adapters.get(digest)
        return "the adapter is not loaded" if adapter is None else adapter.refusal

    def failure(self, digest: str) -> str:
        """Why no request can use an adapter any more; empty: requests may wait for it."""
        adapter = self._adapters.get(digest)
        return "" if adapter is None else adapter.failure

    def start_request(self, digest: str, now: float) -> None:
        """Count a new request for an adapter."""
        adapter = self._adapters[digest]
        adapter.requests += 1
        self.version += 1
        adapter.popularity = adapter.popularity_at(now, self._half_life) + 1.0
        adapter.last_used = now

    def end_request(self, digest: str) -> None:
        """Uncount a request that has ended and is in no plan in flight."""
        adapter = self._adapters[digest]
        adapter.requests -= 1
        self.version += 1
        if adapter.requests == 0 and self._claimant == digest:
            self._end_claim()
        self._forget_if_drained(adapter)

    def slot_for(self, digest: str, serial: int) -> int | None:
        """The slot of an adapter; None: not now, asked again in the next step. Starts its load where there is room."""
        adapter = self._adapters[digest]
        if adapter.blocked_since is not None and serial > adapter.blocked_since:
            return None
        if adapter.state is AdapterState.SLOT:
            return adapter.slot
        if adapter.state is AdapterState.DISK and self._may_stage(adapter) and self._make_room_for(adapter):
            self._move(adapter, AdapterState.LOADING)
            self._wanted.append(digest)
        elif adapter.state is AdapterState.HOST:
            slot = self._idle_slot()
            if slot is not None:
                self._enter_slot(adapter, slot)
                return slot
        if adapter.state is not AdapterState.LOADING:
            adapter.tries += 1
            if adapter.tries >= CLAIM_AFTER:
                self._claim(adapter, serial)
        return None

    def start_row(self, digest: str) -> None:
        """Count a row that computes with an adapter from now on."""
        self._adapters[digest].rows += 1

    def end_row(self, digest: str) -> None:
        """Uncount a row whose sequence has ended or was preempted."""
        self._adapters[digest].rows -= 1

    def make_room(self, count: int, reserve: int = 0) -> None:
        """Free so many blocks by evicting idle adapters or prefixes, the least popular first.

        While fewer than count + reserve are available, idle adapters are evicted at any popularity: no request needs
        them.
        """
        pool = self._pool
        while self.dependency_aware and self._reserved_blocks:
            is_short = pool.available < count + reserve
            if pool.free >= count and not is_short:
                return
            adapter = self._rule.next(idle_block_holders(self._adapters.values()))
            if adapter is not None and (is_short or self._rule.is_below_next_prefix(adapter)):
                self._evict(adapter)
            elif pool.free < count and pool.cached:
                pool.evict_next()
            else:
                return

    # --- loads, statuses and checks

    @property
    def is_reading(self) -> bool:
        """Whether an adapter is being read from storage."""
        return any(adapter.state is AdapterState.LOADING for adapter in self._adapters.values())

    def take_loads(self) -> tuple[AdapterLoad, ...]:
        """The copies of adapters into slots, for the plan being made."""
        loads, self._loads = self._loads, []
        return tuple(loads)

    def take_wanted(self) -> tuple[str, ...]:
        """The adapters to read from storage again; memory is reserved for them."""
        wanted, self._wanted = self._wanted, []
        return tuple(wanted)

    def take_dropped(self) -> tuple[str, ...]:
        """The adapters whose host copies may be dropped, unless they were loaded again meanwhile."""
        dropped, self._dropped = self._dropped, []
        return tuple(digest for digest in dict.fromkeys(dropped) if not self._is_in_memory(digest))

    def statuses(self) -> tuple[AdapterStatus, ...]:
        """The statuses of all known adapters."""
        return tuple(adapter.status() for _, adapter in sorted(self._adapters.items()))

    def invalid_blocks(self) -> int:
        """Published blocks, on device and host, whose adapter is not in memory: no request can use them."""
        tiers = (self._pool,) if self._pool.below is None else (self._pool, self._pool.below)
        return sum(t.members(group) for t in tiers for group in t.groups() if group and not self._is_in_memory(group))

    def check(self) -> None:
        """Raise AssertionError when slots, memory or counts of adapters are inconsistent."""
        adapters = self._adapters.values()
        assert {digest for digest in self._slots if digest} == {a.digest for a in adapters if a.slot != BASE_SLOT}
        assert all((a.state is AdapterState.SLOT) == (a.slot != BASE_SLOT) for a in adapters)
        assert all(self._slots[a.slot] == a.digest for a in adapters if a.slot != BASE_SLOT)
        assert all(a.rows == 0 or a.state is AdapterState.SLOT for a in adapters), "a row computes without its adapter"
        assert all(0 <= a.rows <= a.requests for a in adapters)
        assert sum(a.reserved_blocks for a in adapters) == self._reserved_blocks <= self.most_blocks
        assert self._pool.reserved == (self._reserved_blocks if self.dependency_aware else self.most_blocks)
        assert sum(is_in_memory(a) for a in adapters) <= self.most_in_memory
        if self.dependency_aware:
            assert self.invalid_blocks() == 0, "KV outlived its adapter"

    # --- loading and eviction

    def _enter_slot(self, adapter: Adapter, slot: int) -> None:
        before = self._slots[slot]
        if before is not None:
            self._leave_slot(self._adapters[before])
        self._slots[slot] = adapter.digest
        adapter.slot = slot
        self._move(adapter, AdapterState.SLOT)
        self._loads.append(AdapterLoad(slot=slot, digest=adapter.digest))

    def _leave_slot(self, adapter: Adapter) -> None:
        assert adapter.rows == 0, "a slot is not overwritten under a row"
        self._slots[adapter.slot] = None
        self._loads = [load for load in self._loads if load.slot != adapter.slot]
        adapter.slot = BASE_SLOT
        self._move(adapter, AdapterState.HOST)

    def _make_room_for(self, adapter: Adapter) -> bool:
        """Reserve memory for an adapter, evicting others and prefixes; False: all of it is in use."""
        cost = adapter.cost(self._block_bytes)
        in_memory = sum(holds_memory(a) for a in self._adapters.values() if a is not adapter)
        while in_memory >= self.most_in_memory or self._reserved_blocks + cost > self.most_blocks:
            victim = self._rule.next(a for a in self._adapters.values() if a is not adapter and is_evictable(a))
            if victim is None:
                return False
            self._evict(victim)
            in_memory -= 1
        if self.dependency_aware:
            while self._pool.free < cost:
                victim = self._rule.next(idle_block_holders(self._adapters.values(), besides=adapter))
                if victim is not None and self._rule.is_below_next_prefix(victim):
                    self._evict(victim)
                elif self._pool.cached:
                    self._pool.evict_next()
                else:
                    return False
            self._pool.reserve(cost)
        adapter.reserved_blocks = cost
        self._reserved_blocks += cost
        return True

    def _evict(self, adapter: Adapter) -> None:
        """Evict an adapter from memory, after the prefixes that were computed with it."""
        if self.dependency_aware:
            self._pool.evict_group(adapter.digest)
        if adapter.slot != BASE_SLOT:
            self._leave_slot(adapter)
        self._give_back_memory(adapter)
        self._dropped.append(adapter.digest)
        self._move(adapter, AdapterState.DISK)

    def _give_back_memory(self, adapter: Adapter) -> None:
        if self.dependency_aware:
            self._pool.unreserve(adapter.reserved_blocks)
        self._reserved_blocks -= adapter.reserved_blocks
        adapter.reserved_blocks = 0

    def _forget_if_drained(self, adapter: Adapter) -> None:
        if adapter.draining and adapter.requests == 0:
            self._pool.evict_group(adapter.digest)
            if adapter.slot != BASE_SLOT:
                self._leave_slot(adapter)
            self._give_back_memory(adapter)
            if is_in_memory(adapter):
                self._dropped.append(adapter.digest)
            del self._adapters[adapter.digest]
            self.version += 1

    def _may_stage(self, adapter: Adapter) -> bool:
        """Whether an adapter would run soon: while it waits in memory, it takes KV blocks from running requests."""
        others = self._adapters.values()
        staged = sum(a.requests > 0 and a.rows == 0 and holds_memory(a) for a in others)
        most = min(STAGED, self.max_adapters) if self.dependency_aware else self.max_adapters
        return staged < most or self._claimant == adapter.digest

    def _move(self, adapter: Adapter, state: AdapterState) -> None:
        adapter.state = state
        self.version += 1
        if state is not AdapterState.DISK:
            adapter.tries = 0
            if self._claimant == adapter.digest:  # the claim is met: the closed adapter is open again
                self._end_claim()

    def _claim(self, adapter: Adapter, serial: int) -> None:
        if self._claimant is not None:
            return
        victim = choose_victim(adapter, self._adapters.values())
        if victim is not None:
            self._claimant = adapter.digest
            victim.blocked_since = serial

    def _end_claim(self) -> None:
        self._claimant = None
        for adapter in self._adapters.values():
            adapter.blocked_since = None

    # --- where adapters are

    def _idle_slot(self) -> int | None:
        if None in self._slots:
            return self._slots.index(None)
        adapter = self._rule.next(a for a in self._adapters.values() if a.slot != BASE_SLOT and a.rows == 0)
        return None if adapter is None else adapter.slot

    def _is_in_memory(self, digest: str) -> bool:
        adapter = self._adapters.get(digest)
        return adapter is not None and is_in_memory(adapter)
