"""Rotary position embedding (RoPE), and its scaling to longer contexts: none, linear, llama3, yarn, longrope.

Yarn (Peng et al. 2023) keeps short wavelengths, stretches long ones by `factor`, and blends between; because stretched
positions flatten attention, it scales the scores by the square of `attention_scale`, through cos and sin. Longrope
(Ding et al. 2024) divides each frequency by a factor of its own, from one of two lists.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeScaling:
    """RoPE scaling parameters. `linear` uses `factor` alone; comments name the fields of the other kinds."""

    kind: str  # default | linear | llama3 | yarn | longrope
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    original_max_position: int = 8192  # llama3 and yarn: the context of the training
    beta_fast: float = 32.0  # yarn: waves with more turns than this over that context are not stretched
    beta_slow: float = 1.0  # and waves with fewer turns than this are stretched by the whole factor
    truncate: bool = True  # the bounds between them are rounded to whole dimensions
    attention_factor: float | None = None  # None: by the paper's formula, or by the two below
    mscale: float | None = None
    mscale_all_dim: float | None = None
    short_factors: tuple[float, ...] = ()  # longrope: for contexts up to that of the training
    long_factors: tuple[float, ...] = ()  # and for longer contexts

    @property
    def attention_scale(self) -> float:
        """Factor of cos and sin."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "longrope":
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position)) if self.factor > 1 else 1
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


class Rotary:
    """A table of cosines and sines for every position up to `max_positions`.

    Some models have several tables: `variants` are those after the first; each layer has the index of its table.
    """

    def __init__(
        self,
        head_dim: int,
        theta: float,
        scaling: RopeScaling,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        rotary_dim: int = 0,
        variants: tuple[tuple[float, RopeScaling] | None, ...] = (),
    ) -> None:
        """rotary_dim: dimensions of a head that are rotated; 0: all. variants: base and scaling; None: no rotation."""
        turned = rotary_dim or head_dim
        tables = []
        for variant in ((theta, scaling), *variants):
            base, stretched = variant or (theta, None)
            tables.append(_table(head_dim, turned, base, stretched, max_positions))
        self._table = torch.cat(tables, dim=1).to(device=device, dtype=dtype)  # (positions, 2 · tables, D)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(T,) -> 2 × (T, 1, D); with variants 2 × (T, tables, D)."""
        rows = self._table.index_select(0, positions)
        return rows[:, ::2], rows[:, 1::2]


def _table(
    head_dim: int, turned: int, theta: float, scaling: RopeScaling | None, max_positions: int
) -> Tensor:  # (positions, 2, D)
    """Table of cos and sin. Both halves of a head have the same angles; x·cos + roll(x)·sin is the rotation.

    In each half the first dimensions are rotated and the rest is not: `reorder_rotary_dims` orders the weights so.
    """
    half = head_dim // 2
    cos, sin = torch.ones(max_positions, half), torch.zeros(max_positions, half)
    if scaling is not None:
        frequencies = inverse_frequencies(turned, theta, scaling, max_positions)
        angles = torch.arange(max_positions).float()[:, None] * frequencies[None, :]
        cos[:, : turned // 2] = angles.cos() * scaling.attention_scale
        sin[:, : turned // 2] = angles.sin() * scaling.attention_scale
    return torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)), dim=1)


def reorder_rotary_dims(weight: Tensor, head_dim: int, turned: int, *, interleaved: bool = False) -> Tensor:
    """Reorder the dimensions of heads, rows of `weight`, so that rotated dimensions lie where `_table` expects them.

    A checkpoint has the rotated dimensions first, in two halves, then the rest. Queries and keys are reordered alike,
    so their dot products are unchanged. 8 dimensions of which 4 are rotated: 0 1 2 3 4 5 6 7 -> 0 1 4 5 2 3 6 7.
    `interleaved`: the rotated dimensions are neighbours, not in two halves: -> 0 2 4 5 1 3 6 7.
    """
    if turned == head_dim and not interleaved:
        return weight
    pairs, rest = turned // 2, (head_dim - turned) // 2
    order = torch.arange(head_dim, device=weight.device)
    first, second, still = order[:pairs], order[pairs : 2 * pairs], order[2 * pairs :]
    if interleaved:
        first, second = order[0 : 2 * pairs : 2], order[1 : 2 * pairs : 2]
    order = torch.cat((first, still[:rest], second, still[rest:]))
    heads = weight.view(-1, head_dim, *weight.shape[1:])
    return heads[:, order].reshape(weight.shape)


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling, max_positions: int = 0) -> Tensor:
    """Inverse frequencies: radians per position for each pair of a head's dimensions. (D / 2,).

    max_positions: the engine's context length, by which longrope chooses its factors.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (theta**exponents)
    match scaling.kind:
        case "linear":
            return frequencies / scaling.factor
        case "llama3":
            return _llama3(frequencies, scaling)
        case "yarn":
            return _yarn(frequencies, head_dim, theta, scaling)
        case "longrope":
            beyond = max_positions > scaling.original_max_position
            return frequencies / torch.tensor(scaling.long_factors if beyond else scaling.short_factors)
    assert scaling.kind == "default", f"{scaling.kind} is refused when the configuration is read"
    return frequencies


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3: short wavelengths stay, long ones are stretched by `factor`, wavelengths between are blended."""
    wavelengths = 2 * math.pi / frequencies
    low = scaling.original_max_position / scaling.low_freq_factor
    high = scaling.original_max_position / scaling.high_freq_factor
    span = scaling.high_freq_factor - scaling.low_freq_factor
    if span == 0:  # nothing lies between
        return torch.where(wavelengths > low, frequencies / scaling.factor, frequencies)
    blend = (scaling.original_max_position / wavelengths - scaling.low_freq_factor) / span
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    stretched = torch.where(wavelengths > low, frequencies / scaling.factor, frequencies)
    return torch.where((wavelengths <= low) & (wavelengths >= high), blended, stretched)


def _yarn(frequencies: Tensor, head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Yarn: as llama3, by a ramp over dimensions from `beta_fast` to `beta_slow` turns over the trained context."""

    def dimension_of(turns: float) -> float:
        waves = scaling.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(waves) / (2 * math.log(theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # no ramp, and no division by zero
    stretched_share = ((torch.arange(head_dim // 2).float() - low) / (high - low)).clamp(0, 1)
    return frequencies / scaling.factor * stretched_share + frequencies * (1 - stretched_share)
