"""Batch-invariant kernels of a CUDA device for `deterministic`: a token's result depends on its own sequence only.

The kernels are those of `gpu`: they compute row by row, in tiles whose shape the model fixes. Only decode, which sums
the splits of a sequence, has another order of sums than prefill; so here every row is attended as a chunk.
"""

from slipway_runtime.kernels.attention_plan import plan_in_one_order as plan_attention
from slipway_runtime.kernels.gpu import (
    add_lora,
    add_rms_norm,
    apply_bitmask,
    choose_experts,
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
