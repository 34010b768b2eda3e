"""Loads the router and experts of a layer (MoE) from the tensor layout of each family.

| family    | router     | experts                                                                                     |
|-----------|------------|---------------------------------------------------------------------------------------------|
| mixtral   | gate       | block_sparse_moe.experts.N.w1 (gate), w3 (up), w2 (down)                                    |
| qwen3_moe | gate       | mlp.experts.N.gate_proj, up_proj, down_proj                                                 |
| gpt_oss   | router     | mlp.experts.gate_up_proj (E, H, 2I), gate and up interleaved, and down_proj (E, I, H);      |
|           |            | or the same transposed and in MXFP4: …_blocks and …_scales                                  |

A tensor-parallel rank has a part of the inner features of every expert.
"""

import torch
from torch import Tensor

from slipway_runtime.kernels.dispatch import Kernels
from slipway_runtime.kernels.reference_experts import ExpertWeights
from slipway_runtime.layers.experts import ExpertsMlp, GroupedExperts, StackedExperts
from slipway_runtime.layers.linear import Linear
from slipway_runtime.layers.matmul import MakeMatmul
from slipway_runtime.layers.quantized_weight import Weight, concatenated, dequantized, select_rows
from slipway_runtime.models.config import ModelConfig
from slipway_runtime.models.config_values import ModelRefusedError
from slipway_runtime.models.quantized_checkpoint import WeightReader, mxfp4_numbers
from slipway_runtime.models.sharding import Share
from slipway_runtime.models.weights import Checkpoint

_Pair = tuple[Weight, Weight]  # gate_up (2I, H) and down (H, I) of an expert


def load_experts(
    config: ModelConfig,
    checkpoint: Checkpoint,
    weights: WeightReader,
    prefix: str,
    kernels: Kernels,
    *,
    make_matmul: MakeMatmul,
    make_router: MakeMatmul,
    share: Share,
) -> ExpertsMlp:
    """Load the MoE MLP of the layer whose tensor names begin with `prefix`."""
    about, hidden = config.experts, config.hidden_size
    assert about is not None, "a dense model"
    own = share.of(about.intermediate_size)
    biases = None
    if config.model_type == "gpt_oss":
        router_name = f"{prefix}.mlp.router"
        pairs, biases = _of_gpt_oss(config, checkpoint, f"{prefix}.mlp.experts", own)
        if share.rank:
            biases = biases[0], torch.zeros_like(biases[1])  # only rank 0 adds the biases of down
    else:
        block = f"{prefix}.block_sparse_moe" if config.model_type == "mixtral" else f"{prefix}.mlp"
        names = ("w1", "w3", "w2") if config.model_type == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        router_name = f"{block}.gate"
        pairs = [_of_one(config, weights, f"{block}.experts.{number}", names, share) for number in range(about.count)]
    router = Linear(
        make_router(checkpoint.take(f"{router_name}.weight", about.count, hidden)),
        checkpoint.take(f"{router_name}.bias", about.count) if about.biased else None,
    )
    experts: GroupedExperts | StackedExperts
    if checkpoint.device.type == "cuda":
        stacked = ExpertWeights(
            torch.stack([dequantized(gate_up) for gate_up, _ in pairs]),
            torch.stack([dequantized(down) for _, down in pairs]),
            None if biases is None else biases[0],
            None if biases is None else biases[1],
            limit=about.swiglu_limit,
        )
        experts = StackedExperts(stacked, kernels)
    else:
        matrices = [(make_matmul(gate_up), make_matmul(down)) for gate_up, down in pairs]
        experts = GroupedExperts(matrices, kernels, biases=biases, limit=about.swiglu_limit)
    return ExpertsMlp(router, experts, per_token=about.per_token, normalize=about.normalize, reduce=share.reduce)


def _of_one(
    config: ModelConfig, weights: WeightReader, prefix: str, names: tuple[str, str, str], share: Share
) -> _Pair:
    assert config.experts is not None
    inner, hidden = config.experts.intermediate_size, config.hidden_size
    own = share.of(inner)
    gate, up = (weights.matrix(f"{prefix}.{name}", inner, hidden, rows=own) for name in names[:2])
    down = weights.matrix(f"{prefix}.{names[2]}", hidden, inner)
    if share.size > 1:
        down = dequantized(down)[:, own].contiguous()
    return concatenated([gate, up]), down


def _of_gpt_oss(
    config: ModelConfig, checkpoint: Checkpoint, prefix: str, own: slice
) -> tuple[list[_Pair], tuple[Tensor, Tensor]]:
    """All experts of a layer: pairs of matrices, and the biases (E, 2I) and (E, H)."""
    assert config.experts is not None
    count, inner, hidden = config.experts.count, config.experts.intermediate_size, config.hidden_size
    gate_up = _stacked(checkpoint, f"{prefix}.gate_up_proj", count, 2 * inner, hidden)  # (E, 2I, H)
    down = _stacked(checkpoint, f"{prefix}.down_proj", count, hidden, inner)  # (E, H, I)
    gate_up_bias = checkpoint.take(f"{prefix}.gate_up_proj_bias", count, 2 * inner)
    down_bias = checkpoint.take(f"{prefix}.down_proj_bias", count, hidden)
    # Gate and up are interleaved in the file; here they are halves.
    apart = torch.cat((torch.arange(0, 2 * inner, 2)[own], torch.arange(1, 2 * inner, 2)[own])).to(gate_up.device)
    pairs: list[_Pair] = [
        (select_rows(gate_up[expert], apart), down[expert][:, own].contiguous()) for expert in range(count)
    ]
    return pairs, (gate_up_bias[:, apart].contiguous(), down_bias)


def _stacked(checkpoint: Checkpoint, name: str, count: int, out_size: int, in_size: int) -> Tensor:
    """One matrix of all experts: (E, out, in)."""
    if f"{name}_blocks" not in checkpoint:
        return checkpoint.take(name, count, in_size, out_size).transpose(1, 2)
    if f"{name}_scales" not in checkpoint:
        raise ModelRefusedError(f"the checkpoint lacks the tensor {name}_scales")
    checkpoint.check_shape(f"{name}_blocks", count, out_size, in_size // 32, 16)
    checkpoint.check_shape(f"{name}_scales", count, out_size, in_size // 32)
    blocks, scales = checkpoint.take_raw(f"{name}_blocks"), checkpoint.take_raw(f"{name}_scales")
    # Dequantize one expert at a time: float32 numbers take eight times the memory of the codes.
    return torch.stack([mxfp4_numbers(*of, checkpoint.dtype) for of in zip(blocks, scales, strict=True)])
