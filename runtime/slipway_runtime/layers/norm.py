"""RMSNorm and LayerNorm layers."""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

from slipway_runtime.kernels.dispatch import Kernels


class Norm(Protocol):
    """Norm of the last dimension."""

    def __call__(self, x: Tensor) -> Tensor:
        """x: (…, H) -> (…, H)."""

    def after_adding(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add x to `residual` in place, and return the norm of the sum. x, residual: (T, H) -> (T, H)."""


class RMSNorm:
    """Scales the last dimension to unit root mean square, then by a learned weight."""

    __slots__ = ("_kernels", "eps", "weight")

    def __init__(self, weight: Tensor, eps: float, kernels: Kernels) -> None:
        self.weight = weight
        self.eps = eps
        self._kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        """x: (…, H) -> (…, H)."""
        return self._kernels.rms_norm(x, self.weight, self.eps)

    def after_adding(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add x to `residual` in place, and return the norm of the sum. x, residual: (T, H) -> (T, H)."""
        return self._kernels.add_rms_norm(x, residual, self.weight, self.eps)


class SplitRMSNorm:
    """RMSNorm of a dimension that is divided between ranks: the squares are summed over all of them."""

    __slots__ = ("_copies", "_eps", "_reduce", "_size", "_weight")

    def __init__(
        self, weight: Tensor, eps: float, reduce: Callable[[Tensor], Tensor], *, size: int, copies: int
    ) -> None:
        """weight: the rank's part  size: of the whole dimension  copies: ranks that have the same part."""
        self._weight = weight
        self._eps = eps
        self._reduce = reduce
        self._size = size
        self._copies = copies

    def __call__(self, x: Tensor) -> Tensor:
        """x: (T, own part) -> the same shape. All ranks must call it with equal T."""
        rows = x.float()
        squares = self._reduce(rows.square().sum(-1, keepdim=True)) / self._copies
        return (rows * torch.rsqrt(squares / self._size + self._eps)).to(x.dtype) * self._weight


class LayerNorm:
    """Subtracts the mean of the last dimension, scales it to unit variance, then by a learned weight."""

    __slots__ = ("_bias", "_eps", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        """weight: (H,), or (heads, D) of a norm of each head."""
        self._weight = weight
        self._bias = bias
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """x: (…, H) or (…, heads, D) -> the same shape."""
        if self._weight.dim() == 1:
            return F.layer_norm(x, self._weight.shape, self._weight, self._bias, self._eps)
        return F.layer_norm(x, self._weight.shape[1:], eps=self._eps) * self._weight

    def after_adding(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add x to `residual` in place, and return the norm of the sum. x, residual: (T, H) -> (T, H)."""
        return self(residual.add_(x))
