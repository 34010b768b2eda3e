"""Which rotary embedding a config.json asks for: the block is `rope_scaling` in older files, `rope_parameters` in new.

| rope_type | honoured                                                | context, without max_model_len               |
|-----------|---------------------------------------------------------|----------------------------------------------|
| default   | as it is                                                | max_position_embeddings                      |
| linear    | every position divided by factor                        | max_position_embeddings × factor             |
| dynamic   | up to max_position_embeddings, where it changes nothing | max_position_embeddings                      |
| yarn      | with attention_factor, mscale, beta_fast, beta_slow     | original_max_position_embeddings × factor    |
| llama3    | as it is                                                | max_position_embeddings, which is long there |

`dynamic` stretches by the length that a sequence has at the moment: keys in the cache were turned for another length,
so beyond the trained context no engine with a cache computes what the model's authors meant. We stop there.
"""

from typing import Any, Final

from slipway_runtime.layers.rotary import RopeScaling
from slipway_runtime.models.config_values import ModelRefusedError, demand, flag, number, whole

MOST_POSITIONS: Final = 1 << 24  # float32 counts no further in steps of one
_EVERYWHERE: Final = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_KEYS: Final = {
    "default": frozenset({"original_max_position_embeddings"}),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"}
        | {"attention_factor", "mscale", "mscale_all_dim"}
    ),
    "llama3": frozenset({"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}),
}


def rope_theta(raw: dict[str, Any]) -> float:
    """The base of the wavelengths."""
    for place in (_block(raw), raw):
        if place.get("rope_theta") is not None:
            return number(place, "rope_theta", above=1.0)
    return 10_000.0


def rope_scaling(raw: dict[str, Any]) -> RopeScaling:
    """How positions are stretched; ModelRefusedError for what would be computed otherwise than in training."""
    block = {key: value for key, value in _block(raw).items() if value is not None}
    kind = block.get("rope_type") or block.get("type") or "default"
    if not isinstance(kind, str) or kind not in _KEYS:
        raise ModelRefusedError(f"config.json: rope_type {kind!r} is not supported; {', '.join(_KEYS)} are")
    unknown = sorted(block.keys() - _KEYS[kind] - _EVERYWHERE)
    if unknown:
        raise ModelRefusedError(f"config.json: rope_type {kind!r} with {', '.join(unknown)} is not supported")
    demand(block, "partial_rotary_factor", 1.0)
    longest = whole(raw, "max_position_embeddings", at_most=MOST_POSITIONS)
    trained = longest
    if "original_max_position_embeddings" in block:
        trained = whole(block, "original_max_position_embeddings", at_most=MOST_POSITIONS)
    match kind:
        case "default":
            return RopeScaling(kind)
        case "dynamic":
            number(block, "factor")
            return RopeScaling("default")
        case "linear":
            return RopeScaling(kind, factor=number(block, "factor"))
        case "llama3":
            low = number(block, "low_freq_factor")
            return RopeScaling(
                kind,
                factor=number(block, "factor"),
                low_freq_factor=low,
                high_freq_factor=number(block, "high_freq_factor", above=low),
                original_max_position=trained,
            )
    return _yarn(block, trained, longest)


def _yarn(block: dict[str, Any], trained: int, longest: int) -> RopeScaling:
    # As DeepSeek writes it, without a factor, the two lengths say it.
    factor = number(block, "factor") if "factor" in block else longest / trained

    def optional(key: str) -> float | None:
        return number(block, key) if key in block else None

    slow = number(block, "beta_slow") if block.get("beta_slow") else 1.0
    return RopeScaling(
        "yarn",
        factor=factor,
        original_max_position=trained,
        beta_fast=number(block, "beta_fast", above=slow) if block.get("beta_fast") else 32.0,
        beta_slow=slow,
        truncate=flag(block, "truncate") if "truncate" in block else True,
        attention_factor=optional("attention_factor"),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
    )


def longest_context(raw: dict[str, Any], scaling: RopeScaling) -> int:
    """Positions that the model can tell apart, as the table above says."""
    longest = whole(raw, "max_position_embeddings", at_most=MOST_POSITIONS)
    if scaling.kind == "linear":
        return min(int(longest * scaling.factor), MOST_POSITIONS)
    if scaling.kind == "yarn":
        return min(max(longest, int(scaling.original_max_position * scaling.factor)), MOST_POSITIONS)
    return longest


def _block(raw: dict[str, Any]) -> dict[str, Any]:
    block = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(block, dict) or any(isinstance(value, dict) for value in block.values()):
        raise ModelRefusedError("config.json: rope parameters that differ by layer are not supported")
    return block
