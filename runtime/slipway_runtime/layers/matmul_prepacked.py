"""Linears with weights prepacked for a CPU library (MKL, oneDNN). Unpacked float32 is slowest at 2 to 32 rows of x.

One thread, the linears of 8 layers of a 135M model, ms at 1 / 2 / 4 / 8 / 16 / 32 / 128 rows (Xeon with
AVX512-VNNI and without BF16, five other processes on two cores):

    F.linear, float32    27  32  63  84  83  125  293
    oneDNN, packed       43  39  40  47  63   97  280
    MKL, packed          28  27  28  31  43   72  214

Hence: oneDNN for bfloat16 if the processor multiplies bfloat16; for float32 the compiled kernels (`matmul_native`), or
MKL if they are not built and torch has MKL; else F.linear.
"""

import torch
from torch import Tensor

from slipway_runtime.kernels import native
from slipway_runtime.layers.matmul import Dense, Matmul
from slipway_runtime.layers.matmul_native import NativePacked

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
