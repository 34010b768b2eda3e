"""Every kernel in plain torch: the definition, and what runs on a CPU."""

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

from slipway_runtime.kernels.reference_attention import paged_attention, plan_attention, rope_and_store
from slipway_runtime.kernels.reference_lora import add_lora, plan_lora
from slipway_runtime.kernels.reference_sampling import draw, penalize

__all__ = [
    "add_lora",
    "draw",
    "paged_attention",
    "penalize",
    "plan_attention",
    "plan_lora",
    "rms_norm",
    "rope_and_store",
    "swiglu",
]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight, the mean in float32, the weight applied in x's type."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype) * weight


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
