"""Kernels of a CUDA device: Triton kernels, and the reference for the rest.

Importing this imports Triton; `dispatch` imports it for CUDA devices only.
"""

from slipway_runtime.kernels.captured_plan import (
    chunk_capacity,
    empty_chunks,
    first_rows,
    pack_chunks,
    plan_for_capture,
    with_chunks,
)
from slipway_runtime.kernels.decode_work import plan_attention, update_static_inputs
from slipway_runtime.kernels.expert_rows import choose_experts
from slipway_runtime.kernels.experts import mix_experts
from slipway_runtime.kernels.lora import add_lora, plan_lora, plan_lora_for_capture, update_static_lora_inputs
from slipway_runtime.kernels.norms import add_rms_norm, geglu, rms_norm, swiglu
from slipway_runtime.kernels.paged_attention import chunk_tile, paged_attention
from slipway_runtime.kernels.penalties import penalize_rows
from slipway_runtime.kernels.sampling import apply_bitmask, sample
from slipway_runtime.kernels.store_kv import rope_and_store

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
