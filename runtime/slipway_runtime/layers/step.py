"""Step context: the inputs that all layers of one step share (rotary tables, slot mapping, attention and LoRA plan)."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from slipway_runtime.kernels.dispatch import AttentionPlan


@dataclass(frozen=True, slots=True)
class StepContext:
    """Inputs of one step of T tokens, shared by all layers."""

    cos: Tensor  # (T, 1, D)
    sin: Tensor
    slots: Tensor  # (T,) slot mapping: where the cache stores each token's keys and values
    plan: AttentionPlan
    lora: Any | None = None  # the LoRA plan of the step, for the hooks of the linears; None: no token has an adapter
    # Tokens whose adapters change experts, by adapter slot: (slot, (n,) indices of tokens).
    expert_rows: tuple[tuple[int, Tensor], ...] = ()
