"""Llama, Mistral, Qwen2 and Qwen3 as one decoder: they differ in biases and norms of heads, which the config says."""

import torch
from torch import Tensor

from slipway_runtime.kernels.dispatch import Kernels
from slipway_runtime.layers.attention import Attention, StepContext
from slipway_runtime.layers.embedding import Embedding
from slipway_runtime.layers.linear import Linear
from slipway_runtime.layers.matmul import Dense, MakeMatmul
from slipway_runtime.layers.norm import RMSNorm
from slipway_runtime.layers.rotary import Rotary
from slipway_runtime.models.config import ModelConfig
from slipway_runtime.models.sharding import WHOLE, Share, part_of
from slipway_runtime.models.weights import Checkpoint


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    __slots__ = ("_attention_norm", "_kernels", "_mlp_norm", "attention", "down", "gate_up")

    def __init__(
        self,
        attention: Attention,
        gate_up: Linear,
        down: Linear,
        attention_norm: RMSNorm,
        mlp_norm: RMSNorm,
        kernels: Kernels,
    ) -> None:
        self.attention = attention
        self.gate_up = gate_up
        self.down = down
        self._attention_norm = attention_norm
        self._mlp_norm = mlp_norm
        self._kernels = kernels

    def __call__(self, x: Tensor | None, stream: Tensor, cache: Tensor, step: StepContext) -> Tensor:
        """stream: (T, H), which grows in place  x: (T, H) what the layer before adds to it -> what this layer adds."""
        normed = self._attention_norm(stream) if x is None else self._attention_norm.after_adding(x, stream)
        normed = self._mlp_norm.after_adding(self.attention(normed, cache, step), stream)
        return self.down(self._kernels.swiglu(self.gate_up(normed, step)), step)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Its matrices, in the order in which they compute."""
        return self.attention.qkv, self.attention.out, self.gate_up, self.down


class Decoder:
    """Token ids of a step to hidden states; hidden states to scores of the next token."""

    def __init__(
        self, embedding: Embedding, layers: list[DecoderLayer], norm: RMSNorm, head: Linear, rotary: Rotary
    ) -> None:
        self.rotary = rotary
        self._embedding = embedding
        self.layers = layers
        self._norm = norm
        self._head = head

    def __call__(self, token_ids: Tensor, caches: list[Tensor], step: StepContext) -> Tensor:
        """(T,) -> (T, H)."""
        stream, x = self._embedding(token_ids), None
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, stream, cache, step)
        return stream if x is None else stream.add_(x)

    @property
    def nbytes(self) -> int:
        """Memory of the weights in the form that they compute in; norms are too small to count."""
        layers = sum(linear.nbytes for layer in self.layers for linear in layer.linears)
        head = self._head.matmul
        shared = isinstance(head, Dense) and head.weight is self._embedding.weight
        return layers + self._head.nbytes + (0 if shared else self._embedding.weight.nbytes)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token, for the rows that sample one. (R, H) -> (R, V), float32."""
        return self._head(self._norm(hidden)).float()


def load_decoder(
    config: ModelConfig,
    checkpoint: Checkpoint,
    kernels: Kernels,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device,
    make_matmul: MakeMatmul = Dense,
    make_head: MakeMatmul = Dense,
    share: Share = WHOLE,
) -> Decoder:
    """Build the decoder, or a rank's share of it, from a checkpoint's tensors.

    `make_…` decides in which form its matrices compute.
    """
    hidden, vocabulary = config.hidden_size, config.vocab_size
    own = part_of(config, share.size)

    def side_by_side(prefix: str, names: tuple[str, ...], out_sizes: tuple[int, ...], *, bias: bool) -> Linear:
        parts = []
        for name, out_size in zip(names, out_sizes, strict=True):
            rows = share.of(out_size)
            weight = checkpoint.take(f"{prefix}.{name}.weight", out_size, hidden, rows=rows)
            own_bias = checkpoint.take(f"{prefix}.{name}.bias", out_size, rows=rows) if bias else None
            parts.append((f"{prefix}.{name}", weight, own_bias))
        return Linear.merged(parts, make_matmul)

    def summed(name: str, in_size: int, *, bias: bool) -> Linear:
        weight = checkpoint.take(f"{name}.weight", hidden, in_size)[:, share.of(in_size)].contiguous()
        own_bias = checkpoint.take(f"{name}.bias", hidden) if bias else None
        # The bias is in the sum once.
        return Linear.merged([(name, weight, own_bias if share.rank == 0 else None)], make_matmul, share.reduce)

    def norm(name: str, size: int = hidden) -> RMSNorm:
        return RMSNorm(checkpoint.take(f"{name}.weight", size), config.rms_norm_eps, kernels)

    def layer(index: int) -> DecoderLayer:
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        q_size, kv_size = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
        inner = config.intermediate_size
        return DecoderLayer(
            Attention(
                side_by_side(
                    attention, ("q_proj", "k_proj", "v_proj"), (q_size, kv_size, kv_size), bias=config.qkv_bias
                ),
                summed(f"{attention}.o_proj", q_size, bias=config.out_bias),
                num_q_heads=own.num_q_heads,
                num_kv_heads=own.num_kv_heads,
                head_dim=config.head_dim,
                q_norm=norm(f"{attention}.q_norm", config.head_dim) if config.qk_norm else None,
                k_norm=norm(f"{attention}.k_norm", config.head_dim) if config.qk_norm else None,
                window=config.window_of(index),
                kernels=kernels,
            ),
            side_by_side(mlp, ("gate_proj", "up_proj"), (inner, inner), bias=config.mlp_bias),
            summed(f"{mlp}.down_proj", inner, bias=config.mlp_bias),
            norm(f"{prefix}.input_layernorm"),
            norm(f"{prefix}.post_attention_layernorm"),
            kernels,
        )

    table = checkpoint.take("model.embed_tokens.weight", vocabulary, hidden)
    layers = checkpoint.in_parallel(layer, config.num_layers)
    if config.tied_embeddings:
        checkpoint.ignore("lm_head.weight")
        head = Linear(make_head(table))  # the matrix that reads tokens also scores them
    else:
        head = Linear(make_head(checkpoint.take("lm_head.weight", vocabulary, hidden)))
    embedding = Embedding(table, shared=config.tied_embeddings and isinstance(head.matmul, Dense))
    rotary = Rotary(config.head_dim, config.rope_theta, config.rope_scaling, max_positions, dtype, device)
    return Decoder(embedding, layers, norm("model.norm"), head, rotary)
