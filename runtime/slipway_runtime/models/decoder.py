"""The decoder of all model families, and `load_decoder`; differences are in the config (listed in `families`)."""

import torch
from torch import Tensor

from slipway_runtime.kernels.dispatch import Kernels
from slipway_runtime.layers.attention import StepContext
from slipway_runtime.layers.decoder_layer import DecoderLayer
from slipway_runtime.layers.embedding import Embedding
from slipway_runtime.layers.linear import Linear
from slipway_runtime.layers.matmul import Dense, MakeMatmul
from slipway_runtime.layers.norm import RMSNorm
from slipway_runtime.layers.rotary import RopeScaling, Rotary
from slipway_runtime.models.checkpoint import Checkpoint
from slipway_runtime.models.config import ModelConfig
from slipway_runtime.models.layer_loader import LayerLoader
from slipway_runtime.models.quantized_checkpoint import WeightReader, parse_quantization
from slipway_runtime.models.sharding import WHOLE, Share


class Decoder:
    """Computes hidden states from the token ids of a step, and logits from hidden states."""

    def __init__(
        self,
        embedding: Embedding,
        layers: list[DecoderLayer],
        norm: RMSNorm,
        head: Linear,
        rotary: Rotary,
        *,
        logit_softcap: float | None = None,
    ) -> None:
        self._logit_softcap = logit_softcap
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
        """Memory of the loaded weights (packed or quantized as they compute); norms are too small to count."""
        layers = sum(layer.nbytes for layer in self.layers)
        head = self._head.matmul
        shared = isinstance(head, Dense) and head.weight is self._embedding.weight
        return layers + self._head.nbytes + (0 if shared else self._embedding.weight.nbytes)

    def normed(self, hidden: Tensor) -> Tensor:
        """Hidden states after the final norm, from which embeddings are pooled. (R, H) -> (R, H)."""
        return self._norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the next token. (R, H) -> (R, V), float32."""
        scores = self._head(self._norm(hidden)).float()
        cap = self._logit_softcap
        return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)


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
    *,
    scores_tokens: bool = True,
    make_router: MakeMatmul = Dense,
) -> Decoder:
    """Build the decoder, or a rank's share of it, from a checkpoint's tensors.

    make_matmul, make_head, make_router: choose the `Matmul` of the matrices. scores_tokens: False if the engine never
    samples, so that lm_head is not read.
    """
    hidden, vocabulary = config.hidden_size, config.vocab_size
    weights = WeightReader(checkpoint, parse_quantization(config.quantization), dtype)
    loader = LayerLoader(
        config, checkpoint, weights, kernels, make_matmul=make_matmul, make_router=make_router, share=share
    )
    table = checkpoint.take("model.embed_tokens.weight", vocabulary, hidden)
    layers = checkpoint.in_parallel(loader.layer, config.num_layers)
    if not scores_tokens:
        checkpoint.ignore("lm_head.weight")
        head = Linear(Dense(table))
    elif config.tied_embeddings:
        checkpoint.ignore("lm_head.weight")
        head = Linear(make_head(table))  # tied: the embedding matrix is also lm_head
    else:
        head = Linear(make_head(weights.matrix("lm_head", vocabulary, hidden)))
    shared = isinstance(head.matmul, Dense) and head.matmul.weight is table
    embedding = Embedding(table, shared=shared, scale=config.embedding_scale)
    rotary = Rotary(
        config.head_dim,
        config.rope_theta,
        config.rope_scaling,
        max_positions,
        dtype,
        device,
        rotary_dim=config.rotary_dim,
        variants=_rotary_variants(config),
    )
    return Decoder(embedding, layers, loader.norm("model.norm"), head, rotary, logit_softcap=config.logit_softcap)


def _rotary_variants(config: ModelConfig) -> tuple[tuple[float, RopeScaling] | None, ...]:
    """Rotary tables after the first; `ModelConfig.rotary_table_of` has the table of each layer."""
    if config.layers_without_positions:
        return (None,)
    return () if config.local_rope_theta is None else ((config.local_rope_theta, RopeScaling("default")),)
