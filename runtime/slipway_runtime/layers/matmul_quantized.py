"""Linears with int8 or float8 weights and a scale per output: w ≈ code · scale.

- `WeightOnly` (W8A16) is the reference: dequantize the codes, then a plain matrix product.
- `DynamicInt8` (W8A8) also quantizes the rows of x to int8, each by its own scale, and multiplies bytes with exact
  integer sums (VNNI on a CPU): the fastest that a CPU has. A row's scale depends on no other row.
- `ScaledFp8` does the same in float8 on GPUs that multiply float8.
- `GroupedFp8` (W8A16) has a scale for each group of inputs, as checkpoints in blocks of 128 × 128 do.
- `Int4` (W4A16) has a scale and a zero for each group of inputs; on CPUs torch's int4 kernel multiplies it, on GPUs
  (`GpuInt4`) ours.
Each but the last three takes an unquantized matrix, which it quantizes, or one that the checkpoint has in its format.
"""

import warnings
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

from slipway_runtime.kernels.dispatch import OLDEST, has_float8
from slipway_runtime.kernels.rounding import LARGEST_CODE, SMALLEST_SCALE, quantize
from slipway_runtime.layers.quantized_weight import OneScaleRows, QuantizedWeight


def rounded_rows(weight: Tensor | OneScaleRows, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes (out, in) and scales (out,): those of a quantized weight, or the weight quantized now."""
    if isinstance(weight, OneScaleRows):
        assert weight.codes.dtype == dtype, "codes of another format"
        return weight.codes, weight.scales
    return quantize(weight, dtype)


class WeightOnly:
    """One-byte weights, multiplied in the dtype of x."""

    __slots__ = ("_on_gpu", "codes", "in_features", "out_features", "scales")
    rows_are_independent = False

    def __init__(self, weight: Tensor | OneScaleRows, dtype: torch.dtype) -> None:  # (out, in)
        self.out_features, self.in_features = weight.shape
        # Scales stay in float32: a result is rounded once, and small scales are no float16.
        self.codes, self.scales = rounded_rows(weight, dtype)
        self._on_gpu = weight.device.type == "cuda" and weight.dtype.itemsize == 2
        if self._on_gpu:
            from slipway_runtime.kernels.byte_products import (  # Triton, which a CPU never imports
                compile_times_codes,
                readable,
            )

            compile_times_codes(readable(self.codes), self.scales, weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """x: (T, in) -> (T, out)."""
        if self._on_gpu:
            from slipway_runtime.kernels.byte_products import (  # Triton, which a CPU never imports
                MOST_ROWS,
                readable,
                times_codes,
            )

            if len(x) <= MOST_ROWS:
                return times_codes(x, readable(self.codes), self.scales)
        if x.dtype == torch.float16:  # codes are 100 times as large as weights: their sums would overflow
            return F.linear(x, self.codes.to(x.dtype).mul_(self.scales[:, None]))
        return F.linear(x, self.codes.to(x.dtype)).mul_(self.scales)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes


class DynamicInt8:
    """int8 weights times rows of x quantized to int8, by oneDNN; integer sums are exact."""

    __slots__ = ("_packed", "_scales", "_zeros", "in_features", "out_features")
    rows_are_independent = False

    def __init__(self, weight: Tensor | OneScaleRows) -> None:  # (out, in)
        self.out_features, self.in_features = weight.shape
        codes, self._scales = rounded_rows(weight, torch.int8)
        self._packed = torch.ops.onednn.qlinear_prepack(codes, None)
        self._zeros = torch.zeros(self.out_features, dtype=torch.int32)

    def __call__(self, x: Tensor) -> Tensor:
        """x: (T, in) -> (T, out)."""
        rows = x.float()
        scale = rows.abs().amax(1, keepdim=True).div_(LARGEST_CODE[torch.int8]).clamp_min_(SMALLEST_SCALE)
        codes = (rows / scale).round_().add_(128).to(torch.uint8)  # oneDNN wants unsigned rows, with 128 as their zero
        y: Tensor = torch.ops.onednn.qlinear_pointwise(
            codes, 1.0, 128, self._packed, self._scales, self._zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return y.mul_(scale).to(x.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.out_features * (self.in_features + 4)

    @staticmethod
    def works_here() -> bool:
        """Whether oneDNN's int8 product works on this processor and torch, and is correct."""
        weight = torch.linspace(-1, 1, 48 * 32).view(48, 32).sin()
        x = torch.linspace(-2, 2, 3 * 32).view(3, 32).cos()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                y = DynamicInt8(weight)(x)
        except (RuntimeError, AttributeError, UserWarning):
            return False
        return torch.allclose(y, F.linear(x, weight), atol=0.1)


class ScaledFp8:
    """float8 weights times rows of x quantized to float8, on GPUs that multiply float8; a scale per output and row."""

    __slots__ = ("_codes", "_scales", "in_features", "out_features")
    rows_are_independent = False

    def __init__(self, weight: Tensor | OneScaleRows) -> None:  # (out, in)
        self.out_features, self.in_features = weight.shape
        codes, scales = rounded_rows(weight, torch.float8_e4m3fn)
        self._codes, self._scales = codes, scales[None, :]

    def __call__(self, x: Tensor) -> Tensor:
        """x: (T, in) -> (T, out)."""
        from slipway_runtime.kernels.byte_products import rows_as_float8  # Triton, which a CPU never imports

        codes, scale = rows_as_float8(x)
        y: Tensor = torch._scaled_mm(
            codes, self._codes.t(), scale_a=scale, scale_b=self._scales, out_dtype=torch.bfloat16
        )
        return y.to(x.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self._codes.nbytes + self._scales.nbytes

    @staticmethod
    def fits(weight: Tensor | OneScaleRows) -> bool:
        """Whether this device multiplies float8 matrices of this shape."""
        if weight.device.type != "cuda" or weight.shape[0] % 16 or weight.shape[1] % 16:
            return False
        return has_float8(weight.device)


class GroupedFp8:
    """float8 weights of a checkpoint with a scale for each group of inputs, multiplied in the dtype of x, on GPUs."""

    __slots__ = ("_codes", "_group", "_scales", "in_features", "out_features")
    rows_are_independent = False

    def __init__(self, weight: QuantizedWeight) -> None:  # (out, in)
        from slipway_runtime.kernels.byte_products import (  # Triton, which a CPU never imports
            compile_times_codes,
            readable,
        )

        self.out_features, self.in_features = weight.shape
        self._codes, self._scales, self._group = readable(weight.codes), weight.scales, weight.group
        compile_times_codes(self._codes, self._scales, weight.dtype, self._group)

    def __call__(self, x: Tensor) -> Tensor:
        """x: (T, in) -> (T, out)."""
        from slipway_runtime.kernels.byte_products import MOST_ROWS, numbers_of_codes, times_codes

        if len(x) <= MOST_ROWS:
            return times_codes(x, self._codes, self._scales, self._group)
        return F.linear(x, numbers_of_codes(self._codes, self._scales, self._group, x.dtype))

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self._codes.nbytes + self._scales.nbytes

    @staticmethod
    def fits(weight: QuantizedWeight) -> bool:
        """Whether this is such a weight on a GPU."""
        if weight.codes.dtype != torch.float8_e4m3fn or weight.zeros is not None or weight.order is not None:
            return False
        if weight.device.type != "cuda" or weight.group % 64 or weight.dtype.itemsize != 2:
            return False
        return torch.cuda.get_device_capability(weight.device) >= OLDEST


_GROUPS: Final = (32, 64, 128, 256)
_MIDDLE: Final = 8  # the kernel subtracts it from each code


class Int4:
    """Weight-only int4 on a CPU: w = (code - 8) · scale + zero, by groups.

    Rows of x are rounded to bfloat16, whatever the model's dtype. One thread of a Xeon with AVX512, a matrix of
    4096 × 4096 in groups of 128, ms at 1 / 8 / 32 / 128 rows:

        four bits            0.5   7.2  15.0  89
        F.linear, bfloat16   8.4  11.3  12.8  36
        F.linear, float32     19    47   111  163
    """

    __slots__ = ("_group", "_order", "_packed", "_scales_and_zeros", "in_features", "out_features")
    rows_are_independent = False

    def __init__(self, weight: QuantizedWeight) -> None:
        self.out_features, self.in_features = weight.shape
        self._group = weight.group
        self._order = weight.order
        # (code - zero) · scale = (code - 8) · scale + (8 - zero) · scale
        zeros = (_MIDDLE - (0.0 if weight.zeros is None else weight.zeros)) * weight.scales
        both = torch.stack((weight.scales.T, zeros.T), dim=-1)
        self._scales_and_zeros = both.to(torch.bfloat16).contiguous()  # (groups, out, 2)
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.codes.int(), 1)

    def __call__(self, x: Tensor) -> Tensor:
        """x: (T, in) -> (T, out)."""
        rows = (x if self._order is None else x.index_select(1, self._order)).to(torch.bfloat16).contiguous()
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self._packed, self._group, self._scales_and_zeros)
        return y.to(x.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zeros."""
        return int(self._packed.nbytes + self._scales_and_zeros.nbytes)

    @staticmethod
    def fits(weight: QuantizedWeight) -> bool:
        """Whether this is such a weight on a CPU whose int4 kernel supports its shape."""
        out_features, in_features = weight.shape
        if weight.bits != 4 or weight.group not in _GROUPS or in_features % weight.group or out_features % 16:
            return False
        return weight.device.type == "cpu" and works_here()


class GpuInt4:
    """Weight-only int4 on a GPU: w = (code - zero) · scale, by groups, multiplied in the dtype of x."""

    __slots__ = ("_order", "_weight", "in_features", "out_features")
    rows_are_independent = False

    def __init__(self, weight: QuantizedWeight) -> None:  # (out, in)
        from slipway_runtime.kernels import int4_products  # Triton, which a CPU never imports

        self.out_features, self.in_features = weight.shape
        self._order = weight.order
        self._weight = int4_products.pack(weight.codes, weight.scales, weight.zeros, weight.group)
        int4_products.compile_times_int4(self._weight, weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """x: (T, in) -> (T, out)."""
        from slipway_runtime.kernels.int4_products import MOST_ROWS, numbers_of_int4, times_int4

        rows = x if self._order is None else x.index_select(1, self._order)
        if len(rows) <= MOST_ROWS:
            return times_int4(rows, self._weight)
        return F.linear(rows, numbers_of_int4(self._weight, x.dtype))

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zeros."""
        return self._weight.nbytes

    @staticmethod
    def fits(weight: QuantizedWeight) -> bool:
        """Whether this is such a weight on a GPU."""
        if weight.bits != 4 or weight.group % 32 or weight.shape[1] % weight.group:
            return False
        if weight.device.type != "cuda" or weight.dtype.itemsize != 2:
            return False
        return torch.cuda.get_device_capability(weight.device) >= OLDEST


_checked: list[bool] = []


def works_here() -> bool:
    """Whether the int4 kernel of this processor and torch works and is correct; tried once."""
    if not _checked:
        generator = torch.Generator().manual_seed(0)
        codes = torch.randint(0, 16, (48, 96), generator=generator, dtype=torch.uint8)
        scales, zeros = torch.rand(2, 48, 3, generator=generator)
        weight = QuantizedWeight(codes, scales, 32, torch.float32, zeros=zeros * 16, bits=4)
        x = torch.randn(3, 96, generator=generator)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                y = Int4(weight)(x)
        except (RuntimeError, AttributeError, UserWarning):
            _checked.append(False)
        else:
            exact = x @ weight.dequantized().T
            _checked.append(bool((y - exact).abs().max() < 0.02 * exact.abs().max()))
    return _checked[0]
