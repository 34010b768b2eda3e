"""Around the grouped products of a mixture of experts, in Triton: the choice of experts, the order of rows, the sum.

Each of the three is one launch where torch takes six, twenty and three; a decode step of a model with 48 sparse layers
would spend more time in them than in reading its experts. Tested against `reference_experts`, and `sort_by_expert`
against its definition in torch, which orders long prompts.

Nothing was timed yet.
"""

# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
# Triton comes without types, and gives the arguments of a kernel its own.
# ruff: noqa: N803
# Compile-time constants of a kernel are upper case, as everywhere in Triton.

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

FEW_ROWS, MANY_ROWS = 16, 64  # of a block: a product on tensor cores takes no less than 16
# `_place` compares each row with each: for so many that is less work than the launches of a sort.
MOST_COMPARED: Final = 16_384
ROWS, OTHERS = 32, 256  # rows of a program of `_place`, and of those that it compares them with at once


@dataclass(frozen=True, slots=True)
class Blocks:
    """The rows of a step, sorted by expert, in blocks of rows of one expert. All on the device."""

    order: Tensor  # (N,) rows sorted by expert
    experts: Tensor  # (B,) expert of each block; E: unused block
    firsts: Tensor  # (B,) index in `order` of each block's first row
    ends: Tensor  # (E,) end in `order` of the rows of each expert that has any
    size: int  # rows of a block


def choose_experts(scores: Tensor, per_token: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """scores: (T, E) of the router -> weights (T, K) float32 and experts (T, K) int32. See `reference_experts`.

    Of equal scores the first expert is chosen first.
    """
    num_tokens, num_experts = scores.shape
    weights = torch.empty(num_tokens, per_token, dtype=torch.float32, device=scores.device)
    experts = torch.empty(num_tokens, per_token, dtype=torch.int32, device=scores.device)
    _choose[(num_tokens,)](
        scores, weights, experts, scores.stride(0), NUM_EXPERTS=num_experts, PER_TOKEN=per_token, NORMALIZE=normalize,
        BLOCK_E=triton.next_power_of_2(num_experts), BLOCK_K=triton.next_power_of_2(per_token),
    )  # fmt: skip
    return weights, experts


def sort_by_expert(experts: Tensor, num_experts: int) -> Blocks:
    """Sort rows by expert, each expert's in their order. experts: (T, K). All shapes depend on T, K and E alone."""
    num_rows = experts.numel()
    size = FEW_ROWS if num_rows < MANY_ROWS * num_experts else MANY_ROWS
    if num_rows > MOST_COMPARED:
        return sort_many_by_expert(experts, num_experts, size)
    most = min(num_rows, num_rows // size + num_experts)
    order, ends = experts.new_empty(num_rows, dtype=torch.int32), experts.new_empty(num_experts, dtype=torch.int32)
    firsts, of_block = experts.new_empty(most, dtype=torch.int32), experts.new_full((most,), num_experts)
    _place[(triton.cdiv(num_rows, ROWS),)](
        experts, order, of_block, firsts, ends, num_rows, SIZE=size, ONE_EACH=most == num_rows, ROWS=ROWS,
        OTHERS=OTHERS,
    )  # fmt: skip
    return Blocks(order, of_block, firsts, ends, size)


def sort_many_by_expert(experts: Tensor, num_experts: int, size: int) -> Blocks:
    """The same for any number of rows, in torch."""
    flat = experts.flatten()
    num_rows = len(flat)
    chosen, order = flat.sort(stable=True)
    numbers = torch.arange(num_experts, device=flat.device, dtype=flat.dtype)
    ends = torch.searchsorted(chosen, numbers, right=True)
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    block_ends = ((counts + size - 1) // size).cumsum(0)
    block = torch.arange(num_rows // size + min(num_experts, num_rows), device=flat.device)
    of_block = torch.searchsorted(block_ends, block, right=True)
    owner = of_block.clamp_max(num_experts - 1)
    before = block_ends[owner] - (counts[owner] + size - 1) // size  # blocks of the experts before
    firsts = ends[owner] - counts[owner] + (block - before) * size
    return Blocks(order.int(), of_block.int(), firsts.int(), ends.int(), size)


def sum_experts(out: Tensor, weights: Tensor) -> Tensor:
    """out: (T, K, H) of each token's experts, weights: (T, K) -> (T, H): their weighted sum, in the order of K."""
    num_tokens, per_token, hidden = out.shape
    y = out.new_empty(num_tokens, hidden)
    block = min(1024, triton.next_power_of_2(hidden))
    _sum[(num_tokens, triton.cdiv(hidden, block))](out, weights, y, HIDDEN=hidden, PER_TOKEN=per_token, BLOCK=block)
    return y


@triton.jit
def _choose(
    scores, weights, experts, stride,
    NUM_EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr, NORMALIZE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One token: the softmax of its scores, or of the chosen ones alone, and the PER_TOKEN largest."""
    token = tl.program_id(0)
    e, k = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    left = tl.load(scores + token * stride + e, mask=e < NUM_EXPERTS, other=float("-inf")).to(tl.float32)
    highest = tl.max(left, axis=0)
    total = tl.sum(tl.exp(left - highest), axis=0)
    best_scores = tl.full([BLOCK_K], float("-inf"), tl.float32)
    best = tl.zeros([BLOCK_K], dtype=tl.int32)
    for place in tl.static_range(PER_TOKEN):
        score = tl.max(left, axis=0)
        expert = tl.min(tl.where(left == score, e, NUM_EXPERTS - 1), axis=0)  # the last one if scores are NaN
        best_scores = tl.where(k == place, score, best_scores)
        best = tl.where(k == place, expert, best)
        left = tl.where(e == expert, float("-inf"), left)
    weight = tl.exp(best_scores - highest)
    if NORMALIZE:
        total = tl.sum(weight, axis=0)
    tl.store(weights + token * PER_TOKEN + k, weight / total, mask=k < PER_TOKEN)
    tl.store(experts + token * PER_TOKEN + k, best, mask=k < PER_TOKEN)


@triton.jit(do_not_specialize=["num_rows"])
def _place(
    experts, order, of_block, firsts, ends, num_rows,
    SIZE: tl.constexpr, ONE_EACH: tl.constexpr, ROWS: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """ROWS rows: where each goes among all rows, and the blocks that begin with one of them.

    A block has a number that no other one gets, whatever the others are: the place of its first row, or that place in
    whole blocks and one more for each expert before.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < num_rows
    own = tl.load(experts + row, mask=real, other=-1)
    before = tl.zeros([ROWS], dtype=tl.int32)  # rows of experts before this one
    rank = tl.zeros([ROWS], dtype=tl.int32)  # rows of this expert before this row
    count = tl.zeros([ROWS], dtype=tl.int32)  # all rows of this expert
    for start in range(0, num_rows, OTHERS):
        other_row = start + tl.arange(0, OTHERS)
        other = tl.load(experts + other_row, mask=other_row < num_rows, other=2147483647)
        same = other[None, :] == own[:, None]
        before += tl.sum((other[None, :] < own[:, None]).to(tl.int32), axis=1)
        rank += tl.sum((same & (other_row[None, :] < row[:, None])).to(tl.int32), axis=1)
        count += tl.sum(same.to(tl.int32), axis=1)
    place = before + rank
    tl.store(order + place, row, mask=real)
    tl.store(ends + own, before + count, mask=real & (rank == 0))
    begins = real & (rank % SIZE == 0)
    block = place if ONE_EACH else before // SIZE + own + rank // SIZE
    tl.store(of_block + block, own, mask=begins)
    tl.store(firsts + block, place, mask=begins)


@triton.jit
def _sum(out, weights, y, HIDDEN: tl.constexpr, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK numbers of one token."""
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for place in tl.static_range(PER_TOKEN):
        row = token * PER_TOKEN + place
        weight = tl.load(weights + row)
        sums += weight * tl.load(out + row * HIDDEN + h, mask=h < HIDDEN, other=0.0).to(tl.float32)
    tl.store(y + token * HIDDEN + h, sums.to(y.dtype.element_ty), mask=h < HIDDEN)
