"""What a checkpoint's config.json asks for: every key is honoured, known to change nothing, or a reason to refuse."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog

from slipway_api.memory import ModelShape
from slipway_runtime.layers.rotary import RopeScaling
from slipway_runtime.models.config_rope import longest_context, rope_scaling, rope_theta
from slipway_runtime.models.config_values import (
    DoesNotFitError,
    ModelRefusedError,
    demand,
    flag,
    number,
    read_json,
    shown,
    whole,
)

__all__ = ["DoesNotFitError", "ModelConfig", "ModelRefusedError", "parse_config", "read_config"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    max_position: int  # the longest context, stretched positions included
    tied_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: int | None  # tokens that a sliding layer sees, its own included; None: no layer slides
    sliding_layers: frozenset[int]  # the others see everything
    dtype: str  # of the checkpoint: float32, bfloat16 or float16
    eos_token_ids: tuple[int, ...]

    @property
    def num_parameters(self) -> int:
        """Weights, near enough to choose a number format by."""
        heads = (2 * self.num_q_heads + 2 * self.num_kv_heads) * self.head_dim
        layer = self.hidden_size * (heads + 3 * self.intermediate_size)
        return self.num_layers * layer + self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)

    @property
    def shape(self) -> ModelShape:
        """As the planner of memory counts it."""
        return ModelShape(
            layers=self.num_layers,
            hidden=self.hidden_size,
            heads=self.num_q_heads,
            kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate=self.intermediate_size,
            vocab=self.vocab_size,
            tied=self.tied_embeddings,
        )

    def window_of(self, layer: int) -> int | None:
        """Tokens that this layer sees, its own included; None: all."""
        return self.sliding_window if layer in self.sliding_layers else None

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Keys and values of one token in all layers. Counts KV heads, not attention heads."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value


log = structlog.get_logger()


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Change nothing about the tokens that come out, whatever their value.
_INERT = _words(
    "_name_or_path architectures transformers_version use_cache bos_token_id pad_token_id unk_token_id sep_token_id "
    "decoder_start_token_id initializer_range attention_dropout hidden_dropout embd_pdrop resid_pdrop model_type "
    "output_attentions output_hidden_states return_dict return_dict_in_generate id2label label2id problem_type "
    "gradient_checkpointing torchscript tokenizer_class prefix task_specific_params finetuning_task auto_map "
    "_attn_implementation attn_implementation _attn_implementation_autoset "
    "chunk_size_feed_forward is_encoder_decoder is_decoder torch_dtype dtype tf_legacy_loss use_bfloat16 "
    # defaults for generate(), which requests decide here
    "max_length min_length do_sample early_stopping num_beams temperature top_k top_p typical_p repetition_penalty "
    "length_penalty num_return_sequences"
)
_HONOURED = _words(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "rms_norm_eps rope_theta rope_scaling rope_parameters max_position_embeddings tie_word_embeddings attention_bias "
    "mlp_bias sliding_window use_sliding_window max_window_layers layer_types eos_token_id hidden_act pretraining_tp "
    "quantization_config add_cross_attention pruned_heads "
    "is_matryoshka matryoshka_dimensions"  # models/pooling.py
)
# A key that is not known, with one of these words, says how tokens are computed: without it they would be others.
# Any other is what a library or a person left there, such as `unsloth_version`.
_COMPUTING = _words(
    "expert moe router lora_rank attn attention head query rope rotary alibi position window sliding norm logit "
    "softcap multiplier scal bias act mlp intermediate hidden embed layer residual mup conv mamba ssm state "
    "recurrent cross encoder vision image audio text_config quant sparse mtp nextn parallel"
)
_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")

# Larger than any published model by far, and small enough that nothing computed from them overflows or fills a disk.
_MOST: Final = {
    "vocab_size": 1 << 22,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1024,
    "num_attention_heads": 4096,
    "num_key_value_heads": 4096,
    "head_dim": 1024,
}
_MOST_END_TOKENS: Final = 256


def read_config(model_path: Path) -> ModelConfig:
    """Read config.json (and generation_config.json for end-of-sequence tokens); raise ModelRefusedError."""
    raw = read_json(model_path / "config.json")
    generation = model_path / "generation_config.json"
    return parse_config(raw, read_json(generation) if generation.exists() else {})


def parse_config(raw: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    """The decoder that `raw` describes, or ModelRefusedError with the key that stands in the way."""
    model_type = raw.get("model_type")
    if model_type not in _MODEL_TYPES:
        raise ModelRefusedError(f"model_type is {shown(model_type)}: this engine runs {', '.join(_MODEL_TYPES)}")
    unknown = sorted(key for key in raw.keys() - _INERT - _HONOURED if raw[key] not in (None, False))
    if computed := [key for key in unknown if any(word in key.lower() for word in _COMPUTING)]:
        raise ModelRefusedError(f"config.json asks for what this engine does not know: {', '.join(computed)}")
    if unknown:
        log.info("config.json has keys that are not used", keys=[shown(key) for key in unknown[:20]])
    demand(raw, "hidden_act", "silu")
    demand(raw, "pretraining_tp", 1)
    demand(raw, "quantization_config", None)
    demand(raw, "add_cross_attention", False)
    if raw.get("pruned_heads"):
        raise ModelRefusedError("config.json: pruned_heads is not supported")
    try:
        return _decoder(str(model_type), raw, generation or {})
    except KeyError as missing:
        raise ModelRefusedError(f"config.json lacks {missing.args[0]}") from missing


def _decoder(model_type: str, raw: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    def size(key: str) -> int:
        return whole(raw, key, at_most=_MOST[key])

    hidden, heads, layers = size("hidden_size"), size("num_attention_heads"), size("num_hidden_layers")
    kv_heads = heads if raw.get("num_key_value_heads") is None else size("num_key_value_heads")
    if heads % kv_heads:
        raise ModelRefusedError(f"{heads} attention heads cannot be shared by {kv_heads} key-value heads")
    head_dim = (128 if model_type == "qwen3" else hidden // heads) if raw.get("head_dim") is None else size("head_dim")
    if head_dim < 2 or head_dim % 2:
        raise ModelRefusedError(f"heads have {head_dim} dimensions: rotary positions turn pairs of them")
    window, sliding = _sliding(model_type, raw, layers)
    scaling = rope_scaling(raw)
    biased = flag(raw, "attention_bias")
    return ModelConfig(
        model_type=model_type,
        vocab_size=size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=size("intermediate_size"),
        num_layers=layers,
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=number(raw, "rms_norm_eps", at_most=1.0) if "rms_norm_eps" in raw else 1e-6,
        rope_theta=rope_theta(raw),
        rope_scaling=scaling,
        max_position=longest_context(raw, scaling),
        tied_embeddings=flag(raw, "tie_word_embeddings"),
        qkv_bias=model_type == "qwen2" or biased,  # Qwen2 has no key for it: always these three, never the output
        out_bias=model_type != "qwen2" and biased,
        mlp_bias=flag(raw, "mlp_bias"),
        qk_norm=model_type == "qwen3",
        sliding_window=window,
        sliding_layers=sliding,
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        eos_token_ids=_eos_token_ids(raw, generation),
    )


def _sliding(model_type: str, raw: dict[str, Any], layers: int) -> tuple[int | None, frozenset[int]]:
    """The window, and the layers that use it.

    | family       | layers that slide                                                                             |
    |--------------|-----------------------------------------------------------------------------------------------|
    | mistral      | all, when sliding_window is set                                                               |
    | qwen2, qwen3 | with use_sliding_window: those of layer_types, else those from max_window_layers on           |
    | llama        | none: a window in its config would be ignored by its authors' code, so it is refused          |
    """
    kinds = _layer_types(raw, layers)
    window = raw.get("sliding_window")
    if model_type.startswith("qwen") and not flag(raw, "use_sliding_window"):
        window = None
    if window is None:
        if kinds and "sliding_attention" in kinds:
            raise ModelRefusedError("config.json: layer_types has sliding_attention, and there is no sliding_window")
        return None, frozenset()
    window = whole(raw, "sliding_window", at_most=1 << 31)
    if model_type.startswith("qwen"):
        if kinds is None:
            sliding = frozenset(range(_max_window_layers(raw), layers))
        else:
            sliding = frozenset(index for index, kind in enumerate(kinds) if kind == "sliding_attention")
        return (window, sliding) if sliding else (None, frozenset())
    if model_type != "mistral":
        raise ModelRefusedError(f"config.json: sliding_window is {window}; {model_type} models have none")
    if kinds and set(kinds) != {"sliding_attention"}:
        raise ModelRefusedError("config.json: a mistral model whose layer_types mix windows is not supported")
    return window, frozenset(range(layers))


def _max_window_layers(raw: dict[str, Any]) -> int:
    if raw.get("max_window_layers") == 0:
        return 0
    return whole(raw, "max_window_layers", at_most=1 << 31) if "max_window_layers" in raw else 28


def _layer_types(raw: dict[str, Any], layers: int) -> list[str] | None:
    kinds = raw.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ModelRefusedError(f"config.json: layer_types does not name each of the {layers} layers")
    unknown = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
    if unknown:
        raise ModelRefusedError(f"config.json: layers of type {', '.join(unknown[:3])} are not supported")
    return kinds


def _eos_token_ids(raw: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    found: set[int] = set()
    for source in (raw, generation):
        ids = source.get("eos_token_id")
        ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if len(ids) > _MOST_END_TOKENS or any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
            raise ModelRefusedError("eos_token_id is neither a token id nor a short list of them")
        found.update(ids)
    return tuple(sorted(found))
