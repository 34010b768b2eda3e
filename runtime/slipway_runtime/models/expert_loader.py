"""Loads the mixture of experts of a layer from the tensor layout of its family.

| family           | router       | experts                                                                            |
|------------------|--------------|------------------------------------------------------------------------------------|
| mixtral, minimax | gate         | block_sparse_moe.experts.N.w1 (gate), w3 (up), w2 (down)                           |
| most others      | gate         | mlp.experts.N.gate_proj, up_proj, down_proj                                        |
| granitemoe       | router.layer | block_sparse_moe.input_linear (E, 2I, H), output_linear (E, H, I)                  |
| llama4_text      | router       | feed_forward.experts.gate_up_proj (E, H, 2I) and down_proj (E, I, H)               |
| qwen3_vl_moe     | gate         | mlp.experts.gate_up_proj and down_proj, the same                                   |
| gpt_oss          | router       | the same, gate and up interleaved; or transposed, in MXFP4: …_blocks and …_scales  |

A tensor-parallel rank has a part of the inner features of every expert, and of the shared expert.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from slipway_runtime.kernels.dispatch import Kernels, has_float8
from slipway_runtime.kernels.reference_experts import ByteMatrices, ExpertWeights, Mxfp4Matrices
from slipway_runtime.layers.decoder_layer import DenseMlp
from slipway_runtime.layers.experts import ExpertsMlp, GroupedExperts, StackedExperts
from slipway_runtime.layers.linear import Linear
from slipway_runtime.layers.matmul import MatmulMakers
from slipway_runtime.layers.quantized_weight import QuantizedWeight, Weight, concatenated, dequantized, select_rows
from slipway_runtime.layers.routing import Routing
from slipway_runtime.models.checkpoint import Checkpoint
from slipway_runtime.models.config import ModelConfig
from slipway_runtime.models.config_experts import Experts
from slipway_runtime.models.config_values import ModelRefusedError
from slipway_runtime.models.quantized_checkpoint import WeightReader
from slipway_runtime.models.sharding import InputCut, Shard

GROUP: Final = 32  # columns that share a scale in MXFP4
TILE_COLUMNS: Final = 64  # that the grouped product takes at a time: BLOCK_K of `kernels.experts`
_Pair = tuple[Weight, Weight]  # gate_up (2I, H) and down (H, I) of an expert


def load_experts(
    config: ModelConfig,
    checkpoint: Checkpoint,
    weights: WeightReader,
    prefix: str,
    kernels: Kernels,
    makers: MatmulMakers,
    share: Shard,
    cut: InputCut,
    *,
    shared: DenseMlp | None = None,
) -> ExpertsMlp:
    """Load the MoE MLP of the layer whose tensor names begin with `prefix`. shared: the expert of all tokens."""
    about, hidden = config.experts, config.hidden_size
    assert about is not None, "a dense model"
    own = share.of_features(about.intermediate_size)
    biases: tuple[Tensor, Tensor] | None = None
    in_mxfp4: tuple[Mxfp4Matrices, Mxfp4Matrices] | None = None
    pairs: list[_Pair] = []
    keys, block = about.keys, f"{prefix}.{about.keys.block}"
    if about.biased:
        biases = _biases_of_gpt_oss(config, checkpoint, f"{prefix}.mlp.experts", share)
        in_mxfp4 = _codes_of_gpt_oss(config, checkpoint, f"{prefix}.mlp.experts", own)
        if in_mxfp4 is None:
            pairs = _of_gpt_oss(config, checkpoint, f"{prefix}.mlp.experts", own)
    elif keys.fused is not None:
        pairs = _of_one_tensor(config, checkpoint, f"{block}.{keys.fused[0]}", f"{block}.{keys.fused[1]}", own)
    elif f"{block}.experts.gate_up_proj" in checkpoint:
        pairs = _of_transposed(config, checkpoint, f"{block}.experts", own)
    else:
        pairs = [
            _load_expert(config, weights, f"{block}.experts.{number}", keys.names, own, cut)
            for number in range(about.count)
        ]
    exact = None if keys.scoring == "softmax" and not keys.correction else torch.float32
    router = Linear(
        makers.routers(checkpoint.take(f"{block}.{keys.router}.weight", about.count, hidden, dtype=exact)),
        checkpoint.take(f"{block}.{keys.router}.bias", about.count) if about.biased else None,
    )
    experts: GroupedExperts | StackedExperts
    if checkpoint.device.type == "cuda":
        gate_ups, downs = in_mxfp4 or tuple(stack_experts(matrices) for matrices in zip(*pairs, strict=True))
        stacked = ExpertWeights(
            gate_ups,
            downs,
            None if biases is None else biases[0],
            None if biases is None else biases[1],
            limit=about.swiglu_limit,
        )
        experts = StackedExperts(stacked, kernels)
    else:
        matrices = [(makers.layers(gate_up), makers.layers(down)) for gate_up, down in pairs]
        experts = GroupedExperts(matrices, kernels, biases=biases, limit=about.swiglu_limit)
    gate = None
    if shared is not None and keys.shared_gate:
        gate = Linear(makers.routers(checkpoint.take(f"{block}.{keys.shared_gate}.weight", 1, hidden)))
    return ExpertsMlp(
        router,
        experts,
        _routing(about, checkpoint, block, kernels),
        scales_input=keys.scales_input,
        shared=shared,
        shared_gate=gate,
        reduce=share.reduce,
        name=f"{block}.experts",
    )


def _routing(about: Experts, checkpoint: Checkpoint, block: str, kernels: Kernels) -> Routing:
    keys, correction = about.keys, None
    if keys.correction:
        name = f"{block}.{keys.correction}"
        shape = (1, about.count) if keys.correction_is_matrix else (about.count,)
        correction = checkpoint.take(name, *shape, dtype=torch.float32).flatten()
    return Routing(
        kernels,
        per_token=about.per_token,
        normalize=about.normalize,
        sigmoid=keys.scoring == "sigmoid",
        correction=correction,
        groups=about.groups,
        groups_per_token=about.groups_per_token,
        scale=about.scale,
    )


def stack_experts(matrices: Sequence[Weight]) -> Tensor | ByteMatrices:
    """The matrices of all experts as one; as codes, where they have one byte and the GPU multiplies them."""
    first = matrices[0]
    if isinstance(first, QuantizedWeight) and first.zeros is None and first.order is None:
        alike = [one for one in matrices if isinstance(one, QuantizedWeight) and one.group == first.group]
        whole = first.scales.shape[1] == 1  # a scale for each row
        multiplied = first.codes.dtype == torch.int8 or (
            first.codes.dtype == torch.float8_e4m3fn and has_float8(first.device)
        )
        if multiplied and len(alike) == len(matrices) and (whole or first.group % TILE_COLUMNS == 0):
            codes = torch.stack([one.codes.view(torch.uint8) for one in alike]).view(first.codes.dtype)
            scales = torch.stack([one.scales for one in alike])
            return ByteMatrices(codes, scales, first.shape[1] if whole else first.group, first.dtype)
    return torch.stack([dequantized(one) for one in matrices])


def _load_expert(
    config: ModelConfig, weights: WeightReader, prefix: str, names: tuple[str, str, str], own: slice, cut: InputCut
) -> _Pair:
    assert config.experts is not None
    inner, hidden = config.experts.intermediate_size, config.hidden_size
    gate, up = (weights.matrix(f"{prefix}.{name}", inner, hidden, rows=own) for name in names[:2])
    down = cut(weights.matrix(f"{prefix}.{names[2]}", hidden, inner), own)
    return concatenated([gate, up]), down


def _of_one_tensor(config: ModelConfig, checkpoint: Checkpoint, gate_up: str, down: str, own: slice) -> list[_Pair]:
    """All experts of a layer from (E, 2I, H) and (E, H, I)."""
    assert config.experts is not None
    count, inner, hidden = config.experts.count, config.experts.intermediate_size, config.hidden_size
    first = checkpoint.take(f"{gate_up}.weight", count, 2 * inner, hidden)
    second = checkpoint.take(f"{down}.weight", count, hidden, inner)
    return _pairs(first, second, inner, own)


def _of_transposed(config: ModelConfig, checkpoint: Checkpoint, prefix: str, own: slice) -> list[_Pair]:
    """All experts of a layer from (E, H, 2I) and (E, I, H), or from the transposed tensors."""
    assert config.experts is not None
    count, inner, hidden = config.experts.count, config.experts.intermediate_size, config.hidden_size
    names = (f"{prefix}.gate_up_proj", f"{prefix}.down_proj")
    by_outputs = ((count, 2 * inner, hidden), (count, hidden, inner))
    if tuple(checkpoint.shape_of(name) for name in names) == by_outputs:
        whole = [checkpoint.take(name, *shape) for name, shape in zip(names, by_outputs, strict=True)]
        return _pairs(whole[0], whole[1], inner, own)
    first = checkpoint.take(f"{prefix}.gate_up_proj", count, hidden, 2 * inner).transpose(1, 2)
    second = checkpoint.take(f"{prefix}.down_proj", count, inner, hidden).transpose(1, 2)
    return _pairs(first, second, inner, own)


def _pairs(gate_up: Tensor, down: Tensor, inner: int, own: slice) -> list[_Pair]:
    """The rank's part of each expert. gate_up: (E, 2I, H)  down: (E, H, I)."""
    gate, up = gate_up[:, :inner][:, own], gate_up[:, inner:][:, own]
    return [
        (torch.cat((gate[expert], up[expert])), down[expert][:, own].contiguous()) for expert in range(len(gate_up))
    ]


def _deinterleave_rows(inner: int, own: slice, device: torch.device) -> Tensor:
    """The rows of gpt-oss's gate_up_proj that are a rank's: gate and up are interleaved there; here they are halves."""
    return torch.cat((torch.arange(0, 2 * inner, 2)[own], torch.arange(1, 2 * inner, 2)[own])).to(device)


def _biases_of_gpt_oss(config: ModelConfig, checkpoint: Checkpoint, prefix: str, share: Shard) -> tuple[Tensor, Tensor]:
    """Of all experts of a layer: (E, 2I) and (E, H)."""
    assert config.experts is not None
    count, inner, hidden = config.experts.count, config.experts.intermediate_size, config.hidden_size
    gate_up = checkpoint.take(f"{prefix}.gate_up_proj_bias", count, 2 * inner)
    down = checkpoint.take(f"{prefix}.down_proj_bias", count, hidden)
    gate_up = gate_up[:, _deinterleave_rows(inner, share.of_features(inner), gate_up.device)].contiguous()
    return gate_up, torch.zeros_like(down) if share.rank else down  # only rank 0 adds the biases of down


def _of_gpt_oss(config: ModelConfig, checkpoint: Checkpoint, prefix: str, own: slice) -> list[_Pair]:
    """All experts of a layer as numbers."""
    assert config.experts is not None
    count, inner, hidden = config.experts.count, config.experts.intermediate_size, config.hidden_size
    gate_up = _stacked(checkpoint, f"{prefix}.gate_up_proj", count, 2 * inner, hidden)  # (E, 2I, H)
    down = _stacked(checkpoint, f"{prefix}.down_proj", count, hidden, inner)  # (E, H, I)
    apart = _deinterleave_rows(inner, own, gate_up.device)
    return [(select_rows(gate_up[expert], apart), down[expert][:, own].contiguous()) for expert in range(count)]


def _codes_of_gpt_oss(
    config: ModelConfig, checkpoint: Checkpoint, prefix: str, own: slice
) -> tuple[Mxfp4Matrices, Mxfp4Matrices] | None:
    """gate_up and down of all experts of a layer in MXFP4, where a GPU multiplies codes.

    None: they are numbers, or a rank's columns of down are no whole groups.
    """
    assert config.experts is not None
    count, inner, hidden = config.experts.count, config.experts.intermediate_size, config.hidden_size
    if checkpoint.device.type != "cuda" or f"{prefix}.down_proj_blocks" not in checkpoint:
        return None
    if own.start % GROUP or own.stop % GROUP:
        return None
    gate_up = _in_mxfp4(checkpoint, f"{prefix}.gate_up_proj", count, 2 * inner, hidden)
    down = _in_mxfp4(checkpoint, f"{prefix}.down_proj", count, hidden, inner)
    apart = _deinterleave_rows(inner, own, gate_up.codes.device)
    codes, scales = slice(own.start // 2, own.stop // 2), slice(own.start // GROUP, own.stop // GROUP)
    return (
        replace(gate_up, codes=gate_up.codes[:, apart].contiguous(), scales=gate_up.scales[:, apart].contiguous()),
        replace(down, codes=down.codes[..., codes].contiguous(), scales=down.scales[..., scales].contiguous()),
    )


def _stacked(checkpoint: Checkpoint, name: str, count: int, out_size: int, in_size: int) -> Tensor:
    """One matrix of all experts as numbers: (E, out, in)."""
    if f"{name}_blocks" not in checkpoint:
        return checkpoint.take(name, count, in_size, out_size).transpose(1, 2)
    matrices = _in_mxfp4(checkpoint, name, count, out_size, in_size)
    # Dequantize one expert at a time: float32 numbers take eight times the memory of the codes.
    return torch.stack([matrices[expert] for expert in range(count)])


def _in_mxfp4(checkpoint: Checkpoint, name: str, count: int, out_size: int, in_size: int) -> Mxfp4Matrices:
    """One matrix of all experts as codes."""
    if f"{name}_scales" not in checkpoint:
        raise ModelRefusedError(f"the checkpoint lacks the tensor {name}_scales")
    checkpoint.check_shape(f"{name}_blocks", count, out_size, in_size // GROUP, GROUP // 2)
    checkpoint.check_shape(f"{name}_scales", count, out_size, in_size // GROUP)
    blocks, scales = checkpoint.take_raw(f"{name}_blocks"), checkpoint.take_raw(f"{name}_scales")
    return Mxfp4Matrices(blocks.flatten(2), scales, checkpoint.dtype)
