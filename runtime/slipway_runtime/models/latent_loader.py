"""Loads multi-head latent attention (MLA): q_a_proj, q_b_proj, kv_a_proj_with_mqa, kv_b_proj and o_proj of a layer.

A tensor-parallel rank has the heads of q_b_proj, kv_b_proj and o_proj that are its own, and all of the rest: the
latents of the cache are the same on all ranks.
"""

import torch
from torch import Tensor

from slipway_runtime.kernels.dispatch import Kernels
from slipway_runtime.layers.latent_attention import LatentAttention
from slipway_runtime.layers.linear import Linear
from slipway_runtime.layers.matmul import MatmulMakers
from slipway_runtime.layers.norm import RMSNorm
from slipway_runtime.layers.quantized_weight import dequantized, select_rows
from slipway_runtime.layers.rotary import reorder_rotary_dims
from slipway_runtime.models.checkpoint import Checkpoint
from slipway_runtime.models.config import ModelConfig
from slipway_runtime.models.quantized_checkpoint import WeightReader
from slipway_runtime.models.sharding import Shard

LATENT_EPSILON = 1e-6  # of the norms of latents, whatever the config's epsilon


def load_latent_attention(
    config: ModelConfig,
    checkpoint: Checkpoint,
    weights: WeightReader,
    prefix: str,
    kernels: Kernels,
    makers: MatmulMakers,
    share: Shard,
    out: Linear,
) -> LatentAttention:
    """Load the attention of the layer whose tensor names begin with `prefix`. out: its o_proj."""
    about, hidden, heads = config.latent, config.hidden_size, config.num_q_heads
    assert about is not None, "a model without latents"
    order = reorder_rotary_dims(torch.arange(about.rotary), about.rotary, about.rotary, interleaved=config.interleaved)

    def linear(name: str, out_size: int, in_size: int, rows: Tensor, *, bias: bool = False) -> Linear:
        weight = select_rows(weights.matrix(f"{prefix}.{name}", out_size, in_size), rows)
        own = checkpoint.take(f"{prefix}.{name}.bias", out_size)[rows.to(checkpoint.device)] if bias else None
        return Linear.merged([(f"{prefix}.{name}", weight, own)], makers.layers)

    def norm(name: str, size: int) -> RMSNorm:
        return RMSNorm(checkpoint.take(f"{prefix}.{name}.weight", size), LATENT_EPSILON, kernels)

    down = linear(
        "kv_a_proj_with_mqa",
        about.rank + about.rotary,
        hidden,
        torch.cat((torch.arange(about.rank), about.rank + order)),
        bias=about.biased,
    )
    size = about.plain + about.rotary
    own = share.of_heads(heads)
    of_head = torch.cat((torch.arange(about.plain), about.plain + order))
    rows = (torch.arange(own.start, own.stop)[:, None] * size + of_head).flatten()
    q_down = q_norm = None
    if about.query_rank:
        q_down = linear("q_a_proj", about.query_rank, hidden, torch.arange(about.query_rank), bias=about.biased)
        q_norm = norm("q_a_layernorm", about.query_rank)
        q_up = linear("q_b_proj", heads * size, about.query_rank, rows)
    else:
        q_up = linear("q_proj", heads * size, hidden, rows)
    each = about.plain + about.value
    up = dequantized(weights.matrix(f"{prefix}.kv_b_proj", heads * each, about.rank, rows=share.of_heads(heads, each)))
    by_head = up.view(-1, each, about.rank)
    key_up, value_up = by_head[:, : about.plain], by_head[:, about.plain :]
    return LatentAttention(
        down,
        norm("kv_a_layernorm", about.rank),
        q_down,
        q_norm,
        q_up,
        key_up.contiguous(),
        value_up.contiguous(),
        out,
        kernels=kernels,
        scale=config.attention_scale,
    )
