"""Attention over the paged cache on a GPU, in Triton: a claim about `reference.paged_attention`.

Two kernels share one inner loop over tiles of keys, which it finds through the block table:
- decode: one new token a row. A sequence is cut into splits of SPLIT tokens, one program each per KV head; a merge
  weighs them when any row has more than one. The length of a split is fixed, so a row's arithmetic does not depend
  on its neighbours.
- extend: several new tokens a row, causal by absolute position. Scores exist one tile of BLOCK_M × BLOCK_N at a time.

The query heads of a KV head are rows of the same tile: each key is read once for all of them. A row of length 0 is
padding: neither its block table nor the cache is read for it, and its output is zero.

The floor of decode is the cache's bytes over the memory's bandwidth: a token of a layer costs 2 · Hkv · D · itemsize
bytes (4 KiB at Hkv 8, D 128, bf16). No timing on a GPU has been made yet, and the tile sizes are not tuned.
"""

# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
# Triton comes without types, and gives the arguments of a kernel its own.
# ruff: noqa: N803
# Compile-time constants of a kernel are upper case, as everywhere in Triton.

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["paged_attention", "plan_attention"]

Ints = npt.NDArray[np.int64]

SPLIT = 512  # tokens of a sequence that one decode program reads
EXTEND_ROWS = 64  # of a tile: new tokens × query heads of a KV head
LOWEST = tl.constexpr(-1e30)  # below any score, and finite
NO_WINDOW = (1 << 31) - 1  # tokens; more than any sequence has


@dataclass(frozen=True, slots=True)
class Plan:
    """The attention of one step. R rows: `num_decodes` of one new token, then C chunks."""

    lengths: Tensor  # (R,) past and new tokens
    tables: Tensor  # (R, blocks of the longest)
    num_decodes: int
    work: Tensor  # (splits, 2): row, which of its splits
    first_split: Tensor  # (num_decodes + 1,) where a row's splits begin in `work`
    merge: bool  # any row has more than one split
    split: int
    chunk_starts: Tensor  # (C + 1,) where a chunk's tokens begin, counted from the first chunk's first
    num_chunks: int
    num_chunk_tokens: int
    block_size: int


def plan_attention(num_computed: Ints, num_new: Ints, block_tables: Ints, block_size: int, like: Tensor) -> Plan:
    """Prepare once what the attention of every layer needs. Rows of one new token come first. `like`: device."""

    def on_device(values: Ints) -> Tensor:
        return torch.from_numpy(values.astype(np.int32)).to(like.device)

    lengths = num_computed + num_new
    num_decodes = int(np.count_nonzero(num_new == 1))
    splits = np.maximum(-(-lengths[:num_decodes] // SPLIT), 1)  # padding has one too: it writes its zeros
    first_split = np.concatenate((np.zeros(1, dtype=np.int64), splits.cumsum()))
    rows = np.repeat(np.arange(num_decodes), splits)
    chunk_starts = np.concatenate((np.zeros(1, dtype=np.int64), num_new[num_decodes:].cumsum()))
    return Plan(
        lengths=on_device(lengths),
        tables=on_device(block_tables),
        num_decodes=num_decodes,
        work=on_device(np.stack((rows, np.arange(len(rows)) - first_split[rows]), axis=1)),
        first_split=on_device(first_split),
        merge=bool((splits > 1).any()),
        split=SPLIT,
        chunk_starts=on_device(chunk_starts),
        num_chunks=len(num_new) - num_decodes,
        num_chunk_tokens=int(chunk_starts[-1]),
        block_size=block_size,
    )


def paged_attention(
    q: Tensor, kv: Tensor, cache: Tensor, plan: Plan, scale: float, window: int | None = None
) -> Tensor:
    """softmax(q·k * scale) · v over the tokens of the same sequence up to the query's own, the last `window` of them.

    q: (T, Hq, D)  cache: (blocks, 2, Hkv, page, D) -> (T, Hq * D). `kv`, this step's, is in the cache already.
    """
    num_tokens, num_heads, head_dim = q.shape
    assert q.stride(2) == 1, "the elements of a query head lie side by side"
    assert cache.is_contiguous(), "so do those of a head's page"
    out = q.new_empty(num_tokens, num_heads * head_dim)
    if plan.num_decodes:
        _launch_decode(q, cache, plan, scale, window or NO_WINDOW, out)
    if plan.num_chunk_tokens:
        _launch_extend(q[plan.num_decodes :], cache, plan, scale, window or NO_WINDOW, out[plan.num_decodes :])
    return out


def _launch_decode(q: Tensor, cache: Tensor, plan: Plan, scale: float, window: int, out: Tensor) -> None:
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = cache.shape[2]
    groups = num_heads // num_kv_heads
    num_splits = plan.work.shape[0]
    partial, stats = out, out  # not read, not written
    if plan.merge:
        partial = q.new_empty(num_splits, num_heads, head_dim, dtype=torch.float32)
        stats = q.new_empty(num_splits, num_heads, 2, dtype=torch.float32)
    _decode[(num_splits, num_kv_heads)](
        q, cache, out, partial, stats, plan.work, plan.lengths, plan.tables,
        plan.tables.stride(0), q.stride(0), q.stride(1), cache.stride(0), cache.stride(1),
        window, scale * math.log2(math.e),
        GROUPS=groups, SPLIT_TOKENS=plan.split, PARTIAL=plan.merge, BLOCK_SIZE=plan.block_size,
        BLOCK_M=max(16, _power_of_two(groups)), **_tile(cache),
    )  # fmt: skip
    if plan.merge:
        _merge[(plan.num_decodes, num_heads)](
            partial, stats, out, plan.first_split, HEAD_DIM=head_dim, BLOCK_D=_power_of_two(head_dim)
        )


def _launch_extend(q: Tensor, cache: Tensor, plan: Plan, scale: float, window: int, out: Tensor) -> None:
    """q, out: the chunks' part."""
    num_kv_heads = cache.shape[2]
    groups = q.shape[1] // num_kv_heads
    block_m = max(EXTEND_ROWS, _power_of_two(groups))
    queries = block_m // groups
    # An upper bound: every chunk may end in a tile that is not full. Programs beyond the last tile return.
    _extend[(plan.num_chunk_tokens // queries + plan.num_chunks, num_kv_heads)](
        q, cache, out, plan.chunk_starts, plan.lengths[plan.num_decodes :], plan.tables[plan.num_decodes :],
        plan.num_chunks, plan.tables.stride(0), q.stride(0), q.stride(1), cache.stride(0), cache.stride(1),
        window, scale * math.log2(math.e),
        GROUPS=groups, QUERIES=queries, BLOCK_SIZE=plan.block_size, BLOCK_M=block_m, **_tile(cache),
    )  # fmt: skip


def _tile(cache: Tensor) -> dict[str, int]:
    """The shape of a tile of keys. Wide ones are shorter, so that keys and values fit into shared memory."""
    head_dim = cache.shape[4]
    block_d = max(16, _power_of_two(head_dim))  # tl.dot takes no less than 16
    return {"HEAD_DIM": head_dim, "BLOCK_D": block_d, "BLOCK_N": 64 if block_d * cache.itemsize <= 256 else 32}


def _power_of_two(n: int) -> int:
    """The smallest that is at least n."""
    return 1 << (n - 1).bit_length()


@triton.jit
def _attend(
    q, keys, table, start, end, since, seen, block_stride, value_offset, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Softmax over positions start … end, in base 2; query i sees since[i] … seen[i] ≤ end of them.

    q: (BLOCK_M, BLOCK_D)  keys: of this KV head in block 0 -> maximum and sum (BLOCK_M,), weighted values
    (BLOCK_M, BLOCK_D), not yet divided by the sum.
    """
    d = tl.arange(0, BLOCK_D)
    maximum = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for first in range(start, end, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        block = tl.load(table + n // BLOCK_SIZE, mask=n < end, other=0)
        # A block's number times its stride leaves 32 bits behind.
        token = block.to(tl.int64) * block_stride + (n % BLOCK_SIZE) * HEAD_DIM
        place = keys + token[:, None] + d[None, :]
        wanted = (n < end)[:, None] & (d < HEAD_DIM)[None, :]
        k = tl.load(place, mask=wanted, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        visible = (n[None, :] >= since[:, None]) & (n[None, :] < seen[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        # Finite from the first tile on, though a window may hide all of it: -inf - -inf would be NaN.
        higher = tl.maximum(tl.maximum(maximum, tl.max(scores, 1)), LOWEST)
        shrink = tl.exp2(maximum - higher)
        p = tl.exp2(scores - higher[:, None])
        v = tl.load(place + value_offset, mask=wanted, other=0.0)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        total = total * shrink + tl.sum(p, 1)
        maximum = higher
    return maximum, total, acc


@triton.jit(do_not_specialize=["table_stride", "window"])
def _decode(
    q, cache, out, partial, stats, work, lengths, tables,
    table_stride, q_token_stride, q_head_stride, block_stride, value_offset, window, scale_log2,
    GROUPS: tl.constexpr, SPLIT_TOKENS: tl.constexpr, PARTIAL: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One split of one row, for the query heads of one KV head. Grid: (splits, Hkv)."""
    item = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    row = tl.load(work + 2 * item).to(tl.int64)
    start = tl.load(work + 2 * item + 1) * SPLIT_TOKENS
    length = tl.load(lengths + row)
    end = tl.minimum(start + SPLIT_TOKENS, length)

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    head = kv_head * GROUPS + m
    ours = (m < GROUPS)[:, None] & (d < HEAD_DIM)[None, :]
    tile = tl.load(q + row * q_token_stride + head[:, None] * q_head_stride + d[None, :], mask=ours, other=0.0)
    seen = tl.zeros([BLOCK_M], dtype=tl.int32) + end
    since = tl.zeros([BLOCK_M], dtype=tl.int32) + length - window
    maximum, total, acc = _attend(
        tile, cache + kv_head * BLOCK_SIZE * HEAD_DIM, tables + row * table_stride, start, end, since, seen,
        block_stride, value_offset, scale_log2, HEAD_DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_D,
    )  # fmt: skip

    num_heads = tl.num_programs(1) * GROUPS
    if PARTIAL:
        place = item * num_heads + head
        tl.store(partial + place[:, None] * HEAD_DIM + d[None, :], acc, mask=ours)
        tl.store(stats + 2 * place, tl.where(total > 0, maximum, LOWEST), mask=m < GROUPS)  # no -inf to merge
        tl.store(stats + 2 * place + 1, total, mask=m < GROUPS)
    else:
        attended = acc / tl.where(total > 0, total, 1.0)[:, None]
        place = row * num_heads + head
        tl.store(out + place[:, None] * HEAD_DIM + d[None, :], attended.to(out.dtype.element_ty), mask=ours)


@triton.jit
def _merge(partial, stats, out, first_split, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """The splits of one row and head, weighed by their sums. Grid: (num_decodes, Hq)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    d = tl.arange(0, BLOCK_D)
    maximum = float("-inf")
    total = 0.0
    acc = tl.zeros([BLOCK_D], dtype=tl.float32)
    for item in range(tl.load(first_split + row), tl.load(first_split + row + 1)):
        place = tl.cast(item, tl.int64) * num_heads + head
        part = tl.load(partial + place * HEAD_DIM + d, mask=d < HEAD_DIM, other=0.0)
        part_maximum = tl.load(stats + 2 * place)
        higher = tl.maximum(maximum, part_maximum)
        shrink = tl.exp2(maximum - higher)
        weight = tl.exp2(part_maximum - higher)
        acc = acc * shrink + part * weight
        total = total * shrink + tl.load(stats + 2 * place + 1) * weight
        maximum = higher
    attended = acc / tl.where(total > 0, total, 1.0)
    place = (row * num_heads + head) * HEAD_DIM
    tl.store(out + place + d, attended.to(out.dtype.element_ty), mask=d < HEAD_DIM)


@triton.jit(do_not_specialize=["num_chunks", "table_stride", "window"])
def _extend(
    q, cache, out, chunk_starts, lengths, tables, num_chunks,
    table_stride, q_token_stride, q_head_stride, block_stride, value_offset, window, scale_log2,
    GROUPS: tl.constexpr, QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """QUERIES new tokens of one chunk × the query heads of one KV head. Grid: (tiles or more, Hkv).

    Chunk c begins at tile chunk_starts[c] // QUERIES + c: at or behind the last tile that the chunks before it need.
    """
    tile_id = tl.program_id(0)
    kv_head = tl.program_id(1)
    chunk = 0
    beyond = num_chunks
    while beyond - chunk > 1:  # the last chunk that begins at or before this tile
        middle = (chunk + beyond) // 2
        begins = tl.load(chunk_starts + middle) // QUERIES + middle
        chunk = tl.where(begins <= tile_id, middle, chunk)
        beyond = tl.where(begins <= tile_id, beyond, middle)
    chunk_start = tl.load(chunk_starts + chunk)
    num_new = tl.load(chunk_starts + chunk + 1) - chunk_start
    first = (tile_id - chunk_start // QUERIES - chunk) * QUERIES
    if first >= num_new:
        return

    length = tl.load(lengths + chunk)
    past = length - num_new
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    t = first + m // GROUPS
    head = kv_head * GROUPS + m % GROUPS
    ours = ((m < QUERIES * GROUPS) & (t < num_new))[:, None] & (d < HEAD_DIM)[None, :]
    token = (chunk_start + t).to(tl.int64)[:, None]
    tile = tl.load(q + token * q_token_stride + head[:, None] * q_head_stride + d[None, :], mask=ours, other=0.0)
    end = tl.minimum(length, past + first + QUERIES)
    table = tables + tl.cast(chunk, tl.int64) * table_stride
    _, total, acc = _attend(
        tile, cache + kv_head * BLOCK_SIZE * HEAD_DIM, table, 0, end,
        past + t + 1 - window, tl.minimum(past + t + 1, end), block_stride, value_offset, scale_log2,
        HEAD_DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    num_heads = tl.num_programs(1) * GROUPS
    place = (token * num_heads + head[:, None]) * HEAD_DIM + d[None, :]
    tl.store(out + place, (acc / tl.where(total > 0, total, 1.0)[:, None]).to(out.dtype.element_ty), mask=ours)
