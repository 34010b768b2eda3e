"""Fused mixture of experts (MoE) on a GPU, in Triton. Tested against `reference.mix_experts`.

There are T × K rows, one per token and chosen expert. They are sorted by expert, and cut into blocks of BLOCK_M rows of
one expert; a program computes BLOCK_N outputs of a block. The number of blocks of an expert is known on the device
alone: the launch has programs for the most blocks possible, and programs without a block exit at once. So the host
reads nothing back, and CUDA graphs can capture the step.

Quantized matrices are read as they are in the checkpoint, and become numbers in registers. One-byte codes are
multiplied as they are, and the sum over a tile of columns, which lie in one group, by the group's factor. In MXFP4 a
byte has the codes of two neighbouring columns, so a tile of bytes is multiplied twice: its low halves by the even
columns of x, its high halves by the odd ones.

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
from slipway_runtime.kernels.reference_experts import ByteMatrices, ExpertWeights, Matrices, Mxfp4Matrices

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


def _multiply(
    x: Tensor, weight: Matrices, bias: Tensor | None, blocks: Blocks, num_rows: int, per_token: int
) -> Tensor:
    """Row r of the result is row r // per_token of x times the matrix of its expert. weight: (E, out, in)."""
    num_experts, out_size, in_size = weight.shape
    assert x.stride(1) == 1, "the elements of a row lie side by side"
    codes, scales = (weight, weight) if isinstance(weight, Tensor) else (weight.codes, weight.scales)
    group = weight.group if isinstance(weight, ByteMatrices) else 0
    assert group % BLOCK_K == 0 or group == in_size, "a tile of columns lies in one group"
    assert codes.is_contiguous(), "the matrices are addressed without strides"
    assert scales.is_contiguous(), "and so are their scales"
    out = x.new_empty(num_rows, out_size)
    grid = (triton.cdiv(out_size, BLOCK_N), len(blocks.experts))
    _grouped[grid](
        x, codes, scales, out if bias is None else bias, out, blocks.order, blocks.experts, blocks.firsts, blocks.ends,
        x.stride(0), num_experts, PER_TOKEN=per_token, BIAS=bias is not None, OUT_SIZE=out_size, IN_SIZE=in_size,
        BLOCK_M=blocks.size, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, MXFP4=isinstance(weight, Mxfp4Matrices), GROUP=group,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_experts"])
def _grouped(
    x, weight, scales, bias, out, order, experts, firsts, ends, x_stride, num_experts,
    PER_TOKEN: tl.constexpr, BIAS: tl.constexpr, OUT_SIZE: tl.constexpr, IN_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, MXFP4: tl.constexpr,
    GROUP: tl.constexpr,
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
    own = x + (row // PER_TOKEN)[:, None] * x_stride
    first = expert.to(tl.int64) * OUT_SIZE  # row of the matrix, among those of all experts
    sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, IN_SIZE, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        rows = tl.load(own + k[None, :], mask=real[:, None] & (k < IN_SIZE)[None, :], other=0.0)
        if MXFP4:
            byte, group = start // 2 + tl.arange(0, BLOCK_K // 2), start // 32 + tl.arange(0, BLOCK_K // 32)
            both = tl.load(
                weight + (first + n)[None, :] * (IN_SIZE // 2) + byte[:, None],
                mask=(n < OUT_SIZE)[None, :] & (byte < IN_SIZE // 2)[:, None], other=0,
            )  # fmt: skip
            scale = tl.load(
                scales + (first + n)[None, :] * (IN_SIZE // 32) + group[:, None],
                mask=(n < OUT_SIZE)[None, :] & (group < IN_SIZE // 32)[:, None], other=0,
            )  # fmt: skip
            scale = tl.broadcast_to(scale[:, None, :], (BLOCK_K // 32, 16, BLOCK_N)).reshape(BLOCK_K // 2, BLOCK_N)
            even, odd = tl.split(rows.reshape(BLOCK_M, BLOCK_K // 2, 2))
            sums += tl.dot(even, _mxfp4(both & 15, scale).to(rows.dtype), input_precision=PRECISION)
            sums += tl.dot(odd, _mxfp4(both >> 4, scale).to(rows.dtype), input_precision=PRECISION)
        else:
            columns = tl.load(
                weight + (first + n)[None, :] * IN_SIZE + k[:, None],
                mask=(n < OUT_SIZE)[None, :] & (k < IN_SIZE)[:, None], other=0.0,
            )  # fmt: skip
            if GROUP:
                scale = tl.load(
                    scales + (first + n) * tl.cdiv(IN_SIZE, GROUP) + start // GROUP, mask=n < OUT_SIZE, other=0.0
                )
                sums += tl.dot(rows, columns.to(rows.dtype), input_precision=PRECISION) * scale[None, :]
            else:
                sums += tl.dot(rows, columns, input_precision=PRECISION)
    if BIAS:
        sums += tl.load(bias + expert * OUT_SIZE + n, mask=n < OUT_SIZE, other=0.0).to(tl.float32)[None, :]
    place = out + row[:, None] * OUT_SIZE + n[None, :]
    tl.store(place, sums.to(out.dtype.element_ty), mask=real[:, None] & (n < OUT_SIZE)[None, :])


@triton.jit
def _mxfp4(code, scale):
    """The numbers of E2M1 codes (a sign, two bits of exponent, one of fraction), times 2 ** (scale - 127). float32."""
    code = code.to(tl.int32)
    # The three low bits as the lowest of an exponent and the highest of a fraction: 2 ** 126 times too small, for
    # subnormals too. A power of two below the normal ones is a fraction alone.
    size = ((code & 7) << 22).to(tl.float32, bitcast=True) * 85070591730234615865843651857942052864.0
    power = tl.where(scale == 0, 1 << 22, scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return tl.where(code >= 8, -size, size) * power
