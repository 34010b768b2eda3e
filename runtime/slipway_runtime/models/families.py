"""Model families: the keys of config.json that each family adds, and how its layers differ from Llama's.

| model_type  | published as                      | differs from Llama by                                             |
|-------------|-----------------------------------|-------------------------------------------------------------------|
| llama       | Llama 2, 3.x, SmolLM2             |                                                                   |
| smollm3     | SmolLM3                           | layers without rotary positions                                   |
| mistral     | Mistral, Mistral Nemo             | a sliding window on all layers                                    |
| qwen2       | Qwen2, Qwen2.5                    | biases of q, k and v, a sliding window on some layers             |
| qwen3       | Qwen3                             | norms of heads, a sliding window on some layers                   |
| phi3        | Phi-3, Phi-3.5, Phi-4, Phi-4-mini | merged projections, longrope, positions for a part of a head      |
| gemma2      | Gemma 2                           | (1 + w) norms before and after, GELU, soft caps, scaled embedding |
| gemma3_text | Gemma 3, text only                | the same without caps; norms of heads, two rotary bases           |
| mixtral     | Mixtral                           | experts                                                           |
| qwen3_moe   | Qwen3 mixture of experts          | norms of heads, experts in some layers                            |
| gpt_oss     | gpt-oss                           | experts with biases and a clamped SwiGLU, attention sinks         |
| gemma       | Gemma 1, CodeGemma                | as gemma2, without norms after, caps and windows                  |
| ministral   | Ministral                         | a sliding window on some layers                                   |
| ministral3  | Ministral 3                       | as mistral; queries scaled beyond the trained context             |
| cwm         | Code World Model                  | the same                                                          |
| seed_oss    | Seed-OSS                          | biases of q, k and v, and a key for that of o                     |
| granite     | Granite 3 and 4, dense            | factors of embedding, scores, residual stream and logits          |
| olmo2       | OLMo 2                            | norms only after attention and MLP; norms of all heads as one     |
| olmo3       | OLMo 3                            | the same, a sliding window on some layers                         |
| exaone4     | EXAONE 4                          | norms only after; norms of heads; layers without positions        |
| ernie4_5    | ERNIE 4.5, dense                  | neighbouring dimensions are rotated together                      |
| helium      | Helium                            | the same                                                          |
| glm         | GLM-4, GLM-Edge                   | the same for half a head; gate and up merged                      |
| glm4        | GLM-4-0414, GLM-Z1                | the same, norms before and after                                  |

The text part of a multimodal model is one of these, too (`wrappers`).
"""

from dataclasses import dataclass
from typing import Any, Final

from slipway_runtime.models.config_values import ModelRefusedError, flag, number, shown, whole


def words(text: str) -> frozenset[str]:
    """The words of a text: keys of config.json."""
    return frozenset(text.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The mixture of experts of the sparse layers."""

    count: int
    per_token: int
    intermediate_size: int  # inner features of one expert
    layers: frozenset[int]  # all other layers have a dense MLP
    normalize: bool  # the weights of a token's experts sum to one
    swiglu_limit: float | None = None  # gate and up are clamped to it, as gpt-oss does
    biased: bool = False


@dataclass(frozen=True, slots=True)
class Norms:
    """Names of a layer's norms in the checkpoint; "": there is none."""

    attention: str
    mlp: str
    attention_out: str = ""
    mlp_out: str = ""


BEFORE: Final = Norms("input_layernorm", "post_attention_layernorm")
AFTER: Final = Norms("", "", "post_attention_layernorm", "post_feedforward_layernorm")
GEMMA: Final = Norms(
    "input_layernorm", "pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"
)
GLM4: Final = Norms("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Keys and defaults that a model_type adds to Llama's."""

    keys: frozenset[str] = frozenset()  # used
    inert: frozenset[str] = frozenset()  # without effect on the output tokens
    neutral: tuple[tuple[str, object], ...] = ()  # keys with the one supported value, which has no effect
    activation: str = "silu"
    ties_by_default: bool = False  # default of tie_word_embeddings
    head_dim: int | None = None  # default of head_dim; None: hidden_size / heads
    qk_norm: bool = False
    gemma: bool = False
    fused: bool = False  # q, k, v are one matrix in the checkpoint, and so are gate and up
    fused_mlp: bool = False  # gate and up are one matrix
    norms: Norms = BEFORE
    wide_qk_norm: bool = False  # one norm over all heads of q, and one over those of k
    interleaved: bool = False  # neighbouring dimensions of a head are rotated together, not those of its halves


_MOE_TRAINING: Final = words("router_aux_loss_coef output_router_logits router_jitter_noise")
_GEMMA_KEYS: Final = words(
    "hidden_activation query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping "
    "sliding_window_pattern _sliding_window_pattern rope_local_base_freq"
)
FAMILIES: Final[dict[str, Family]] = {
    "llama": Family(),
    "smollm3": Family(
        keys=words("no_rope_layers no_rope_layer_interval"), inert=words("pretraining_tp"), ties_by_default=True
    ),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(head_dim=128, qk_norm=True),
    "phi3": Family(
        keys=words("original_max_position_embeddings partial_rotary_factor"),
        neutral=(("full_attn_mod", 1), ("interpolate_factor", 1)),
        fused=True,
    ),
    "gemma2": Family(
        keys=_GEMMA_KEYS,
        inert=words("sliding_window_size"),
        activation="gelu_pytorch_tanh",
        ties_by_default=True,
        head_dim=256,
        gemma=True,
        norms=GEMMA,
    ),
    "gemma3_text": Family(
        keys=_GEMMA_KEYS,
        activation="gelu_pytorch_tanh",
        ties_by_default=True,
        head_dim=256,
        qk_norm=True,
        gemma=True,
        norms=GEMMA,
    ),
    "mixtral": Family(keys=words("num_local_experts num_experts_per_tok"), inert=_MOE_TRAINING),
    "qwen3_moe": Family(
        keys=words(
            "num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob "
            "decoder_sparse_step mlp_only_layers"
        ),
        inert=_MOE_TRAINING,
        qk_norm=True,
    ),
    "gpt_oss": Family(
        keys=words("num_local_experts num_experts_per_tok swiglu_limit swiglu_alpha"),
        inert=_MOE_TRAINING | words("experts_per_token initial_context_length"),
        head_dim=64,
    ),
    "gemma": Family(
        keys=words("hidden_activation"),
        activation="gelu_pytorch_tanh",
        ties_by_default=True,
        head_dim=256,
        gemma=True,
    ),
    "ministral": Family(),
    "ministral3": Family(head_dim=128),
    "cwm": Family(head_dim=128),
    "seed_oss": Family(keys=words("attention_out_bias"), inert=words("residual_dropout"), head_dim=128),
    "granite": Family(
        keys=words("embedding_multiplier attention_multiplier residual_multiplier logits_scaling"),
    ),
    "olmo2": Family(norms=AFTER, wide_qk_norm=True),
    "olmo3": Family(norms=AFTER, wide_qk_norm=True),
    "exaone4": Family(keys=words("sliding_window_pattern"), norms=AFTER, qk_norm=True),
    "ernie4_5": Family(keys=words("use_bias"), ties_by_default=True, head_dim=128, interleaved=True),
    "helium": Family(head_dim=128, interleaved=True),
    "glm": Family(head_dim=128, fused_mlp=True, interleaved=True),
    "glm4": Family(head_dim=128, fused_mlp=True, interleaved=True, norms=GLM4),
}

_MOST_EXPERTS: Final = 4096


def check_activation(family: Family, raw: dict[str, Any]) -> None:
    """Raise ModelRefusedError for an activation that the family's published models do not have."""
    for key in ("hidden_activation", "hidden_act"):
        if key == "hidden_activation" and not family.gemma:
            continue
        said = raw.get(key)
        # Gemma's first config files have "gelu", while its authors' code computes the tanh form.
        if said is not None and said != family.activation and not (family.gemma and said == "gelu"):
            raise ModelRefusedError(f"config.json: {key} is {said!r}; only {family.activation!r} is supported")


def experts_of(model_type: str, raw: dict[str, Any], layers: int) -> Experts | None:
    """Mixture-of-experts settings of a config; None for a dense model."""
    if model_type not in ("mixtral", "qwen3_moe", "gpt_oss"):
        return None
    count_key = "num_local_experts" if raw.get("num_local_experts") is not None else "num_experts"
    if raw.get("num_experts", raw.get(count_key)) != raw.get(count_key):
        raise ModelRefusedError(
            f"config.json: num_experts is {shown(raw['num_experts'])} and num_local_experts is "
            f"{shown(raw['num_local_experts'])}: these are two names of one number; remove the wrong one"
        )
    count = whole(raw, count_key, at_most=_MOST_EXPERTS)
    per_token = whole(raw, "num_experts_per_tok", at_most=_MOST_EXPERTS)
    if per_token > count:
        raise ModelRefusedError(f"config.json: num_experts_per_tok is {per_token}, and there are {count} experts")
    if model_type == "gpt_oss":
        if raw.get("swiglu_alpha", 1.702) != 1.702:
            raise ModelRefusedError(f"config.json: swiglu_alpha is {raw['swiglu_alpha']!r}; only 1.702 is supported")
        return Experts(
            count=count,
            per_token=per_token,
            intermediate_size=whole(raw, "intermediate_size", at_most=1 << 20),
            layers=frozenset(range(layers)),
            normalize=True,
            swiglu_limit=number(raw, "swiglu_limit") if "swiglu_limit" in raw else 7.0,
            biased=True,
        )
    inner = "moe_intermediate_size" if model_type == "qwen3_moe" else "intermediate_size"
    return Experts(
        count=count,
        per_token=per_token,
        intermediate_size=whole(raw, inner, at_most=1 << 20),
        layers=_sparse_layers(raw, layers) if model_type == "qwen3_moe" else frozenset(range(layers)),
        normalize=flag(raw, "norm_topk_prob") if model_type == "qwen3_moe" else True,
    )


def _sparse_layers(raw: dict[str, Any], layers: int) -> frozenset[int]:
    step = whole(raw, "decoder_sparse_step", at_most=1 << 20) if "decoder_sparse_step" in raw else 1
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(not isinstance(index, int) for index in dense):
        raise ModelRefusedError("config.json: mlp_only_layers is not a list of layers")
    return frozenset(index for index in range(layers) if (index + 1) % step == 0 and index not in dense)


@dataclass(frozen=True, slots=True)
class Biases:
    """Which matrices of a layer have a bias."""

    qkv: bool
    out: bool
    mlp: bool


def biases_of(model_type: str, raw: dict[str, Any]) -> Biases:
    """The biases of a layer's matrices, by the keys of the family."""
    attention, mlp = flag(raw, "attention_bias"), flag(raw, "mlp_bias")
    match model_type:
        case "qwen2":  # it has no key for them
            return Biases(True, False, mlp)
        case "seed_oss":
            return Biases(raw.get("attention_bias") is None or attention, flag(raw, "attention_out_bias"), mlp)
        case "ernie4_5":
            return Biases(*(flag(raw, "use_bias"),) * 3)
        case "glm" | "glm4":
            return Biases(raw.get("attention_bias") is None or attention, False, False)
        case "helium":
            return Biases(attention, False, mlp)
    return Biases(attention, attention, mlp)


def layers_without_positions(model_type: str, raw: dict[str, Any], layers: int) -> frozenset[int]:
    """Layers without RoPE (NoPE): SmolLM3's no_rope_layers has a 0 for each; in EXAONE 4 those with full attention."""
    if model_type == "exaone4" and raw.get("sliding_window") is not None:
        kinds = raw.get("layer_types")
        period = whole(raw, "sliding_window_pattern", at_most=1 << 20) if "sliding_window_pattern" in raw else 4
        return frozenset(
            index
            for index in range(layers)
            if ((index + 1) % period == 0 if kinds is None else kinds[index] == "full_attention")
        )
    if model_type != "smollm3":
        return frozenset()
    said = raw.get("no_rope_layers")
    if said is None:
        step = whole(raw, "no_rope_layer_interval", at_most=1 << 20) if "no_rope_layer_interval" in raw else 4
        return frozenset(index for index in range(layers) if (index + 1) % step == 0)
    if not isinstance(said, list) or len(said) != layers or any(value not in (0, 1) for value in said):
        raise ModelRefusedError(f"config.json: no_rope_layers does not say 0 or 1 for each of the {layers} layers")
    return frozenset(index for index, turned in enumerate(said) if not turned)
