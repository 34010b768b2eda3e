"""Fused mixture of experts (MoE) on a GPU, in Triton. Tested against `reference.mix_experts`.

There are T × K rows, one per token and chosen expert. They are sorted by expert, and cut into blocks of BLOCK_M rows of
one expert; a program computes BLOCK_N outputs of a block. The number of blocks of an expert is known on the device
alone: the launch has programs for the most blocks possible, and programs without a block exit at once. So the host
reads nothing back, and CUDA graphs can capture the step.

The lower bound of decode is reading the chosen experts; of prefill, the products. Nothing was timed yet.
"""

# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
# Triton comes without types, and gives the arguments of a kernel its own.
# ruff: noqa: N803
# Compile-time constants of a kernel are upper case, as everywhere in Triton.

import triton
import triton.language as tl
from torch import Tensor

from slipway_runtime.kernels.expert_rows import Blocks, sort_by_expert, sum_experts
from slipway_runtime.kernels.norms import clamped_swiglu, swiglu
from slipway_runtime.kernels.reference_experts import ExpertWeights

__all__ = ["mix_experts"]

BLOCK_N, BLOCK_K = 64, 64
PRECISION = tl.constexpr("tf32x3")  # of products of float32; 16-bit types ignore it


def mix_experts(x: Tensor, weights: Tensor, experts: Tensor, of: ExpertWeights) -> Tensor:
    """x: (T, H)  weights, experts: (T, K) -> (T, H): the weighted sum of the outputs of each token's experts."""
    num_tokens, per_token = experts.shape
    blocks = sort_by_expert(experts, of.gate_up.shape[0])
    gate_up = _multiply(x, of.gate_up, of.gate_up_bias, blocks, experts.numel(), per_token)
    inner = swiglu(gate_up) if of.limit is None else clamped_swiglu(gate_up, of.limit)
    out = _multiply(inner, of.down, of.down_bias, blocks, experts.numel(), 1)
    return sum_experts(out.view(num_tokens, per_token, -1), weights)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, blocks: Blocks, num_rows: int, per_token: int) -> Tensor:
    """Row r of the result is row r // per_token of x times the matrix of its expert. weight: (E, out, in)."""
    num_experts, out_size, in_size = weight.shape
    assert x.stride(1) == 1, "the elements of a row lie side by side"
    assert weight.is_contiguous(), "the matrices are addressed without strides"
    out = x.new_empty(num_rows, out_size)
    grid = (triton.cdiv(out_size, BLOCK_N), len(blocks.experts))
    _grouped[grid](
        x, weight, out if bias is None else bias, out, blocks.order, blocks.experts, blocks.firsts, blocks.ends,
        x.stride(0), num_experts, PER_TOKEN=per_token, BIAS=bias is not None, OUT_SIZE=out_size, IN_SIZE=in_size,
        BLOCK_M=blocks.size, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_experts"])
def _grouped(
    x, weight, bias, out, order, experts, firsts, ends, x_stride, num_experts,
    PER_TOKEN: tl.constexpr, BIAS: tl.constexpr, OUT_SIZE: tl.constexpr, IN_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of one expert × BLOCK_N outputs. Grid: (blocks of outputs, blocks of rows)."""
    block = tl.program_id(1)
    expert = tl.load(experts + block)
    if expert >= num_experts:
        return
    m = tl.load(firsts + block) + tl.arange(0, BLOCK_M)
    real = m < tl.load(ends + expert)
    row = tl.load(order + m, mask=real, other=0).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    matrix = weight + expert.to(tl.int64) * OUT_SIZE * IN_SIZE
    sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, IN_SIZE, BLOCK_K):
        inside = start + k < IN_SIZE
        rows = tl.load(
            x + (row // PER_TOKEN)[:, None] * x_stride + (start + k)[None, :],
            mask=real[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        columns = tl.load(
            matrix + n[None, :] * IN_SIZE + (start + k)[:, None],
            mask=(n < OUT_SIZE)[None, :] & inside[:, None], other=0.0,
        )  # fmt: skip
        sums += tl.dot(rows, columns, input_precision=PRECISION)
    if BIAS:
        sums += tl.load(bias + expert * OUT_SIZE + n, mask=n < OUT_SIZE, other=0.0).to(tl.float32)[None, :]
    place = out + row[:, None] * OUT_SIZE + n[None, :]
    tl.store(place, sums.to(out.dtype.element_ty), mask=real[:, None] & (n < OUT_SIZE)[None, :])
