"""Linears with int8 or float8 weights and a scale per output: w ≈ code · scale.

- `WeightOnly` (W8A16) is the reference: dequantize the codes, then a plain matrix product.
- `DynamicInt8` (W8A8) also quantizes the rows of x to int8, each by its own scale, and multiplies bytes with exact
  integer sums (VNNI on a CPU): the fastest that a CPU has. A row's scale depends on no other row.
- `ScaledFp8` does the same in float8 on GPUs that multiply float8.
Each takes an unquantized matrix, which it quantizes, or one that the checkpoint holds quantized in the same format.
"""

import warnings
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_SMALLEST_SCALE = 1e-12  # of a row of zeros


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(R, in) -> codes (R, in) and scales (R,), float32: a row's largest value becomes the largest code."""
    x = x.float()
    scale = (x.abs().amax(1) / LARGEST[dtype]).clamp_min_(_SMALLEST_SCALE)
    code = x / scale[:, None]
    return (code.round_() if dtype == torch.int8 else code).to(dtype), scale


@dataclass(frozen=True, slots=True)
class OneScaleRows:
    """A matrix that is already quantized: codes (out, in), scales (out,) in float32, and the model's dtype."""

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """(out, in)."""
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        """Device of the codes."""
        return self.codes.device


def rounded_rows(weight: Tensor | OneScaleRows, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes (out, in) and scales (out,): those of a quantized weight, or the weight quantized now."""
    if isinstance(weight, OneScaleRows):
        assert weight.codes.dtype == dtype, "codes of another format"
        return weight.codes, weight.scales
    return quantize_rows(weight, dtype)


class WeightOnly:
    """One-byte weights, multiplied in the dtype of x."""

    __slots__ = ("_on_gpu", "codes", "in_features", "out_features", "scales")
    rows_are_independent = False

    def __init__(self, weight: Tensor | OneScaleRows, dtype: torch.dtype) -> None:  # (out, in)
        self.out_features, self.in_features = weight.shape
        self.codes, scales = rounded_rows(weight, dtype)
        self.scales = scales.to(weight.dtype)
        self._on_gpu = dtype == torch.int8 and weight.device.type == "cuda" and weight.dtype.itemsize == 2
        if self._on_gpu:
            from slipway_runtime.kernels.byte_products import compile_times_int8  # Triton, which a CPU never imports

            compile_times_int8(self.codes, self.scales)

    def __call__(self, x: Tensor) -> Tensor:
        """x: (T, in) -> (T, out)."""
        if self._on_gpu:
            from slipway_runtime.kernels.byte_products import MOST_ROWS, times_int8  # Triton, which a CPU never imports

            if len(x) <= MOST_ROWS:
                return times_int8(x, self.codes, self.scales)
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
        scale = rows.abs().amax(1, keepdim=True).div_(LARGEST[torch.int8]).clamp_min_(_SMALLEST_SCALE)
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
        return torch.cuda.get_device_capability(weight.device) >= (8, 9)
