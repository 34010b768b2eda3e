"""RMSNorm, SwiGLU and GeGLU in plain torch: the reference, and the fallback on a CPU."""

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight, the mean in float32, the weight applied in x's type.

    Five torch calls, where `F.rms_norm` takes eight on a CPU; for a few rows calls are the whole cost.
    """
    rows = x.float()
    length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    scale = torch.addcmul(rows.new_full((), eps), length, length, value=1 / rows.shape[-1]).rsqrt_()
    normed = rows * scale
    if x.dtype == torch.float32:
        return normed.mul_(weight)
    # Weights in float32 are multiplied before the result is rounded.
    return normed.to(x.dtype) * weight if weight.dtype == x.dtype else normed.mul_(weight).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x in place, then rms_norm(residual)."""
    return rms_norm(residual.add_(x), weight, eps)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def geglu(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, by the tanh form of GELU."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)
