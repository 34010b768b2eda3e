"""Mixture of experts of a config.json: sizes, sparse layers and the way a router chooses.

| sparse layers | family                           | keys                                                             |
|---------------|----------------------------------|------------------------------------------------------------------|
| all           | mixtral, gpt_oss, granitemoe, …  |                                                                  |
| by step       | qwen2_moe, qwen3_moe             | decoder_sparse_step, mlp_only_layers                             |
| after dense   | glm4_moe, dots1, deepseek        | first_k_dense_replace: dense layers in front                     |
| interval      | ernie4_5_moe                     | moe_layer_interval, moe_layer_start_index, moe_layer_end_index   |
| listed        | llama4_text                      | moe_layers, else interleave_moe_layer_step                       |
"""

from dataclasses import dataclass
from typing import Any, Final

from slipway_runtime.models.config_values import ModelRefusedError, demand, flag, number, shown, whole
from slipway_runtime.models.families import Family, MoeKeys


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
    keys: MoeKeys  # names of the tensors, and the function of the router's scores
    groups: int = 1  # of neighbouring experts
    groups_per_token: int = 1  # a token's experts are in so many groups
    scale: float = 1.0  # of the weights of a token's experts
    shared_size: int = 0  # inner features of the expert of all tokens; 0: there is none


_MOST_EXPERTS: Final = 4096
_MOST_FEATURES: Final = 1 << 20


def experts_of(model_type: str, family: Family, raw: dict[str, Any], layers: int) -> Experts | None:
    """Mixture-of-experts settings of a config; None for a dense model."""
    keys = family.moe
    if keys is None:
        return None
    count_key = keys.count
    if count_key == "num_experts" and raw.get("num_local_experts") is not None:
        count_key = "num_local_experts"
    if count_key in ("num_experts", "num_local_experts"):
        _check_two_names(raw, count_key)
    count = whole(raw, count_key, at_most=_MOST_EXPERTS)
    per_token = whole(raw, keys.chosen, at_most=_MOST_EXPERTS)
    if per_token > count:
        raise ModelRefusedError(f"config.json: {keys.chosen} is {per_token}, and there are {count} experts")
    if raw.get("swiglu_alpha", 1.702) != 1.702:
        raise ModelRefusedError(f"config.json: swiglu_alpha is {raw['swiglu_alpha']!r}; only 1.702 is supported")
    if keys.scales_input and per_token != 1:
        raise ModelRefusedError(f"config.json: {keys.chosen} is {per_token}; {model_type} models are run with 1")
    if keys.scoring == "sigmoid" and raw.get("scoring_func", "sigmoid") not in ("sigmoid", "noaux_tc"):
        raise ModelRefusedError(f"config.json: scoring_func is {shown(raw['scoring_func'])}; 'sigmoid' is supported")
    inner = whole(raw, keys.inner, at_most=_MOST_FEATURES)
    groups, groups_per_token = _groups(keys, raw, count, per_token)
    limited = model_type == "gpt_oss"
    return Experts(
        count=count,
        per_token=per_token,
        intermediate_size=inner,
        layers=_sparse_layers(keys, raw, layers),
        normalize=_normalizes(keys, raw),
        swiglu_limit=(number(raw, "swiglu_limit") if "swiglu_limit" in raw else 7.0) if limited else None,
        biased=limited,
        keys=keys,
        groups=groups,
        groups_per_token=groups_per_token,
        scale=number(raw, "routed_scaling_factor") if keys.scaled and "routed_scaling_factor" in raw else 1.0,
        shared_size=_shared_size(keys, raw, inner),
    )


def _check_two_names(raw: dict[str, Any], count_key: str) -> None:
    if raw.get("num_experts", raw.get(count_key)) != raw.get(count_key):
        raise ModelRefusedError(
            f"config.json: num_experts is {shown(raw['num_experts'])} and num_local_experts is "
            f"{shown(raw['num_local_experts'])}: these are two names of one number; remove the wrong one"
        )


def _normalizes(keys: MoeKeys, raw: dict[str, Any]) -> bool:
    if keys.normalizes is not None:
        return keys.normalizes
    return keys.normalizes_by_default if raw.get("norm_topk_prob") is None else flag(raw, "norm_topk_prob")


def _groups(keys: MoeKeys, raw: dict[str, Any], count: int, per_token: int) -> tuple[int, int]:
    """Groups of experts, and those of a token."""
    if keys.scoring == "softmax" and keys.scaled:  # DeepSeek-V2
        method = raw.get("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            raise ModelRefusedError(
                f"config.json: topk_method is {shown(method)}; greedy and group_limited_greedy are known"
            )
        if method == "greedy":
            return 1, 1
    elif keys.scaled:
        demand(raw, "topk_method", "noaux_tc")
    if not keys.scaled or raw.get("n_group") in (None, 1):
        return 1, 1
    groups = whole(raw, "n_group", at_most=_MOST_EXPERTS)
    chosen = whole(raw, "topk_group", at_most=_MOST_EXPERTS)
    if count % groups or chosen > groups or per_token > chosen * (count // groups):
        raise ModelRefusedError(
            f"config.json: {count} experts in n_group {groups}, and a token has topk_group {chosen}, do not give "
            f"it {per_token} experts"
        )
    return groups, chosen


def _shared_size(keys: MoeKeys, raw: dict[str, Any], inner: int) -> int:
    if not keys.shared:
        return inner if keys.shared_name else 0
    if not raw.get(keys.shared):
        return 0
    found = whole(raw, keys.shared, at_most=_MOST_FEATURES)
    return found * inner if keys.shared_counts else found


def _sparse_layers(keys: MoeKeys, raw: dict[str, Any], layers: int) -> frozenset[int]:
    def index(key: str, default: int) -> int:
        value = raw.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < -1:
            raise ModelRefusedError(f"config.json: {key} is {shown(value)}; a whole number is needed")
        return value

    match keys.sparse:
        case "by step":
            step = whole(raw, "decoder_sparse_step", at_most=1 << 20) if "decoder_sparse_step" in raw else 1
            dense = raw.get("mlp_only_layers") or []
            if not isinstance(dense, list) or any(not isinstance(index, int) for index in dense):
                raise ModelRefusedError("config.json: mlp_only_layers is not a list of layers")
            return frozenset(index for index in range(layers) if (index + 1) % step == 0 and index not in dense)
        case "after dense":
            kinds = raw.get("mlp_layer_types")
            if kinds is not None:
                if not isinstance(kinds, list) or len(kinds) != layers or set(map(str, kinds)) - {"dense", "sparse"}:
                    raise ModelRefusedError(f"config.json: mlp_layer_types does not name each of the {layers} layers")
                return frozenset(layer for layer, kind in enumerate(kinds) if kind == "sparse")
            demand(raw, "moe_layer_freq", 1)
            return frozenset(range(max(0, index("first_k_dense_replace", keys.dense_layers)), layers))
        case "interval":
            step = whole(raw, "moe_layer_interval", at_most=1 << 20) if "moe_layer_interval" in raw else 1
            start, end = index("moe_layer_start_index", 1), index("moe_layer_end_index", -1)
            last = layers - 1 if end == -1 else end
            return frozenset(layer for layer in range(layers) if (layer + 1) % step == 0 and start <= layer <= last)
        case "listed":
            said = raw.get("moe_layers")
            if said is None:
                step = (
                    whole(raw, "interleave_moe_layer_step", at_most=1 << 20)
                    if "interleave_moe_layer_step" in raw
                    else 1
                )
                return frozenset(range(step - 1, layers, step))
            if not isinstance(said, list) or any(not isinstance(one, int) or not 0 <= one < layers for one in said):
                raise ModelRefusedError("config.json: moe_layers is not a list of layers")
            return frozenset(said)
    return frozenset(range(layers))
