"""Multi-head latent attention (MLA) in a config.json: DeepSeek-V2 and V3, Kimi K2, Youtu, GLM-4.7-Flash."""

import math
from dataclasses import dataclass
from typing import Any, Final

from slipway_runtime.layers.rotary import RopeScaling
from slipway_runtime.models.config_values import ModelRefusedError, flag, whole
from slipway_runtime.models.families import Family

_MOST: Final = 1 << 14


@dataclass(frozen=True, slots=True)
class Latent:
    """Sizes of latent attention."""

    rank: int  # of the latent that all heads share: kv_lora_rank
    rotary: int  # rotated dimensions of a head, with one key for all heads: qk_rope_head_dim
    plain: int  # the other dimensions of q and k: qk_nope_head_dim
    value: int  # dimensions of a value: v_head_dim
    query_rank: int  # of the latent of the queries: q_lora_rank; 0: q is one matrix
    biased: bool  # q_a_proj, kv_a_proj_with_mqa and o_proj have a bias

    def scale(self, scaling: RopeScaling) -> float:
        """Factor of the scores. Yarn stretches it by the square of its mscale_all_dim."""
        scale = float((self.plain + self.rotary) ** -0.5)
        if scaling.kind != "yarn" or not scaling.mscale_all_dim or scaling.factor <= 1:
            return scale
        return scale * (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0) ** 2

    def parameters(self, hidden: int, heads: int) -> int:
        """Weights of the matrices of a layer's attention."""
        q = heads * (self.plain + self.rotary)
        queries = self.query_rank * (hidden + q) if self.query_rank else hidden * q
        keys = hidden * (self.rank + self.rotary) + self.rank * heads * (self.plain + self.value)
        return queries + keys + heads * self.value * hidden


def latent_of(family: Family, raw: dict[str, Any]) -> Latent | None:
    """Latent attention of a config; None: the family has keys and values."""
    if not family.latent:
        return None
    rotary = whole(raw, "qk_rope_head_dim", at_most=_MOST)
    if rotary % 2:
        raise ModelRefusedError(f"config.json: qk_rope_head_dim is {rotary}: rotary positions turn pairs of dimensions")
    return Latent(
        rank=whole(raw, "kv_lora_rank", at_most=_MOST),
        rotary=rotary,
        plain=whole(raw, "qk_nope_head_dim", at_most=_MOST),
        value=whole(raw, "v_head_dim", at_most=_MOST),
        query_rank=0 if raw.get("q_lora_rank") is None else whole(raw, "q_lora_rank", at_most=_MOST),
        biased=flag(raw, "attention_bias"),
    )
