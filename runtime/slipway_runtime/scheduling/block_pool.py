"""Who holds which block of KV cache, and which blocks can be shared.

A block holds the keys and values of `block_size` consecutive tokens, and is in exactly one state:

    live     referenced by at least one sequence; never reused
    cached   referenced by nobody, holds a published prefix; the least recently used is evicted when a block is needed
    free     referenced by nobody, holds nothing

    free + cached + live = total

A full block is published under a key that chains over everything before it, so that equal keys mean equal tokens
from the first one on, computed with the same model, adapter and salt. Published blocks are never written again.
Block 0 belongs to nobody: padding points there.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

NULL_BLOCK = 0


def root_key(*, model: str = "", adapter: str = "", salt: str = "") -> bytes:
    """The parent of a first block. Whatever changes the KV of equal tokens, or who may share it, goes in here."""
    parts = (part.encode() for part in (model, adapter, salt))
    return blake2b(b"".join(len(part).to_bytes(4, "big") + part for part in parts), digest_size=16).digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of a full block that follows the block with the key `parent`."""
    return blake2b(parent + array("I", token_ids).tobytes(), digest_size=16).digest()


class BlockPool:
    """Blocks 1 … `num_blocks`, reference-counted, with the published prefixes that they hold."""

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        assert num_blocks >= 1
        assert block_size >= 1
        self.total = num_blocks
        self.block_size = block_size
        self._ref_count = [0] * (num_blocks + 1)
        self._key_of: list[bytes | None] = [None] * (num_blocks + 1)
        self._block_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # the next to be evicted comes first
        self._free = list(range(num_blocks, 0, -1))  # a stack: the lowest on top, so that early blocks lie side by side

    @property
    def free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Blocks that hold a reusable prefix and nobody uses."""
        return len(self._cached)

    @property
    def live(self) -> int:
        """Blocks that sequences use: the real pressure."""
        return self.total - len(self._free) - len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that could be allocated now."""
        return len(self._free) + len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest published prefix of this chain. They are not held yet: see `hold`."""
        blocks = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def reusable(self, blocks: Iterable[int]) -> int:
        """How many of these blocks nobody uses: holding them takes so many from the available ones."""
        return sum(self._ref_count[block] == 0 for block in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """Reference blocks that `match` found."""
        for block in blocks:
            if self._ref_count[block] == 0:
                assert self._key_of[block] is not None, "only a published block can be found"
                del self._cached[block]
            self._ref_count[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Take blocks to be written, evicting the least recently used prefixes when nothing is free."""
        assert count <= self.available, "the caller asks only for what is available"
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _none = self._cached.popitem(last=False)
                self._forget(block)
            assert self._ref_count[block] == 0
            self._ref_count[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference of each block of a chain; the ends of chains will be evicted before their roots."""
        for block in reversed(blocks):
            assert self._ref_count[block] > 0, "a block is given back once per reference"
            self._ref_count[block] -= 1
            if self._ref_count[block] > 0:
                continue
            if self._key_of[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None

    def publish(self, block: int, key: bytes) -> None:
        """Let others find this full, computed block. If an equal one is published already, this one stays private."""
        assert self._ref_count[block] > 0, "only who computed a block can publish it"
        if self._key_of[block] is None and key not in self._block_of:
            self._key_of[block] = key
            self._block_of[key] = block

    def fork(self, blocks: Sequence[int], num_tokens: int) -> tuple[list[int], tuple[int, int] | None]:
        """A second table over the same tokens: full blocks are shared, the one still being written is copied.

        Returns the new table and the copy (from, to) to make before anybody writes, if one is needed.
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

    def forget_all(self) -> None:
        """Drop every prefix that nobody uses, and let nobody find those in use: what they hold is no longer valid."""
        for block in list(self._cached):
            self._free.append(block)
        self._cached.clear()
        for block in list(self._block_of.values()):
            self._forget(block)

    def check(self) -> None:
        """Raise AssertionError when the books do not balance."""
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        assert not set(self._free) & set(self._cached), "a block is free and cached"
        live = sum(count > 0 for count in self._ref_count)
        assert self._ref_count[NULL_BLOCK] == 0
        assert NULL_BLOCK not in self._cached
        assert NULL_BLOCK not in self._free
        assert live + len(self._cached) + len(self._free) == self.total, "free + cached + live = total"
        assert all(self._ref_count[block] == 0 for block in (*self._free, *self._cached))
        assert all(self._key_of[block] is None for block in self._free), "a free block can be found"
        assert all(self._key_of[block] is not None for block in self._cached)
        assert {key: block for block, key in enumerate(self._key_of) if key is not None} == self._block_of

    def _forget(self, block: int) -> None:
        key = self._key_of[block]
        if key is not None:
            del self._block_of[key]
            self._key_of[block] = None
