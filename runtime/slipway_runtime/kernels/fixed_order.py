"""Batch-invariant kernels for `deterministic`: a token's result depends on its own sequence only. In plain torch.

A sum of floats depends on its order, and libraries choose the order by the shape of a call. So every shape here is
fixed: attention takes QUERIES positions (an aligned tile, even if a step computes only some of them) times KEYS
positions at a time, from the first tile to the last, with a running maximum. Decode, chunked prefill and verification
of drafts then compute the same bits for a token, and the other positions of a tile add exact zeros.

The rest of the reference works row by row and is the same here. Sums are float32, whatever the model's type.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

from slipway_runtime.kernels import kv_pages
from slipway_runtime.kernels.reference import (
    add_lora,
    add_rms_norm,
    apply_bitmask,
    choose_experts,
    geglu,
    mix_experts,
    penalize_rows,
    plan_lora,
    rms_norm,
    rope_and_store,
    sample,
    swiglu,
)
from slipway_runtime.kernels.reference_attention import Scoring
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

QUERIES = 8  # positions of a tile of queries
KEYS = 64  # positions of a tile of keys, rounded up to whole blocks
_LANES = 64  # elementwise calls compute a last, partial vector in another way: sizes are padded to whole vectors
_LOWEST = -1e30  # below any score, and finite


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Attention plan: N tiles of queries; tiles that attend to the most tiles of keys come first."""

    places: Tensor  # (T,) index of each token among the N * QUERIES places
    limits: Tensor  # (N, QUERIES) position of the query at each place; -1: no query
    tables: Tensor  # (N, blocks) block table of the tile's sequence, padded with the null block
    active: tuple[int, ...]  # for each tile of keys: how many of the N tiles attend to it
    blocks_per_tile: int
    keys: int  # positions of a tile of keys


def plan_attention(
    num_computed: Ints, num_new: Ints, block_tables: Ints, block_size: int, like: Tensor
) -> AttentionPlan:
    """Make the attention plan of a step, shared by all layers."""
    blocks_per_tile = -(-KEYS // block_size)
    keys = blocks_per_tile * block_size
    rows = np.repeat(np.arange(len(num_new)), num_new)
    starts = np.cumsum(num_new) - num_new
    positions = np.arange(len(rows)) + np.repeat(num_computed - starts, num_new)
    # Tiles in the order of their tokens: tokens of a sequence are neighbours, so equal ones are too.
    opens = np.ones(len(rows), dtype=bool)
    opens[1:] = (rows[1:] != rows[:-1]) | (positions[1:] // QUERIES != positions[:-1] // QUERIES)
    tile_of = np.cumsum(opens) - 1
    last = np.append(np.flatnonzero(opens)[1:], len(rows)) - 1  # each tile's last token
    needs = positions[last] // keys + 1  # tiles of keys
    order = np.argsort(-needs, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    places = rank[tile_of] * QUERIES + positions % QUERIES
    limits = np.full(len(order) * QUERIES, -1, dtype=np.int64)
    limits[places] = positions
    tables = np.zeros((len(order), int(needs.max()) * blocks_per_tile), dtype=np.int64)
    width = min(tables.shape[1], block_tables.shape[1])
    own = block_tables[rows[last[order]], :width]
    used = np.arange(width) <= positions[last[order]][:, None] // block_size
    tables[:, :width] = np.where(used, own, 0)
    return AttentionPlan(
        places=torch.from_numpy(places).to(like.device),
        limits=torch.from_numpy(limits.reshape(-1, QUERIES)).to(like.device),
        tables=torch.from_numpy(tables).to(like.device),
        active=tuple(int((needs > tile).sum()) for tile in range(int(needs.max()))),
        blocks_per_tile=blocks_per_tile,
        keys=keys,
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

    q: (T, Hq, D) -> (T, Hq * D). `kv`, this step's, is in the cache already.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = cache.shape[2]
    groups, num_tiles = num_heads // num_kv_heads, len(plan.limits)
    rows = QUERIES * groups
    spread = q.new_zeros(num_tiles * QUERIES, num_heads, head_dim, dtype=torch.float32)
    spread[plan.places] = q.float()
    # (N * Hkv, QUERIES * G, D): the query heads of a KV head are rows of the same tile
    queries = spread.view(num_tiles, QUERIES, num_kv_heads, groups, head_dim).transpose(1, 2)
    queries = queries.reshape(num_tiles * num_kv_heads, rows, head_dim)
    limits = plan.limits[:, None, :, None].expand(-1, num_kv_heads, -1, groups).reshape(-1, rows, 1)
    maximum = queries.new_full((num_tiles * num_kv_heads, rows, 1), _LOWEST)
    total = queries.new_zeros(num_tiles * num_kv_heads, rows, head_dim + 8)  # the last columns: the sum of weights
    if scoring is not None and scoring.sinks is not None:  # the softmax starts with the sink's score, of value zero
        sinks = scoring.sinks.view(1, num_kv_heads, 1, groups).expand(num_tiles, -1, QUERIES, -1)
        maximum = sinks.reshape(num_tiles * num_kv_heads, rows, 1).clone()
        total[..., head_dim:] = 1.0
    for tile, active in enumerate(plan.active):
        k, v = _read(cache, plan, tile, active, head_dim)
        count = len(k)
        scores = torch.bmm(queries[:count], k.transpose(1, 2)).mul_(scale)
        if scoring is not None and scoring.softcap is not None:
            scores = _tanh(scores.div_(scoring.softcap)).mul_(scoring.softcap)
        places = torch.arange(tile * plan.keys, (tile + 1) * plan.keys, device=q.device)
        hidden = places > limits[:count]
        if window is not None:
            hidden |= places <= limits[:count] - window
        scores.masked_fill_(hidden, float("-inf"))
        higher = torch.maximum(maximum[:count], scores.amax(-1, keepdim=True))
        weights = _exp(scores.sub_(higher))
        total[:count] *= _exp(maximum[:count] - higher)
        total[:count] += _weighted(weights, v, hidden)
        maximum[:count] = higher
    attended = total[..., :head_dim] / total[..., head_dim:].amax(-1, keepdim=True).clamp_min_(1e-30)
    attended = attended.view(num_tiles, num_kv_heads, QUERIES, groups, head_dim).transpose(1, 2)
    return attended.reshape(num_tiles * QUERIES, num_heads * head_dim)[plan.places].to(q.dtype)


def _weighted(weights: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    """weights · v, without the values that are hidden from a query: 0 · NaN would be NaN in its result."""
    broken = ~v.isfinite()
    if not broken.any():
        return torch.bmm(weights, v)
    seen = torch.bmm((~hidden).float(), broken.float()) > 0  # results that contain such a value of their own sequence
    return torch.bmm(weights, v.masked_fill(broken, 0.0)).masked_fill_(seen, float("nan"))


def _read(cache: Tensor, plan: AttentionPlan, tile: int, active: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Keys (active * Hkv, KEYS, D) and values (active * Hkv, KEYS, D + 8), the last columns ones; float32."""
    num_kv_heads = cache.shape[2]
    blocks = plan.tables[:active, tile * plan.blocks_per_tile : (tile + 1) * plan.blocks_per_tile]
    if kv_pages.is_quantized(cache.dtype):
        read = cache.view(torch.int8)[blocks.flatten()].view(cache.dtype)
        read = kv_pages.dequantized(read, head_dim, torch.float32)
    else:
        read = cache[blocks.flatten()].float()
    # (active, n, 2, Hkv, page, D) -> (2, active, Hkv, n, page, D)
    read = read.view(active, plan.blocks_per_tile, 2, num_kv_heads, -1, head_dim).permute(2, 0, 3, 1, 4, 5)
    k, v = read.reshape(2, active * num_kv_heads, plan.keys, head_dim)
    return k, F.pad(v, (0, 8), value=1.0)


def _tanh(x: Tensor) -> Tensor:
    """The hyperbolic tangent, computed in the same way for every element at any index."""
    squared = _exp(x.clamp(-15.0, 15.0).mul_(2.0))  # beyond ± 15 the result is ± 1 in float32
    return 1.0 - 2.0 / (squared + 1.0)


def _exp(x: Tensor) -> Tensor:
    """e to the power of x, computed in the same way for every element at any index."""
    count = x.numel()
    if count % _LANES == 0:
        return x.exp()
    padded = x.new_zeros(-(-count // _LANES) * _LANES)
    padded[:count] = x.flatten()
    return padded.exp_()[:count].view(x.shape)
