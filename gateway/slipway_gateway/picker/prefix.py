"""Prefix matching: which endpoint was sent the beginning of this prompt before, and so has its KV cache.

Approximate, unless the endpoint tells what it has in its cache (`kv_feeds`).

The text of a request is cut into blocks of 256 bytes, and each block is hashed together with the hash of the block
before it, so that one hash stands for the whole text up to its block. The first hash contains the tenant and the model,
so that one tenant's prompts never change where another tenant's requests go.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Final

BLOCK_BYTES: Final = 256
MAX_BLOCKS: Final = 256  # 64 KiB of text; what comes after it hardly changes the choice
TOKENS_OF_BLOCK: Final = BLOCK_BYTES // 4


def block_hashes(parts: Iterable[bytes | memoryview], *salt: str) -> tuple[int, ...]:
    """The chained hashes of the whole blocks of `parts`, in order; a last block that is not full has none.

    Stable between processes, so that all gateways compute the same ones.
    """
    text = b"\x1f".join(_limited(parts))
    # Names contain no control characters, so no two lists of names make the same salt.
    previous = blake2b("\x1f".join(salt).encode(errors="replace"), digest_size=8).digest()
    hashes = []
    for start in range(0, min(len(text) // BLOCK_BYTES, MAX_BLOCKS) * BLOCK_BYTES, BLOCK_BYTES):
        previous = blake2b(text[start : start + BLOCK_BYTES], digest_size=8, key=previous).digest()
        hashes.append(int.from_bytes(previous, "little"))
    return tuple(hashes)


def _limited(parts: Iterable[bytes | memoryview]) -> Iterable[bytes]:
    left = BLOCK_BYTES * MAX_BLOCKS
    for part in parts:
        if left <= 0:
            return
        piece = bytes(part[:left])
        left -= len(piece)
        yield piece


class PrefixIndex:
    """The blocks that each endpoint was sent lately: an LRU for each endpoint, bounded for each and in all.

    The blocks of a request are touched from the last to the first, so a block is always older than the ones before it,
    and the LRU forgets the end of a text first. Therefore the known blocks of a chain are always a prefix of it, which
    a binary search finds; only where blocks were discarded one by one, each is looked up in turn. An entry takes about
    120 bytes; 256 Ki entries are 32 MiB.
    """

    def __init__(self, *, blocks_per_endpoint: int = 8192, blocks_in_all: int = 256 * 1024) -> None:
        assert blocks_per_endpoint > 0
        self._per_endpoint = blocks_per_endpoint
        self._in_all = blocks_in_all
        self._known: dict[str, OrderedDict[int, None]] = {}
        self._with_gaps: set[str] = set()  # endpoints of which blocks were discarded: chains may have gaps

    @property
    def limit(self) -> int:
        """How many blocks are kept for each endpoint now: fewer when there are many endpoints."""
        return max(1, min(self._per_endpoint, self._in_all // max(1, len(self._known))))

    def blocks_of(self, endpoint: str) -> int:
        """How many blocks are known of this endpoint."""
        return len(self._known.get(endpoint, ()))

    def matched(self, endpoint: str, blocks: Sequence[int]) -> int:
        """How many of the first `blocks` this endpoint was sent before."""
        known = self._known.get(endpoint)
        if not known or not blocks or blocks[0] not in known:
            return 0
        if endpoint in self._with_gaps:
            return next((number for number, block in enumerate(blocks) if block not in known), len(blocks))
        low, high = 1, len(blocks)  # blocks[low - 1] is known; blocks[high] is not, or does not exist
        while low < high:
            middle = (low + high + 1) // 2
            if blocks[middle - 1] in known:
                low = middle
            else:
                high = middle - 1
        return low

    def add(self, endpoint: str, blocks: Sequence[int]) -> None:
        """The endpoint is sent a request with these blocks, and will have their KV cache."""
        if not blocks:
            return
        known = self._known.setdefault(endpoint, OrderedDict())
        for block in reversed(blocks):
            known[block] = None
            known.move_to_end(block)
        limit = self.limit
        while len(known) > limit:
            known.popitem(last=False)

    def discard(self, endpoint: str, blocks: Sequence[int]) -> None:
        """The endpoint has evicted the KV of these blocks."""
        known = self._known.get(endpoint)
        if known is None or not blocks:
            return
        self._with_gaps.add(endpoint)
        for block in blocks:
            known.pop(block, None)

    def remove(self, endpoint: str) -> None:
        """The endpoint is gone, or its container was restarted with an empty cache."""
        self._known.pop(endpoint, None)
        self._with_gaps.discard(endpoint)
