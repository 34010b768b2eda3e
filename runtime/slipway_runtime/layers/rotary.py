"""Rotary position embedding, and the ways to stretch it over longer contexts: none, linear, llama3, yarn.

Yarn (Peng et al. 2023) keeps short waves, stretches long ones by `factor`, blends between; and because stretched
positions make attention flatter, it sharpens the scores by the square of `attention_scale`, through cos and sin.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeScaling:
    """How positions are stretched. `linear` uses `factor` alone; the other kinds what is theirs."""

    kind: str  # default | linear | llama3 | yarn
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    original_max_position: int = 8192  # llama3 and yarn: the context of the training
    beta_fast: float = 32.0  # yarn: waves with more turns than this over that context stay as they are
    beta_slow: float = 1.0  # and those with fewer than this are stretched whole
    truncate: bool = True  # the bounds between them are rounded to whole dimensions
    attention_factor: float | None = None  # None: as the paper has it, or by the two below
    mscale: float | None = None
    mscale_all_dim: float | None = None

    @property
    def attention_scale(self) -> float:
        """What cos and sin are multiplied by."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


class Rotary:
    """A table of cosines and sines for every position up to `max_positions`."""

    def __init__(
        self,
        head_dim: int,
        theta: float,
        scaling: RopeScaling,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        angles = torch.arange(max_positions).float()[:, None] * inverse_frequencies(head_dim, theta, scaling)[None, :]
        cos, sin = angles.cos() * scaling.attention_scale, angles.sin() * scaling.attention_scale
        # Both halves of a head turn by the same angles; the sign makes x·cos + roll(x)·sin the rotation.
        table = torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)), dim=1)
        self._table = table.to(device=device, dtype=dtype)  # (positions, 2, D)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(T,) -> 2 × (T, 1, D)."""
        rows = self._table.index_select(0, positions)
        return rows[:, :1], rows[:, 1:]


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Radians per position for each pair of a head's dimensions. (D / 2,)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (theta**exponents)
    match scaling.kind:
        case "linear":
            return frequencies / scaling.factor
        case "llama3":
            return _llama3(frequencies, scaling)
        case "yarn":
            return _yarn(frequencies, head_dim, theta, scaling)
    assert scaling.kind == "default", f"{scaling.kind} is refused when the configuration is read"
    return frequencies


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Short waves stay, long waves are stretched by `factor`, those between are blended by their length."""
    wavelengths = 2 * math.pi / frequencies
    low = scaling.original_max_position / scaling.low_freq_factor
    high = scaling.original_max_position / scaling.high_freq_factor
    span = scaling.high_freq_factor - scaling.low_freq_factor
    blend = (scaling.original_max_position / wavelengths - scaling.low_freq_factor) / span
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    stretched = torch.where(wavelengths > low, frequencies / scaling.factor, frequencies)
    return torch.where((wavelengths <= low) & (wavelengths >= high), blended, stretched)


def _yarn(frequencies: Tensor, head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """The same by a ramp over dimensions, between those that turn `beta_fast` and `beta_slow` times in training."""

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
