"""Matrix product y = x Wᵀ: the `Matmul` protocol, and `Dense`. A class stores weights in the form it computes with."""

from collections.abc import Callable
from typing import Protocol

import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

from slipway_runtime.layers.quantized_weight import Weight, dequantized


class Matmul(Protocol):
    """Multiplies rows of x by a weight matrix (out, in)."""

    out_features: int
    in_features: int

    @property
    def rows_are_independent(self) -> bool:
        """Whether a row's result depends on the row alone, bit for bit."""

    def __call__(self, x: Tensor) -> Tensor:
        """x: (T, in) -> (T, out), a new tensor."""

    @property
    def nbytes(self) -> int:
        """Memory of the weights, scales included."""


MakeMatmul = Callable[[Weight], Matmul]  # from a weight (out, in), plain or quantized


class Dense:
    """Unquantized weights and F.linear: the reference for the other classes."""

    __slots__ = ("in_features", "out_features", "weight")
    rows_are_independent = False

    def __init__(self, weight: Weight) -> None:  # (out, in)
        self.out_features, self.in_features = weight.shape
        self.weight = dequantized(weight)

    def __call__(self, x: Tensor) -> Tensor:
        """x: (T, in) -> (T, out)."""
        return F.linear(x, self.weight)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self.weight.nbytes
