"""What serves a CUDA device: Triton where a kernel is written, the reference for the rest.

Importing this imports Triton; `dispatch` does it only when a CUDA device asks.
"""

from slipway_runtime.kernels.attention_plan import plan_attention, plan_to_repeat, refill
from slipway_runtime.kernels.lora import add_lora, plan_lora, plan_lora_to_repeat, refill_lora
from slipway_runtime.kernels.norms import add_rms_norm, rms_norm, swiglu
from slipway_runtime.kernels.paged_attention import paged_attention
from slipway_runtime.kernels.reference_sampling import penalize
from slipway_runtime.kernels.sampling import apply_bitmask, draw
from slipway_runtime.kernels.store_kv import rope_and_store

__all__ = [
    "add_lora",
    "add_rms_norm",
    "apply_bitmask",
    "draw",
    "paged_attention",
    "penalize",
    "plan_attention",
    "plan_lora",
    "plan_lora_to_repeat",
    "plan_to_repeat",
    "refill",
    "refill_lora",
    "rms_norm",
    "rope_and_store",
    "swiglu",
]
