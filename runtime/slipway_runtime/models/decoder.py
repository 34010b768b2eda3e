"""The decoder of all model families, and `load_decoder`; differences are in the config (listed in `families`)."""

import structlog
from torch import Tensor

from slipway_runtime.kernels.dispatch import Kernels
from slipway_runtime.layers.attention import StepContext
from slipway_runtime.layers.decoder_layer import DecoderLayer
from slipway_runtime.layers.embedding import Embedding
from slipway_runtime.layers.linear import Linear
from slipway_runtime.layers.matmul import ALL_DENSE, Dense, MatmulMakers
from slipway_runtime.layers.norm import Norm
from slipway_runtime.layers.rotary import RopeScaling, Rotary
from slipway_runtime.models.checkpoint import Checkpoint
from slipway_runtime.models.config import ModelConfig
from slipway_runtime.models.layer_loader import LayerLoader
from slipway_runtime.models.quantized_checkpoint import WeightReader, parse_quantization
from slipway_runtime.models.score_head import SCORE_TENSOR
from slipway_runtime.models.sharding import WHOLE, Shard

log = structlog.get_logger()


class Decoder:
    """Computes hidden states from the token ids of a step, and logits from hidden states."""

    def __init__(
        self,
        embedding: Embedding,
        layers: list[DecoderLayer],
        norm: Norm,
        head: Linear | None,
        rotary: Rotary,
        *,
        vocab_size: int,
        logit_softcap: float | None = None,
        logit_scale: float = 1.0,
        share: Shard = WHOLE,
    ) -> None:
        """head: lm_head, or this rank's share of it; None: this decoder computes no logits."""
        self.vocab_size = vocab_size
        self._logit_softcap = logit_softcap
        self._logit_scale = logit_scale
        self._share = share
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
        table, head = self._embedding.weight, self._head
        shared = head is not None and isinstance(head.matmul, Dense) and head.matmul.weight is table
        return layers + (0 if head is None else head.nbytes) + (0 if shared else table.nbytes)

    @property
    def scores_tokens(self) -> bool:
        """Whether it computes logits; otherwise only hidden states, for embeddings."""
        return self._head is not None

    def normed(self, hidden: Tensor) -> Tensor:
        """Hidden states after the final norm, from which embeddings are pooled. (R, H) -> (R, H)."""
        return self._norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the next token. (R, H) -> (R, V), float32. With several ranks, all must call it with equal R."""
        assert self._head is not None, "this decoder computes no logits"
        scores = self._share.all_logits(self._head(self._norm(hidden)), self.vocab_size).float()
        if self._logit_scale != 1.0:
            scores.mul_(self._logit_scale)
        cap = self._logit_softcap
        return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)


def load_decoder(
    config: ModelConfig,
    checkpoint: Checkpoint,
    kernels: Kernels,
    max_positions: int,
    makers: MatmulMakers = ALL_DENSE,
    share: Shard = WHOLE,
    *,
    scores_tokens: bool = True,
) -> Decoder:
    """Build the decoder, or a rank's share of it, from a checkpoint's tensors, in its dtype and on its device.

    scores_tokens: False if the engine never samples, so that lm_head is not read.
    """
    hidden, vocabulary = config.hidden_size, config.vocab_size
    weights = WeightReader(checkpoint, parse_quantization(config.quantization), checkpoint.dtype)
    loader = LayerLoader(config, checkpoint, weights, kernels, makers, share)
    tokens = share.of_vocabulary(vocabulary)
    table = checkpoint.take("model.embed_tokens.weight", vocabulary, hidden, rows=tokens)
    layers = checkpoint.in_parallel(loader.layer, config.num_layers)
    if share.rank == 0 and (reason := loader.cut.lost_codes):  # the same on all ranks
        log.warning("weights take more memory than in the checkpoint", reason=reason)
    if config.draft_layers:
        checkpoint.ignore_if(lambda name: _is_of_drafts(name, config.num_layers))
    head = None
    if not scores_tokens or config.tied_embeddings:
        checkpoint.ignore("lm_head.weight")
        checkpoint.ignore(SCORE_TENSOR)
    if scores_tokens:  # tied: the embedding matrix is also lm_head
        tied = config.tied_embeddings
        head = Linear(makers.head(table if tied else weights.matrix("lm_head", vocabulary, hidden, rows=tokens)))
    embedding = Embedding(
        table,
        shared=head is not None and isinstance(head.matmul, Dense) and head.matmul.weight is table,
        scale=config.embedding_scale,
        first=tokens.start,
        reduce=share.reduce,
    )
    rotary = Rotary(
        config.head_dim if config.latent is None else config.latent.rotary,
        config.rope_theta,
        config.rope_scaling,
        max_positions,
        checkpoint.dtype,
        checkpoint.device,
        rotary_dim=config.rotary_dim,
        variants=_rotary_variants(config),
    )
    norm = loader.norm("model.norm")
    return Decoder(
        embedding,
        layers,
        norm,
        head,
        rotary,
        vocab_size=vocabulary,
        logit_softcap=config.logit_softcap,
        logit_scale=config.logit_scale,
        share=share,
    )


def _is_of_drafts(name: str, layers: int) -> bool:
    """Whether a tensor is of the layers after the last, which draft several tokens (multi-token prediction)."""
    if name.startswith("model.mtp_"):
        return True
    index = name.removeprefix("model.layers.").partition(".")[0]
    return name.startswith("model.layers.") and index.isdigit() and int(index) >= layers


def _rotary_variants(config: ModelConfig) -> tuple[tuple[float, RopeScaling] | None, ...]:
    """Rotary tables after the first; `ModelConfig.rotary_table_of` has the table of each layer."""
    if config.layers_without_positions:
        return (None,)
    return () if config.local_rope_theta is None else ((config.local_rope_theta, RopeScaling("default")),)
