"""Norms and the activation in plain torch: the definition, and what runs on a CPU."""

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight, the mean in float32, the weight applied in x's type."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x in place, then rms_norm(residual)."""
    return rms_norm(residual.add_(x), weight, eps)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
