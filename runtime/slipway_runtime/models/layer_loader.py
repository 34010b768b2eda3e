"""Builds decoder layers, or a tensor-parallel rank's share of them, from a checkpoint's tensors.

The router and experts of a layer (MoE) are in the tensor layout of each family:

| family    | router     | experts                                                                                     |
|-----------|------------|---------------------------------------------------------------------------------------------|
| mixtral   | gate       | block_sparse_moe.experts.N.w1 (gate), w3 (up), w2 (down)                                    |
| qwen3_moe | gate       | mlp.experts.N.gate_proj, up_proj, down_proj                                                 |
| gpt_oss   | router     | mlp.experts.gate_up_proj (E, H, 2I), gate and up interleaved, and down_proj (E, I, H);      |
|           |            | or the same transposed and in MXFP4: …_blocks and …_scales                                  |

A tensor-parallel rank has a part of the inner features of every expert.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from slipway_runtime.kernels.dispatch import Kernels, has_float8
from slipway_runtime.kernels.reference_experts import ByteMatrices, ExpertWeights, Mxfp4Matrices
from slipway_runtime.layers.attention import Attention
from slipway_runtime.layers.decoder_layer import DecoderLayer, DenseMlp, Mlp
from slipway_runtime.layers.experts import ExpertsMlp, GroupedExperts, StackedExperts
from slipway_runtime.layers.linear import Linear
from slipway_runtime.layers.matmul import MatmulMakers
from slipway_runtime.layers.norm import RMSNorm
from slipway_runtime.layers.quantized_weight import QuantizedWeight, Weight, concatenated, dequantized, select_rows
from slipway_runtime.layers.rotary import reorder_rotary_dims
from slipway_runtime.models.checkpoint import Checkpoint
from slipway_runtime.models.config import ModelConfig
from slipway_runtime.models.config_values import ModelRefusedError
from slipway_runtime.models.quantized_checkpoint import WeightReader
from slipway_runtime.models.sharding import InputCut, Shard, part_of

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
) -> ExpertsMlp:
    """Load the MoE MLP of the layer whose tensor names begin with `prefix`."""
    about, hidden = config.experts, config.hidden_size
    assert about is not None, "a dense model"
    own = share.of_features(about.intermediate_size)
    biases: tuple[Tensor, Tensor] | None = None
    in_mxfp4: tuple[Mxfp4Matrices, Mxfp4Matrices] | None = None
    pairs: list[_Pair] = []
    if config.model_type == "gpt_oss":
        router_name = f"{prefix}.mlp.router"
        biases = _biases_of_gpt_oss(config, checkpoint, f"{prefix}.mlp.experts", share)
        in_mxfp4 = _codes_of_gpt_oss(config, checkpoint, f"{prefix}.mlp.experts", own)
        if in_mxfp4 is None:
            pairs = _of_gpt_oss(config, checkpoint, f"{prefix}.mlp.experts", own)
    else:
        block = f"{prefix}.block_sparse_moe" if config.model_type == "mixtral" else f"{prefix}.mlp"
        names = ("w1", "w3", "w2") if config.model_type == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        router_name = f"{block}.gate"
        pairs = [
            _load_expert(config, weights, f"{block}.experts.{number}", names, own, cut) for number in range(about.count)
        ]
    router = Linear(
        makers.routers(checkpoint.take(f"{router_name}.weight", about.count, hidden)),
        checkpoint.take(f"{router_name}.bias", about.count) if about.biased else None,
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
    return ExpertsMlp(
        router, experts, kernels, per_token=about.per_token, normalize=about.normalize, reduce=share.reduce
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


class LayerLoader:
    """Builds the layers of a decoder; may be called from several threads."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        weights: WeightReader,
        kernels: Kernels,
        makers: MatmulMakers,
        share: Shard,
    ) -> None:
        self._config = config
        self._own = part_of(config, share.size, share.rank)
        self._checkpoint = checkpoint
        self._weights = weights
        self._kernels = kernels
        self._makers = makers
        self._share = share
        self.cut = InputCut(share)

    def layer(self, index: int) -> DecoderLayer:
        """Build the layer of this index."""
        config, prefix = self._config, f"model.layers.{index}"
        names = (config.norms.attention, config.norms.mlp, config.norms.attention_out, config.norms.mlp_out)
        attention, mlp, attention_out, mlp_out = (self.norm(f"{prefix}.{name}") if name else None for name in names)
        return DecoderLayer(
            self._attention(index, f"{prefix}.self_attn"),
            self._mlp(index, prefix),
            attention,
            mlp,
            attention_out_norm=attention_out,
            mlp_out_norm=mlp_out,
            output_scale=config.residual_scale,
        )

    def norm(self, name: str, size: int = 0) -> RMSNorm:
        """Build the norm of this name. size: of its weight; 0: the hidden size."""
        config = self._config
        exact = torch.float32 if config.norm_offset else None  # 1 + w in bfloat16 would lose most of w
        weight = self._checkpoint.take(f"{name}.weight", size or config.hidden_size, dtype=exact)
        if config.norm_offset:
            weight += config.norm_offset
        return RMSNorm(weight, config.rms_norm_eps, self._kernels)

    def _attention(self, index: int, prefix: str) -> Attention:
        config, own = self._config, self._own
        sinks = None
        if config.attention_sinks:
            sinks = self._checkpoint.take(f"{prefix}.sinks", config.num_q_heads, dtype=torch.float32)
            sinks = sinks[self._share.of_heads(config.num_q_heads)].contiguous()
        return Attention(
            self._qkv(prefix),
            self._row_parallel(
                f"{prefix}.o_proj",
                config.num_q_heads * config.head_dim,
                self._share.of_heads(config.num_q_heads, config.head_dim),
                bias=config.out_bias,
            ),
            num_q_heads=own.num_q_heads,
            num_kv_heads=own.num_kv_heads,
            head_dim=config.head_dim,
            q_norm=self.norm(f"{prefix}.q_norm", config.head_dim) if config.qk_norm else None,
            k_norm=self.norm(f"{prefix}.k_norm", config.head_dim) if config.qk_norm else None,
            window=config.window_of(index),
            kernels=self._kernels,
            scale=config.attention_scale,
            softcap=config.attention_softcap,
            sinks=sinks,
            rotary_table=config.rotary_table_of(index),
            wide_norms=self._wide_norms(prefix) if config.wide_qk_norm else None,
        )

    def _wide_norms(self, prefix: str) -> tuple[RMSNorm, RMSNorm]:
        config = self._config
        q, k = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return self.norm(f"{prefix}.q_norm", q), self.norm(f"{prefix}.k_norm", k)

    def _qkv(self, prefix: str) -> Linear:
        config = self._config
        q_size, kv_size = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
        q, kv = (self._share.of_heads(count, config.head_dim) for count in (config.num_q_heads, config.num_kv_heads))
        matrices = {"q_proj": (q_size, q), "k_proj": (kv_size, kv), "v_proj": (kv_size, kv)}
        parts = self._column_parallel(prefix, matrices, "qkv_proj", bias=config.qkv_bias)
        if config.rotary_dim or config.interleaved:
            values = parts.pop()
            parts = [
                (name, select_rows(weight, order), None if bias is None else bias[order.to(bias.device)])
                for name, weight, bias in parts
                for order in [self._rotary_row_order(len(weight))]
            ]
            parts.append(values)
        return Linear.merged(parts, self._makers.layers)

    def _rotary_row_order(self, count: int) -> Tensor:
        """Row indices that put a q or k projection into the order of the rotary table."""
        config = self._config
        turned = config.rotary_dim or config.head_dim
        return reorder_rotary_dims(torch.arange(count), config.head_dim, turned, interleaved=config.interleaved)

    def _column_parallel(
        self, prefix: str, matrices: Mapping[str, tuple[int, slice]], fused: str, *, bias: bool
    ) -> list[tuple[str, Weight, Tensor | None]]:
        """Matrices with the same inputs, this rank's rows of each: (name, weight, bias).

        matrices: all rows, and the rank's, by name, in the order of the rows in the `fused` matrix.
        """
        hidden = self._config.hidden_size
        parts: list[tuple[str, Weight, Tensor | None]] = []
        if self._config.fused_projections or (self._config.fused_mlp and fused == "gate_up_proj"):
            whole = self._weights.matrix(f"{prefix}.{fused}", sum(size for size, _ in matrices.values()), hidden)
            start = 0
            for name, (out_size, of) in matrices.items():
                rows = slice(start + of.start, start + of.stop)
                parts.append((f"{prefix}.{name}", select_rows(whole, rows), None))
                start += out_size
            return parts
        for name, (out_size, of) in matrices.items():
            weight = self._weights.matrix(f"{prefix}.{name}", out_size, hidden, rows=of)
            own_bias = self._checkpoint.take(f"{prefix}.{name}.bias", out_size, rows=of) if bias else None
            parts.append((f"{prefix}.{name}", weight, own_bias))
        return parts

    def _row_parallel(self, name: str, in_size: int, own: slice, *, bias: bool) -> Linear:
        hidden, share = self._config.hidden_size, self._share
        weight = self.cut(self._weights.matrix(name, hidden, in_size), own)
        own_bias = self._checkpoint.take(f"{name}.bias", hidden) if bias else None
        # Only rank 0 has the bias, so that the all-reduce adds it once.
        return Linear.merged([(name, weight, own_bias if share.rank == 0 else None)], self._makers.layers, share.reduce)

    def _mlp(self, index: int, prefix: str) -> Mlp:
        config = self._config
        if config.experts is not None and index in config.experts.layers:
            return load_experts(
                config,
                self._checkpoint,
                self._weights,
                prefix,
                self._kernels,
                self._makers,
                self._share,
                self.cut,
            )
        inner, own = config.intermediate_size, self._share.of_features(config.intermediate_size)
        matrices = {"gate_proj": (inner, own), "up_proj": (inner, own)}
        parts = self._column_parallel(f"{prefix}.mlp", matrices, "gate_up_proj", bias=config.mlp_bias)
        return DenseMlp(
            Linear.merged(parts, self._makers.layers),
            self._row_parallel(f"{prefix}.mlp.down_proj", inner, own, bias=config.mlp_bias),
            self._kernels,
            activation=config.activation,
        )
