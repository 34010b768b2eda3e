"""Options of a config.json that differ by layer or matrix: windows, rotary positions, biases and norms."""

from dataclasses import dataclass
from typing import Any

from slipway_runtime.models.config_values import ModelRefusedError, flag, shown, whole
from slipway_runtime.models.families import BEFORE, CLOVA, Family, Norms


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
        case "starcoder2":
            return Biases(*(raw.get("use_bias") is None or flag(raw, "use_bias"),) * 3)
        case "qwen2_moe":
            return Biases(raw.get("qkv_bias") is None or flag(raw, "qkv_bias"), False, False)
        case "ernie4_5_moe" | "minimax_m2":
            return Biases(False, False, False)
        case "glm4_moe" | "solar_open":
            return Biases(attention, False, False)
        case "deepseek_v2" | "deepseek_v3" | "kimi_k2" | "glm4_moe_lite" | "youtu":
            return Biases(False, attention, mlp)
        case "internlm3":
            attention, mlp = attention or flag(raw, "qkv_bias"), mlp or flag(raw, "bias")
        case "cohere" | "cohere2" | "hunyuan_v1_dense" | "granitemoe" | "granitemoeshared" | "dots1" | "llama4_text":
            return Biases(attention, attention, False)
        case "glm" | "glm4":
            return Biases(raw.get("attention_bias") is None or attention, False, False)
        case "helium":
            return Biases(attention, False, mlp)
    return Biases(attention, attention, mlp)


def check_attention_types(raw: dict[str, Any]) -> None:
    """Raise ModelRefusedError for a model of MiniMax with layers of linear attention."""
    said = raw.get("attn_type_list")
    if said is not None and (not isinstance(said, list) or any(kind != 1 for kind in said)):
        raise ModelRefusedError(
            f"config.json: attn_type_list is {shown(said)}; only 1 (softmax attention) is supported"
        )


def norms_of(family: Family, raw: dict[str, Any]) -> Norms:
    """The norms of a layer: those of the family, unless the config switches the norms of outputs off."""
    return BEFORE if family.norms is CLOVA and raw.get("use_post_norm") is False else family.norms


def layers_without_positions(model_type: str, raw: dict[str, Any], layers: int) -> frozenset[int]:
    """Layers without RoPE (NoPE): SmolLM3's no_rope_layers has a 0 for each; in EXAONE 4 and Cohere 2 the layers
    with full attention."""
    if model_type in ("exaone4", "cohere2") and raw.get("sliding_window") is not None:
        kinds = raw.get("layer_types")
        period = whole(raw, "sliding_window_pattern", at_most=1 << 20) if "sliding_window_pattern" in raw else 4
        return frozenset(
            index
            for index in range(layers)
            if ((index + 1) % period == 0 if kinds is None else kinds[index] == "full_attention")
        )
    if model_type not in ("smollm3", "llama4_text"):
        return frozenset()
    said = raw.get("no_rope_layers")
    if said is None or (said == [] and model_type == "llama4_text"):
        step = whole(raw, "no_rope_layer_interval", at_most=1 << 20) if "no_rope_layer_interval" in raw else 4
        return frozenset(index for index in range(layers) if (index + 1) % step == 0)
    if not isinstance(said, list) or len(said) != layers or any(value not in (0, 1) for value in said):
        raise ModelRefusedError(f"config.json: no_rope_layers does not say 0 or 1 for each of the {layers} layers")
    return frozenset(index for index, turned in enumerate(said) if not turned)


def sliding_layers(model_type: str, raw: dict[str, Any], layers: int) -> tuple[int | None, frozenset[int]]:
    """The sliding window, and the layers that use it.

    | family               | layers with a sliding window                                                          |
    |----------------------|---------------------------------------------------------------------------------------|
    | mistral, ministral3, | all, when sliding_window is set                                                       |
    | phi3, mixtral,       |                                                                                       |
    | starcoder2           |                                                                                       |
    | qwen2, qwen3         | with use_sliding_window: those of layer_types, else those from max_window_layers on   |
    | qwen3_moe            | all, with use_sliding_window                                                          |
    | smollm3              | with use_sliding_window: those of layer_types, else those without positions           |
    | gemma2, gpt_oss      | those of layer_types, else every second from the first on                             |
    | gemma3_text,         | those of layer_types, else all but every sliding_window_pattern-th                    |
    | exaone4, cohere2     |                                                                                       |
    | qwen2_moe            | with use_sliding_window: those of layer_types, else every second before               |
    |                      | max_window_layers                                                                     |
    | dots1                | those of layer_types, else those from max_window_layers on                            |
    | ministral, olmo3     | those of layer_types, else all; olmo3: all but every fourth                           |
    | cwm                  | those of layer_types, else all but the first of four                                  |
    | all others           | none: a window in its config would be ignored by its authors' code, so it is refused  |
    """
    kinds = _layer_types(model_type, raw, layers)
    window = raw.get("sliding_window")
    if model_type in _WINDOW_BY_FLAG and not flag(raw, "use_sliding_window"):
        window = None
    if window is None:
        if kinds and "sliding_attention" in kinds and not (model_type == "smollm3" and "sliding_window" in raw):
            raise ModelRefusedError("config.json: layer_types has sliding_attention, and there is no sliding_window")
        if model_type == "cohere2":
            raise ModelRefusedError("config.json lacks sliding_window, which cohere2 models need")
        return None, frozenset()
    window = whole(raw, "sliding_window", at_most=1 << 31)
    if model_type in _WINDOW_EVERYWHERE:
        if kinds and set(kinds) != {"sliding_attention"} and model_type != "qwen3_moe":
            raise ModelRefusedError(f"config.json: a {model_type} model whose layer_types mix windows is not supported")
        return window, frozenset(range(layers))
    if model_type not in _WINDOW_SOMEWHERE:
        raise ModelRefusedError(f"config.json: sliding_window is {window}; {model_type} models have no window")
    if kinds is not None:
        sliding = frozenset(index for index, kind in enumerate(kinds) if kind == "sliding_attention")
    elif model_type == "smollm3":
        sliding = layers_without_positions(model_type, raw, layers)
    elif model_type == "qwen2_moe":
        sliding = frozenset(range(0, min(layers, _max_window_layers(model_type, raw)), 2))
    elif model_type == "ministral":
        sliding = frozenset(range(layers))
    elif model_type == "cwm":
        sliding = frozenset(index for index in range(layers) if index % 4)
    elif model_type in ("gemma2", "gpt_oss", "gemma3_text", "olmo3", "exaone4", "cohere2"):
        period = _window_period(model_type, raw)
        sliding = frozenset(index for index in range(layers) if (index + 1) % period)
    else:
        sliding = frozenset(range(_max_window_layers(model_type, raw), layers))
    return (window, sliding) if sliding else (None, frozenset())


_WINDOW_BY_FLAG = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3")
_WINDOW_EVERYWHERE = ("mistral", "ministral3", "phi3", "mixtral", "qwen3_moe", "starcoder2")
_WINDOW_SOMEWHERE = frozenset(
    {*_WINDOW_BY_FLAG, "gemma2", "gemma3_text", "gpt_oss", "ministral", "cwm", "olmo3", "exaone4", "cohere2", "dots1"}
)


def _window_period(model_type: str, raw: dict[str, Any]) -> int:
    """Period of the layers with full attention: one in so many layers."""
    if model_type in ("gemma2", "gpt_oss"):
        return 2
    key = "sliding_window_pattern" if "sliding_window_pattern" in raw else "_sliding_window_pattern"
    return whole(raw, key, at_most=1 << 20) if key in raw else 6 if model_type == "gemma3_text" else 4


def _max_window_layers(model_type: str, raw: dict[str, Any]) -> int:
    if raw.get("max_window_layers") == 0:
        return 0
    return (
        whole(raw, "max_window_layers", at_most=1 << 31)
        if "max_window_layers" in raw
        else 62
        if model_type == "dots1"
        else 28
    )


def _layer_types(model_type: str, raw: dict[str, Any], layers: int) -> list[str] | None:
    kinds = raw.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ModelRefusedError(f"config.json: layer_types does not name each of the {layers} layers")
    known = {"full_attention", "sliding_attention"}
    if model_type == "llama4_text":  # in a chunk, which is the longest context, attention is full
        known.add("chunked_attention")
    unknown = sorted({str(kind) for kind in kinds} - known)
    if unknown:
        raise ModelRefusedError(f"config.json: layers of type {', '.join(unknown[:3])} are not supported")
    return kinds
