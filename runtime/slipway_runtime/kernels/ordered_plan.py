"""Attention plan of a step in `deterministic` on a GPU: every row in splits of fixed positions, merged in their order.

Split n of a sequence is its positions SPLIT · n … SPLIT · (n + 1), whatever its length. A token's result is that of
its splits, each computed from nothing, merged from the first to the last. One program computes and merges them all, or
each split has a program and a second kernel merges: the sums are the same, so how the work is divided depends on what
fills the GPU, and a token has the same bits in a prompt, in a chunk of it, as a draft, in decode and in a graph.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from slipway_runtime.kernels import captured_plan
from slipway_runtime.kernels.attention_plan import CHUNK_PROGRAMS, ChunkTile
from slipway_runtime.kernels.captured_plan import ChunkCapacity, StaticChunks
from slipway_runtime.kernels.upload import Ints, upload

SPLIT = 512  # positions; a multiple of every tile of keys
MOST_SLOTS = 8192  # partial results of a step: as many as those of 256 decode rows of 8k tokens without `deterministic`


@dataclass(frozen=True, slots=True)
class Work:
    """Programs of a step, for tiles of a number of queries. All int32."""

    programs: Tensor  # (P, 4): chunk, first token of the tile, split or ALL, the chunk's first slot
    merges: Tensor  # (M, 3): token, its first slot, chunk
    num_slots: int  # of the buffer of partial results: one for each token and split


ALL = -1  # in place of a split: the program computes all of them
NO_TOKEN = -1  # in place of a token: nothing is merged


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Attention plan of one step. C chunks: every row is one, with one new token or many."""

    lengths: Tensor  # (C,) past and new tokens
    tables: Tensor  # (C, blocks of the longest)
    chunk_starts: Tensor  # (C + 1,) first token of each chunk among those of the step, and the end of the last
    new: Ints  # (C,) on the host
    host_lengths: Ints  # (C,) on the host
    block_size: int
    decode_splits: int = 0  # most splits of a row, in a plan for graphs of decode, which knows no lengths on the host
    captured_work: Work | None = None  # of a plan for graphs of steps with chunks, in static buffers
    _work: dict[ChunkTile, Work] = field(default_factory=dict)

    def work(self, tile: ChunkTile) -> Work:
        """Programs for such tiles, made once a step."""
        if self.captured_work is not None:
            return self.captured_work
        if tile not in self._work:
            programs, merges, num_slots = divide(self.new, self.host_lengths, tile)
            on_device = upload([part.astype(np.int32) for part in (programs, merges)], self.lengths.device)
            self._work[tile] = Work(on_device[0], on_device[1], num_slots)
        return self._work[tile]


def plan_attention(
    num_computed: Ints, num_new: Ints, block_tables: Ints, block_size: int, like: Tensor
) -> AttentionPlan:
    """Make the attention plan of a step, shared by all layers. `like`: device."""
    lengths, starts = num_computed + num_new, np.concatenate((np.zeros(1, dtype=np.int64), num_new.cumsum()))
    on_device = upload([array.astype(np.int32) for array in (lengths, block_tables, starts)], like.device)
    return AttentionPlan(on_device[0], on_device[1], on_device[2], num_new, lengths, block_size)


def divide(new: Ints, lengths: Ints, tile: ChunkTile) -> tuple[Ints, Ints, int]:
    """`programs`, `merges` and `num_slots` of a step's Work, on the host.

    A chunk has a program for each split if one program for all would take half as long again as each program of a GPU
    that has its share of the whole step.
    """
    splits, tiles = -(-lengths // SPLIT), -(-new // tile.queries)
    share = -(-int((tiles * splits).sum()) * tile.kv_heads // CHUNK_PROGRAMS)
    is_divided = 2 * splits > 3 * share
    is_divided &= np.where(is_divided, new * splits, 0).cumsum() <= MOST_SLOTS
    slots = np.where(is_divided, new * splits, 0)
    bases = slots.cumsum() - slots
    of_tile = np.where(is_divided, splits, 1)
    chunk = np.repeat(np.arange(len(new)), tiles * of_tile)
    number = np.arange(len(chunk)) - np.repeat((tiles * of_tile).cumsum() - tiles * of_tile, tiles * of_tile)
    first, split = number // of_tile[chunk] * tile.queries, number % of_tile[chunk]
    programs = np.stack((chunk, first, np.where(is_divided[chunk], split, ALL), bases[chunk]), 1)
    keys = np.where(
        is_divided[chunk], SPLIT, np.minimum(lengths[chunk] - new[chunk] + first + tile.queries, lengths[chunk])
    )
    merged = np.repeat(np.arange(len(new)), np.where(is_divided, new, 0))
    token = np.arange(int(new.sum()))[np.repeat(is_divided, new)]
    within = token - (new.cumsum() - new)[merged]
    merges = np.stack((token, bases[merged] + within * splits[merged], merged), 1)
    return programs[np.argsort(-keys, kind="stable")], merges, int(slots.sum())


def programs_of_a_row(rows: int, splits: int, kv_heads: int) -> int:
    """How many programs share the splits of each row, for each KV head, in a graph of rows of one new token."""
    if 2 * rows * kv_heads > CHUNK_PROGRAMS or rows * splits > MOST_SLOTS:
        return 1
    return min(splits, -(-2 * CHUNK_PROGRAMS // (rows * kv_heads)))


def plan_for_capture(num_rows: int, max_model_len: int, block_size: int, like: Tensor) -> AttentionPlan:
    """Plan for CUDA graphs: one new token a row, static buffers that `update_static_inputs` fills, fixed launches."""
    nothing = np.zeros(0, dtype=np.int64)
    return AttentionPlan(
        lengths=torch.zeros(num_rows, dtype=torch.int32, device=like.device),
        tables=torch.zeros(num_rows, -(-max_model_len // block_size), dtype=torch.int32, device=like.device),
        chunk_starts=torch.arange(num_rows + 1, dtype=torch.int32, device=like.device),
        new=nothing,
        host_lengths=nothing,
        block_size=block_size,
        decode_splits=-(-max_model_len // SPLIT),
    )


def first_rows(plan: AttentionPlan, num_rows: int) -> AttentionPlan:
    """A captured plan for fewer rows, in the same buffers: only one of the plans may be in use at a time."""
    return replace(
        plan,
        lengths=plan.lengths[:num_rows],
        tables=plan.tables[:num_rows],
        chunk_starts=plan.chunk_starts[: num_rows + 1],
    )


def chunk_capacity(num_tokens: int, max_num_seqs: int) -> ChunkCapacity:
    """The capacity of a captured step of so many tokens: each row is a chunk."""
    return ChunkCapacity(
        tokens=num_tokens,
        decodes=0,
        chunks=min(num_tokens, max_num_seqs),
        programs=max(num_tokens, captured_plan.LEAST_PROGRAMS),
        slots=max(8 * num_tokens, captured_plan.LEAST_SLOTS),
    )


def with_chunks(
    plan: AttentionPlan, capacity: ChunkCapacity, starts: Tensor, work: Tensor, merges: Tensor
) -> AttentionPlan:
    """A captured plan for a step with chunks, in the row buffers of `plan`, with the programs of `pack_chunks`."""
    return replace(
        first_rows(plan, capacity.rows),
        chunk_starts=starts,
        decode_splits=0,
        captured_work=Work(work, merges, capacity.slots),
    )


def empty_chunks(capacity: ChunkCapacity, padding_row: int) -> StaticChunks:
    """Static inputs of a captured step with chunks that consists of padding."""
    work, merges = np.zeros((capacity.programs, 4), dtype=np.int32), np.zeros((capacity.tokens, 3), dtype=np.int32)
    work[:, 0] = capacity.chunks  # the row that is always padding
    merges[:, 0], merges[:, 2] = np.arange(capacity.tokens), capacity.chunks  # of no split: the output becomes zero
    return captured_plan.all_padding(capacity, padding_row, work, merges)


def pack_chunks(
    capacity: ChunkCapacity, row_ids: Ints, num_computed: Ints, num_new: Ints, *, padding_row: int, tile: ChunkTile
) -> StaticChunks | None:
    """Static inputs of a step with chunks, padded to a capacity; None: it exceeds the capacity.

    padding_row: the row whose block table padding has  tile: of `chunk_tile`.
    """
    num_tokens, num_chunks = int(num_new.sum()), len(num_new)
    if num_tokens > capacity.tokens or num_chunks > capacity.chunks:
        return None
    programs, merged, num_slots = divide(num_new, num_computed + num_new, tile)
    if len(programs) > capacity.programs or num_slots > capacity.slots:
        return None
    static = rows, lengths, starts, work, merges = empty_chunks(capacity, padding_row)
    rows[:num_chunks], lengths[:num_chunks] = row_ids, num_computed + num_new
    starts[:num_chunks] = num_new.cumsum() - num_new
    starts[num_chunks:] = num_tokens
    work[: len(programs)] = programs
    merges[:num_tokens, 0] = NO_TOKEN
    merges[: len(merged)] = merged
    return static
