"""What a checkpoint's config.json asks for: every key is honoured, known to change nothing, or a reason to refuse."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipway_runtime.layers.rotary import RopeScaling


class ModelRefusedError(Exception):
    """A checkpoint or a setting that this engine cannot honour; the message is a sentence for the user."""


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
    max_position: int
    tied_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: int | None  # beyond this length the model would forget; we stop there
    dtype: str  # of the checkpoint: float32, bfloat16 or float16
    eos_token_ids: tuple[int, ...]

    @property
    def num_parameters(self) -> int:
        """Weights, near enough to choose a number format by."""
        heads = (2 * self.num_q_heads + 2 * self.num_kv_heads) * self.head_dim
        layer = self.hidden_size * (heads + 3 * self.intermediate_size)
        return self.num_layers * layer + self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Keys and values of one token in all layers. Counts KV heads, not attention heads."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Change nothing about the tokens that come out, whatever their value.
_INERT = _words(
    "_name_or_path architectures transformers_version use_cache bos_token_id pad_token_id unk_token_id sep_token_id "
    "decoder_start_token_id initializer_range attention_dropout hidden_dropout embd_pdrop resid_pdrop model_type "
    "output_attentions output_hidden_states return_dict return_dict_in_generate id2label label2id problem_type "
    "gradient_checkpointing torchscript tokenizer_class prefix task_specific_params finetuning_task auto_map "
    "_attn_implementation attn_implementation _attn_implementation_autoset max_window_layers "
    "chunk_size_feed_forward is_encoder_decoder is_decoder torch_dtype dtype tf_legacy_loss use_bfloat16 "
    # defaults for generate(), which requests decide here
    "max_length min_length do_sample early_stopping num_beams temperature top_k top_p typical_p repetition_penalty "
    "length_penalty num_return_sequences"
)
_HONOURED = _words(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "rms_norm_eps rope_theta rope_scaling rope_parameters max_position_embeddings tie_word_embeddings attention_bias "
    "mlp_bias sliding_window use_sliding_window layer_types eos_token_id hidden_act pretraining_tp "
    "quantization_config add_cross_attention pruned_heads"
)
_ROPE_KEYS = {
    "default": frozenset(
        {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
    ),
    "linear": frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"}),
    "llama3": _words(
        "rope_type type rope_theta partial_rotary_factor factor low_freq_factor high_freq_factor "
        "original_max_position_embeddings"
    ),
}
_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


def read_config(model_path: Path) -> ModelConfig:
    """Read config.json (and generation_config.json for end-of-sequence tokens); raise ModelRefusedError."""
    raw = _read_json(model_path / "config.json")
    generation = model_path / "generation_config.json"
    return parse_config(raw, _read_json(generation) if generation.exists() else {})


def parse_config(raw: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    """The decoder that `raw` describes, or ModelRefusedError with the key that stands in the way."""
    model_type = raw.get("model_type")
    if model_type not in _MODEL_TYPES:
        raise ModelRefusedError(f"model_type is {model_type!r}: this engine runs {', '.join(_MODEL_TYPES)}")
    unknown = sorted(key for key in raw.keys() - _INERT - _HONOURED if raw[key] not in (None, False))
    if unknown:
        raise ModelRefusedError(f"config.json asks for what this engine does not know: {', '.join(unknown)}")
    _demand(raw, "hidden_act", "silu")
    _demand(raw, "pretraining_tp", 1)
    _demand(raw, "quantization_config", None)
    _demand(raw, "add_cross_attention", False)
    if raw.get("pruned_heads"):
        raise ModelRefusedError("config.json: pruned_heads is not supported")
    try:
        hidden, heads = _whole(raw, "hidden_size"), _whole(raw, "num_attention_heads")
        config = ModelConfig(
            model_type=model_type,
            vocab_size=_whole(raw, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_whole(raw, "intermediate_size"),
            num_layers=_whole(raw, "num_hidden_layers"),
            num_q_heads=heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or (128 if model_type == "qwen3" else hidden // heads)),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=_rope_theta(raw),
            rope_scaling=_rope_scaling(raw),
            max_position=_whole(raw, "max_position_embeddings"),
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=model_type == "qwen2" or bool(raw.get("attention_bias", False)),
            out_bias=model_type != "qwen2" and bool(raw.get("attention_bias", False)),
            mlp_bias=bool(raw.get("mlp_bias", False)),
            qk_norm=model_type == "qwen3",
            sliding_window=_sliding_window(raw),
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
            eos_token_ids=_eos_token_ids(raw, generation or {}),
        )
    except KeyError as missing:
        raise ModelRefusedError(f"config.json lacks {missing.args[0]}") from missing
    if config.num_q_heads % config.num_kv_heads:
        raise ModelRefusedError(
            f"{config.num_q_heads} attention heads cannot be shared by {config.num_kv_heads} key-value heads"
        )
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelRefusedError(f"there is no {path.name} in the checkpoint") from None
    except json.JSONDecodeError as error:
        raise ModelRefusedError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelRefusedError(f"{path.name} holds no JSON object")
    return raw


def _demand(raw: dict[str, Any], key: str, value: object) -> None:
    if raw.get(key, value) != value:
        raise ModelRefusedError(f"config.json: {key} is {raw[key]!r}; only {value!r} is supported")


def _whole(raw: dict[str, Any], key: str) -> int:
    if not isinstance(raw[key], int) or raw[key] < 1:
        raise ModelRefusedError(f"config.json: {key} is {raw[key]!r}; a positive whole number is needed")
    return int(raw[key])


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    """The rope block, which older checkpoints call rope_scaling and newer ones rope_parameters."""
    block = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(block, dict) or any(isinstance(value, dict) for value in block.values()):
        raise ModelRefusedError("config.json: rope parameters that differ by layer are not supported")
    return block


def _rope_theta(raw: dict[str, Any]) -> float:
    return float(_rope(raw).get("rope_theta") or raw.get("rope_theta") or 10_000.0)


def _rope_scaling(raw: dict[str, Any]) -> RopeScaling:
    block = _rope(raw)
    kind = block.get("rope_type") or block.get("type") or "default"
    if kind not in _ROPE_KEYS:
        raise ModelRefusedError(f"config.json: rope_type {kind!r} is not supported; {', '.join(_ROPE_KEYS)} are")
    unknown = sorted(block.keys() - _ROPE_KEYS[kind])
    if unknown:
        raise ModelRefusedError(f"config.json: rope_type {kind!r} with {', '.join(unknown)} is not supported")
    _demand(block, "partial_rotary_factor", 1.0)
    if kind == "default":
        return RopeScaling(kind)
    if kind == "linear":
        return RopeScaling(kind, factor=float(block["factor"]))
    return RopeScaling(
        kind,
        factor=float(block["factor"]),
        low_freq_factor=float(block["low_freq_factor"]),
        high_freq_factor=float(block["high_freq_factor"]),
        original_max_position=int(block["original_max_position_embeddings"]),
    )


def _sliding_window(raw: dict[str, Any]) -> int | None:
    """The window, when a layer uses one. Up to its length it hides nothing; longer contexts are not offered."""
    layers = raw.get("layer_types")
    if layers is not None:
        unknown = sorted(set(layers) - {"full_attention", "sliding_attention"})
        if unknown:
            raise ModelRefusedError(f"config.json: layers of type {', '.join(unknown)} are not supported")
        if "sliding_attention" not in layers:
            return None
    if raw["model_type"].startswith("qwen") and not raw.get("use_sliding_window", False):
        return None
    window = raw.get("sliding_window")
    return None if window is None else int(window)


def _eos_token_ids(raw: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    found: set[int] = set()
    for source in (raw, generation):
        ids = source.get("eos_token_id")
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return tuple(sorted(found))
