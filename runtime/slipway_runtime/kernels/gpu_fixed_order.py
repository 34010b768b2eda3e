"""Batch-invariant kernels of a CUDA device for `deterministic`: a token's result depends on its own sequence only.

The kernels are those of `gpu`: they compute row by row, in tiles whose shape the model fixes. Only attention, which
sums a sequence in another order in decode than in prefill, has kernels of its own (`ordered_attention`).
"""

from slipway_runtime.kernels.captured_plan import update_static_inputs
from slipway_runtime.kernels.gpu import (
    add_lora,
    add_rms_norm,
    apply_bitmask,
    choose_experts,
    geglu,
    mix_experts,
    penalize_rows,
    plan_lora,
    plan_lora_for_capture,
    rms_norm,
    rope_and_store,
    sample,
    swiglu,
    update_static_lora_inputs,
)
from slipway_runtime.kernels.ordered_attention import chunk_tile, paged_attention
from slipway_runtime.kernels.ordered_plan import (
    chunk_capacity,
    empty_chunks,
    first_rows,
    pack_chunks,
    plan_attention,
    plan_for_capture,
    with_chunks,
)

__all__ = [
    "add_lora",
    "add_rms_norm",
    "apply_bitmask",
    "choose_experts",
    "chunk_capacity",
    "chunk_tile",
    "empty_chunks",
    "first_rows",
    "geglu",
    "mix_experts",
    "pack_chunks",
    "paged_attention",
    "penalize_rows",
    "plan_attention",
    "plan_for_capture",
    "plan_lora",
    "plan_lora_for_capture",
    "rms_norm",
    "rope_and_store",
    "sample",
    "swiglu",
    "update_static_inputs",
    "update_static_lora_inputs",
    "with_chunks",
]
