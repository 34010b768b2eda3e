"""Attention plan of one step on a GPU: rows, block tables, and how the work is divided among programs (split-KV).

Rows of one new token (decode) come first; the rest are chunks of several new tokens. A decode row is cut into splits by
its own length alone. A chunk of new tokens on a long context (drafts, the end of a cached prompt) that has too few
programs for a GPU is cut into splits too, by its own numbers alone; other chunks are computed in whole tiles, the
longest first. So a token's arithmetic depends on its own sequence only, never on the rest of the batch.
"""

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from slipway_runtime.kernels.upload import Ints, upload

SPLIT = 256  # tokens of a sequence that one decode split reads at least
MAX_SPLITS = 32  # of a decode row: longer ones have longer splits
# A chunk is cut into splits of at least CHUNK_SPLIT tokens of context, so that it has up to CHUNK_PROGRAMS programs,
# two for each multiprocessor of an H100. 32 tokens after 32k, 8 KV heads: 2 tiles · 8 heads → 264 // 16 = 16 splits of
# 2k, 256 programs in place of 16. A chunk of more than half as many programs is not cut.
CHUNK_SPLIT, MAX_CHUNK_SPLITS, CHUNK_PROGRAMS = 1024, 32, 264
# Programs of a decode launch. More than a GPU runs at once, so that some start as others end; few enough that a
# captured launch, which must cover the longest context, is not mostly programs without work.
DECODE_PROGRAMS = 2048


@dataclass(frozen=True, slots=True)
class ChunkTile:
    """What a program of a chunk in splits computes: a tile of queries, for one of the KV heads."""

    queries: int
    kv_heads: int


@dataclass(frozen=True, slots=True)
class ChunkWork:
    """Programs of the chunks, for tiles of a number of queries. All int32."""

    whole: Tensor  # (P, 2): chunk, first token of the tile; tiles with the most keys first
    # (S, 5): chunk, first token, split, the chunk's first slot in the buffer of partial results, tokens of its splits
    split: Tensor
    merges: Tensor  # (M, 3): token, its first slot, how many splits it has
    num_slots: int  # of the buffer of partial results: one for each token and split


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Attention plan of one step. R rows: `num_decodes` of one new token, then C chunks."""

    lengths: Tensor  # (R,) past and new tokens
    tables: Tensor  # (R, blocks of the longest)
    num_decodes: int
    work: Tensor  # (1 + num_decodes · most_splits,) int32: the splits of decode rows, see `decode_work`
    most_splits: int  # most splits of any decode row
    split: int  # fewest tokens of a split of a decode row
    max_splits: int  # limit of `most_splits`
    chunk_starts: Tensor  # (C + 1,) first token of each chunk among those of the step, and the end of the last
    chunk_new: Ints  # (C,) on the host
    chunk_lengths: Ints  # (C,) on the host
    block_size: int
    captured_work: ChunkWork | None = None  # of a plan for CUDA graphs, in static buffers
    _work: dict[tuple[int, ChunkTile], ChunkWork] = field(default_factory=dict)

    def chunk_work(self, queries: int, tile: ChunkTile) -> ChunkWork:
        """Programs for tiles of `queries` queries, made once a step. tile: of chunks that are split."""
        if self.captured_work is not None:
            return self.captured_work
        key = queries, tile
        if key not in self._work:
            self._work[key] = self._divide(queries, tile)
        return self._work[key]

    def _divide(self, queries: int, tile: ChunkTile) -> ChunkWork:
        new, lengths = self.chunk_new, self.chunk_lengths
        each = tokens_of_splits(new, lengths, tile)
        is_split = each < lengths
        chunk, first = _tiles(np.where(is_split, 0, new), queries)
        keys = np.minimum(lengths[chunk] - new[chunk] + first + queries, lengths[chunk])
        longest_first = np.argsort(-keys, kind="stable")
        starts = self.num_decodes + new.cumsum() - new
        work = divide_splits(np.where(is_split, new, 0), lengths, starts, each, tile.queries)
        parts = (np.stack((chunk, first), 1)[longest_first], work[0], work[1])
        on_device = upload([part.astype(np.int32) for part in parts], self.lengths.device)
        return ChunkWork(on_device[0], on_device[1], on_device[2], work[2])


def divide_splits(new: Ints, lengths: Ints, starts: Ints, each: Ints, queries: int) -> tuple[Ints, Ints, int]:
    """Divide split chunks into programs: `split`, `merges` and `num_slots` of a ChunkWork, on the host.

    new: (C,) tokens of each chunk; 0: it is not split  lengths: (C,)  starts: (C,) their first tokens
    each: (C,) tokens of their splits  queries: of a tile.
    """
    splits = _ceil_div(lengths, each)
    slots = new * splits
    bases = slots.cumsum() - slots
    chunk, first = _tiles(new, queries)
    of_tile = splits[chunk]
    tile = np.repeat(np.arange(len(chunk)), of_tile)
    split = np.arange(len(tile)) - np.repeat(of_tile.cumsum() - of_tile, of_tile)
    merged, token = _tiles(new, 1)
    work = np.stack((chunk[tile], first[tile], split, bases[chunk[tile]], each[chunk[tile]]), 1)
    merges = np.stack((starts[merged] + token, bases[merged] + token * splits[merged], splits[merged]), 1)
    return work, merges, int(slots.sum())


def tokens_of_splits(new: Ints, lengths: Ints, tile: ChunkTile) -> Ints:
    """Tokens of context in each split of a chunk, by its own numbers alone; no fewer than its length: one split."""
    programs = _ceil_div(new, tile.queries) * tile.kv_heads
    most = np.clip(CHUNK_PROGRAMS // np.maximum(programs, 1), 1, MAX_CHUNK_SPLITS)
    return split_tokens(lengths, CHUNK_SPLIT, most)


def plan_attention(
    num_computed: Ints, num_new: Ints, block_tables: Ints, block_size: int, like: Tensor
) -> AttentionPlan:
    """Make the attention plan of a step, shared by all layers. Rows of one new token come first. `like`: device."""
    lengths, num_decodes = num_computed + num_new, int(np.count_nonzero(num_new == 1))
    chunk_starts = num_decodes + np.concatenate((np.zeros(1, dtype=np.int64), num_new[num_decodes:].cumsum()))
    on_device = upload([array.astype(np.int32) for array in (lengths, block_tables, chunk_starts)], like.device)
    most_splits = int(num_splits(lengths[:num_decodes], SPLIT, MAX_SPLITS).max(initial=1))
    return AttentionPlan(
        lengths=on_device[0],
        tables=on_device[1],
        num_decodes=num_decodes,
        work=on_device[0].new_empty(1 + num_decodes * most_splits),
        most_splits=most_splits,
        split=SPLIT,
        max_splits=MAX_SPLITS,
        chunk_starts=on_device[2],
        chunk_new=num_new[num_decodes:],
        chunk_lengths=lengths[num_decodes:],
        block_size=block_size,
    )


def split_tokens(lengths: Ints, tokens: int, most: Ints | int) -> Ints:
    """Tokens of each split of sequences of these lengths: a multiple of `tokens`, so that there are `most` at most."""
    return np.maximum(_ceil_div(_ceil_div(lengths, most), tokens), 1) * tokens


def num_splits(lengths: Ints, tokens: int, most: int) -> Ints:
    """Number of splits of sequences of these lengths; must equal `paged_attention.splits_of`."""
    return np.maximum(_ceil_div(lengths, split_tokens(lengths, tokens, most)), 1)


def _ceil_div(a: Ints, b: Ints | int) -> Ints:
    return -(-a // b)


def _tiles(tokens: Ints, queries: int) -> tuple[Ints, Ints]:
    """Chunk and first token of every tile of `queries` tokens. tokens: of each chunk; a chunk of 0 has no tiles."""
    counts = -(-tokens // queries)
    chunk = np.repeat(np.arange(len(tokens)), counts)
    return chunk, (np.arange(len(chunk)) - np.repeat(counts.cumsum() - counts, counts)) * queries
