"""Builds decoder layers, or a tensor-parallel rank's share of them, from a checkpoint's tensors."""

from collections.abc import Mapping

import torch
from torch import Tensor

from slipway_runtime.kernels.dispatch import Kernels
from slipway_runtime.layers.attention import Attention
from slipway_runtime.layers.decoder_layer import DecoderLayer, DenseMlp, Mlp
from slipway_runtime.layers.latent_attention import LatentAttention
from slipway_runtime.layers.linear import Linear, Reduce
from slipway_runtime.layers.matmul import MatmulMakers
from slipway_runtime.layers.norm import LayerNorm, Norm, RMSNorm, SplitRMSNorm
from slipway_runtime.layers.quantized_weight import Weight, select_rows
from slipway_runtime.layers.rotary import reorder_rotary_dims
from slipway_runtime.models.checkpoint import Checkpoint
from slipway_runtime.models.config import ModelConfig
from slipway_runtime.models.config_experts import Experts
from slipway_runtime.models.expert_loader import load_experts
from slipway_runtime.models.families import GATED, MlpNames
from slipway_runtime.models.latent_loader import load_latent_attention
from slipway_runtime.models.quantized_checkpoint import WeightReader
from slipway_runtime.models.sharding import InputCut, Shard, part_of

HeadsNorm = RMSNorm | SplitRMSNorm | LayerNorm  # over all heads, or of each with weights of its own


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
            parallel=config.parallel,
        )

    def norm(self, name: str) -> Norm:
        """Build the norm of this name over the hidden size."""
        config = self._config
        if not config.layer_norm:
            return self._rms_norm(name)
        weight = self._checkpoint.take(f"{name}.weight", config.hidden_size)
        bias = self._checkpoint.take(f"{name}.bias", config.hidden_size) if config.norm_bias else None
        return LayerNorm(weight, bias, config.rms_norm_eps)

    def _rms_norm(self, name: str, size: int = 0) -> RMSNorm:
        """size: of its weight; 0: the hidden size."""
        config = self._config
        exact = torch.float32 if config.norm_offset else None  # 1 + w in bfloat16 would lose most of w
        weight = self._checkpoint.take(f"{name}.weight", size or config.hidden_size, dtype=exact)
        if config.norm_offset:
            weight += config.norm_offset
        return RMSNorm(weight, config.rms_norm_eps, self._kernels)

    def _attention(self, index: int, prefix: str) -> Attention | LatentAttention:
        config, own = self._config, self._own
        value_size = config.head_dim if config.latent is None else config.latent.value
        out = self._row_parallel(
            f"{prefix}.o_proj",
            config.num_q_heads * value_size,
            self._share.of_heads(config.num_q_heads, value_size),
            bias=config.out_bias,
            reduce=self._share.reduce,
        )
        if config.latent is not None:
            return load_latent_attention(
                config, self._checkpoint, self._weights, prefix, self._kernels, self._makers, self._share, out
            )
        sinks = None
        if config.attention_sinks:
            sinks = self._checkpoint.take(f"{prefix}.sinks", config.num_q_heads, dtype=torch.float32)
            sinks = sinks[self._share.of_heads(config.num_q_heads)].contiguous()
        q_norm, k_norm = (self._head_norm(index, f"{prefix}.{name}") for name in config.head_norms)
        return Attention(
            self._qkv(prefix),
            out,
            num_q_heads=own.num_q_heads,
            num_kv_heads=own.num_kv_heads,
            head_dim=config.head_dim,
            q_norm=q_norm,
            k_norm=k_norm,
            window=config.window_of(index),
            kernels=self._kernels,
            scale=config.attention_scale,
            softcap=config.attention_softcap,
            sinks=sinks,
            rotary_table=config.rotary_table_of(index),
            wide_norms=self._wide_norms(prefix),
            norms_after_rotation=config.norms_after_rotation,
        )

    def _head_norm(self, index: int, name: str) -> RMSNorm | None:
        """The norm that all heads of q or of k share; None: there is none."""
        config = self._config
        if config.unit_head_norms and index not in config.layers_without_positions:
            ones = torch.ones(config.head_dim, dtype=self._checkpoint.dtype, device=self._checkpoint.device)
            return RMSNorm(ones, config.rms_norm_eps, self._kernels)
        if not config.qk_norm or config.layer_norm:
            return None
        norm = self._rms_norm(name, config.head_dim)
        norm.weight = self._in_rotary_order(norm.weight)
        return norm

    def _in_rotary_order(self, weight: Tensor) -> Tensor:
        """The weights of norms of whole heads, in the order of the rows of q and k. (heads · D,) -> (heads · D,)."""
        if not (self._config.rotary_dim or self._config.interleaved):
            return weight
        return weight[self._rotary_row_order(len(weight)).to(weight.device)].contiguous()

    def _wide_norms(self, prefix: str) -> tuple[HeadsNorm, HeadsNorm] | None:
        config = self._config
        names = [f"{prefix}.{name}" for name in config.head_norms]
        counts = (config.num_q_heads, config.num_kv_heads)
        if config.wide_qk_norm:
            q, k = (self._wide_norm(name, heads) for name, heads in zip(names, counts, strict=True))
            return q, k
        if not (config.qk_norm and config.layer_norm):
            return None
        of_q, of_k = (self._norm_of_heads(name, heads) for name, heads in zip(names, counts, strict=True))
        return of_q, of_k

    def _wide_norm(self, name: str, heads: int) -> RMSNorm | SplitRMSNorm:
        """The norm over all heads, or the rank's part of it."""
        config, share = self._config, self._share
        norm = self._rms_norm(name, heads * config.head_dim)
        norm.weight = self._in_rotary_order(norm.weight)
        if share.reduce is None:
            return norm
        own = norm.weight[share.of_heads(heads, config.head_dim)].contiguous()
        copies = max(1, share.size // heads)
        return SplitRMSNorm(own, norm.eps, share.reduce, size=heads * config.head_dim, copies=copies)

    def _norm_of_heads(self, name: str, heads: int) -> LayerNorm:
        """The rank's part of a norm of each head with weights of its own."""
        config = self._config
        weight = self._checkpoint.take(f"{name}.weight", heads, config.head_dim)[self._share.of_heads(heads)]
        return LayerNorm(self._in_rotary_order(weight.flatten()).view(weight.shape), None, config.rms_norm_eps)

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

    def _row_parallel(self, name: str, in_size: int, own: slice, *, bias: bool, reduce: Reduce | None) -> Linear:
        hidden, share = self._config.hidden_size, self._share
        weight = self.cut(self._weights.matrix(name, hidden, in_size), own)
        own_bias = self._checkpoint.take(f"{name}.bias", hidden) if bias else None
        # Only rank 0 has the bias, so that the all-reduce adds it once.
        return Linear.merged([(name, weight, own_bias if share.rank == 0 else None)], self._makers.layers, reduce)

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
                shared=self._shared_expert(prefix, config.experts),
            )
        block = f"{prefix}.{config.mlp.block}"
        return self._dense_mlp(block, config.mlp, config.intermediate_size, reduce=self._share.reduce)

    def _shared_expert(self, prefix: str, experts: Experts) -> DenseMlp | None:
        """The expert of all tokens, which the caller adds before the all-reduce."""
        if not experts.shared_size:
            return None
        keys, own = experts.keys, self._share.of_features(experts.shared_size)
        if keys.shared_fused is None:
            return self._dense_mlp(f"{prefix}.{keys.block}.{keys.shared_name}", GATED, experts.shared_size, reduce=None)
        hidden, size = self._config.hidden_size, experts.shared_size
        gate_up, down = (f"{prefix}.{keys.shared_name}.{name}" for name in keys.shared_fused)
        whole = self._weights.matrix(gate_up, 2 * size, hidden)
        rows = [select_rows(whole, slice(start + own.start, start + own.stop)) for start in (0, size)]
        named = zip(("gate_proj", "up_proj"), rows, strict=True)  # as adapters name them: `adapter_modules`
        parts = [(f"{prefix}.{keys.shared_name}.{name}", part, None) for name, part in named]
        matrix = self.cut(self._weights.matrix(down, hidden, size), own)
        return DenseMlp(
            Linear.merged(parts, self._makers.layers),
            Linear.merged([(f"{prefix}.{keys.shared_name}.down_proj", matrix, None)], self._makers.layers),
            self._kernels,
        )

    def _dense_mlp(self, block: str, names: MlpNames, inner: int, *, reduce: Reduce | None) -> DenseMlp:
        config, own = self._config, self._share.of_features(inner)
        matrices = {name: (inner, own) for name in (names.gate, names.up) if name}
        parts = self._column_parallel(block, matrices, "gate_up_proj", bias=config.mlp_bias)
        return DenseMlp(
            Linear.merged(parts, self._makers.layers),
            self._row_parallel(f"{block}.{names.down}", inner, own, bias=config.mlp_bias, reduce=reduce),
            self._kernels,
            activation=config.activation,
            has_gate=bool(names.gate),
        )
