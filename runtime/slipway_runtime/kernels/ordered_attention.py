"""Paged attention for `deterministic` on a GPU, in Triton: splits of fixed positions, merged in their order.

See `ordered_plan` for what makes a token's bits the same in every step. On this side it takes three things: one kernel
computes all tokens, compiled once for a model, so a row of one token is a tile like that of a prompt; a split begins
with an empty softmax, in a program of its own or not; and `_merged` is the only merge, in which each rounding is
written out, so that two kernels make the same of it. Masked keys add exact zeros.
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

from slipway_runtime.kernels import ordered_plan
from slipway_runtime.kernels import paged_attention as shared
from slipway_runtime.kernels.attention_plan import ChunkTile
from slipway_runtime.kernels.ordered_plan import AttentionPlan
from slipway_runtime.kernels.paged_attention import LOG2_E, LOWEST, NO_WINDOW, attend, store_partial
from slipway_runtime.kernels.reference_attention import Scoring

__all__ = ["chunk_tile", "paged_attention"]

MERGED_AT_ONCE = 8  # splits whose partial results are read together


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
    num_tokens, num_heads, head_dim = q.shape
    assert q.stride(2) == 1, "the elements of a query head lie side by side"
    assert cache.is_contiguous(), "a head's page is contiguous only then"
    num_kv_heads = cache.shape[2]
    groups = num_heads // num_kv_heads
    options = shared.extend_tile("ordered", q, cache, plan.block_size)
    out = q.new_empty(num_tokens, num_heads * head_dim)
    if plan.decode_splits:  # a graph's: rows of one token, whose lengths are known on the device only
        rows, work, merges = len(plan.lengths), plan.lengths, plan.lengths
        sharing = ordered_plan.programs_of_a_row(rows, plan.decode_splits, num_kv_heads)
        programs, num_slots, num_merges = rows * sharing, rows * plan.decode_splits if sharing > 1 else 0, rows
    else:
        of_step = plan.work(ChunkTile(options["BLOCK_M"] // groups, num_kv_heads))
        work, merges, sharing = of_step.programs, of_step.merges, 0
        programs, num_slots, num_merges = len(work), of_step.num_slots, len(merges)
    # As many arguments of the same types in every step: other types would compile the kernel again.
    partial = q.new_empty(max(num_slots, 1), num_heads, head_dim, dtype=torch.float32)
    stats = q.new_empty(max(num_slots, 1), num_heads, 2, dtype=torch.float32)
    sinks, softcap_log2 = shared.of_scoring(scoring, q)
    has_sinks = scoring is not None and scoring.sinks is not None
    _extend_in_order[(programs, num_kv_heads)](
        q, cache, shared.scales_of(cache, head_dim), out, partial, stats, work, plan.chunk_starts, plan.lengths,
        plan.tables, plan.tables.stride(0), q.stride(0), q.stride(1), window or NO_WINDOW, scale * math.log2(math.e),
        sharing, plan.decode_splits, sinks, softcap_log2,
        SOFTCAP=scoring is not None and scoring.softcap is not None, SINKS=has_sinks,
        GROUPS=groups, QUERIES=options["BLOCK_M"] // groups, SPLIT=ordered_plan.SPLIT, **options,
    )  # fmt: skip
    if num_slots:
        _merge_in_order[(num_merges, num_heads)](
            partial, stats, out, merges, plan.lengths, sharing, plan.decode_splits, sinks,
            SINKS=has_sinks, SPLIT=ordered_plan.SPLIT, HEAD_DIM=head_dim, BLOCK_D=shared.power_of_two(head_dim),
            AT_ONCE=MERGED_AT_ONCE,
        )  # fmt: skip
    return out


def chunk_tile(q: Tensor, cache: Tensor, block_size: int) -> ChunkTile:
    """What a program computes. q: (…, Hq, D)."""
    groups = q.shape[1] // cache.shape[2]
    return ChunkTile(shared.extend_tile("ordered", q, cache, block_size)["BLOCK_M"] // groups, cache.shape[2])


@triton.jit
def _merged(maximum, total, acc, more, its_total, its_acc):
    """A running softmax, and that of another split added to it. Sums are explicit FMAs, rounded as they are written."""
    more = tl.where(its_total > 0, more, LOWEST)
    higher = tl.maximum(maximum, more)
    shrink = tl.exp2(maximum - higher)
    its_shrink = tl.exp2(more - higher)
    total = tl.fma(total, shrink, its_total * its_shrink)
    acc = tl.fma(acc, tl.broadcast_to(shrink[:, None], acc.shape), its_acc * its_shrink[:, None])
    return higher, total, acc


@triton.jit(
    do_not_specialize=["table_stride", "window", "sharing", "room"],
    do_not_specialize_on_alignment=["work", "chunk_starts", "lengths", "tables"],
)
def _extend_in_order(
    q, cache, scales, out, partial, stats, work, chunk_starts, lengths, tables,
    table_stride, q_token_stride, q_head_stride, window, scale_log2, sharing, room, sinks, softcap_log2,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    GROUPS: tl.constexpr, QUERIES: tl.constexpr, SPLIT: tl.constexpr,
    HEAD_DIM: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, QUANTIZED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """QUERIES new tokens of one chunk × the query heads of one KV head. Grid: (programs, Hkv).

    sharing: 0: programs are listed in `work`; else so many programs share the splits of a row of one token, whose
    partial results are in `room` slots. Which it is is no constant: one compiled kernel computes every step.
    """
    kv_head = tl.program_id(1)
    chunk = tl.program_id(0)
    first = 0
    split = 0
    slot = 0
    step = 1
    if sharing == 0:
        entry = work + 4 * chunk
        chunk = tl.load(entry)
        first = tl.load(entry + 1)
        split = tl.load(entry + 2)
        slot = tl.load(entry + 3)
        step = 1 << 30  # one split
    else:
        split = chunk % sharing
        chunk = chunk // sharing
        slot = chunk * room
        step = sharing
        if sharing == 1:
            split = -1
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
    queries = q + token[:, None] * q_token_stride + head[:, None] * q_head_stride + d[None, :]
    tile = tl.load(queries, mask=ours, other=0.0)
    end = tl.minimum(length, past + first + QUERIES)
    start = tl.maximum(past + first + 1 - window, 0) // BLOCK_N * BLOCK_N
    num_splits = tl.cdiv(length, SPLIT)
    num_heads: tl.constexpr = NUM_KV_HEADS * GROUPS
    begin = split
    last = num_splits
    if split < 0:
        begin = start // SPLIT
        last = tl.cdiv(end, SPLIT)
        step = 1
    maximum = tl.full([BLOCK_M], LOWEST, dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    if SINKS:  # noqa: SIM102  a constant, and a value of the device
        if split < 0:
            sink = tl.load(sinks + head, mask=m < QUERIES * GROUPS, other=0.0) * LOG2_E
            maximum = tl.maximum(sink, LOWEST)
            total += 1.0
    for now in range(begin, last, step):
        its_end = tl.minimum(end, (now + 1) * SPLIT)
        more, its_total, its_acc = attend(
            tile, cache, scales, kv_head, tables + tl.cast(chunk, tl.int64) * table_stride,
            tl.maximum(start, now * SPLIT), its_end, its_end, its_end,
            past + t + 1 - window, tl.minimum(past + t + 1, its_end),
            scale_log2, softcap_log2,
            False, SOFTCAP, HEAD_DIM, NUM_KV_HEADS, BLOCK_SIZE, QUANTIZED, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        if split < 0:
            maximum, total, acc = _merged(maximum, total, acc, more, its_total, its_acc)
        else:
            where = (tl.cast(slot, tl.int64) + t * num_splits + now) * num_heads + head
            store_partial(partial, stats, where, more, its_total, its_acc, real, HEAD_DIM, BLOCK_D)
    if split < 0:
        place = (token * num_heads + head)[:, None] * HEAD_DIM + d[None, :]
        attended = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out + place, attended.to(out.dtype.element_ty), mask=ours)


@triton.jit(do_not_specialize=["sharing", "room"], do_not_specialize_on_alignment=["merges", "lengths"])
def _merge_in_order(
    partial, stats, out, merges, lengths, sharing, room, sinks,
    SINKS: tl.constexpr, SPLIT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one token and head, from the first to the last. Grid: (merges, Hq)."""
    token = tl.program_id(0)
    slot = token * room
    chunk = token
    if sharing == 0:
        entry = merges + 3 * token
        token = tl.load(entry)
        slot = tl.load(entry + 1)
        chunk = tl.load(entry + 2)
        if token < 0:
            return
    num_splits = tl.cdiv(tl.load(lengths + chunk), SPLIT)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    d = tl.arange(0, BLOCK_D)
    maximum = tl.full([1], LOWEST, dtype=tl.float32)
    total = tl.zeros([1], dtype=tl.float32)
    acc = tl.zeros([1, BLOCK_D], dtype=tl.float32)
    if SINKS:
        maximum = tl.maximum(maximum, tl.load(sinks + head) * LOG2_E)
        total += 1.0
    for first in range(0, num_splits, AT_ONCE):
        for number in tl.static_range(AT_ONCE):
            split = first + number + tl.arange(0, 1)
            ours = split < num_splits
            place = (tl.cast(slot, tl.int64) + split) * num_heads + head
            more = tl.load(stats + 2 * place, mask=ours, other=LOWEST)
            its_total = tl.load(stats + 2 * place + 1, mask=ours, other=0.0)
            read = ours[:, None] & (d < HEAD_DIM)[None, :]
            its_acc = tl.load(partial + place[:, None] * HEAD_DIM + d[None, :], mask=read, other=0.0)
            maximum, total, acc = _merged(maximum, total, acc, more, its_total, its_acc)
    attended = acc / tl.where(total > 0, total, 1.0)[:, None]
    place = (tl.cast(token, tl.int64) * num_heads + head) * HEAD_DIM + d[None, :]
    tl.store(out + place, attended.to(out.dtype.element_ty), mask=(d < HEAD_DIM)[None, :])
