"""Four-bit weight-only matmul (W4A16) on a GPU, in Triton: w = (code - zero) · scale, by groups of inputs.

Tested against `QuantizedWeight.dequantized`.
- pack: two codes a byte. A byte has column j of a group and column j + group / 2, so the inputs that the low codes of
  some bytes multiply lie side by side, and so do those of the high codes.
- times_int4: x times the codes, read once, in half a byte a weight, and converted in registers; the sums are float32,
  those of a group are multiplied by its scale, and a result is rounded once.
- numbers_of_int4: the numbers of the codes, for products of many rows: a library multiplies them, which reads each
  once for all rows.

The compiled kernels are described in docs/gpu-ledger.md; nothing was timed on a GPU yet.
"""

# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
# Triton comes without types, and gives the arguments of a kernel its own.
# ruff: noqa: N803
# Compile-time constants of a kernel are upper case, as everywhere in Triton.

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["MOST_ROWS", "Packed", "compile_times_int4", "numbers_of_int4", "pack", "times_int4"]

# With more rows, a product is compute-bound: then codes become numbers once, and the library multiplies.
MOST_ROWS = 256
# By the number of rows: rows, outputs and bytes of a tile, warps, stages. Of few rows, two tiles of bytes are read at
# once, for more bytes under way; with four a Blackwell runs out of registers.
_TILES = ((16, (16, 32, 64, 4, 5)), (64, (64, 64, 64, 4, 3)), (MOST_ROWS, (128, 64, 32, 8, 4)))
_MOST_PARTS = 2


@dataclass(frozen=True, slots=True)
class Packed:
    """Codes of a matrix (out, in) as the kernels read them."""

    codes: Tensor  # (out, in / 2) uint8
    scales: Tensor  # (groups, out) float32
    zeros: Tensor  # (groups, out) uint8
    group: int  # inputs; a multiple of 32 that divides them

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zeros."""
        return self.codes.nbytes + self.scales.nbytes + self.zeros.nbytes


def pack(codes: Tensor, scales: Tensor, zeros: Tensor | None, group: int) -> Packed:
    """codes: (out, in) uint8, 0 … 15  scales: (out, groups)  zeros: the same, whole numbers; None: 0."""
    outputs, inputs = codes.shape
    halves = codes.view(outputs, inputs // group, 2, group // 2)
    both = (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(outputs, inputs // 2).contiguous()
    wholes = torch.zeros_like(scales) if zeros is None else zeros
    return Packed(both, scales.T.contiguous(), wholes.T.to(torch.uint8).contiguous(), group)


def times_int4(x: Tensor, weight: Packed) -> Tensor:
    """x: (T, in), T ≤ MOST_ROWS -> (T, out), in the type of x."""
    rows, inputs = x.shape
    outputs = weight.codes.shape[0]
    x = x.contiguous()
    y = x.new_empty(rows, outputs)
    block_m, block_n, most_bytes, warps, stages = next(tile for most, tile in _TILES if rows <= most)
    half = weight.group // 2
    block = min(most_bytes, half & -half)  # a tile's bytes lie in one group
    parts = math.gcd(_MOST_PARTS, inputs // 2 // block) if block_m == 16 else 1
    _times_int4[(triton.cdiv(outputs, block_n), triton.cdiv(rows, block_m))](
        x, weight.codes, weight.scales, weight.zeros, y, rows, OUT=outputs, IN=inputs, GROUP=weight.group,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK=block, PARTS=parts, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y


def compile_times_int4(weight: Packed, dtype: torch.dtype) -> None:
    """Compile the kernel for every tile shape of this weight, whichever batch sizes the warm-up runs. dtype: of x."""
    inputs = 2 * weight.codes.shape[1]
    for most, (block_m, *_) in _TILES:
        times_int4(torch.zeros(min(most, block_m), inputs, dtype=dtype, device=weight.codes.device), weight)


def numbers_of_int4(weight: Packed, dtype: torch.dtype) -> Tensor:
    """The numbers of the codes (out, in)."""
    outputs, half = weight.codes.shape
    numbers = weight.codes.new_empty(outputs, 2 * half, dtype=dtype)
    block = 1024
    _numbers_of_int4[(outputs, triton.cdiv(half, block))](
        weight.codes, weight.scales, weight.zeros, numbers, OUT=outputs, HALF_IN=half, HALF=weight.group // 2,
        BLOCK=block,
    )  # fmt: skip
    return numbers


@triton.jit
def _number(code, zero):
    """code - zero, exact. float32.

    The code is put into the fraction of 2 ** 23. A conversion of integers would do the same, of which an A100 does a
    quarter as many a clock as of other instructions: it would be bound by them, not by bytes.
    """
    return (code.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + zero)


@triton.jit(do_not_specialize=["rows"])
def _times_int4(
    x, codes, scales, zeros, y, rows,
    OUT: tl.constexpr, IN: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows × BLOCK_N outputs. Grid: (blocks of outputs, blocks of rows).

    Numbers times rows, not rows times numbers: tensor cores of a Hopper take the first factor from registers, where the
    numbers are, and rows, of which there may be few, are the factor that may be 16 wide.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    real, wanted = (m < rows)[:, None], n < OUT
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    of_row = x + m.to(tl.int64)[:, None] * IN
    of_output = codes + n.to(tl.int64)[:, None] * (IN // 2)
    j = tl.arange(0, BLOCK)
    for start in range(0, IN // 2, PARTS * BLOCK):
        for part in tl.static_range(PARTS):
            first = start + part * BLOCK
            group = first // (GROUP // 2)
            k = group * GROUP + first % (GROUP // 2) + j
            low = tl.load(of_row + k[None, :], mask=real, other=0.0)
            high = tl.load(of_row + (k + GROUP // 2)[None, :], mask=real, other=0.0)
            both = tl.load(of_output + (first + j)[None, :], mask=wanted[:, None], other=0)
            zero = tl.load(zeros + group * OUT + n, mask=wanted, other=0).to(tl.float32)[:, None]
            scale = tl.load(scales + group * OUT + n, mask=wanted, other=0.0)
            product = tl.dot(_number(both & 15, zero).to(low.dtype), tl.trans(low))
            product = tl.dot(_number(both >> 4, zero).to(high.dtype), tl.trans(high), product)
            acc += product * scale[:, None]
    place = y + m.to(tl.int64)[:, None] * OUT + n[None, :]
    tl.store(place, tl.trans(acc).to(y.dtype.element_ty), mask=real & wanted[None, :])


@triton.jit
def _numbers_of_int4(
    codes, scales, zeros, numbers,
    OUT: tl.constexpr, HALF_IN: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """HALF_IN bytes a row, HALF of each group. Grid: (outputs, blocks of bytes)."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = j < HALF_IN
    both = tl.load(codes + row * HALF_IN + j, mask=inside, other=0)
    group = j // HALF
    zero = tl.load(zeros + group * OUT + row, mask=inside, other=0).to(tl.float32)
    scale = tl.load(scales + group * OUT + row, mask=inside, other=0.0)
    place = numbers + row * (2 * HALF_IN) + group * (2 * HALF) + j % HALF
    tl.store(place, (_number(both & 15, zero) * scale).to(numbers.dtype.element_ty), mask=inside)
    tl.store(place + HALF, (_number(both >> 4, zero) * scale).to(numbers.dtype.element_ty), mask=inside)
