"""Kernels of a CPU for float32: the compiled kernels (`native`), and the reference for the rest.

They compute what the reference computes. Also, a row's result depends on its own sequence alone, bit for bit, so
`deterministic` uses them too, at no cost.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipway_runtime.kernels import kv_pages, native
from slipway_runtime.kernels.reference_attention import HeadNorms, Scoring
from slipway_runtime.kernels.reference_experts import choose_experts, mix_experts
from slipway_runtime.kernels.reference_lora import LoraWeights
from slipway_runtime.kernels.reference_sampling import apply_bitmask, penalize_rows, sample
from slipway_runtime.kernels.upload import Ints

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

QUERIES = 16  # tokens of a sequence per tile, which share each read of a key; as in attention.cpp
TOKENS = 4  # tokens of an adapter per tile, which share each read of its matrices; as in lora.cpp
KINDS = {torch.float32: 0, torch.int8: 1, torch.float8_e4m3fn: 2, torch.bfloat16: 3}  # of a cache; as in attention.cpp

_found = native.library()
assert _found is not None, "dispatch asks for this only where there is a library"
_native = _found


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight."""
    assert x.dtype == torch.float32, "the compiled kernels take float32"
    x = x.contiguous()  # named, so that it lives until the call has ended
    out = torch.empty_like(x)
    size = x.shape[-1]
    _native.rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // size, size, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x in place, then rms_norm(residual). Both contiguous."""
    out = torch.empty_like(residual)
    rows, size = x.shape
    _native.add_rms_norm(x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, size, eps)
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up."""
    rows, both = gate_up.shape
    out = gate_up.new_empty(rows, both // 2)
    _native.swiglu(gate_up.data_ptr(), out.data_ptr(), rows, both // 2)
    return out


def geglu(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, by the tanh form of GELU."""
    rows, both = gate_up.shape
    out = gate_up.new_empty(rows, both // 2)
    _native.geglu(gate_up.data_ptr(), out.data_ptr(), rows, both // 2)
    return out


def rope_and_store(
    qkv: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor, num_q_heads: int, norms: HeadNorms = None
) -> Tensor:
    """Norm and rotate queries and keys in place, write keys and values into their slots, return the queries."""
    assert qkv.dtype == torch.float32, "the compiled kernels take float32"
    num_tokens, num_heads, head_dim = qkv.shape
    num_kv_heads = (num_heads - num_q_heads) // 2
    plain = not kv_pages.is_quantized(cache.dtype)
    of_queries, of_keys, eps = norms if norms is not None else (None, None, 0.0)
    _native.rope_and_store(
        qkv.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        cos.stride(0),
        cache.data_ptr() if plain else None,
        KINDS[cache.dtype],
        slots.data_ptr(),
        None if of_queries is None else of_queries.data_ptr(),
        None if of_keys is None else of_keys.data_ptr(),
        eps,
        num_tokens,
        num_q_heads,
        num_kv_heads,
        head_dim,
        kv_pages.block_size_of(cache, head_dim),
    )
    if not plain:
        kv_pages.store(qkv[:, num_q_heads:].view(num_tokens, 2, num_kv_heads, head_dim), cache, slots)
    return qkv[:, :num_q_heads]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Attention plan of one step, shared by all layers."""

    tiles: Tensor  # (N, 3) first token, number of tokens (at most QUERIES, adjacent), row
    tables: Tensor  # (R, blocks) block tables
    positions: Tensor  # (T,) of the tokens in their sequences
    num_scores: int  # of one head: the work
    block_size: int
    memo: dict[object, Any] = field(default_factory=dict)  # of `cpu_layer`, for the time of the step


def plan_attention(
    num_computed: Ints, num_new: Ints, block_tables: Ints, block_size: int, like: Tensor
) -> AttentionPlan:
    """Make the attention plan of a step, shared by all layers."""
    starts = np.cumsum(num_new) - num_new
    rows = np.arange(len(num_new))
    if int(num_new.max()) == 1:
        tiles, positions = np.stack((starts, num_new, rows), axis=1), num_computed
    else:
        per_row = -(-num_new // QUERIES)
        of_row = np.repeat(rows, per_row)
        done = (np.arange(len(of_row)) - np.repeat(np.cumsum(per_row) - per_row, per_row)) * QUERIES
        tiles = np.stack((starts[of_row] + done, np.minimum(QUERIES, num_new[of_row] - done), of_row), axis=1)
        positions = np.arange(int(num_new.sum())) + np.repeat(num_computed - starts, num_new)
    return AttentionPlan(
        tiles=torch.from_numpy(np.ascontiguousarray(tiles)),
        tables=torch.from_numpy(np.ascontiguousarray(block_tables)),
        positions=torch.from_numpy(positions),
        num_scores=int(positions.sum()) + len(positions),
        block_size=block_size,
    )


def paged_attention(
    q: Tensor,
    kv: Tensor,
    cache: Tensor,
    plan: AttentionPlan,
    scale: float,
    window: int | None = None,
    scoring: Scoring | None = None,
) -> Tensor:
    """softmax(q·k * scale) · v over the tokens of the same sequence up to the query's own, the last `window` of them.

    q: (T, Hq, D), heads side by side -> (T, Hq * D). `kv`, this step's, is in the cache already.
    """
    assert cache.shape[1] == 2, "a cache of latents, which these kernels would read beyond"
    num_tokens, num_heads, head_dim = q.shape
    out = q.new_empty(num_tokens, num_heads * head_dim)
    sinks = None if scoring is None or scoring.sinks is None else scoring.sinks.data_ptr()
    _native.attend_pages(
        q.data_ptr(),
        q.stride(0),
        cache.data_ptr(),
        KINDS[cache.dtype],
        out.data_ptr(),
        plan.tiles.data_ptr(),
        len(plan.tiles),
        plan.tables.data_ptr(),
        plan.tables.shape[1],
        plan.positions.data_ptr(),
        num_heads,
        cache.shape[2],
        head_dim,
        plan.block_size,
        scale,
        window or 0,
        0.0 if scoring is None else scoring.softcap or 0.0,
        sinks,
        plan.num_scores,
    )
    return out


@dataclass(frozen=True, slots=True)
class LoraPlan:
    """LoRA plan of one step, shared by all layers: the tokens of each adapter slot."""

    slots: int  # bit s: any token has slot s
    tiles: Tensor  # (N, 2 + TOKENS) slot, number of tokens, their indices


def plan_lora(token_slots: Ints, num_slots: int, like: Tensor, *, tile: int = 0) -> LoraPlan:
    """Group the tokens of a step by slot; -1: no adapter. A token is computed alike in any group, so `tile` is free."""
    tiles = []
    for slot in np.unique(token_slots[token_slots >= 0]).tolist():
        members = np.flatnonzero(token_slots == slot)
        own = np.zeros((-(-len(members) // TOKENS), 2 + TOKENS), dtype=np.int64)
        own[:, 0], own[:, 1] = slot, TOKENS
        own[-1, 1] = len(members) - TOKENS * (len(own) - 1)
        own[:, 2:] = np.pad(members, (0, len(own) * TOKENS - len(members))).reshape(-1, TOKENS)
        tiles.append(own)
    slots = sum(1 << int(own[0, 0]) for own in tiles)
    return LoraPlan(slots, torch.from_numpy(np.concatenate(tiles) if tiles else np.zeros((0, 2 + TOKENS), np.int64)))


def add_lora(x: Tensor, y: Tensor, weights: LoraWeights, plan: LoraPlan) -> None:
    """y += the LoRA output of each token's adapter, in place. x: (T, in)  y: (T, out), contiguous."""
    if not weights.slots & plan.slots:
        return  # none of the step's adapters changes this layer
    num_parts, max_rank, num_slots, in_size = weights.a.shape
    x = x.contiguous()
    _native.add_lora(
        x.data_ptr(),
        y.data_ptr(),
        weights.a.data_ptr(),
        weights.b.data_ptr(),
        weights.columns_on_device.data_ptr(),
        weights.ranks_on_device.data_ptr(),
        num_parts,
        max_rank,
        num_slots,
        in_size,
        weights.b.shape[2],
        plan.tiles.data_ptr(),
        len(plan.tiles),
    )
