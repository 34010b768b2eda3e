"""Linears on a CPU: on the compiled kernels (`kernels.native`), or packed by a library (MKL, oneDNN).

`Native…`: float32 or bfloat16 weights in tiles, or int8 with a scale per output. A row's result depends on the row
alone, bit for bit, so `deterministic` needs nothing else. One thread, the linears of 8 layers of a 135M model, ms at
1 / 8 / 32 / 128 / 512 rows (EPYC with AVX512-BF16; `python -m bench linears`):

    MKL, packed (MklPacked)               8.7  15.6  28.9  88.1  319
    NativePacked                          4.9   5.1  17.4  68.0  266
    NativePacked, bfloat16 numbers        2.4   4.5  16.7  67.9  266
    oneDNN, bfloat16 (OneDnnPacked)       4.7   5.1  11.0  37.2  140
    NativeBf16                            2.5   3.0   9.4  35.5  137
    oneDNN, int8 (DynamicInt8)            4.9   5.3   9.2  26.2   94
    NativeInt8                            1.5   1.7   5.2  18.8   73

Without the compiled kernels: oneDNN for bfloat16 if the processor multiplies bfloat16; MKL for float32 if torch has
it; else F.linear, which is slowest at 2 to 32 rows (the same linears, five other processes on two cores, ms at
1 / 2 / 4 / 8 / 16 / 32 / 128 rows):

    F.linear, float32    27  32  63  84  83  125  293
    oneDNN, packed       43  39  40  47  63   97  280
    MKL, packed          28  27  28  31  43   72  214
"""

import torch
from torch import Tensor

from slipway_runtime.kernels import native
from slipway_runtime.kernels.native import Native
from slipway_runtime.layers.matmul import Dense, Matmul
from slipway_runtime.layers.matmul_quantized import rounded_rows
from slipway_runtime.layers.quantized_weight import OneScaleRows

LARGEST_ROW = 2**31 // (255 * 127)  # most inputs whose sum of byte products always fits into an int32


class NativePacked:
    """float32 weights, packed for the compiled kernels.

    Weights that are bfloat16 numbers, as those of most published checkpoints are, are stored as such and become float32
    in registers: half the bytes of a step, and the same result bit for bit.
    """

    __slots__ = ("in_features", "native", "out_features", "packed")
    rows_are_independent = True

    def __init__(self, weight: Tensor, native: Native) -> None:  # (out, in), float32
        self.out_features, self.in_features = weight.shape
        self.native = native
        plain = weight.contiguous()  # named, so that it lives until the call has ended
        rounded = plain.to(torch.bfloat16)
        outputs = native.padded_outputs(self.out_features)
        if torch.equal(rounded.to(torch.float32), plain):
            self.packed = torch.empty(outputs * native.padded_widened_inputs(self.in_features), dtype=torch.bfloat16)
            native.pack_widened(rounded.data_ptr(), self.packed.data_ptr(), *weight.shape)
        else:
            self.packed = torch.empty(outputs * self.in_features)
            native.pack(plain.data_ptr(), self.packed.data_ptr(), *weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        """x: (T, in) -> (T, out)."""
        rows, x = x.shape[0], x.contiguous()
        y = x.new_empty(rows, self.out_features)
        multiply = self.native.linear_widened if self.is_widened else self.native.linear
        multiply(x.data_ptr(), self.packed.data_ptr(), y.data_ptr(), rows, self.in_features, self.out_features)
        return y

    @property
    def is_widened(self) -> bool:
        """Whether the weights are stored as bfloat16."""
        return self.packed.dtype == torch.bfloat16

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, padding included."""
        return self.packed.nbytes


class NativeBf16:
    """bfloat16 weights times float32 rows, packed for the compiled kernels.

    On processors that multiply bfloat16 the rows are rounded to it; on others the weights become float32 in registers.
    """

    __slots__ = ("in_features", "native", "out_features", "packed")
    rows_are_independent = True

    def __init__(self, weight: Tensor, native: Native) -> None:  # (out, in), rounded to bfloat16
        self.out_features, self.in_features = weight.shape
        self.native = native
        padded = native.padded_bf16_outputs(self.out_features) * native.padded_bf16_inputs(self.in_features)
        self.packed = torch.empty(padded, dtype=torch.bfloat16)
        rounded = weight.to(torch.bfloat16).contiguous()
        native.pack_bf16(rounded.data_ptr(), self.packed.data_ptr(), *weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        """x: (T, in) -> (T, out)."""
        assert x.dtype == torch.float32, "the compiled kernels take float32"
        rows, x = x.shape[0], x.contiguous()
        y = x.new_empty(rows, self.out_features)
        scratch = torch.empty(self.native.bf16_scratch(rows, self.in_features), dtype=torch.uint8)
        self.native.linear_bf16(
            x.data_ptr(),
            self.packed.data_ptr(),
            y.data_ptr(),
            scratch.data_ptr(),
            rows,
            self.in_features,
            self.out_features,
        )
        return y

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, padding included."""
        return self.packed.nbytes


class NativeInt8:
    """int8 weights times rows of x quantized to int8, each by its own scale; integer sums are exact."""

    __slots__ = ("in_features", "native", "offsets", "out_features", "packed", "scales")
    rows_are_independent = True

    def __init__(self, weight: Tensor | OneScaleRows, native: Native) -> None:  # (out, in)
        self.out_features, self.in_features = weight.shape
        self.native = native
        codes, scales = rounded_rows(weight, torch.int8)
        padded = native.padded_byte_outputs(self.out_features)
        self.scales = torch.zeros(padded)
        self.scales[: self.out_features] = scales
        self.offsets = torch.zeros(padded, dtype=torch.int32)
        self.packed = torch.empty(padded * native.padded_byte_inputs(self.in_features), dtype=torch.int8)
        native.pack_bytes(codes.data_ptr(), self.packed.data_ptr(), self.offsets.data_ptr(), *weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        """x: (T, in) -> (T, out)."""
        rows, x = x.shape[0], x.contiguous()
        y = x.new_empty(rows, self.out_features)
        scratch = torch.empty(self.native.bytes_scratch(rows, self.in_features), dtype=torch.uint8)
        self.native.linear_bytes(
            x.data_ptr(),
            self.packed.data_ptr(),
            self.scales.data_ptr(),
            self.offsets.data_ptr(),
            y.data_ptr(),
            scratch.data_ptr(),
            rows,
            self.in_features,
            self.out_features,
        )
        return y

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and offsets."""
        return self.packed.nbytes + self.scales.nbytes + self.offsets.nbytes

    @staticmethod
    def fits(weight: Tensor | OneScaleRows, native: Native) -> bool:
        """Whether this processor's int8 kernel supports a matrix of this shape."""
        return native.multiplies_bytes and weight.dtype == torch.float32 and weight.shape[1] <= LARGEST_ROW


_EXPECTED_ROWS = 16  # the batch size that MKL packs for; any other works too


def prepacked(weight: Tensor) -> Matmul:
    """The fastest `Matmul` of this machine for a weight (out, in) of this dtype."""
    if weight.device.type != "cpu":
        return Dense(weight)
    if weight.dtype == torch.float32 and (library := native.library()) is not None:
        return NativePacked(weight, library)
    if weight.dtype == torch.float32 and torch._C.has_mkl:
        return MklPacked(weight)
    if weight.dtype == torch.bfloat16 and computes_bf16():
        return OneDnnPacked(weight)
    return Dense(weight)


def computes_bf16() -> bool:
    """Whether the processor multiplies bfloat16. If not, torch converts to float32, and float32 weights are faster."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


class MklPacked:
    """float32 weights, packed by MKL."""

    __slots__ = ("_no_weight", "_packed", "in_features", "out_features")
    rows_are_independent = False

    def __init__(self, weight: Tensor) -> None:  # (out, in)
        self.out_features, self.in_features = weight.shape
        self._packed = torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), _EXPECTED_ROWS)
        # The operator also takes the original weight, for row counts other than the packed one. `__call__` passes x's
        # own row count as the packed one, so only the original's shape is read, and its numbers need not be kept.
        self._no_weight = weight.new_empty(1).expand(weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        """x: (T, in) -> (T, out)."""
        y: Tensor = torch.ops.mkl._mkl_linear(x, self._packed, self._no_weight, None, x.shape[0])
        return y

    @property
    def nbytes(self) -> int:
        """Bytes of the weights; packing pads by less than a percent."""
        return 4 * self.out_features * self.in_features


class OneDnnPacked:
    """bfloat16 weights, packed by oneDNN."""

    __slots__ = ("_packed", "in_features", "out_features")
    rows_are_independent = False

    def __init__(self, weight: Tensor) -> None:  # (out, in)
        self.out_features, self.in_features = weight.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _EXPECTED_ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        """x: (T, in) -> (T, out)."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, None, "none", [], "")
        return y

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return 2 * self.out_features * self.in_features
