"""Block pool of the KV cache: reference counts, prefix cache index and eviction of blocks; the log of KV events.

A block holds the keys and values of `block_size` consecutive tokens, and is in exactly one state:

    live     referenced by at least one sequence; never reused
    cached   referenced by no sequence, holds a published prefix that is evicted when a block is needed
    free     referenced by no sequence, holds nothing
    reserved its memory is reserved by an adapter: adapters and KV share one budget

    free + cached + live + reserved = total

With a host tier below, evicted blocks can still be found in host memory (host_tier.py).

An eviction order (eviction.py) chooses which cached block is evicted first. With both orders, a prompt of any length
that is seen once does not evict a prefix that is used repeatedly.

Published blocks are indexed by group, the adapter that they were computed with, and are evicted with that adapter.

A full block is published under a chained hash of all tokens up to its end, so that equal keys mean equal tokens
from the first one on, computed with the same model, adapter and salt. Published blocks are never written again.
Block 0 belongs to no sequence: padding points there.

KV events say which blocks were stored and removed, in vLLM's terms, for routers that look for a prefix.
"""

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from slipway_runtime.messages import AllBlocksCleared, BlockRemoved, BlockStored, Medium
from slipway_runtime.scheduling.eviction import ColdBlocks, EvictionOrder, SegmentedLru
from slipway_runtime.scheduling.text_blocks import TextBlockIndex

KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KvEventLog:
    """Collects events until `take`; successive events of the same kind become one."""

    def __init__(self, block_size: int, medium: Medium = Medium.DEVICE) -> None:
        self._block_size = block_size
        self._medium = medium
        self._events: list[KvEvent] = []
        self._removed: list[bytes] = []
        self._stored: list[tuple[bytes, Sequence[int]]] = []  # of one chain
        self._parent: bytes | None = None
        self._adapter = ""

    def stored(self, parent: bytes | None, key: bytes, token_ids: Sequence[int], adapter: str) -> None:
        """Record that a block was published; `parent` is None for the first one of a chain.

        As in vLLM's events of host memory, a block without tokens is recorded by its key alone, and needs no chain.
        """
        if not self._stored or (token_ids and self._stored[-1][0] != parent):
            self._close()
            self._parent, self._adapter = parent, adapter
        self._stored.append((key, token_ids))

    def removed(self, key: bytes) -> None:
        """Record that a block is no longer published."""
        if self._stored:
            self._close()
        self._removed.append(key)

    def cleared(self) -> None:
        """Record that no block is published any more."""
        self._close()
        self._events.append(AllBlocksCleared())

    def take(self) -> tuple[KvEvent, ...]:
        """The events since the last call."""
        self._close()
        events, self._events = self._events, []
        return tuple(events)

    def _close(self) -> None:
        if self._removed:
            self._events.append(BlockRemoved(block_hashes=tuple(self._removed), medium=self._medium))
            self._removed = []
        if self._stored:
            self._events.append(
                BlockStored(
                    block_hashes=tuple(key for key, _ in self._stored),
                    parent_block_hash=self._parent,
                    token_ids=tuple(token_id for _, token_ids in self._stored for token_id in token_ids),
                    block_size=self._block_size,
                    adapter=self._adapter,
                    medium=self._medium,
                )
            )
            self._stored = []


NULL_BLOCK = 0


def root_key(*, model: str = "", adapter: str = "", salt: str | None = "") -> bytes:
    """The parent key of a sequence's first block: it separates equal tokens whose KV differs or must not be shared.

    salt: None is the public root, which no salt can name: for prompts of the service, shared by all requests.
    """
    parts = (part.encode() for part in ((model, adapter) if salt is None else (model, adapter, salt)))
    return blake2b(b"".join(len(part).to_bytes(4, "big") + part for part in parts), digest_size=16).digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of a full block that follows the block with the key `parent`."""
    return blake2b(parent + array("I", token_ids).tobytes(), digest_size=16).digest()


class BlockPool:
    """Blocks 1 … `num_blocks`, reference-counted, with the published prefixes that they hold.

    `now`: the time at which eviction candidates are compared, set by the scheduler before each step.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        shares_prefixes: bool = True,  # False: no block is ever published or found: prefix caching is off
        events: KvEventLog | None = None,
    ) -> None:
        assert num_blocks >= 1
        assert block_size >= 1
        self.total = num_blocks
        self.block_size = block_size
        self.shares_prefixes = shares_prefixes
        self.now = 0.0
        self.events = events
        self.below: ColdBlocks | None = None
        self.text_blocks: TextBlockIndex | None = None
        self._ref_count = [0] * (num_blocks + 1)
        self._key_of: list[bytes | None] = [None] * (num_blocks + 1)
        self._block_of: dict[bytes, int] = {}
        self._group_of = [""] * (num_blocks + 1)
        self._members: dict[str, dict[int, None]] = {}  # group -> its published blocks
        self.order: EvictionOrder = SegmentedLru(num_blocks)
        self._free = list(range(num_blocks, 0, -1))  # a stack: the lowest on top, so that early blocks lie side by side
        self._reserved: list[int] = []
        self._next_to_check = 1
        self.returns = 0  # how often blocks were given back: until the next time, an allocation that failed fails again

    @property
    def free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Blocks that hold a published prefix and that no sequence uses."""
        return len(self.order)

    @property
    def reserved(self) -> int:
        """Blocks whose memory is reserved by adapters."""
        return len(self._reserved)

    @property
    def live(self) -> int:
        """Blocks that sequences use."""
        return self.total - len(self._free) - self.cached - len(self._reserved)

    @property
    def available(self) -> int:
        """Blocks that could be allocated now."""
        return len(self._free) + self.cached

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest published prefix of this chain of keys, NULL_BLOCK for those in the tier below.

        The blocks are not referenced yet: see `hold`.
        """
        blocks = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                if self.below is None or key not in self.below:
                    break
                block = NULL_BLOCK
            blocks.append(block)
        return blocks

    def key_of(self, block: int) -> bytes | None:
        """The key under which this block is published; None: it is not."""
        return self._key_of[block]

    def holds(self, key: bytes) -> bool:
        """Whether a block of this pool is published under this key."""
        return key in self._block_of

    def reusable(self, blocks: Iterable[int]) -> int:
        """How many of these blocks no sequence uses: holding them lowers `available` by that number."""
        return sum(self._ref_count[block] == 0 for block in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """Reference blocks that `match` found."""
        for block in blocks:
            if self._ref_count[block] == 0:
                assert self._key_of[block] is not None, "only a published block can be found"
                self.order.remove(block)
            self._ref_count[block] += 1

    def count_use(self, blocks: Iterable[int]) -> None:
        """Report to the eviction order that a sequence reuses these blocks."""
        for block in blocks:
            self.order.used(block, self.now)

    def allocate(self, count: int) -> list[int]:
        """Allocate blocks to be written, evicting cached prefixes when none is free."""
        assert count <= self.available, "the caller asks only for what is available"
        blocks = [self._take() for _ in range(count)]
        for block in blocks:
            self._ref_count[block] = 1
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block of a chain; the last blocks of a chain are evicted before its first."""
        self.returns += 1
        for block in reversed(blocks):
            assert self._ref_count[block] > 0, "a block is given back once per reference"
            self._ref_count[block] -= 1
            if self._ref_count[block] > 0:
                continue
            if self._key_of[block] is None:
                self._free.append(block)
            else:
                self.order.add(block)

    def publish(self, block: int, key: bytes, group: str = "") -> bool:
        """Publish this full, computed block; False if an equal one is published: this one stays private."""
        assert self._ref_count[block] > 0, "only who computed a block can publish it"
        if self._key_of[block] is not None or key in self._block_of:
            return False
        self._key_of[block] = key
        self._block_of[key] = block
        self._group_of[block] = group
        self._members.setdefault(group, {})[block] = None
        self.order.published(block, key, group, self.now)
        return True

    def unpublish(self, blocks: Iterable[int]) -> None:
        """Remove held blocks from the prefix cache, so that no later sequence finds their KV."""
        for block in blocks:
            assert self._ref_count[block] > 0
            if self._key_of[block] is not None:
                self._forget(block)

    def fork(self, blocks: Sequence[int], num_tokens: int) -> tuple[list[int], tuple[int, int] | None]:
        """Make a second block table over the same tokens: full blocks are shared, the partial one is copied.

        Returns the new table and the copy (from, to) to make before the next write, if one is needed.
        """
        full = num_tokens // self.block_size
        shared = list(blocks[:full])
        for block in shared:
            assert self._ref_count[block] > 0
            self._ref_count[block] += 1
        if num_tokens % self.block_size == 0:
            return shared, None
        (copy,) = self.allocate(1)
        return [*shared, copy], (blocks[full], copy)

    # --- groups, and the memory that adapters share with the blocks

    def members(self, group: str) -> int:
        """How many published blocks a group has, live ones included."""
        return len(self._members.get(group, ()))

    def groups(self) -> Iterable[str]:
        """The groups that have published blocks."""
        return self._members

    def evict_group(self, group: str) -> None:
        """Unpublish the blocks of this group in all tiers; those that no sequence uses become free."""
        if self.below is not None:
            self.below.evict_group(group)
        for block in list(self._members.get(group, ())):
            self._forget(block)
            if self._ref_count[block] == 0:
                self._free.append(block)

    def evict_by(self, order: EvictionOrder) -> None:
        """Set the eviction order, before any block is published."""
        assert not self._block_of
        self.order = order

    def evict_next(self) -> None:
        """Evict the next cached block: it becomes free."""
        self._free.append(self._next_cached())

    def reserve(self, count: int) -> None:
        """Reserve the memory of so many available blocks for an adapter."""
        assert count <= self.available
        self._reserved += [self._take() for _ in range(count)]

    def unreserve(self, count: int) -> None:
        """Return so many reserved blocks to the pool: they can hold KV again."""
        assert count <= len(self._reserved)
        self.returns += 1
        for _ in range(count):
            self._free.append(self._reserved.pop())

    def forget_all(self) -> None:
        """Unpublish all blocks in all tiers: their KV is no longer valid. Those that no sequence uses become free."""
        events, self.events = self.events, None  # one event for all of them
        for group in list(self._members):
            self.evict_group(group)
        self.events = events
        if self.below is not None:
            self.below.forget_all()
        if events is not None:
            events.cleared()

    def check_next(self, count: int) -> None:
        """Raise AssertionError when the counts do not add up, or one of the next `count` blocks is inconsistent.

        A call looks at `count` blocks, whatever the size of the pool; successive calls go round the whole pool.
        """
        assert self.live >= 0, "free + cached + live + reserved = total"
        for block in range(self._next_to_check, min(self._next_to_check + count, self.total + 1)):
            assert self._ref_count[block] >= 0
            key = self._key_of[block]
            if key is not None:
                assert self._block_of.get(key) == block
                assert block in self._members[self._group_of[block]]
        self._next_to_check += count
        if self._next_to_check > self.total:
            self._next_to_check = 1

    def check(self) -> None:
        """Raise AssertionError when the states, references or indexes of the blocks are inconsistent."""
        states = (self._free, self.order.blocks(), self._reserved)
        idle = [block for state in states for block in state]
        assert len(set(idle)) == len(idle), "a block is in two states"
        assert self._ref_count[NULL_BLOCK] == 0
        assert NULL_BLOCK not in idle
        live = sum(count > 0 for count in self._ref_count)
        assert live + len(idle) == self.total, "free + cached + live + reserved = total"
        assert all(self._ref_count[block] == 0 for block in idle)
        empty = (*self._free, *self._reserved)
        assert all(self._key_of[block] is None for block in empty), "an empty block can be found"
        assert all(self._key_of[block] is not None for block in self.order.blocks())
        assert {key: block for block, key in enumerate(self._key_of) if key is not None} == self._block_of
        members = {block: group for group, blocks in self._members.items() for block in blocks}
        assert members == {block: self._group_of[block] for block in self._block_of.values()}
        if self.below is not None:
            self.below.check()

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        return self._next_cached()

    def _next_cached(self) -> int:
        block = self.order.next()
        assert block is not None, "the caller knows that there is one"
        assert self._ref_count[block] == 0
        key = self._key_of[block]
        if self.below is not None and key is not None:
            self.below.demote(block, key, self._group_of[block])
        self._forget(block)
        return block

    def _forget(self, block: int) -> None:
        """Remove a published block from every index."""
        key = self._key_of[block]
        assert key is not None
        del self._block_of[key]
        self._key_of[block] = None
        self.order.forgotten(block, key, self.now)
        members = self._members[self._group_of[block]]
        del members[block]
        if not members:
            del self._members[self._group_of[block]]
        if self._ref_count[block] == 0:
            self.order.remove(block)
        if self.events is not None:
            self.events.removed(key)
        if self.text_blocks is not None:
            self.text_blocks.removed(key)
