"""Reference implementation of every kernel in plain torch: the definition, and the fallback on a CPU."""

from slipway_runtime.kernels.reference_attention import paged_attention, plan_attention, rope_and_store
from slipway_runtime.kernels.reference_experts import choose_experts, mix_experts
from slipway_runtime.kernels.reference_lora import add_lora, plan_lora
from slipway_runtime.kernels.reference_norms import add_rms_norm, geglu, rms_norm, swiglu
from slipway_runtime.kernels.reference_sampling import apply_bitmask, penalize_rows, sample

__all__ = [
    "add_lora",
    "add_rms_norm",
    "apply_bitmask",
    "choose_experts",
    "geglu",
    "mix_experts",
    "paged_attention",
    "penalize_rows",
    "plan_attention",
    "plan_lora",
    "rms_norm",
    "rope_and_store",
    "sample",
    "swiglu",
]
