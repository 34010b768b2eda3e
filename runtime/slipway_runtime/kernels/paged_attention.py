"""Paged attention on a GPU (split-KV decode, chunked prefill), in Triton. Tested against `reference.paged_attention`.

Two kernels share one inner loop over tiles of keys, which are found through the block table:
- decode: one new token a row. A sequence is cut into splits; the programs of a KV head share the splits of all rows by
  a list (`decode_work`); a second kernel merges the splits if there may be more than one. The splits of a row depend
  on its own length alone, and each is computed alone: a row's arithmetic depends neither on the batch nor on how many
  programs share the list, so that CUDA graphs can replay the step.
- extend: several new tokens a row, causal by absolute position. Scores exist one tile of BLOCK_M × BLOCK_N at a time.

The query heads of a KV head are rows of the same tile: each key is read once for all of them. A row of length 0 is
padding: neither its block table nor the cache is read for it, and its output is zero. Codes of a quantized cache are
multiplied in the dtype of the queries, which holds them exactly; the scales are applied to scores and weights.

The lower bound of decode is the cache's bytes over the memory's bandwidth: a token of a layer costs 2 · Hkv · D ·
itemsize bytes (4 KiB at Hkv 8, D 128, bf16). An H100 reaches 0.86 to 0.88 of a copy's speed (docs/performance.md);
docs/gpu-ledger.md describes the compiled kernels.
"""

# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
# Triton comes without types, and gives the arguments of a kernel its own.
# ruff: noqa: N803
# Compile-time constants of a kernel are upper case, as everywhere in Triton.

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipway_runtime.kernels import kv_pages, tiles
from slipway_runtime.kernels.attention_plan import DECODE_PROGRAMS, MAX_CHUNK_SPLITS, AttentionPlan, ChunkTile
from slipway_runtime.kernels.reference_attention import Scoring

__all__ = ["chunk_tile", "paged_attention"]

EXTEND_ROWS = 64  # of a tile: new tokens × query heads of a KV head
LOWEST = tl.constexpr(-1e30)  # below any score, and finite
PRECISION = tl.constexpr("tf32x3")  # of products of float32: three on tensor cores; 16-bit types ignore it
LOG2_E = tl.constexpr(math.log2(math.e))
NO_WINDOW = (1 << 31) - 1  # tokens; more than any sequence has


def paged_attention(
    q: Tensor,
    kv: Tensor,
    cache: Tensor,
    plan: AttentionPlan,
    scale: float,
    window: int | None = None,
    scoring: Scoring | None = None,
) -> Tensor:
    """softmax(q·k * scale) · v over the tokens of the same sequence up to the query's own, the last `window` of them.

    q: (T, Hq, D)  cache: see `kv_pages` -> (T, Hq * D). `kv`, this step's, is already in the cache.
    """
    assert cache.shape[1] == 2, "a cache of latents, which these kernels would read beyond"
    num_tokens, num_heads, head_dim = q.shape
    assert q.stride(2) == 1, "the elements of a query head lie side by side"
    assert cache.is_contiguous(), "a head's page is contiguous only then"
    out = q.new_empty(num_tokens, num_heads * head_dim)
    if plan.num_decodes:
        _launch_decode(q, cache, plan, scale, window or NO_WINDOW, scoring, out)
    if len(plan.chunk_new):
        _launch_extend(q, cache, plan, scale, window or NO_WINDOW, scoring, out)
    return out


def chunk_tile(q: Tensor, cache: Tensor, block_size: int) -> ChunkTile:
    """The tile of a chunk that is computed in splits. q: (…, Hq, D)."""
    groups = q.shape[1] // cache.shape[2]
    return ChunkTile(extend_tile("extend_split", q, cache, block_size)["BLOCK_M"] // groups, cache.shape[2])


def _launch_decode(
    q: Tensor, cache: Tensor, plan: AttentionPlan, scale: float, window: int, scoring: Scoring | None, out: Tensor
) -> None:
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = cache.shape[2]
    groups = num_heads // num_kv_heads
    rows, splits = plan.num_decodes, plan.most_splits
    merge = splits > 1
    partial, stats = out, out  # not read, not written
    if merge:
        partial = q.new_empty(rows, splits, num_heads, head_dim, dtype=torch.float32)
        stats = q.new_empty(rows, splits, num_heads, 2, dtype=torch.float32)
    programs = min(rows * splits, triton.cdiv(DECODE_PROGRAMS, num_kv_heads))
    _decode[(num_kv_heads, programs)](
        q, cache, scales_of(cache, head_dim), out, partial, stats, plan.work, plan.lengths, plan.tables,
        plan.tables.stride(0), q.stride(0), q.stride(1), window, scale * math.log2(math.e), splits,
        *of_scoring(scoring, q),
        SOFTCAP=scoring is not None and scoring.softcap is not None,
        SINKS=scoring is not None and scoring.sinks is not None,
        GROUPS=groups, SPLIT_TOKENS=plan.split, MOST_SPLITS=plan.max_splits, PARTIAL=merge,
        BLOCK_M=max(16, power_of_two(groups)), **_tile("decode", q, cache, plan.block_size),
    )  # fmt: skip
    if merge:
        _merge[(rows, num_heads)](
            partial, stats, out, plan.lengths, splits, SPLIT_TOKENS=plan.split, MOST_SPLITS=plan.max_splits,
            HEAD_DIM=head_dim, BLOCK_D=power_of_two(head_dim), BLOCK_S=power_of_two(plan.max_splits),
        )  # fmt: skip


def _launch_extend(
    q: Tensor, cache: Tensor, plan: AttentionPlan, scale: float, window: int, scoring: Scoring | None, out: Tensor
) -> None:
    """Launch the extend kernel for the chunks of a step. q, out: of all tokens."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = cache.shape[2]
    groups = num_heads // num_kv_heads
    whole, split = (extend_tile(name, q, cache, plan.block_size) for name in ("extend", "extend_split"))
    work = plan.chunk_work(whole["BLOCK_M"] // groups, ChunkTile(split["BLOCK_M"] // groups, num_kv_heads))
    partial, stats = out, out
    if work.num_slots:
        partial = q.new_empty(work.num_slots, num_heads, head_dim, dtype=torch.float32)
        stats = q.new_empty(work.num_slots, num_heads, 2, dtype=torch.float32)
    for programs, tile, of_splits in ((work.whole, whole, False), (work.split, split, True)):
        if not len(programs):
            continue
        # Whole tiles do not use partial results; a tensor of another dtype would compile the kernel again.
        parts = (partial, stats) if of_splits else (out, out)
        _extend[(len(programs), num_kv_heads)](
            q, cache, scales_of(cache, head_dim), out, *parts, programs,
            plan.chunk_starts, plan.lengths[plan.num_decodes :], plan.tables[plan.num_decodes :],
            plan.tables.stride(0), q.stride(0), q.stride(1), window, scale * math.log2(math.e),
            *of_scoring(scoring, q),
            SOFTCAP=scoring is not None and scoring.softcap is not None,
            SINKS=scoring is not None and scoring.sinks is not None,
            GROUPS=groups, QUERIES=tile["BLOCK_M"] // groups, PARTIAL=of_splits, **tile,
        )  # fmt: skip
    if work.num_slots:
        _merge_chunks[(len(work.merges), num_heads)](
            partial, stats, out, work.merges,
            HEAD_DIM=head_dim, BLOCK_D=power_of_two(head_dim), BLOCK_S=power_of_two(MAX_CHUNK_SPLITS),
        )  # fmt: skip


def of_scoring(scoring: Scoring | None, q: Tensor) -> tuple[Tensor, float]:
    """Sinks (or a dummy tensor that is not read), and the soft cap of scores in base 2."""
    if scoring is None:
        return q, 0.0
    return q if scoring.sinks is None else scoring.sinks, (scoring.softcap or 0.0) * math.log2(math.e)


def scales_of(cache: Tensor, head_dim: int) -> Tensor:
    """Scales of a quantized cache; else a dummy tensor that is not read."""
    return kv_pages.scales(cache, head_dim) if kv_pages.is_quantized(cache.dtype) else cache


def _tile(kernel: str, q: Tensor, cache: Tensor, block_size: int) -> dict[str, int]:
    """Launch options: cache layout and tile of keys. Wide heads have shorter tiles, to fit into shared memory.

    Queries in float32 take twice the registers: their tiles are smaller, and `tiles.json` is for 16-bit queries only.
    """
    head_dim = q.shape[2]
    block_d = max(16, power_of_two(head_dim))  # tl.dot takes no less than 16
    layout = {
        "HEAD_DIM": head_dim,
        "NUM_KV_HEADS": cache.shape[2],
        "BLOCK_SIZE": block_size,
        "QUANTIZED": kv_pages.is_quantized(cache.dtype),
        "BLOCK_D": block_d,
    }
    rows = {"decode": {}, "ordered": {"BLOCK_M": 32, "num_warps": 8}}.get(kernel, {"BLOCK_M": 32})  # ordered: two sums
    if q.dtype == torch.float32:
        narrow = {"BLOCK_M": 16, "BLOCK_N": 16} if kernel == "ordered" else {}
        if kernel == "decode" and not layout["QUANTIZED"]:
            narrow["BLOCK_N"] = 16  # two buffers of 32 keys leave one block on a multiprocessor with 99 KiB
        if kernel == "extend_split" and layout["QUANTIZED"]:
            narrow["num_warps"] = 8
        return layout | rows | {"BLOCK_N": 32 if block_d <= 128 else 16} | narrow
    if block_d > 128:
        default = {"BLOCK_N": 32} | rows
        if kernel.startswith("extend"):
            default |= {"BLOCK_M": 64, "num_warps": 8, "num_stages": 3}
    else:
        default = {"BLOCK_N": 64 if block_d * cache.itemsize <= 256 else 32}
        if kernel == "ordered":
            default["num_warps"] = 8
    return layout | default | tiles.tuned(kernel, head_dim=block_d, itemsize=cache.itemsize, device=cache.device)


def extend_tile(kernel: str, q: Tensor, cache: Tensor, block_size: int) -> dict[str, int]:
    """Launch options of the extend kernel, for whole or for split chunks."""
    tile = _tile(kernel, q, cache, block_size)
    tile["BLOCK_M"] = max(tile.get("BLOCK_M", EXTEND_ROWS), power_of_two(q.shape[1] // cache.shape[2]))
    return tile


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


@triton.jit
def attend(
    q, cache, scales, kv_head, table, start, all_see, all_saw, end, since, seen, scale_log2, softcap_log2,
    UNMASKED: tl.constexpr, SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, QUANTIZED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Softmax over positions start … end, in base 2; query i attends to since[i] … seen[i] ≤ end of them.

    q: (BLOCK_M, BLOCK_D) -> maximum and sum (BLOCK_M,), weighted values (BLOCK_M, BLOCK_D), not yet divided by the sum.
    UNMASKED: all queries attend to all of all_see … all_saw, so tiles in there are added without masks: of a long
    prompt all but those at a window's edge and on the diagonal. It pays where tensor cores are the bound: an H100
    computed a prompt of 8,192 tokens in 0.88 of the time, and decode in 1.05. Tiles are added in their order.
    """
    maximum = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    whole = end
    rest = end
    if UNMASKED:
        # Without a window all_see is near the least number there is: nothing may be subtracted from it.
        whole = tl.minimum(start + tl.cdiv(tl.maximum(all_see, start) - start, BLOCK_N) * BLOCK_N, end)
        rest = whole + tl.maximum(all_saw - whole, 0) // BLOCK_N * BLOCK_N
    for first in range(start, whole, BLOCK_N):
        maximum, total, acc = _add_tile(
            q, cache, scales, kv_head, table, first, end, since, seen, scale_log2, softcap_log2, maximum, total, acc,
            True, SOFTCAP, HEAD_DIM, NUM_KV_HEADS, BLOCK_SIZE, QUANTIZED, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    if UNMASKED:
        for first in range(whole, rest, BLOCK_N):
            maximum, total, acc = _add_tile(
                q, cache, scales, kv_head, table, first, end, since, seen, scale_log2, softcap_log2,
                maximum, total, acc, False, SOFTCAP, HEAD_DIM, NUM_KV_HEADS, BLOCK_SIZE, QUANTIZED, BLOCK_N, BLOCK_D,
            )  # fmt: skip
        for first in range(rest, end, BLOCK_N):
            maximum, total, acc = _add_tile(
                q, cache, scales, kv_head, table, first, end, since, seen, scale_log2, softcap_log2,
                maximum, total, acc, True, SOFTCAP, HEAD_DIM, NUM_KV_HEADS, BLOCK_SIZE, QUANTIZED, BLOCK_N, BLOCK_D,
            )  # fmt: skip
    return maximum, total, acc


@triton.jit
def _add_tile(
    q, cache, scales, kv_head, table, first, end, since, seen, scale_log2, softcap_log2, maximum, total, acc,
    MASKED: tl.constexpr, SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, QUANTIZED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add the BLOCK_N keys from `first` on to a running softmax. MASKED: some query does not attend to some of them."""
    page: tl.constexpr = BLOCK_SIZE * (HEAD_DIM + 4) if QUANTIZED else BLOCK_SIZE * HEAD_DIM
    values: tl.constexpr = NUM_KV_HEADS * page  # from a key to its value; two of them are a block
    d = tl.arange(0, BLOCK_D)
    n = first + tl.arange(0, BLOCK_N)
    there = n < end if MASKED else n >= 0
    # A block's number times its stride may exceed 32 bits.
    block = tl.load(table + n // BLOCK_SIZE, mask=there, other=0) if MASKED else tl.load(table + n // BLOCK_SIZE)
    block = block.to(tl.int64)
    token = block * (2 * values) + kv_head * page + (n % BLOCK_SIZE) * HEAD_DIM
    place = cache + token[:, None] + d[None, :]
    if MASKED or HEAD_DIM < BLOCK_D:
        wanted = there[:, None] & (d < HEAD_DIM)[None, :]
        k = tl.load(place, mask=wanted, other=0.0)
        v = tl.load(place + values, mask=wanted, other=0.0)
    else:
        k = tl.load(place)
        v = tl.load(place + values)
    factor = scale_log2  # of scores; where it is the same for all keys it becomes part of the exponent's FMA
    if QUANTIZED:
        scale = scales + block * (2 * values // 4) + kv_head * (page // 4) + n % BLOCK_SIZE
        k_scale = tl.load(scale, mask=there, other=0.0) * scale_log2
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION) * k_scale[None, :]
        factor = 1.0
    else:
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if SOFTCAP:  # cap · tanh(score / cap), through the exponential
        scores = softcap_log2 * (1.0 - 2.0 / (tl.exp2(scores * factor * (2 * LOG2_E / softcap_log2)) + 1.0))
        factor = 1.0
    if MASKED:
        visible = (n[None, :] >= since[:, None]) & (n[None, :] < seen[:, None])
        scores = tl.where(visible, scores, float("-inf"))
    # Finite from the first tile on, though a window may hide all of it: -inf - -inf would be NaN.
    higher = tl.maximum(tl.maximum(maximum, tl.max(scores, 1) * factor), LOWEST)
    shrink = tl.exp2(maximum - higher)
    p = tl.exp2(scores * factor - higher[:, None])
    total = total * shrink + tl.sum(p, 1)
    if QUANTIZED:
        p = p * tl.load(scale + values // 4, mask=there, other=0.0)[None, :]
    acc = acc * shrink[:, None] + tl.dot(p.to(q.dtype), v.to(q.dtype), input_precision=PRECISION)
    return higher, total, acc


@triton.jit
def with_sink(maximum, total, acc, sink):
    """Add a sink, a score without a value, to a running softmax. sink: (BLOCK_M,) in base 2; -inf: no sink."""
    higher = tl.maximum(tl.maximum(maximum, sink), LOWEST)
    shrink = tl.exp2(maximum - higher)
    return higher, total * shrink + tl.exp2(sink - higher), acc * shrink[:, None]


@triton.jit
def splits_of(length, SPLIT_TOKENS: tl.constexpr, MOST_SPLITS: tl.constexpr):
    """Number of splits of a sequence, and tokens per split, a multiple of SPLIT_TOKENS."""
    tokens = (tl.cdiv(tl.cdiv(length, MOST_SPLITS), SPLIT_TOKENS)) * SPLIT_TOKENS
    tokens = tl.maximum(tokens, SPLIT_TOKENS)
    return tl.maximum(tl.cdiv(length, tokens), 1), tokens  # padding has one split too, which writes its zeros


@triton.jit(do_not_specialize=["table_stride", "window", "room"])
def _decode(
    q, cache, scales, out, partial, stats, work, lengths, tables,
    table_stride, q_token_stride, q_head_stride, window, scale_log2, room, sinks, softcap_log2,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    GROUPS: tl.constexpr, SPLIT_TOKENS: tl.constexpr, MOST_SPLITS: tl.constexpr, PARTIAL: tl.constexpr,
    HEAD_DIM: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, QUANTIZED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Splits of the list `work` (`decode_work`), for the query heads of one KV head. Grid: (Hkv, programs).

    The heads of a split are neighbours in the grid, so the longest splits, first in the list, start together and first.
    `room`: splits of a row in `partial` and `stats`.
    """
    kv_head = tl.program_id(0)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    head = kv_head * GROUPS + m
    ours = (m < GROUPS)[:, None] & (d < HEAD_DIM)[None, :]
    num_heads: tl.constexpr = NUM_KV_HEADS * GROUPS
    for place in range(tl.program_id(1), tl.load(work), tl.num_programs(1)):
        item = tl.load(work + 1 + place)
        row = (item // MOST_SPLITS).to(tl.int64)
        split = item % MOST_SPLITS
        length = tl.load(lengths + row)
        _, tokens = splits_of(length, SPLIT_TOKENS, MOST_SPLITS)
        first = tl.maximum(length - window, 0)  # what a window hides is not read
        end = tl.minimum((split + 1) * tokens, length)
        start = tl.maximum(split * tokens, first // BLOCK_N * BLOCK_N)
        tile = tl.load(q + row * q_token_stride + head[:, None] * q_head_stride + d[None, :], mask=ours, other=0.0)
        since = tl.zeros([BLOCK_M], dtype=tl.int32) + first
        seen = tl.zeros([BLOCK_M], dtype=tl.int32) + end
        maximum, total, acc = attend(
            tile, cache, scales, kv_head, tables + row * table_stride, start, first, end, end, since, seen, scale_log2,
            softcap_log2, False, SOFTCAP, HEAD_DIM, NUM_KV_HEADS, BLOCK_SIZE, QUANTIZED, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        if SINKS:  # in the first split, which there always is
            sink = tl.load(sinks + head, mask=m < GROUPS, other=0.0) * LOG2_E
            maximum, total, acc = with_sink(maximum, total, acc, tl.where(split == 0, sink, float("-inf")))
        if PARTIAL:
            slot = (row * room + split) * num_heads + head
            store_partial(partial, stats, slot, maximum, total, acc, m < GROUPS, HEAD_DIM, BLOCK_D)
        else:
            attended = acc / tl.where(total > 0, total, 1.0)[:, None]
            into = row * num_heads + head
            tl.store(out + into[:, None] * HEAD_DIM + d[None, :], attended.to(out.dtype.element_ty), mask=ours)


@triton.jit
def store_partial(partial, stats, place, maximum, total, acc, ours, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store the partial result of a split in the slots `place`."""
    d = tl.arange(0, BLOCK_D)
    tl.store(partial + place[:, None] * HEAD_DIM + d[None, :], acc, mask=ours[:, None] & (d < HEAD_DIM)[None, :])
    tl.store(stats + 2 * place, tl.where(total > 0, maximum, LOWEST), mask=ours)  # no -inf to merge
    tl.store(stats + 2 * place + 1, total, mask=ours)


@triton.jit(do_not_specialize=["room"])
def _merge(
    partial, stats, out, lengths, room,
    SPLIT_TOKENS: tl.constexpr, MOST_SPLITS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one decode row and head. Grid: (rows, Hq)."""
    row = tl.program_id(0).to(tl.int64)
    num_splits, _ = splits_of(tl.load(lengths + row), SPLIT_TOKENS, MOST_SPLITS)
    _merge_splits(partial, stats, out, row, row * room, num_splits, HEAD_DIM, BLOCK_D, BLOCK_S)


@triton.jit
def _merge_chunks(
    partial, stats, out, merges, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr
):  # fmt: skip
    """Merge the splits of one token of a chunk, and one head. Grid: (tokens, Hq)."""
    work = merges + 3 * tl.program_id(0)
    token, slot = tl.load(work).to(tl.int64), tl.load(work + 1).to(tl.int64)
    _merge_splits(partial, stats, out, token, slot, tl.load(work + 2), HEAD_DIM, BLOCK_D, BLOCK_S)


@triton.jit
def _merge_splits(
    partial, stats, out, token, slot, num_splits,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Merge a token's splits, in slots from `slot` on, weighted by their sums; all are loaded at once. 0 splits: 0."""
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    d = tl.arange(0, BLOCK_D)
    split = tl.arange(0, BLOCK_S)
    ours = split < num_splits
    place = (slot + split) * num_heads + head
    maximum = tl.load(stats + 2 * place, mask=ours, other=float("-inf"))
    sums = tl.load(stats + 2 * place + 1, mask=ours, other=0.0)
    parts = tl.load(
        partial + place[:, None] * HEAD_DIM + d[None, :], mask=ours[:, None] & (d < HEAD_DIM)[None, :], other=0.0
    )
    weight = tl.exp2(maximum - tl.maximum(tl.max(maximum, 0), LOWEST))  # of no split: zeros, not NaN
    total = tl.sum(sums * weight, 0)
    attended = tl.sum(parts * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + (token * num_heads + head) * HEAD_DIM + d, attended.to(out.dtype.element_ty), mask=d < HEAD_DIM)


@triton.jit(
    do_not_specialize=["table_stride", "window"],
    do_not_specialize_on_alignment=["lengths", "tables", "work"],  # they begin after the decode rows, at any offset
)
def _extend(
    q, cache, scales, out, partial, stats, work, chunk_starts, lengths, tables,
    table_stride, q_token_stride, q_head_stride, window, scale_log2, sinks, softcap_log2,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    GROUPS: tl.constexpr, QUERIES: tl.constexpr, PARTIAL: tl.constexpr,
    HEAD_DIM: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, QUANTIZED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """QUERIES new tokens of one chunk × the query heads of one KV head. Grid: (programs of `work`, Hkv).

    PARTIAL: over one split of the chunk's context, merged by `_merge_chunks`; else over the whole context.
    """
    entry = work + tl.program_id(0) * (5 if PARTIAL else 2)
    kv_head = tl.program_id(1)
    chunk = tl.load(entry)
    first = tl.load(entry + 1)
    chunk_start = tl.load(chunk_starts + chunk)
    num_new = tl.load(chunk_starts + chunk + 1) - chunk_start
    length = tl.load(lengths + chunk)
    past = length - num_new
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    t = first + m // GROUPS
    head = kv_head * GROUPS + m % GROUPS
    real = (m < QUERIES * GROUPS) & (t < num_new)
    ours = real[:, None] & (d < HEAD_DIM)[None, :]
    token = (chunk_start + t).to(tl.int64)
    place = q + token[:, None] * q_token_stride + head[:, None] * q_head_stride + d[None, :]
    tile = tl.load(place, mask=ours, other=0.0)
    end = tl.minimum(length, past + first + QUERIES)
    start = tl.maximum(past + first + 1 - window, 0) // BLOCK_N * BLOCK_N
    num_splits = 1
    split = 0
    if PARTIAL:
        split = tl.load(entry + 2)
        tokens = tl.load(entry + 4)
        num_splits = tl.cdiv(length, tokens)
        start = tl.maximum(start, split * tokens)
        end = tl.minimum(end, (split + 1) * tokens)
    maximum, total, acc = attend(
        tile, cache, scales, kv_head, tables + tl.cast(chunk, tl.int64) * table_stride,
        start, past + first + QUERIES - window, tl.minimum(past + first + 1, end), end,
        past + t + 1 - window, tl.minimum(past + t + 1, end), scale_log2, softcap_log2,
        True, SOFTCAP, HEAD_DIM, NUM_KV_HEADS, BLOCK_SIZE, QUANTIZED, BLOCK_M, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    if SINKS:
        sink = tl.load(sinks + head, mask=m < QUERIES * GROUPS, other=0.0) * LOG2_E
        maximum, total, acc = with_sink(maximum, total, acc, tl.where(split == 0, sink, float("-inf")))
    num_heads: tl.constexpr = NUM_KV_HEADS * GROUPS
    if PARTIAL:
        slot = tl.load(entry + 3).to(tl.int64) + t * num_splits + split
        store_partial(partial, stats, slot * num_heads + head, maximum, total, acc, real, HEAD_DIM, BLOCK_D)
    else:
        place = (token * num_heads + head)[:, None] * HEAD_DIM + d[None, :]
        tl.store(out + place, (acc / tl.where(total > 0, total, 1.0)[:, None]).to(out.dtype.element_ty), mask=ours)
