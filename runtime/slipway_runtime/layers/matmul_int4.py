"""int4 weights (W4A16) with a scale and a zero per group of inputs, multiplied by torch's int4 kernels.

On a CPU rows of x are rounded to bfloat16, whatever the model's dtype. One thread of a Xeon with AVX512, a matrix of
4096 × 4096 in groups of 128, ms at 1 / 8 / 32 / 128 rows:

    four bits            0.5   7.2  15.0  89
    F.linear, bfloat16   8.4  11.3  12.8  36
    F.linear, float32     19    47   111  163

On a GPU the kernel is tinygemm's, for bfloat16 from compute capability 8.0 on; it has not been run here on a GPU.
"""

import warnings
from typing import Final

import torch
from torch import Tensor

from slipway_runtime.layers.quantized_weight import QuantizedWeight

_GROUPS: Final = (32, 64, 128, 256)
_INNER_TILES: Final = 8  # of 16 inputs, that a GPU's thread block reads together
_MIDDLE: Final = 8  # the kernels subtract it from each code


class Int4:
    """Weight-only int4: w = (code - 8) · scale + zero, by groups."""

    __slots__ = ("_group", "_on_cpu", "_order", "_packed", "_scales_and_zeros", "in_features", "out_features")
    rows_are_independent = False

    def __init__(self, weight: QuantizedWeight) -> None:
        self.out_features, self.in_features = weight.shape
        self._group = weight.group
        self._order = weight.order
        self._on_cpu = weight.device.type == "cpu"
        # (code - zero) · scale = (code - 8) · scale + (8 - zero) · scale
        zeros = (_MIDDLE - (0.0 if weight.zeros is None else weight.zeros)) * weight.scales
        both = torch.stack((weight.scales.T, zeros.T), dim=-1)
        self._scales_and_zeros = both.to(torch.bfloat16).contiguous()  # (groups, out, 2)
        if self._on_cpu:
            self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.codes.int(), 1)
        else:
            pairs = (weight.codes[:, ::2] << 4 | weight.codes[:, 1::2]).contiguous()
            self._packed = torch.ops.aten._convert_weight_to_int4pack(pairs, _INNER_TILES)

    def __call__(self, x: Tensor) -> Tensor:
        """x: (T, in) -> (T, out)."""
        rows = (x if self._order is None else x.index_select(1, self._order)).to(torch.bfloat16).contiguous()
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu if self._on_cpu else torch.ops.aten._weight_int4pack_mm
        y: Tensor = multiply(rows, self._packed, self._group, self._scales_and_zeros)
        return y.to(x.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zeros."""
        return int(self._packed.nbytes + self._scales_and_zeros.nbytes)

    @staticmethod
    def fits(weight: QuantizedWeight) -> bool:
        """Whether this device's int4 kernel supports a matrix of this format and shape."""
        out_features, in_features = weight.shape
        if weight.bits != 4 or weight.group not in _GROUPS or in_features % weight.group or out_features % 16:
            return False
        if weight.device.type == "cpu":
            return works_here()
        capable = weight.device.type == "cuda" and torch.cuda.get_device_capability(weight.device) >= (8, 0)
        return capable and weight.dtype == torch.bfloat16 and in_features % (16 * _INNER_TILES) == 0


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
