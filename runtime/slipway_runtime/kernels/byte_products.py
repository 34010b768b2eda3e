"""One-byte weight-only matmul (W8A16) and float8 quantization of rows on a GPU, in Triton.

Tested against `layers.matmul_quantized`.
- times_codes: x times int8 or float8 codes, read once as bytes and converted in registers; the sums are float32,
  multiplied by a scale per output, or per output and group of inputs, and rounded once, so float16 does not overflow.
  A decode step reads half the bytes of a product in 16 bits; converting the codes beforehand reads and writes five
  bytes a weight, 2.5 times as many.
- numbers_of_codes: the codes of groups as numbers, for products of many rows.
- readable: float8 codes as a GPU reads them; before compute capability 8.9 as bytes, which are decoded by shifts.
- rows_as_float8: quantizes rows of x to float8 with a scale each, in one launch; with torch operators it took six.

The compiled kernels are described in docs/gpu-ledger.md; nothing was timed on a GPU yet.
"""

# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
# Triton comes without types, and gives the arguments of a kernel its own.
# ruff: noqa: N803
# Compile-time constants of a kernel are upper case, as everywhere in Triton.

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipway_runtime.kernels.dispatch import has_float8
from slipway_runtime.kernels.rounding import LARGEST_CODE, SMALLEST_SCALE

_LARGEST = LARGEST_CODE[torch.float8_e4m3fn]

__all__ = ["MOST_ROWS", "compile_times_codes", "numbers_of_codes", "readable", "rows_as_float8", "times_codes"]

# With more rows, a product is compute-bound: then codes are converted once, and the library multiplies.
MOST_ROWS = 256
# By the number of rows: rows, outputs and inputs of a tile, warps, stages. Tiles have few outputs, so that a decode
# step of few rows has as many programs as there are multiprocessors.
_TILES = ((16, (16, 32, 256, 4, 4)), (64, (64, 64, 128, 4, 4)), (MOST_ROWS, (128, 64, 64, 8, 4)))


def readable(codes: Tensor) -> Tensor:
    """The codes, in the dtype in which the kernels of their device read them: the same memory."""
    return codes.view(torch.uint8) if codes.dtype == torch.float8_e4m3fn and not has_float8(codes.device) else codes


def times_codes(x: Tensor, codes: Tensor, scales: Tensor, group: int = 0) -> Tensor:
    """x: (T, in), T ≤ MOST_ROWS  codes: (out, in), `readable` -> (T, out), in the type of x.

    scales: (out,), or (out, groups) for groups of so many inputs, a multiple of 64.
    """
    rows, inputs = x.shape
    outputs = codes.shape[0]
    x = x.contiguous()
    assert codes.is_contiguous(), "a row of codes lies side by side"
    y = x.new_empty(rows, outputs)
    block_m, block_n, block_k, warps, stages = next(tile for most, tile in _TILES if rows <= most)
    block_k = min(block_k, group & -group) if group else block_k  # a tile's inputs lie in one group
    _times_codes[(triton.cdiv(outputs, block_n), triton.cdiv(rows, block_m))](
        x, codes, scales, y, rows, OUT=outputs, IN=inputs, GROUP=group, BLOCK_M=block_m, BLOCK_N=block_n,
        BLOCK_K=block_k, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y


def compile_times_codes(codes: Tensor, scales: Tensor, dtype: torch.dtype, group: int = 0) -> None:
    """Compile the kernel for every tile shape of these weights, whichever batch sizes the warm-up runs. dtype: of x."""
    for most, (block_m, *_) in _TILES:
        x = torch.zeros(min(most, block_m), codes.shape[1], dtype=dtype, device=codes.device)
        times_codes(x, codes, scales, group)


def numbers_of_codes(codes: Tensor, scales: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """codes: (out, in), `readable`  scales: (out, groups) -> (out, in)."""
    outputs, inputs = codes.shape
    numbers = codes.new_empty(outputs, inputs, dtype=dtype)
    block = 1024
    _numbers[(outputs, triton.cdiv(inputs, block))](codes, scales, numbers, IN=inputs, GROUP=group, BLOCK=block)
    return numbers


def rows_as_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: (T, in) -> codes (T, in) float8_e4m3fn and scales (T, 1), float32: the largest becomes the largest code."""
    x = x.contiguous()
    rows, inputs = x.shape
    codes = torch.empty(rows, inputs, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    _rows_as_float8[(rows,)](
        x, codes, scales, LARGEST=_LARGEST, SMALLEST=SMALLEST_SCALE, IN=inputs, BLOCK=triton.next_power_of_2(inputs),
        num_warps=8,
    )  # fmt: skip
    return codes, scales


@triton.jit
def _decoded(code):
    """The numbers of int8 or float8 codes, or of bytes that hold float8_e4m3fn. float32."""
    if code.dtype == tl.uint8:
        # Four bits of exponent and three of fraction, put to their places in a float16, whose exponent has five: what
        # they mean there is 2 ** 8 times too small, subnormals included. A weight is no NaN.
        wide = code.to(tl.uint16)
        half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
        number = half.to(tl.float32) * 256.0
    else:
        number = code.to(tl.float32)
    return number


@triton.jit(do_not_specialize=["rows"])
def _times_codes(
    x, codes, scales, y, rows,
    OUT: tl.constexpr, IN: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of outputs, blocks of rows)."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    of_row = x + m.to(tl.int64)[:, None] * IN
    of_output = codes + n.to(tl.int64)[:, None] * IN
    for start in range(0, IN, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(of_row + k[None, :], mask=(m < rows)[:, None] & (k < IN)[None, :], other=0.0)
        b = tl.load(of_output + k[None, :], mask=(n < OUT)[:, None] & (k < IN)[None, :], other=0.0)
        product = tl.dot(a, tl.trans(_decoded(b).to(a.dtype)))
        if GROUP:
            own = tl.load(scales + n * tl.cdiv(IN, GROUP) + start // GROUP, mask=n < OUT, other=0.0)
            acc += product * own.to(tl.float32)[None, :]
        else:
            acc += product
    if not GROUP:
        acc *= tl.load(scales + n, mask=n < OUT, other=0.0).to(tl.float32)[None, :]
    place = y + m.to(tl.int64)[:, None] * OUT + n[None, :]
    tl.store(place, acc.to(y.dtype.element_ty), mask=(m < rows)[:, None] & (n < OUT)[None, :])


@triton.jit
def _numbers(codes, scales, numbers, IN: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: (outputs, blocks of inputs)."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    code = _decoded(tl.load(codes + row * IN + k, mask=k < IN, other=0.0))
    scale = tl.load(scales + row * tl.cdiv(IN, GROUP) + k // GROUP, mask=k < IN, other=0.0)
    tl.store(numbers + row * IN + k, (code * scale).to(numbers.dtype.element_ty), mask=k < IN)


@triton.jit
def _rows_as_float8(
    x, codes, scales, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, IN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One row, held in registers. Grid: (T,)."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    values = tl.load(x + row * IN + k, mask=k < IN, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(values), 0), LARGEST), SMALLEST)
    tl.store(scales + row, scale)
    tl.store(codes + row * IN + k, tl.div_rn(values, scale).to(codes.dtype.element_ty), mask=k < IN)
