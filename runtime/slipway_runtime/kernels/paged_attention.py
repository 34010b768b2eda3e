"""Attention over the paged cache on a GPU, in Triton: a claim about `reference.paged_attention`.

Two kernels share one inner loop over tiles of keys, which it finds through the block table:
- decode: one new token a row. A sequence is cut into splits, one program each per KV head; a merge weighs them when
  there may be more than one. The splits of a row depend on its own length alone: a row's arithmetic does not depend
  on its neighbours, and the grid need not know the lengths, so that a recorded step can be repeated.
- extend: several new tokens a row, causal by absolute position. Scores exist one tile of BLOCK_M × BLOCK_N at a time.

The query heads of a KV head are rows of the same tile: each key is read once for all of them. A row of length 0 is
padding: neither its block table nor the cache is read for it, and its output is zero. Codes of a quantized cache are
multiplied as they are, in the type of the queries, which holds them exactly; their scales go to scores and weights.

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

from slipway_runtime.kernels import kv_pages, tiles

__all__ = ["paged_attention", "plan_attention", "plan_in_one_order", "plan_to_repeat", "refill"]

Ints = npt.NDArray[np.int64]

SPLIT = 512  # tokens of a sequence that one decode program reads at least
MAX_SPLITS = 32  # of a sequence: longer ones have longer splits
EXTEND_ROWS = 64  # of a tile: new tokens × query heads of a KV head
LOWEST = tl.constexpr(-1e30)  # below any score, and finite
NO_WINDOW = (1 << 31) - 1  # tokens; more than any sequence has


@dataclass(frozen=True, slots=True)
class Plan:
    """The attention of one step. R rows: `num_decodes` of one new token, then C chunks."""

    lengths: Tensor  # (R,) past and new tokens
    tables: Tensor  # (R, blocks of the longest)
    num_decodes: int
    most_splits: int  # of any row that decodes
    split: int
    chunk_starts: Tensor  # (C + 1,) where a chunk's tokens begin, counted from the first chunk's first
    num_chunks: int
    num_chunk_tokens: int
    block_size: int


def plan_attention(num_computed: Ints, num_new: Ints, block_tables: Ints, block_size: int, like: Tensor) -> Plan:
    """Prepare once what the attention of every layer needs. Rows of one new token come first. `like`: device."""
    return _plan(num_computed, num_new, block_tables, block_size, like, int(np.count_nonzero(num_new == 1)))


def plan_in_one_order(num_computed: Ints, num_new: Ints, block_tables: Ints, block_size: int, like: Tensor) -> Plan:
    """The same, every row a chunk: keys from the first to the last in whole tiles, whatever a step computes beside.

    A token is then attended bit for bit the same in a prompt, in a chunk of it, as a draft and alone.
    """
    return _plan(num_computed, num_new, block_tables, block_size, like, 0)


def plan_to_repeat(num_rows: int, max_model_len: int, block_size: int, like: Tensor) -> Plan:
    """For rows of one new token each, in buffers that `refill` writes over: what is launched never changes."""
    return Plan(
        lengths=torch.zeros(num_rows, dtype=torch.int32, device=like.device),
        tables=torch.zeros(num_rows, -(-max_model_len // block_size), dtype=torch.int32, device=like.device),
        num_decodes=num_rows,
        most_splits=_num_splits(max_model_len),
        split=SPLIT,
        chunk_starts=torch.zeros(1, dtype=torch.int32, device=like.device),
        num_chunks=0,
        num_chunk_tokens=0,
        block_size=block_size,
    )


def refill(plan: Plan, num_computed: Ints, block_tables: Ints) -> None:
    """Put the rows of a step into a plan to repeat. The rows behind them are padding: length 0, the null block."""
    rows, width = block_tables.shape
    lengths = np.zeros(plan.num_decodes, dtype=np.int32)
    lengths[:rows] = num_computed + 1
    tables = np.zeros((plan.num_decodes, width), dtype=np.int32)
    tables[:rows] = block_tables
    plan.lengths.copy_(torch.from_numpy(lengths))
    plan.tables[:, :width].copy_(torch.from_numpy(tables))


def _plan(
    num_computed: Ints, num_new: Ints, block_tables: Ints, block_size: int, like: Tensor, num_decodes: int
) -> Plan:
    def on_device(values: Ints) -> Tensor:
        return torch.from_numpy(values.astype(np.int32)).to(like.device)

    lengths = num_computed + num_new
    chunk_starts = np.concatenate((np.zeros(1, dtype=np.int64), num_new[num_decodes:].cumsum()))
    return Plan(
        lengths=on_device(lengths),
        tables=on_device(block_tables),
        num_decodes=num_decodes,
        most_splits=_num_splits(int(lengths[:num_decodes].max(initial=0))),
        split=SPLIT,
        chunk_starts=on_device(chunk_starts),
        num_chunks=len(num_new) - num_decodes,
        num_chunk_tokens=int(chunk_starts[-1]),
        block_size=block_size,
    )


def _num_splits(length: int) -> int:
    """As many as `_splits_of` gives it, or more."""
    return min(max(-(-length // SPLIT), 1), MAX_SPLITS)


def paged_attention(
    q: Tensor, kv: Tensor, cache: Tensor, plan: Plan, scale: float, window: int | None = None
) -> Tensor:
    """softmax(q·k * scale) · v over the tokens of the same sequence up to the query's own, the last `window` of them.

    q: (T, Hq, D)  cache: as `kv_pages` says -> (T, Hq * D). `kv`, this step's, is in the cache already.
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
    rows, splits = plan.num_decodes, plan.most_splits
    merge = splits > 1
    partial, stats = out, out  # not read, not written
    if merge:
        partial = q.new_empty(rows, splits, num_heads, head_dim, dtype=torch.float32)
        stats = q.new_empty(rows, splits, num_heads, 2, dtype=torch.float32)
    _decode[(rows, num_kv_heads, splits)](
        q, cache, _scales(cache, head_dim), out, partial, stats, plan.lengths, plan.tables,
        plan.tables.stride(0), q.stride(0), q.stride(1), window, scale * math.log2(math.e),
        GROUPS=groups, SPLIT_TOKENS=plan.split, MOST_SPLITS=MAX_SPLITS, PARTIAL=merge,
        BLOCK_M=max(16, _power_of_two(groups)), **_tile("decode", cache, head_dim, plan.block_size),
    )  # fmt: skip
    if merge:
        _merge[(rows, num_heads)](
            partial, stats, out, plan.lengths, splits, SPLIT_TOKENS=plan.split, MOST_SPLITS=MAX_SPLITS,
            HEAD_DIM=head_dim, BLOCK_D=_power_of_two(head_dim), BLOCK_S=_power_of_two(MAX_SPLITS),
        )  # fmt: skip


def _launch_extend(q: Tensor, cache: Tensor, plan: Plan, scale: float, window: int, out: Tensor) -> None:
    """q, out: the chunks' part."""
    num_kv_heads, head_dim = cache.shape[2], q.shape[2]
    groups = q.shape[1] // num_kv_heads
    tile = _tile("extend", cache, head_dim, plan.block_size)
    block_m = max(tile.pop("BLOCK_M", EXTEND_ROWS), _power_of_two(groups))
    queries = block_m // groups
    # An upper bound: every chunk may end in a tile that is not full. Programs beyond the last tile return.
    _extend[(plan.num_chunk_tokens // queries + plan.num_chunks, num_kv_heads)](
        q, cache, _scales(cache, head_dim), out,
        plan.chunk_starts, plan.lengths[plan.num_decodes :], plan.tables[plan.num_decodes :], plan.num_chunks,
        plan.tables.stride(0), q.stride(0), q.stride(1), window, scale * math.log2(math.e),
        GROUPS=groups, QUERIES=queries, BLOCK_M=block_m, **tile,
    )  # fmt: skip


def _scales(cache: Tensor, head_dim: int) -> Tensor:
    """Those of a quantized cache; else something that is not read."""
    return kv_pages.scales(cache, head_dim) if kv_pages.is_quantized(cache.dtype) else cache


def _tile(kernel: str, cache: Tensor, head_dim: int, block_size: int) -> dict[str, int]:
    """The layout of the cache and the shape of a tile of keys. Wide ones are shorter, to fit into shared memory."""
    block_d = max(16, _power_of_two(head_dim))  # tl.dot takes no less than 16
    return {
        "HEAD_DIM": head_dim,
        "NUM_KV_HEADS": cache.shape[2],
        "BLOCK_SIZE": block_size,
        "QUANTIZED": kv_pages.is_quantized(cache.dtype),
        "BLOCK_D": block_d,
        "BLOCK_N": 64 if block_d * cache.itemsize <= 256 else 32,
    } | tiles.tuned(kernel, head_dim=head_dim, itemsize=cache.itemsize, device=cache.device)


def _power_of_two(n: int) -> int:
    """The smallest that is at least n."""
    return 1 << (n - 1).bit_length()


@triton.jit
def _attend(
    q, cache, scales, kv_head, table, start, end, since, seen, scale_log2,
    HEAD_DIM: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, QUANTIZED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Softmax over positions start … end, in base 2; query i sees since[i] … seen[i] ≤ end of them.

    q: (BLOCK_M, BLOCK_D) -> maximum and sum (BLOCK_M,), weighted values (BLOCK_M, BLOCK_D), not yet divided by the sum.
    """
    page: tl.constexpr = BLOCK_SIZE * (HEAD_DIM + 4) if QUANTIZED else BLOCK_SIZE * HEAD_DIM
    values: tl.constexpr = NUM_KV_HEADS * page  # from a key to its value; two of them are a block
    d = tl.arange(0, BLOCK_D)
    maximum = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for first in range(start, end, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        # A block's number times its stride leaves 32 bits behind.
        block = tl.load(table + n // BLOCK_SIZE, mask=n < end, other=0).to(tl.int64)
        token = block * (2 * values) + kv_head * page + (n % BLOCK_SIZE) * HEAD_DIM
        place = cache + token[:, None] + d[None, :]
        wanted = (n < end)[:, None] & (d < HEAD_DIM)[None, :]
        k = tl.load(place, mask=wanted, other=0.0)
        v = tl.load(place + values, mask=wanted, other=0.0)
        if QUANTIZED:
            scale = scales + block * (2 * values // 4) + kv_head * (page // 4) + n % BLOCK_SIZE
            k_scale = tl.load(scale, mask=n < end, other=0.0) * scale_log2
            scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * k_scale[None, :]
        else:
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        visible = (n[None, :] >= since[:, None]) & (n[None, :] < seen[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        # Finite from the first tile on, though a window may hide all of it: -inf - -inf would be NaN.
        higher = tl.maximum(tl.maximum(maximum, tl.max(scores, 1)), LOWEST)
        shrink = tl.exp2(maximum - higher)
        p = tl.exp2(scores - higher[:, None])
        total = total * shrink + tl.sum(p, 1)
        if QUANTIZED:
            p = p * tl.load(scale + values // 4, mask=n < end, other=0.0)[None, :]
        acc = acc * shrink[:, None] + tl.dot(p.to(q.dtype), v.to(q.dtype), input_precision="ieee")
        maximum = higher
    return maximum, total, acc


@triton.jit
def _splits_of(length, SPLIT_TOKENS: tl.constexpr, MOST_SPLITS: tl.constexpr):
    """How many splits a sequence has, and how many tokens each: whole times SPLIT_TOKENS, and at least that many."""
    tokens = (tl.cdiv(tl.cdiv(length, MOST_SPLITS), SPLIT_TOKENS)) * SPLIT_TOKENS
    tokens = tl.maximum(tokens, SPLIT_TOKENS)
    return tl.maximum(tl.cdiv(length, tokens), 1), tokens  # padding has one too: it writes its zeros


@triton.jit(do_not_specialize=["table_stride", "window"])
def _decode(
    q, cache, scales, out, partial, stats, lengths, tables,
    table_stride, q_token_stride, q_head_stride, window, scale_log2,
    GROUPS: tl.constexpr, SPLIT_TOKENS: tl.constexpr, MOST_SPLITS: tl.constexpr, PARTIAL: tl.constexpr,
    HEAD_DIM: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, QUANTIZED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One split of one row, for the query heads of one KV head. Grid: (rows, Hkv, splits or more)."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths + row)
    num_splits, tokens = _splits_of(length, SPLIT_TOKENS, MOST_SPLITS)
    if split >= num_splits:
        return

    end = tl.minimum((split + 1) * tokens, length)
    first = tl.maximum(length - window, 0)  # what a window hides is not read
    start = tl.maximum(split * tokens, first // BLOCK_N * BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    head = kv_head * GROUPS + m
    ours = (m < GROUPS)[:, None] & (d < HEAD_DIM)[None, :]
    tile = tl.load(q + row * q_token_stride + head[:, None] * q_head_stride + d[None, :], mask=ours, other=0.0)
    seen = tl.zeros([BLOCK_M], dtype=tl.int32) + end
    since = tl.zeros([BLOCK_M], dtype=tl.int32) + first
    maximum, total, acc = _attend(
        tile, cache, scales, kv_head, tables + row * table_stride, start, end, since, seen, scale_log2,
        HEAD_DIM, NUM_KV_HEADS, BLOCK_SIZE, QUANTIZED, BLOCK_M, BLOCK_N, BLOCK_D,
    )  # fmt: skip

    num_heads: tl.constexpr = NUM_KV_HEADS * GROUPS
    if PARTIAL:
        place = (row * tl.num_programs(2) + split) * num_heads + head
        tl.store(partial + place[:, None] * HEAD_DIM + d[None, :], acc, mask=ours)
        tl.store(stats + 2 * place, tl.where(total > 0, maximum, LOWEST), mask=m < GROUPS)  # no -inf to merge
        tl.store(stats + 2 * place + 1, total, mask=m < GROUPS)
    else:
        attended = acc / tl.where(total > 0, total, 1.0)[:, None]
        place = row * num_heads + head
        tl.store(out + place[:, None] * HEAD_DIM + d[None, :], attended.to(out.dtype.element_ty), mask=ours)


@triton.jit(do_not_specialize=["stride"])
def _merge(
    partial, stats, out, lengths, stride,
    SPLIT_TOKENS: tl.constexpr, MOST_SPLITS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """The splits of one row and head, weighed by their sums; `stride` of them have room. Grid: (rows, Hq)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    d = tl.arange(0, BLOCK_D)
    split = tl.arange(0, BLOCK_S)
    num_splits, _ = _splits_of(tl.load(lengths + row), SPLIT_TOKENS, MOST_SPLITS)
    ours = split < num_splits
    place = (row * stride + split) * num_heads + head
    maximum = tl.load(stats + 2 * place, mask=ours, other=float("-inf"))
    sums = tl.load(stats + 2 * place + 1, mask=ours, other=0.0)
    parts = tl.load(
        partial + place[:, None] * HEAD_DIM + d[None, :], mask=ours[:, None] & (d < HEAD_DIM)[None, :], other=0.0
    )
    weight = tl.exp2(maximum - tl.max(maximum, 0))
    total = tl.sum(sums * weight, 0)
    acc = tl.sum(parts * weight[:, None], 0)
    attended = acc / tl.where(total > 0, total, 1.0)
    place = (row * num_heads + head) * HEAD_DIM
    tl.store(out + place + d, attended.to(out.dtype.element_ty), mask=d < HEAD_DIM)


@triton.jit(
    do_not_specialize=["num_chunks", "table_stride", "window"],
    do_not_specialize_on_alignment=["lengths", "tables"],  # they begin behind as many rows as decode
)
def _extend(
    q, cache, scales, out, chunk_starts, lengths, tables, num_chunks,
    table_stride, q_token_stride, q_head_stride, window, scale_log2,
    GROUPS: tl.constexpr, QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, QUANTIZED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
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
    start = tl.maximum(past + first + 1 - window, 0) // BLOCK_N * BLOCK_N
    _, total, acc = _attend(
        tile, cache, scales, kv_head, table, start, end,
        past + t + 1 - window, tl.minimum(past + t + 1, end), scale_log2,
        HEAD_DIM, NUM_KV_HEADS, BLOCK_SIZE, QUANTIZED, BLOCK_M, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    num_heads: tl.constexpr = NUM_KV_HEADS * GROUPS
    place = (token * num_heads + head[:, None]) * HEAD_DIM + d[None, :]
    tl.store(out + place, (acc / tl.where(total > 0, total, 1.0)[:, None]).to(out.dtype.element_ty), mask=ours)
