"""Attention plans of captured steps (CUDA graphs): static buffers that each step overwrites, and fixed launches.

A captured step of decode has rows of one new token. A captured step with chunks has rows of one new token, then chunks
of several: parts of prompts, and draft tokens behind the token before them. Its chunks are all computed in splits, as
many as in a plan of this step alone, be it one. The host lists their programs for each step: the list has a fixed
length, and the rest of it is padding.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipway_runtime.kernels.attention_plan import (
    CHUNK_SPLIT,
    MAX_SPLITS,
    SPLIT,
    AttentionPlan,
    ChunkTile,
    ChunkWork,
    divide_splits,
    num_splits,
    tokens_of_splits,
)
from slipway_runtime.kernels.upload import Ints

Int32s = npt.NDArray[np.int32]
StaticChunks = tuple[Ints, Int32s, Int32s, Int32s, Int32s]  # rows, lengths, chunk starts, split work, merges

# Programs and partial results that a captured step with chunks has room for at least. Programs without work cost time,
# and a step that needs more takes so long on the device that it hides its launches.
LEAST_PROGRAMS, LEAST_SLOTS = 36, 512


@dataclass(frozen=True, slots=True)
class ChunkCapacity:
    """Sizes of a captured step with chunks. A step that exceeds one of them is not replayed."""

    tokens: int
    decodes: int  # rows of one new token
    chunks: int
    programs: int  # for each KV head: a tile of a chunk, and a split of its context
    slots: int  # partial results: one for each token and split

    @property
    def rows(self) -> int:
        """Rows of the plan: of one new token, then chunks, then one that is always padding."""
        return self.decodes + self.chunks + 1


def chunk_capacity(num_tokens: int, max_num_seqs: int) -> ChunkCapacity:
    """The capacity of a captured step of so many tokens."""
    return ChunkCapacity(
        tokens=num_tokens,
        decodes=min(num_tokens, max_num_seqs),
        chunks=min(num_tokens // 2, max_num_seqs),
        programs=max(num_tokens // 2, LEAST_PROGRAMS),
        slots=max(8 * num_tokens, LEAST_SLOTS),
    )


def plan_for_capture(num_rows: int, max_model_len: int, block_size: int, like: Tensor) -> AttentionPlan:
    """Plan for CUDA graphs: one new token a row, static buffers that `update_static_inputs` fills, fixed launches."""
    most_splits = int(num_splits(np.array(max_model_len), SPLIT, MAX_SPLITS))
    return AttentionPlan(
        lengths=torch.zeros(num_rows, dtype=torch.int32, device=like.device),
        tables=torch.zeros(num_rows, -(-max_model_len // block_size), dtype=torch.int32, device=like.device),
        num_decodes=num_rows,
        work=torch.zeros(1 + num_rows * most_splits, dtype=torch.int32, device=like.device),
        most_splits=most_splits,
        split=SPLIT,
        max_splits=MAX_SPLITS,
        chunk_starts=torch.zeros(1, dtype=torch.int32, device=like.device),
        chunk_new=np.zeros(0, dtype=np.int64),
        chunk_lengths=np.zeros(0, dtype=np.int64),
        block_size=block_size,
    )


def first_rows(plan: AttentionPlan, num_rows: int) -> AttentionPlan:
    """A captured plan for fewer rows, in the same buffers: only one of the plans may be in use at a time."""
    return replace(plan, lengths=plan.lengths[:num_rows], tables=plan.tables[:num_rows], num_decodes=num_rows)


def with_chunks(
    plan: AttentionPlan, capacity: ChunkCapacity, starts: Tensor, work: Tensor, merges: Tensor
) -> AttentionPlan:
    """A captured plan for a step with chunks, in the row buffers of `plan`, with the programs of `pack_chunks`.

    Decode programs are launched for the most rows possible: those without a row write zeros, over which chunks write.
    """
    return replace(
        first_rows(plan, capacity.rows),
        num_decodes=capacity.decodes,
        chunk_starts=starts,
        chunk_new=np.zeros(capacity.chunks, dtype=np.int64),  # known on the device alone
        chunk_lengths=np.zeros(capacity.chunks, dtype=np.int64),
        captured_work=ChunkWork(work.new_empty(0, 2), work, merges, capacity.slots),
    )


def update_static_inputs(plan: AttentionPlan, lengths: Tensor, tables: Tensor, rows: Tensor) -> None:
    """Copy a step's rows into a captured plan; a graph may begin with it.

    lengths: (R,) past and new tokens; 0: padding  tables: (N, blocks) block tables of all rows  rows: (R,) of these.
    """
    plan.lengths.copy_(lengths)
    torch.index_select(tables, 0, rows, out=plan.tables)


def empty_chunks(capacity: ChunkCapacity, padding_row: int) -> StaticChunks:
    """Static inputs of a captured step with chunks that consists of padding."""
    work = np.zeros((capacity.programs, 5), dtype=np.int32)
    work[:, 0] = capacity.chunks  # the row that is always padding
    work[:, 4] = CHUNK_SPLIT
    merges = np.zeros((capacity.tokens, 3), dtype=np.int32)
    merges[:, 0] = np.arange(capacity.tokens)  # of no split: the token's output becomes zero
    return all_padding(capacity, padding_row, work, merges)


def all_padding(capacity: ChunkCapacity, padding_row: int, work: Int32s, merges: Int32s) -> StaticChunks:
    """Static inputs of which every row is padding, with these programs."""
    rows = np.full(capacity.rows, padding_row, dtype=np.int64)
    return rows, np.zeros(capacity.rows, dtype=np.int32), np.zeros(capacity.chunks + 2, dtype=np.int32), work, merges


def pack_chunks(
    capacity: ChunkCapacity, row_ids: Ints, num_computed: Ints, num_new: Ints, *, padding_row: int, tile: ChunkTile
) -> StaticChunks | None:
    """Static inputs of a step with chunks, padded to a capacity; None: it exceeds the capacity, or has no chunk.

    Rows of one new token come first. padding_row: the row whose block table padding has  tile: of `chunk_tile`.
    """
    num_tokens, num_decodes = int(num_new.sum()), int(np.count_nonzero(num_new == 1))
    new, all_lengths = num_new[num_decodes:], num_computed + num_new
    num_chunks = len(new)
    if not num_chunks or num_tokens > capacity.tokens or num_chunks > capacity.chunks:
        return None
    first_tokens = num_decodes + new.cumsum() - new
    chunk_lengths = all_lengths[num_decodes:]
    each = tokens_of_splits(new, chunk_lengths, tile)
    programs, merged, num_slots = divide_splits(new, chunk_lengths, first_tokens, each, tile.queries)
    if len(programs) > capacity.programs or num_slots > capacity.slots:
        return None
    static = rows, lengths, starts, work, merges = empty_chunks(capacity, padding_row)
    for padded, values in ((rows, row_ids), (lengths, all_lengths)):
        padded[:num_decodes] = values[:num_decodes]
        padded[capacity.decodes : capacity.decodes + num_chunks] = values[num_decodes:]
    starts[:num_chunks] = first_tokens
    starts[num_chunks:] = num_tokens
    work[: len(programs)] = programs
    merges[num_decodes:num_tokens] = merged
    merges[:num_decodes] = merged[0]  # tokens that are not merged repeat the first merge
    return static
