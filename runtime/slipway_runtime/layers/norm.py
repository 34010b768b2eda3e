"""RMSNorm and LayerNorm layers."""

from typing import Protocol

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
