"""Linears on the compiled CPU kernels (`kernels.native`): packed float32 weights, or int8 with a scale per output.

A row's result depends on the row alone, bit for bit, so `deterministic` needs nothing else.

One thread, the linears of 8 layers of a 135M model, ms at 1 / 8 / 32 / 128 / 512 rows (Xeon with AVX512-VNNI, a
neighbour on the other core; `python -m bench linears` measures it anew):

    MKL, packed (matmul_prepacked)       12.2  13.7  30.6  89.3  303
    NativePacked                         11.5  13.1  23.6  67.1  245
    oneDNN, int8 (DynamicInt8)           10.9  11.3  15.8  37.1  135
    NativeInt8                            3.5   3.8   7.0  19.8   82
"""

import torch
from torch import Tensor

from slipway_runtime.kernels.native import Native
from slipway_runtime.layers.matmul_quantized import OneScaleRows, rounded_rows

LARGEST_ROW = 2**31 // (255 * 127)  # most inputs whose sum of byte products always fits into an int32


class NativePacked:
    """float32 weights, packed for the compiled kernels."""

    __slots__ = ("in_features", "native", "out_features", "packed")
    rows_are_independent = True

    def __init__(self, weight: Tensor, native: Native) -> None:  # (out, in), float32
        self.out_features, self.in_features = weight.shape
        self.native = native
        self.packed = torch.empty(native.padded_outputs(self.out_features) * self.in_features)
        plain = weight.contiguous()  # named, so that it lives until the call has ended
        native.pack(plain.data_ptr(), self.packed.data_ptr(), *weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        """x: (T, in) -> (T, out)."""
        rows, x = x.shape[0], x.contiguous()
        y = x.new_empty(rows, self.out_features)
        self.native.linear(
            x.data_ptr(),
            self.packed.data_ptr(),
            y.data_ptr(),
            rows,
            self.in_features,
            self.out_features,
        )
        return y

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, the last panel's padding included."""
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
        assert x.dtype == torch.float32, "the compiled kernels look at nothing but addresses"
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
