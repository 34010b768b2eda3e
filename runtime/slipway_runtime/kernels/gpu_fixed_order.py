"""What serves a CUDA device where a token's result may depend on nothing but its own sequence.

The kernels are those of `gpu`: they compute row by row, in tiles whose shape the model fixes. Only decode, which sums
the splits of a sequence, has another order than a prompt; so here every row is attended as a chunk.
"""

from slipway_runtime.kernels.attention_plan import plan_in_one_order as plan_attention
from slipway_runtime.kernels.gpu import (
    add_lora,
    add_rms_norm,
    apply_bitmask,
    geglu,
    mix_experts,
    paged_attention,
    penalize_rows,
    plan_lora,
    rms_norm,
    rope_and_store,
    sample,
    swiglu,
)

__all__ = [
    "add_lora",
    "add_rms_norm",
    "apply_bitmask",
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
