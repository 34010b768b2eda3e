"""Multi-LoRA kernels (shrink, expand) on a GPU, in Triton. Tested against `reference_lora`.

Tokens are sorted by slot once per step and cut into chunks of CHUNK tokens of one adapter. Two kernels follow each
linear layer that any of the step's adapters changes, whatever the number of adapters:
- shrink: x Aᵀ for a chunk, one part of the layer and one split of the inputs. Splits have a fixed length, and their
  sums are stored separately, in float32;
- expand: the sums of the splits in their order, times B, added to the outputs and rounded once.

The rank of each part and slot is read on the device: unused ranks of a slot are not loaded. A token's arithmetic does
not depend on the rest of the batch. Tokens without an adapter are in no chunk.

The lower bound is reading the matrices: r · (in + out) elements per part and adapter. The compiled kernels are
described in docs/gpu-ledger.md; nothing was timed on a GPU yet.
"""

# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
# Triton comes without types, and gives the arguments of a kernel its own.
# ruff: noqa: N803
# Compile-time constants of a kernel are upper case, as everywhere in Triton.

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from slipway_runtime.kernels.reference_lora import LoraWeights
from slipway_runtime.kernels.upload import Ints, upload

__all__ = ["add_lora", "plan_lora", "plan_lora_for_capture", "update_static_lora_inputs"]

CHUNK = 16  # tokens of a tile: the least that tl.dot takes
SPLIT = 512  # inputs that one shrink program reads: fewer wait less for memory, and leave expand more sums to read
BLOCK_IN = 128  # of these at a time, up to WIDE_RANK; beyond it BLOCK_IN_WIDE bytes, or registers would not suffice
WIDE_RANK, BLOCK_IN_WIDE = 64, 128
BLOCK_OUT = 128
BLOCK_RANK = 64  # rows of B that one step of expand multiplies


@dataclass(frozen=True, slots=True)
class LoraPlan:
    """LoRA plan of one step: the tokens that have adapters, sorted by slot."""

    slots: int  # bit s: any token has slot s, or may have it in a replay
    order: Tensor  # (N,) indices of the step's tokens, sorted by slot
    work: Tensor  # (chunks, 3): slot, index of its first token in `order`, number of tokens
    repeats: bool = False  # for CUDA graphs: launch all programs, which later contents of plan and slots may need


def plan_lora(token_slots: Ints, num_slots: int, like: Tensor, *, tile: int = 0) -> LoraPlan:
    """Make the LoRA plan of a step. `like`: device; `tile` is only used on a CPU: here rows are independent."""
    used, order, work = _sort_and_cut(token_slots)
    order_on_device, work_on_device = upload((order, work), like.device)
    return LoraPlan(slots=used, order=order_on_device, work=work_on_device)


def _sort_and_cut(token_slots: Ints) -> tuple[int, npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """`slots`, `order` and `work` of a plan, on the host."""
    order = np.argsort(token_slots, kind="stable")[np.count_nonzero(token_slots < 0) :]
    used, firsts, counts = np.unique(token_slots[order], return_index=True, return_counts=True)
    work = [
        (slot, first + start, min(CHUNK, count - start))
        for slot, first, count in zip(used.tolist(), firsts.tolist(), counts.tolist(), strict=True)
        for start in range(0, count, CHUNK)
    ]
    slots = sum(1 << slot for slot in used.tolist())
    return slots, order.astype(np.int32), np.array(work, dtype=np.int32).reshape(-1, 3)


def plan_lora_for_capture(num_tokens: int, num_slots: int, like: Tensor) -> LoraPlan:
    """LoRA plan for CUDA graphs, for any adapters, in static buffers that `update_static_lora_inputs` fills."""
    most_chunks = num_tokens // CHUNK + min(num_slots, num_tokens)  # each slot may end in a chunk that is not full
    return LoraPlan(
        slots=(1 << num_slots) - 1,
        order=torch.zeros(num_tokens, dtype=torch.int32, device=like.device),
        work=torch.zeros(most_chunks, 3, dtype=torch.int32, device=like.device),
        repeats=True,
    )


def update_static_lora_inputs(plan: LoraPlan, token_slots: Ints) -> None:
    """Copy the slots of a step's tokens into a captured plan."""
    _, step_order, step_work = _sort_and_cut(token_slots)
    order, work = np.zeros(plan.order.shape, dtype=np.int32), np.zeros(plan.work.shape, dtype=np.int32)
    order[: len(step_order)] = step_order
    work[: len(step_work)] = step_work
    new_order, new_work = upload((order, work), plan.order.device)
    plan.order.copy_(new_order)
    plan.work.copy_(new_work)


def add_lora(x: Tensor, y: Tensor, weights: LoraWeights, plan: LoraPlan) -> None:
    """y += the LoRA output of each token's adapter, in place. x: (T, in)  y: (T, out)."""
    if not plan.repeats and not weights.slots & plan.slots:
        return  # none of the step's adapters changes this layer
    assert x.stride(1) == y.stride(1) == 1, "the elements of a row lie side by side"
    num_parts, max_rank, num_slots, in_size = weights.a.shape
    num_chunks, num_tokens = plan.work.shape[0], plan.order.shape[0]
    num_splits = triton.cdiv(in_size, SPLIT)
    widest = max(end - start for start, end in zip(weights.columns, weights.columns[1:], strict=False))
    shrunk = x.new_empty(num_splits, num_parts, num_tokens, max_rank, dtype=torch.float32)
    shape = {"NUM_SLOTS": num_slots, "MAX_RANK": max_rank}
    block_r = max(16, triton.next_power_of_2(max_rank))
    _shrink[(num_chunks, num_parts, num_splits)](
        x, weights.a, weights.ranks_on_device, plan.order, plan.work, shrunk, x.stride(0), num_tokens,
        IN=in_size, SPLIT_IN=SPLIT, BLOCK_M=CHUNK, BLOCK_R=block_r, **shape,
        BLOCK_K=BLOCK_IN if block_r <= WIDE_RANK else BLOCK_IN_WIDE // x.itemsize,
    )  # fmt: skip
    _expand[(num_chunks, num_parts, triton.cdiv(widest, BLOCK_OUT))](
        shrunk, weights.b, weights.ranks_on_device, weights.columns_on_device, plan.order, plan.work, y,
        y.stride(0), num_tokens,
        NUM_SPLITS=num_splits, OUT=weights.columns[-1], BLOCK_N=BLOCK_OUT, BLOCK_M=CHUNK,
        BLOCK_R=min(block_r, BLOCK_RANK), **shape, ALIGNED=all(column % 16 == 0 for column in weights.columns),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def _shrink(
    x, a, ranks, order, work, shrunk, x_stride, num_tokens,
    IN: tl.constexpr, SPLIT_IN: tl.constexpr, NUM_SLOTS: tl.constexpr, MAX_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One chunk, one part, one split of the inputs. Grid: (chunks, J, splits)."""
    chunk = tl.program_id(0)
    part = tl.program_id(1)
    split = tl.program_id(2)
    slot = tl.load(work + 3 * chunk)
    first = tl.load(work + 3 * chunk + 1)
    count = tl.load(work + 3 * chunk + 2)
    rank = tl.load(ranks + part * NUM_SLOTS + slot)
    if (rank == 0) | (count == 0):
        return

    m = tl.arange(0, BLOCK_M)
    r = tl.arange(0, BLOCK_R)
    token = tl.load(order + first + m, mask=m < count, other=0).to(tl.int64)
    matrix = a + ((part * MAX_RANK + r).to(tl.int64) * NUM_SLOTS + slot) * IN
    acc = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
    for start in range(split * SPLIT_IN, min(split * SPLIT_IN + SPLIT_IN, IN), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        wanted = (m < count)[:, None] & (k < IN)[None, :]
        rows = tl.load(x + token[:, None] * x_stride + k[None, :], mask=wanted, other=0.0)
        wanted = (r < rank)[:, None] & (k < IN)[None, :]
        tile = tl.load(matrix[:, None] + k[None, :], mask=wanted, other=0.0)
        acc += tl.dot(rows, tl.trans(tile), input_precision="ieee")
    place = ((split * tl.num_programs(1) + part).to(tl.int64) * num_tokens + first + m) * MAX_RANK
    tl.store(shrunk + place[:, None] + r[None, :], acc, mask=(m < count)[:, None] & (r < rank)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _expand(
    shrunk, b, ranks, columns, order, work, y, y_stride, num_tokens,
    NUM_SPLITS: tl.constexpr, OUT: tl.constexpr, NUM_SLOTS: tl.constexpr, MAX_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One chunk, BLOCK_N outputs of one part. Grid: (chunks, J, blocks of the widest part)."""
    chunk = tl.program_id(0)
    part = tl.program_id(1)
    slot = tl.load(work + 3 * chunk)
    first = tl.load(work + 3 * chunk + 1)
    count = tl.load(work + 3 * chunk + 2)
    rank = tl.load(ranks + part * NUM_SLOTS + slot)
    start = tl.load(columns + part)
    end = tl.load(columns + part + 1)
    if ALIGNED:
        start, end = tl.multiple_of(start, 16), tl.multiple_of(end, 16)
    start += tl.program_id(2) * BLOCK_N
    if (rank == 0) | (count == 0) | (start >= end):
        return

    m = tl.arange(0, BLOCK_M)
    n = start + tl.arange(0, BLOCK_N)
    added = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for begin in range(0, rank, BLOCK_R):  # a large rank in parts: the whole matrix at once would spill registers
        r = begin + tl.arange(0, BLOCK_R)
        ours = (m < count)[:, None] & (r < rank)[None, :]
        sums = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
        for split in tl.range(NUM_SPLITS, loop_unroll_factor=4):  # so that several loads are under way
            place = ((split * tl.num_programs(1) + part).to(tl.int64) * num_tokens + first + m) * MAX_RANK
            sums += tl.load(shrunk + place[:, None] + r[None, :], mask=ours, other=0.0)
        row = (r.to(tl.int64) * NUM_SLOTS + slot) * OUT
        wanted = (r < rank)[:, None] & (n < end)[None, :]
        matrix = tl.load(b + row[:, None] + n[None, :], mask=wanted, other=0.0)
        added += _multiply(sums, matrix)
    token = tl.load(order + first + m, mask=m < count, other=0).to(tl.int64)
    place = y + token[:, None] * y_stride + n[None, :]
    ours = (m < count)[:, None] & (n < end)[None, :]
    before = tl.load(place, mask=ours, other=0.0).to(tl.float32)
    tl.store(place, (before + added).to(y.dtype.element_ty), mask=ours)


@triton.jit
def _multiply(sums, matrix):
    """float32 times the matrix's type, on tensor cores. (M, R) · (R, N) -> (M, N), float32.

    With bfloat16 a float32 is split into two halves, and both are multiplied: the error is below 2^-16 of a sum.
    float16 lacks the range for that, so it uses three products of tf32, as float32 does.
    """
    if matrix.dtype == tl.bfloat16:
        high = sums.to(tl.bfloat16)
        low = (sums - high.to(tl.float32)).to(tl.bfloat16)
        product = tl.dot(low, matrix, tl.dot(high, matrix))
    else:
        product = tl.dot(sums, matrix.to(tl.float32), input_precision="tf32x3")
    return product
