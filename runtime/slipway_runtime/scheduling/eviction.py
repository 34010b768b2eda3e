"""Eviction orders of cached blocks, segmented LRU and LRFU, and the pool's interface to a host tier.

The pool reports to its order what happens to its blocks, and asks it for the block to evict.

`SegmentedLru` needs no numbers: blocks used once are evicted before blocks used again, both least recently used first.

`LrfuOrder` is LRFU (Lee et al. 2001): each use counts one and decays with a half-life, and the least popular block is
evicted first. All popularities decay at the same rate, so their order changes only with a use: log2(popularity) + time
of use / half-life is a heap key that stays valid until then. Evicted keys are remembered for a while (ghosts, as in
ARC): a prefix that is computed again is known to be reused, unlike the tokens of a single request.
"""

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol

PROTECTED_SHARE = 0.8  # of the pool, that prefixes used repeatedly may hold against those used once
ONCE = 0.5  # popularity of the first use, until a second one shows that the prefix is reused
GHOSTS_PER_BLOCK = 4  # evicted prefixes remembered, for each block of the pool


def decay(seconds: float, half_life_seconds: float) -> float:
    """The factor by which a popularity has decayed after so many seconds."""
    return float(0.5 ** (max(seconds, 0.0) / half_life_seconds))


class EvictionOrder(Protocol):
    """Chooses the block to evict, from the pool's reports on its blocks; `now` in seconds."""

    def published(self, block: int, key: bytes, group: str, now: float) -> None:
        """Note that a block was published."""

    def used(self, block: int, now: float) -> None:
        """Note that another sequence uses a published block."""

    def add(self, block: int) -> None:
        """Note that no sequence references the block any more: it may be evicted."""

    def remove(self, block: int) -> None:
        """Note that a sequence references the block again, or that it is no longer published: it may not be evicted."""

    def forgotten(self, block: int, key: bytes, now: float) -> None:
        """Note that the block is no longer published."""

    def next(self) -> int | None:
        """The block to evict; None: there is none."""

    def blocks(self) -> list[int]:
        """All blocks that may be evicted."""

    def __len__(self) -> int: ...


class ColdBlocks(Protocol):
    """The pool's interface to a tier that may keep evicted blocks; host_tier.py implements it."""

    def __contains__(self, key: object) -> bool:
        """Whether the tier holds a block with this key."""

    def demote(self, block: int, key: bytes, group: str) -> None:
        """Offload an evicted block; its content stays valid until the next plan is executed."""

    def evict_group(self, group: str) -> None:
        """Drop the blocks of this group."""

    def forget_all(self) -> None:
        """Drop all blocks."""

    def groups(self) -> Iterable[str]:
        """The groups that have blocks in the tier."""

    def members(self, group: str) -> int:
        """How many blocks of this group the tier holds."""

    def check(self) -> None:
        """Raise AssertionError when the tier is inconsistent."""


class SegmentedLru:
    """Evicts blocks used once before blocks used again.

    The oldest of those used again, beyond `PROTECTED_SHARE` of all, count as used once.
    """

    def __init__(self, num_blocks: int) -> None:
        self.used_again = bytearray(num_blocks + 1)
        self._once: OrderedDict[int, None] = OrderedDict()  # the next to be evicted comes first
        self._hot: OrderedDict[int, None] = OrderedDict()
        self._most_hot = int(num_blocks * PROTECTED_SHARE)

    def published(self, block: int, key: bytes, group: str, now: float) -> None:  # noqa: D102  see the protocol
        pass

    def used(self, block: int, now: float) -> None:  # noqa: D102  see the protocol
        self.used_again[block] = True

    def add(self, block: int) -> None:  # noqa: D102  see the protocol
        (self._hot if self.used_again[block] else self._once)[block] = None
        while len(self._hot) > self._most_hot:
            oldest, _none = self._hot.popitem(last=False)
            self.used_again[oldest] = False
            self._once[oldest] = None

    def remove(self, block: int) -> None:  # noqa: D102  see the protocol
        del (self._hot if block in self._hot else self._once)[block]

    def forgotten(self, block: int, key: bytes, now: float) -> None:  # noqa: D102  see the protocol
        self.used_again[block] = False

    def next(self) -> int | None:  # noqa: D102  see the protocol
        return next(iter(self._once or self._hot), None)

    def blocks(self) -> list[int]:  # noqa: D102  see the protocol
        return [*self._once, *self._hot]

    def __len__(self) -> int:
        return len(self._once) + len(self._hot)


class LrfuOrder:
    """Evicts the block with the lowest decayed popularity."""

    def __init__(self, num_blocks: int, half_life_seconds: float) -> None:
        self._half_life = half_life_seconds
        self._popularity = [0.0] * (num_blocks + 1)  # at the last use
        self._used_at = [0.0] * (num_blocks + 1)
        self._ghosts: OrderedDict[bytes, tuple[float, float]] = OrderedDict()
        self._most_ghosts = num_blocks * GHOSTS_PER_BLOCK
        self._heap: list[tuple[float, int, int]] = []  # (key, serial, block); stale when the serial is another now
        self._serial_of: dict[int, int] = {}  # of the blocks that may be evicted
        self._serial = 0

    def published(self, block: int, key: bytes, group: str, now: float) -> None:  # noqa: D102  see the protocol
        ghost = self._ghosts.pop(key, None)
        self._popularity[block] = ONCE if ghost is None else 1.0 + self._faded(*ghost, now)
        self._used_at[block] = now

    def used(self, block: int, now: float) -> None:  # noqa: D102  see the protocol
        self._popularity[block] = 1.0 + self.popularity_of(block, now)
        self._used_at[block] = now

    def add(self, block: int) -> None:  # noqa: D102  see the protocol
        self._serial += 1
        self._serial_of[block] = self._serial
        heapq.heappush(self._heap, self._entry(block))
        if len(self._heap) > 64 + 2 * len(self._serial_of):  # mostly stale
            self._heap = [self._entry(idle) for idle in self._serial_of]
            heapq.heapify(self._heap)

    def remove(self, block: int) -> None:  # noqa: D102  see the protocol
        del self._serial_of[block]

    def forgotten(self, block: int, key: bytes, now: float) -> None:  # noqa: D102  see the protocol
        self._ghosts[key] = (self._popularity[block], self._used_at[block])
        while len(self._ghosts) > self._most_ghosts:
            self._ghosts.popitem(last=False)

    def next(self) -> int | None:  # noqa: D102  see the protocol
        while self._heap:
            _key, serial, block = self._heap[0]
            if self._serial_of.get(block) == serial:
                return block
            heapq.heappop(self._heap)
        return None

    def blocks(self) -> list[int]:  # noqa: D102  see the protocol
        return list(self._serial_of)

    def __len__(self) -> int:
        return len(self._serial_of)

    def popularity_of(self, block: int, now: float) -> float:
        """The uses of a block up to `now`, each halved per half-life since then."""
        return self._faded(self._popularity[block], self._used_at[block], now)

    def _faded(self, popularity: float, at: float, now: float) -> float:
        return popularity * decay(now - at, self._half_life)

    def _entry(self, block: int) -> tuple[float, int, int]:
        # Of equal keys, the block added first is evicted first: the end of a chain is added before its root.
        key = math.log2(self._popularity[block]) + self._used_at[block] / self._half_life
        return key, self._serial_of[block], block
