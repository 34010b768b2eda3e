"""RMSNorm layer."""

from torch import Tensor

from slipway_runtime.kernels.dispatch import Kernels


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
