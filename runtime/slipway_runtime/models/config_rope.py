"""RoPE settings of a config.json: `rope_scaling` in older files, `rope_parameters` in new ones.

A file may have both: transformers 5 writes `rope_parameters`, and model cards say to add `rope_scaling`. Then
`rope_scaling` decides, as in transformers. It has to repeat a rope_theta that only `rope_parameters` has, since
transformers would compute with the family's default instead. `original_max_position_embeddings` beside the block wins
over the one inside it.

| rope_type | supported                                               | context, without max_model_len               |
|-----------|---------------------------------------------------------|----------------------------------------------|
| default   | as it is                                                | max_position_embeddings                      |
| linear    | every position divided by factor                        | max_position_embeddings × factor             |
| dynamic   | up to max_position_embeddings, where it changes nothing | max_position_embeddings                      |
| yarn      | with attention_factor, mscale, beta_fast, beta_slow     | original_max_position_embeddings × factor    |
| llama3    | as it is                                                | max_position_embeddings, which is long there |
| longrope  | short factors up to the trained context, long ones for  | original_max_position_embeddings             |
|           | an engine with a longer max_model_len                   |                                              |

`dynamic` stretches by the current length of a sequence: keys in the cache were rotated for another length, so beyond
the trained context no engine with a KV cache computes what the model's authors meant. That is the limit here.
`longrope` has two sets of factors and the same difficulty: an engine uses one of them for all sequences, by default
the set that its authors use for sequences within the trained context.

Ministral 3 scales its queries beyond the trained context (`llama_4_scaling_beta`): that context is its limit here.
Llama 4 attends within chunks of `attention_chunk_size` tokens, and scales its queries from `floor_scale` on: both are
without effect in the first chunk, and its length is the limit here.

A model has one rotary embedding for all layers; Gemma 3 and OLMo 3 have a second, never stretched, for the layers with
a window.
"""

from typing import Any, Final

from slipway_runtime.layers.rotary import RopeScaling
from slipway_runtime.models.config_values import ModelRefusedError, flag, number, shown, whole

MOST_POSITIONS: Final = 1 << 24  # float32 represents whole numbers exactly up to here
_THETAS: Final = {  # defaults
    "smollm3": 2e6, "gemma3_text": 1e6, "mixtral": 1e6, "gpt_oss": 150_000.0, "cwm": 1e6, "olmo3": 5e5,
    "ministral3": 1e6,
    "ernie4_5": 5e5, "helium": 1e5, "cohere": 5e5, "flex_olmo": 5e5, "solar_open": 1e6,
    "minimax_m2": 5e6, "ernie4_5_moe": 5e5, "llama4_text": 5e5,
}  # fmt: skip
_SHARES: Final = {"glm": 0.5, "glm4": 0.5, "glm4_moe": 0.5, "minimax_m2": 1.0}  # defaults of partial_rotary_factor
_WITH_ALPHA: Final = ("hunyuan_v1_dense",)
_BY_LAYER: Final = ("gemma3_text", "olmo3")  # rope_parameters has a block for each type of layer
_EVERYWHERE: Final = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_KEYS: Final = {
    "default": frozenset({"original_max_position_embeddings"}),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"}
        | {"attention_factor", "mscale", "mscale_all_dim"}
    ),
    "longrope": frozenset(
        {"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"}
    ),
    "llama3": frozenset({"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}),
}


def rope_theta(model_type: str, raw: dict[str, Any], head_dim: int) -> float:
    """RoPE base of the model; Hunyuan's is stretched by alpha, whatever the length of a sequence."""
    block = _block(model_type, raw)
    theta = next(
        (number(place, "rope_theta", above=1.0) for place in (block, raw) if place.get("rope_theta") is not None),
        _THETAS.get(model_type, 10_000.0),
    )
    if model_type in _WITH_ALPHA and block.get("alpha"):
        return float(theta * number(block, "alpha") ** (head_dim / (head_dim - 2)))
    return theta


def local_rope_theta(model_type: str, raw: dict[str, Any]) -> float | None:
    """RoPE base of the layers with a window, if they have a table of their own; their positions are not stretched."""
    if model_type not in _BY_LAYER:
        return None
    block = (raw.get("rope_parameters") or {}).get("sliding_attention") or {}
    if not isinstance(block, dict) or block.get("rope_type", "default") != "default":
        raise ModelRefusedError(
            f"config.json: rope parameters {shown(block)} of layers with a window are not supported"
        )
    for place, key in ((block, "rope_theta"), (raw, "rope_local_base_freq")):
        if place.get(key) is not None:
            return number(place, key, above=1.0)
    return 10_000.0 if model_type == "gemma3_text" else rope_theta(model_type, raw, 0)


def rotary_dim(model_type: str, raw: dict[str, Any], head_dim: int) -> int:
    """Number of rotated dimensions of a head: all, or for Phi and GLM the part that partial_rotary_factor gives."""
    share = _block(model_type, raw).get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if model_type == "minimax_m2" and raw.get("rotary_dim") is not None:
        turned = whole(raw, "rotary_dim", at_most=head_dim)
        if turned % 2:
            raise ModelRefusedError(f"config.json: rotary_dim is {turned}; an even number is needed")
        return turned
    share = _SHARES.get(model_type) if share is None else share
    if share is None or share == 1:
        return head_dim
    if model_type not in ("phi3", *_SHARES) or not isinstance(share, float) or not 0 < share < 1:
        raise ModelRefusedError(f"config.json: partial_rotary_factor is {shown(share)}; only 1.0 is supported")
    turned = int(head_dim * share)
    if turned < 2 or turned % 2:
        raise ModelRefusedError(f"config.json: partial_rotary_factor is {share}: it turns {turned} of {head_dim}")
    return turned


def rope_scaling(model_type: str, raw: dict[str, Any], turned: int) -> RopeScaling:
    """RoPE scaling of the model. Raises ModelRefusedError for settings that would be computed differently here."""
    block = {key: value for key, value in _block(model_type, raw).items() if value is not None}
    kind = block.get("rope_type") or block.get("type") or "default"
    if model_type == "phi3" and kind in ("su", "yarn"):  # names of longrope in Phi-3's first files
        kind = "longrope"
    if not isinstance(kind, str) or kind not in _KEYS:
        raise ModelRefusedError(f"config.json: rope_type {kind!r} is not supported; {', '.join(_KEYS)} are")
    if model_type in _WITH_ALPHA and block.get("alpha"):  # the stretched base is all; `rope_theta` has it
        return RopeScaling("default")
    unknown = sorted(block.keys() - _KEYS[kind] - _EVERYWHERE)
    if unknown:
        raise ModelRefusedError(f"config.json: rope_type {kind!r} with {', '.join(unknown)} is not supported")
    longest = whole(raw, "max_position_embeddings", at_most=MOST_POSITIONS)
    trained = _trained_context(raw, block)
    match kind:
        case "default":
            return RopeScaling(kind)
        case "dynamic":
            number(block, "factor")
            return RopeScaling("default")
        case "linear":
            return RopeScaling(kind, factor=number(block, "factor"))
        case "longrope":
            return _longrope(block, trained, longest, turned)
        case "llama3":
            low, high = number(block, "low_freq_factor"), number(block, "high_freq_factor")
            if high < low:
                raise ModelRefusedError(
                    f"config.json: high_freq_factor is {high:g}; a number from low_freq_factor, {low:g}, is needed"
                )
            return RopeScaling(
                kind,
                factor=number(block, "factor"),
                low_freq_factor=low,
                high_freq_factor=high,
                original_max_position=trained,
            )
    return _yarn(block, trained, longest)


def _trained_context(raw: dict[str, Any], block: dict[str, Any]) -> int:
    for place in (raw, block):
        if place.get("original_max_position_embeddings") is not None:
            return whole(place, "original_max_position_embeddings", at_most=MOST_POSITIONS)
    return whole(raw, "max_position_embeddings", at_most=MOST_POSITIONS)


def _yarn(block: dict[str, Any], trained: int, longest: int) -> RopeScaling:
    # DeepSeek's files have no factor: it is the ratio of the two lengths.
    factor = number(block, "factor") if "factor" in block else longest / trained

    def optional(key: str) -> float | None:
        return number(block, key) if key in block else None

    slow = number(block, "beta_slow") if block.get("beta_slow") else 1.0
    fast = number(block, "beta_fast") if block.get("beta_fast") else 32.0
    if fast < slow:
        raise ModelRefusedError(f"config.json: beta_fast is {fast:g}; a number from beta_slow, {slow:g}, is needed")
    return RopeScaling(
        "yarn",
        factor=factor,
        original_max_position=trained,
        beta_fast=fast,
        beta_slow=slow,
        truncate=flag(block, "truncate") if "truncate" in block else True,
        attention_factor=optional("attention_factor"),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
    )


def _longrope(block: dict[str, Any], trained: int, longest: int, turned: int) -> RopeScaling:
    def factors(key: str) -> tuple[float, ...]:
        found = block[key]
        if not isinstance(found, list) or len(found) != turned // 2:
            raise ModelRefusedError(f"config.json: {key} is not a list of {turned // 2} numbers")
        return tuple(number({key: value}, key) for value in found)

    return RopeScaling(
        "longrope",
        factor=number(block, "factor") if "factor" in block else longest / trained,
        original_max_position=trained,
        attention_factor=number(block, "attention_factor") if "attention_factor" in block else None,
        short_factors=factors("short_factor"),
        long_factors=factors("long_factor"),
    )


def default_context(raw: dict[str, Any], scaling: RopeScaling) -> int:
    """Context length if max_model_len is not set, by the table above."""
    longest = longest_context(raw, scaling)
    return min(longest, scaling.original_max_position) if scaling.kind == "longrope" else longest


def longest_context(raw: dict[str, Any], scaling: RopeScaling) -> int:
    """Longest context length of the model, RoPE scaling included."""
    longest = whole(raw, "max_position_embeddings", at_most=MOST_POSITIONS)
    if _scales_queries(raw):  # from here on the scores are scaled by position, which no kernel does
        return min(longest, _trained_context(raw, raw["rope_parameters"]))
    if raw.get("model_type") == "llama4_text":
        longest = _within_a_chunk(raw, longest)
    if raw.get("model_type") == "cohere" and raw.get("model_max_length") is not None:
        return max(longest, whole(raw, "model_max_length", at_most=MOST_POSITIONS))  # Command R was trained for more
    if scaling.kind == "linear":
        return min(int(longest * scaling.factor), MOST_POSITIONS)
    if scaling.kind == "yarn":
        return min(max(longest, int(scaling.original_max_position * scaling.factor)), MOST_POSITIONS)
    return longest


def _within_a_chunk(raw: dict[str, Any], longest: int) -> int:
    """The context in which Llama 4 attends to all tokens and does not scale its queries."""
    if raw.get("attention_chunk_size") is not None:
        longest = min(longest, whole(raw, "attention_chunk_size", at_most=MOST_POSITIONS))
    if raw.get("attn_temperature_tuning", True):
        floor = whole(raw, "floor_scale", at_most=MOST_POSITIONS) if "floor_scale" in raw else 8192
        longest = min(longest, floor - 1)
    return max(1, longest)


def _scales_queries(raw: dict[str, Any]) -> bool:
    """Whether queries are scaled by their position, in steps of the trained context (Ministral 3, Llama 4)."""
    block = raw.get("rope_parameters") or {}
    return raw.get("model_type") == "ministral3" and bool(block.get("llama_4_scaling_beta"))


def _block(model_type: str, raw: dict[str, Any]) -> dict[str, Any]:
    new, old = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    if model_type in _BY_LAYER and isinstance(new, dict) and "full_attention" in new:
        new = new["full_attention"] or {}
    if model_type == "ministral3" and isinstance(new, dict):
        new = {key: one for key, one in new.items() if key not in ("llama_4_scaling_beta", "max_position_embeddings")}
    for block in (new, old):
        if not isinstance(block, dict) or any(isinstance(value, dict) for value in block.values()):
            raise ModelRefusedError("config.json: rope parameters that differ by layer are not supported")
    if not old:
        return dict(new)
    if model_type == "gemma3_text":  # transformers merges the two for this family
        return {**new, **old}
    for key, default in (("rope_theta", _THETAS.get(model_type, 10_000.0)), ("partial_rotary_factor", 1.0)):
        if new.get(key) not in (None, default) and old.get(key, raw.get(key)) is None:
            raise ModelRefusedError(
                f"config.json: rope_scaling replaces rope_parameters, whose {key} {shown(new[key])} it lacks; "
                f"repeat {key} in rope_scaling, or move its keys into rope_parameters"
            )
    return dict(old)
