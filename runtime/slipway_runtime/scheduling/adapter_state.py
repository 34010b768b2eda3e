"""State of one adapter in the scheduler: its place, the requests and rows that use it, the memory that it takes."""

from collections.abc import Iterable
from dataclasses import dataclass

from slipway_runtime.messages import AdapterState, AdapterStatus
from slipway_runtime.scheduling.eviction import decay

BASE_SLOT = -1  # the base model alone


@dataclass(slots=True)
class Adapter:
    """One adapter, known by the digest of its content."""

    digest: str
    state: AdapterState = AdapterState.LOADING
    num_bytes: int = 0  # 0: not read yet
    rank: int = 0
    pinned: bool = False  # stays in host memory
    draining: bool = False
    slot: int = BASE_SLOT
    reserved_blocks: int = 0
    requests: int = 0  # for it, that have not ended
    rows: int = 0  # that compute with it
    last_used: float = 0.0
    popularity: float = 0.0  # at `last_used`
    tries: int = 0  # failed attempts to get a slot or memory
    blocked_since: int | None = None  # serial of a request: younger requests for this adapter are not started
    error: str = ""

    def status(self) -> AdapterStatus:
        """Build the status of this adapter."""
        return AdapterStatus(
            digest=self.digest,
            state=AdapterState.DRAINING if self.draining else self.state,
            bytes=self.num_bytes,
            rank=self.rank,
            requests=self.requests,
            pinned=self.pinned,
            last_used=self.last_used,
            error=self.error,
        )

    @property
    def failure(self) -> str:
        """Why no request can use this adapter any more; empty: requests may wait for it."""
        return f"the adapter could not be loaded: {self.error}" if self.state is AdapterState.FAILED else ""

    @property
    def refusal(self) -> str:
        """Why a new request for this adapter is refused; empty: it is accepted."""
        return "the adapter is being unloaded" if self.draining else self.failure

    def cost(self, block_bytes: int) -> int:
        """The number of KV blocks whose memory it occupies; 0: its memory is not taken from the KV pool."""
        return -(-self.num_bytes // block_bytes) if block_bytes else 0

    def popularity_at(self, now: float, half_life_seconds: float) -> float:
        """The uses of this adapter up to `now`, each halved per half-life since then."""
        return self.popularity * decay(now - self.last_used, half_life_seconds)


def is_in_memory(adapter: Adapter) -> bool:
    """Whether the adapter is in host memory or in a slot."""
    return adapter.state in (AdapterState.HOST, AdapterState.SLOT)


def holds_memory(adapter: Adapter) -> bool:
    """Whether the adapter is in memory, or loading into memory that is reserved for it."""
    return is_in_memory(adapter) or (adapter.state is AdapterState.LOADING and adapter.num_bytes > 0)


def is_idle(adapter: Adapter) -> bool:
    """Whether the adapter is in memory, not pinned, and no request needs it."""
    return adapter.requests == 0 and not adapter.pinned and is_in_memory(adapter)


def is_evictable(adapter: Adapter) -> bool:
    """Whether the adapter may be evicted: it is idle, or closed for a claimant and no row computes with it."""
    return is_idle(adapter) or (adapter.rows == 0 and adapter.blocked_since is not None and is_in_memory(adapter))


def choose_victim(adapter: Adapter, others: Iterable[Adapter]) -> Adapter | None:
    """The adapter to evict for this one: it holds the slot or memory needed, and the fewest requests need it."""
    wants_slot = adapter.state is AdapterState.HOST
    there = (a for a in others if a is not adapter and (a.slot != BASE_SLOT if wants_slot else is_in_memory(a)))
    return min(there, key=lambda a: (a.pinned, a.rows, a.requests, a.digest), default=None)


def idle_block_holders(adapters: Iterable[Adapter], besides: Adapter | None = None) -> Iterable[Adapter]:
    """The idle adapters whose memory could hold KV blocks."""
    return (a for a in adapters if a is not besides and a.reserved_blocks and is_idle(a))
