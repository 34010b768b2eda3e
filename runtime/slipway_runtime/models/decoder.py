"""Llama, Mistral, Qwen2 and Qwen3 as one decoder: they differ in biases and norms of heads, which the config says."""

import torch
from torch import Tensor

from slipway_runtime.kernels.dispatch import Kernels
from slipway_runtime.layers.attention import Attention, StepContext
from slipway_runtime.layers.embedding import Embedding
from slipway_runtime.layers.linear import Linear
from slipway_runtime.layers.norm import RMSNorm
from slipway_runtime.layers.rotary import Rotary
from slipway_runtime.models.config import ModelConfig
from slipway_runtime.models.weights import Checkpoint


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    __slots__ = ("_attention", "_attention_norm", "_down", "_gate_up", "_kernels", "_mlp_norm")

    def __init__(
        self,
        attention: Attention,
        gate_up: Linear,
        down: Linear,
        attention_norm: RMSNorm,
        mlp_norm: RMSNorm,
        kernels: Kernels,
    ) -> None:
        self._attention = attention
        self._gate_up = gate_up
        self._down = down
        self._attention_norm = attention_norm
        self._mlp_norm = mlp_norm
        self._kernels = kernels

    def __call__(self, x: Tensor, cache: Tensor, step: StepContext) -> Tensor:
        """x: (T, H) -> (T, H)."""
        x = self._attention(self._attention_norm(x), cache, step).add_(x)
        return self._down(self._kernels.swiglu(self._gate_up(self._mlp_norm(x)))).add_(x)


class Decoder:
    """Token ids of a step to hidden states; hidden states to scores of the next token."""

    def __init__(
        self, embedding: Embedding, layers: list[DecoderLayer], norm: RMSNorm, head: Linear, rotary: Rotary
    ) -> None:
        self.rotary = rotary
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head

    def __call__(self, token_ids: Tensor, caches: list[Tensor], step: StepContext) -> Tensor:
        """(T,) -> (T, H)."""
        x = self._embedding(token_ids)
        for layer, cache in zip(self._layers, caches, strict=True):
            x = layer(x, cache, step)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token, for the rows that draw one. (R, H) -> (R, V), float32."""
        return self._head(self._norm(hidden)).float()


def load_decoder(
    config: ModelConfig,
    checkpoint: Checkpoint,
    kernels: Kernels,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Decoder:
    """Build the decoder from a checkpoint's tensors."""
    hidden, vocabulary = config.hidden_size, config.vocab_size

    def linear(name: str, out_size: int, in_size: int, *, bias: bool) -> Linear:
        weight = checkpoint.take(f"{name}.weight", out_size, in_size)
        return Linear(weight, checkpoint.take(f"{name}.bias", out_size) if bias else None)

    def norm(name: str, size: int = hidden) -> RMSNorm:
        return RMSNorm(checkpoint.take(f"{name}.weight", size), config.rms_norm_eps, kernels)

    def layer(prefix: str) -> DecoderLayer:
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        q_size, kv_size = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = Linear.merged(
            [
                linear(f"{attention}.q_proj", q_size, hidden, bias=config.qkv_bias),
                linear(f"{attention}.k_proj", kv_size, hidden, bias=config.qkv_bias),
                linear(f"{attention}.v_proj", kv_size, hidden, bias=config.qkv_bias),
            ]
        )
        gate_up = Linear.merged(
            [
                linear(f"{mlp}.{part}_proj", config.intermediate_size, hidden, bias=config.mlp_bias)
                for part in ("gate", "up")
            ]
        )
        return DecoderLayer(
            Attention(
                qkv,
                linear(f"{attention}.o_proj", hidden, q_size, bias=config.out_bias),
                num_q_heads=config.num_q_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                q_norm=norm(f"{attention}.q_norm", config.head_dim) if config.qk_norm else None,
                k_norm=norm(f"{attention}.k_norm", config.head_dim) if config.qk_norm else None,
                kernels=kernels,
            ),
            gate_up,
            linear(f"{mlp}.down_proj", hidden, config.intermediate_size, bias=config.mlp_bias),
            norm(f"{prefix}.input_layernorm"),
            norm(f"{prefix}.post_attention_layernorm"),
            kernels,
        )

    embedding = Embedding(checkpoint.take("model.embed_tokens.weight", vocabulary, hidden))
    layers = [layer(f"model.layers.{index}") for index in range(config.num_layers)]
    if config.tied_embeddings:
        checkpoint.ignore("lm_head.weight")
        head = embedding.tied_head()
    else:
        head = linear("lm_head", vocabulary, hidden, bias=False)
    rotary = Rotary(config.head_dim, config.rope_theta, config.rope_scaling, max_positions, dtype, device)
    return Decoder(embedding, layers, norm("model.norm"), head, rotary)
