"""Parser of a checkpoint's config.json: every key is used, known to have no effect, logged as unused, or refused."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog

from slipway_api.memory import LATENT_PLANES, ModelShape
from slipway_runtime.layers.rotary import RopeScaling
from slipway_runtime.models.config_experts import Experts, experts_of
from slipway_runtime.models.config_keys import HONOURED, INERT, may_compute
from slipway_runtime.models.config_latent import Latent, latent_of
from slipway_runtime.models.config_layers import (
    biases_of,
    check_attention_types,
    layers_without_positions,
    norms_of,
    sliding_layers,
)
from slipway_runtime.models.config_rope import (
    default_context,
    local_rope_theta,
    longest_context,
    rope_scaling,
    rope_theta,
    rotary_dim,
)
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
from slipway_runtime.models.families import (
    BEFORE,
    FAMILIES,
    GATED,
    HEAD_NORMS,
    Family,
    MlpNames,
    Norms,
    check_activation,
)
from slipway_runtime.models.wrappers import text_part

__all__ = ["DoesNotFitError", "ModelConfig", "ModelRefusedError", "parse_config", "read_config"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and options of a decoder, parsed from config.json."""

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
    max_position: int  # the longest context, RoPE scaling included
    tied_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: int | None  # tokens that a token attends to, itself included; None: no layer has a window
    sliding_layers: frozenset[int]  # all other layers have full attention
    dtype: str  # of the checkpoint: float32, bfloat16 or float16
    eos_token_ids: tuple[int, ...]
    default_position: int = 0  # context length if max_model_len is not set; 0: max_position
    activation: str = "silu"  # of the gate: silu or gelu_pytorch_tanh
    rotary_dim: int = 0  # dimensions of a head that are rotated; 0: all
    local_rope_theta: float | None = None  # of the layers with a window, if it differs
    layers_without_positions: frozenset[int] = frozenset()
    fused_projections: bool = False  # q, k, v are one matrix in the checkpoint, and so are gate and up
    attention_scale: float = 0.0  # factor of the scores; 0: 1 / sqrt(head_dim)
    attention_softcap: float | None = None  # bounds the scores: cap · tanh(score / cap)
    logit_softcap: float | None = None
    attention_sinks: bool = False  # a learned score per head, in the softmax's denominator only
    embedding_scale: float = 1.0
    norm_offset: float = 0.0  # added to the weights of norms, which then stay in float32
    norms: Norms = BEFORE
    wide_qk_norm: bool = False  # one norm over all heads of q, and one over those of k
    interleaved: bool = False  # the checkpoint has rotated dimensions as neighbours, not in two halves
    fused_mlp: bool = False  # gate and up are one matrix in the checkpoint
    head_norms: tuple[str, str] = HEAD_NORMS  # names of the norms of q and k
    norms_after_rotation: bool = False  # of q and k
    layer_norm: bool = False  # norms subtract the mean (LayerNorm); those of heads have weights of their own
    norm_bias: bool = False
    parallel: bool = False  # attention and MLP read the same norm
    unit_head_norms: bool = False  # q and k have norms without weights, in layers with positions
    latent: Latent | None = None  # latent attention (MLA); head_dim is then the size of a token in the cache
    draft_layers: bool = False  # the checkpoint has further layers that draft tokens; they are not loaded
    mlp: MlpNames = GATED
    residual_scale: float = 1.0  # of the outputs of attention and MLP
    logit_scale: float = 1.0
    experts: Experts | None = None
    quantization: dict[str, Any] | None = None  # quantization_config of the checkpoint, unparsed
    derived_from: str = ""  # the names in config.json of the model that the weights were made from

    @property
    def num_parameters(self) -> int:
        """Approximate number of weights, to choose a dtype."""
        return self.shape.all_parameters

    @property
    def shape(self) -> ModelShape:
        """The shape as the memory planner counts it."""
        return ModelShape(
            layers=self.num_layers,
            hidden=self.hidden_size,
            heads=self.num_q_heads,
            kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate=self.intermediate_size,
            vocab=self.vocab_size,
            tied=self.tied_embeddings,
            gated=bool(self.mlp.gate),
            kv_planes=self.kv_planes,
            attention_parameters=0
            if self.latent is None
            else self.latent.parameters(self.hidden_size, self.num_q_heads),
            experts=0 if self.experts is None else self.experts.count,
            experts_per_token=0 if self.experts is None else self.experts.per_token,
            moe_intermediate=0 if self.experts is None else self.experts.intermediate_size,
            sparse_layers=0 if self.experts is None else len(self.experts.layers),
            shared_intermediate=0 if self.experts is None else self.experts.shared_size,
        )

    def window_of(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens, the query's own included; None: full attention."""
        return self.sliding_window if layer in self.sliding_layers else None

    def rotary_table_of(self, layer: int) -> int:
        """Index of the layer's table in `Decoder.rotary`: 0, or 1 for the variant."""
        if layer in self.layers_without_positions:
            return 1
        return 1 if self.local_rope_theta is not None and layer in self.sliding_layers else 0

    @property
    def takes_adapters(self) -> bool:
        """Whether adapters are supported: not with latent attention."""
        return self.latent is None

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Bytes of one token's keys and values in all layers. Counts KV heads, not attention heads."""
        return self.kv_planes * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value

    @property
    def kv_planes(self) -> int:
        """Vectors of a token and head in the cache: key and value, or one latent that is both."""
        return 2 if self.latent is None else LATENT_PLANES


log = structlog.get_logger()


# Limits: far above any published model, and small enough that nothing computed from them overflows or fills a disk.
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
# Compiled attention keeps 16 queries of all heads that share a key-value head on the stack: 3 MB at these limits.
_MOST_SHARING: Final = 256  # attention heads for each key-value head; Falcon-7B, the most of a published model, has 71
_MOST_SHARED_SIZE: Final = 1 << 14  # numbers of these heads together; Falcon-7B has 4,544


def read_config(model_path: Path) -> ModelConfig:
    """Read config.json (and generation_config.json for end-of-sequence tokens); raise ModelRefusedError."""
    raw = read_json(model_path / "config.json")
    generation = model_path / "generation_config.json"
    return parse_config(raw, read_json(generation) if generation.exists() else {})


def parse_config(raw: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    """Parse a config.json. Raises ModelRefusedError, which names the key that is not supported."""
    raw = text_part(raw)
    model_type = raw.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ModelRefusedError(f"model_type is {shown(model_type)}: this engine runs {', '.join(FAMILIES)}")
    for key, value in family.neutral:
        demand(raw, key, value)
    demand(raw, "is_causal", True)
    known = INERT | HONOURED | family.keys | family.inert | {key for key, _ in family.neutral}
    unknown = sorted(key for key in raw.keys() - known if raw[key])  # null, false, 0 and empty: switched off
    if computed := [key for key in unknown if may_compute(key)]:
        raise ModelRefusedError(f"config.json asks for what this engine does not know: {', '.join(computed)}")
    if unknown:
        log.info("config.json has keys that are not used", keys=[shown(key) for key in unknown[:20]])
    check_activation(family, raw)
    check_attention_types(raw)
    if "pretraining_tp" not in family.inert:
        demand(raw, "pretraining_tp", 1)
    demand(raw, "add_cross_attention", False)
    if raw.get("pruned_heads"):
        raise ModelRefusedError("config.json: pruned_heads is not supported")
    try:
        return _decoder(str(model_type), family, raw, generation or {})
    except KeyError as missing:
        raise ModelRefusedError(f"config.json lacks {missing.args[0]}") from missing


def _decoder(model_type: str, family: Family, raw: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    def size(key: str) -> int:
        return whole(raw, key, at_most=_MOST[key])

    hidden, heads, layers = size("hidden_size"), size("num_attention_heads"), size("num_hidden_layers")
    latent = latent_of(family, raw)
    kv_heads = heads if raw.get("num_key_value_heads") is None else size("num_key_value_heads")
    if latent is not None:
        kv_heads = 1
    if heads % kv_heads:
        raise ModelRefusedError(f"{heads} attention heads cannot be shared by {kv_heads} key-value heads")
    head_dim = (family.head_dim or hidden // heads) if raw.get("head_dim") is None else size("head_dim")
    if latent is not None:
        head_dim = latent.rank + latent.rotary
    elif head_dim < 2 or head_dim % 2:
        raise ModelRefusedError(f"heads have {head_dim} dimensions: rotary positions turn pairs of them")
    shared = heads // kv_heads
    if latent is None and (shared > _MOST_SHARING or shared * head_dim > _MOST_SHARED_SIZE):
        raise ModelRefusedError(
            f"{shared} attention heads of size {head_dim} share a key-value head: at most {_MOST_SHARING} heads and "
            f"{_MOST_SHARED_SIZE} numbers together are supported"
        )
    window, sliding = sliding_layers(model_type, raw, layers)
    turned = rotary_dim(model_type, raw, head_dim) if latent is None else latent.rotary
    scaling = rope_scaling(model_type, raw, turned)
    biases = biases_of(model_type, raw)
    return ModelConfig(
        model_type=model_type,
        vocab_size=size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=_intermediate_size(model_type, family, raw),
        num_layers=layers,
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=number(raw, family.epsilon_key, at_most=1.0) if family.epsilon_key in raw else family.epsilon,
        rope_theta=rope_theta(model_type, raw, head_dim),
        rope_scaling=scaling,
        max_position=longest_context(raw, scaling),
        default_position=default_context(raw, scaling),
        tied_embeddings=family.ties_by_default
        if raw.get("tie_word_embeddings") is None
        else flag(raw, "tie_word_embeddings"),
        qkv_bias=biases.qkv,
        out_bias=biases.out,
        mlp_bias=biases.mlp,
        qk_norm=family.qk_norm or (flag(raw, "use_qk_norm") and not (family.unit_head_norms or family.wide_qk_norm)),
        unit_head_norms=family.unit_head_norms and raw.get("use_qk_norm") is not False,
        draft_layers=family.draft_layers,
        sliding_window=window,
        sliding_layers=sliding,
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        eos_token_ids=_eos_token_ids(raw, generation),
        activation=family.activation,
        rotary_dim=0 if turned == head_dim or latent is not None else turned,
        local_rope_theta=local_rope_theta(model_type, raw),
        layers_without_positions=layers_without_positions(model_type, raw, layers),
        fused_projections=family.fused,
        attention_scale=_attention_scale(model_type, raw) if latent is None else latent.scale(scaling),
        latent=latent,
        attention_softcap=_optional(raw, "attn_logit_softcapping"),
        logit_softcap=_optional(raw, "final_logit_softcapping"),
        attention_sinks=model_type == "gpt_oss",
        embedding_scale=hidden**0.5 if family.gemma else _factor(raw, "embedding_multiplier"),
        norm_offset=1.0 if family.gemma else 0.0,
        norms=norms_of(family, raw),
        head_norms=family.head_norms,
        norms_after_rotation=family.norms_after_rotation,
        layer_norm=family.layer_norm,
        norm_bias=family.norm_bias,
        parallel=family.parallel,
        mlp=family.mlp,
        wide_qk_norm=family.wide_qk_norm,
        interleaved=family.interleaved and raw.get("rope_interleave") is not False,
        fused_mlp=family.fused_mlp,
        residual_scale=_factor(raw, "residual_multiplier"),
        logit_scale=_logit_scale(model_type, raw),
        experts=experts_of(model_type, family, raw, layers),
        quantization=_quantization(raw),
        derived_from=" ".join(str(raw[key])[:200] for key in _ORIGINS if isinstance(raw.get(key), str)),
    )


_ORIGINS = ("_name_or_path", "base_model_name_or_path", "base_model", "unsloth_base_model")


def _intermediate_size(model_type: str, family: Family, raw: dict[str, Any]) -> int:
    """Inner features of dense layers; those of an expert if the family has no dense layers."""
    key = "intermediate_size_mlp" if model_type == "llama4_text" else "intermediate_size"
    if raw.get(key) is None and family.moe is not None and family.moe.sparse == "all":
        key = family.moe.inner
    return whole(raw, key, at_most=_MOST["intermediate_size"])


def _attention_scale(model_type: str, raw: dict[str, Any]) -> float:
    if model_type in ("granite", "granitemoe", "granitemoeshared"):
        return _factor(raw, "attention_multiplier")
    if model_type == "hyperclovax":
        return _optional(raw, "attention_multiplier") or 0.0
    return number(raw, "query_pre_attn_scalar") ** -0.5 if "query_pre_attn_scalar" in raw else 0.0


def _logit_scale(model_type: str, raw: dict[str, Any]) -> float:
    if model_type in ("cohere", "cohere2"):
        return number(raw, "logit_scale") if "logit_scale" in raw else 0.0625
    scaling = _factor(raw, "logits_scaling")
    return scaling if model_type == "hyperclovax" else 1 / scaling


def _factor(raw: dict[str, Any], key: str) -> float:
    return 1.0 if raw.get(key) is None else number(raw, key)


def _optional(raw: dict[str, Any], key: str) -> float | None:
    return None if raw.get(key) is None else number(raw, key)


def _quantization(raw: dict[str, Any]) -> dict[str, Any] | None:
    said = raw.get("quantization_config")
    if said is not None and not isinstance(said, dict):
        raise ModelRefusedError(f"config.json: quantization_config is {shown(said)}; an object is needed")
    return said


def _eos_token_ids(raw: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    found: set[int] = set()
    for source in (raw, generation):
        ids = source.get("eos_token_id")
        ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if len(ids) > _MOST_END_TOKENS or any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
            raise ModelRefusedError("eos_token_id is neither a token id nor a short list of them")
        found.update(ids)
    return tuple(sorted(found))
