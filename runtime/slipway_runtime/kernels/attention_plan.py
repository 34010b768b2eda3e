"""Attention plan of one step on a GPU: rows, block tables, and how the work is divided among programs (split-KV).

Rows of one new token (decode) come first; the rest are chunks of several new tokens. A decode row is cut into splits by
its own length alone. A chunk of few new tokens on a long context (drafts, the end of a cached prompt) is cut into
splits too, by its own numbers alone; other chunks are computed in whole tiles, the longest first. So a token's
arithmetic depends on its own sequence only, never on the rest of the batch.
"""

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from slipway_runtime.kernels.upload import Ints, upload

SPLIT = 256  # tokens of a sequence that one decode split reads at least
MAX_SPLITS = 32  # of a decode row: longer ones have longer splits
# A chunk of up to CHUNK_TOKENS new tokens is cut into splits of at least CHUNK_SPLIT tokens of context.
CHUNK_TOKENS, CHUNK_SPLIT, MAX_CHUNK_SPLITS = 16, 1024, 8
# Programs of a decode launch. More than a GPU runs at once, so that programs of long rows start as short rows end; few
# enough that a captured launch, which must cover the longest context, is not mostly programs without work.
DECODE_PROGRAMS = 2048


@dataclass(frozen=True, slots=True)
class ChunkWork:
    """Programs of the chunks, for tiles of a number of queries. All int32."""

    whole: Tensor  # (P, 2): chunk, first token of the tile; tiles with the most keys first
    split: Tensor  # (S, 4): chunk, first token, split, the chunk's first slot in the buffer of partial results
    merges: Tensor  # (M, 3): token, its first slot, how many splits it has
    num_slots: int  # of the buffer of partial results: one for each token and split


@dataclass(frozen=True, slots=True)
class Plan:
    """Attention plan of one step. R rows: `num_decodes` of one new token, then C chunks."""

    lengths: Tensor  # (R,) past and new tokens
    tables: Tensor  # (R, blocks of the longest)
    num_decodes: int
    most_splits: int  # most splits of any decode row
    split: int  # fewest tokens of a split of a decode row
    max_splits: int  # limit of `most_splits`
    chunk_starts: Tensor  # (C + 1,) first token of each chunk among those of the step, and the end of the last
    chunk_new: Ints  # (C,) on the host
    chunk_lengths: Ints  # (C,) on the host
    chunk_split: int  # as `split`, for chunks of few tokens
    max_chunk_splits: int  # 1: no chunk is split
    block_size: int
    captured_work: ChunkWork | None = None  # of a plan for CUDA graphs, in static buffers
    _work: dict[tuple[int, int], ChunkWork] = field(default_factory=dict)

    def chunk_work(self, queries: int, split_queries: int) -> ChunkWork:
        """Programs for tiles of `queries` queries, made once a step. split_queries: for the tiles of split chunks."""
        if self.captured_work is not None:
            return self.captured_work
        key = queries, split_queries
        if key not in self._work:
            self._work[key] = self._divide(queries, split_queries)
        return self._work[key]

    def _divide(self, queries: int, split_queries: int) -> ChunkWork:
        new, lengths = self.chunk_new, self.chunk_lengths
        splits = np.where(new <= CHUNK_TOKENS, num_splits(lengths, self.chunk_split, self.max_chunk_splits), 1)
        is_split = splits > 1
        chunk, first = _tiles(np.where(is_split, 0, new), queries)
        keys = np.minimum(lengths[chunk] - new[chunk] + first + queries, lengths[chunk])
        longest_first = np.argsort(-keys, kind="stable")
        starts = self.num_decodes + new.cumsum() - new
        split_work, merges, num_slots = divide_splits(np.where(is_split, new, 0), starts, splits, split_queries)
        parts = (np.stack((chunk, first), 1)[longest_first], split_work, merges)
        on_device = upload([part.astype(np.int32) for part in parts], self.lengths.device)
        return ChunkWork(on_device[0], on_device[1], on_device[2], num_slots)


def divide_splits(new: Ints, starts: Ints, splits: Ints, queries: int) -> tuple[Ints, Ints, int]:
    """Divide split chunks into programs: `split`, `merges` and `num_slots` of a ChunkWork, on the host.

    new: (C,) tokens of each chunk; 0: it is not split  starts: (C,) their first tokens  queries: of a tile.
    """
    slots = new * splits
    bases = slots.cumsum() - slots
    chunk, first = _tiles(new, queries)
    of_tile = splits[chunk]
    tile = np.repeat(np.arange(len(chunk)), of_tile)
    split = np.arange(len(tile)) - np.repeat(of_tile.cumsum() - of_tile, of_tile)
    merged, token = _tiles(new, 1)
    work = np.stack((chunk[tile], first[tile], split, bases[chunk[tile]]), 1)
    merges = np.stack((starts[merged] + token, bases[merged] + token * splits[merged], splits[merged]), 1)
    return work, merges, int(slots.sum())


def plan_attention(num_computed: Ints, num_new: Ints, block_tables: Ints, block_size: int, like: Tensor) -> Plan:
    """Make the attention plan of a step, shared by all layers. Rows of one new token come first. `like`: device."""
    return _plan(
        num_computed, num_new, block_tables, block_size, like, int(np.count_nonzero(num_new == 1)), MAX_CHUNK_SPLITS
    )


def plan_in_one_order(num_computed: Ints, num_new: Ints, block_tables: Ints, block_size: int, like: Tensor) -> Plan:
    """Plan every row as a chunk, without splits: keys from first to last in whole tiles, for any batch.

    A token's attention is then the same bits in prefill, in a chunk of a prompt, as a draft and in decode.
    """
    return _plan(num_computed, num_new, block_tables, block_size, like, 0, max_chunk_splits=1)


def num_splits(lengths: Ints, tokens: int, most: int) -> Ints:
    """Number of splits of sequences of these lengths; must equal `paged_attention._splits_of`."""
    each = np.maximum(_ceil_div(_ceil_div(lengths, most), tokens), 1) * tokens
    return np.maximum(_ceil_div(lengths, each), 1)


def _ceil_div(a: Ints, b: Ints | int) -> Ints:
    return -(-a // b)


def _plan(
    num_computed: Ints,
    num_new: Ints,
    block_tables: Ints,
    block_size: int,
    like: Tensor,
    num_decodes: int,
    max_chunk_splits: int,
) -> Plan:
    lengths = num_computed + num_new
    chunk_starts = num_decodes + np.concatenate((np.zeros(1, dtype=np.int64), num_new[num_decodes:].cumsum()))
    on_device = upload([array.astype(np.int32) for array in (lengths, block_tables, chunk_starts)], like.device)
    return Plan(
        lengths=on_device[0],
        tables=on_device[1],
        num_decodes=num_decodes,
        most_splits=int(num_splits(lengths[:num_decodes], SPLIT, MAX_SPLITS).max(initial=1)),
        split=SPLIT,
        max_splits=MAX_SPLITS,
        chunk_starts=on_device[2],
        chunk_new=num_new[num_decodes:],
        chunk_lengths=lengths[num_decodes:],
        chunk_split=CHUNK_SPLIT,
        max_chunk_splits=max_chunk_splits,
        block_size=block_size,
    )


def _tiles(tokens: Ints, queries: int) -> tuple[Ints, Ints]:
    """Chunk and first token of every tile of `queries` tokens. tokens: of each chunk; a chunk of 0 has no tiles."""
    counts = -(-tokens // queries)
    chunk = np.repeat(np.arange(len(tokens)), counts)
    return chunk, (np.arange(len(chunk)) - np.repeat(counts.cumsum() - counts, counts)) * queries
