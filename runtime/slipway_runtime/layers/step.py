"""What every layer of one step shares."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from slipway_runtime.kernels.dispatch import AttentionPlan


@dataclass(frozen=True, slots=True)
class StepContext:
    """T tokens, computed together."""

    cos: Tensor  # (T, 1, D)
    sin: Tensor
    slots: Tensor  # (T,) where each token's keys and values go
    plan: AttentionPlan
    lora: Any | None = None  # which token has which adapter, understood by the hooks of the linears; None: no token has
