"""Rotary position embedding, and the ways to stretch it over longer contexts: none, linear, llama3."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeScaling:
    """How positions are stretched. `linear` uses `factor`; `llama3` all of it."""

    kind: str  # default | linear | llama3
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


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
        cos, sin = angles.cos(), angles.sin()
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
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        # Short waves stay, long waves are stretched by `factor`, those between are blended.
        wavelengths = 2 * math.pi / frequencies
        low = scaling.original_max_position / scaling.low_freq_factor
        high = scaling.original_max_position / scaling.high_freq_factor
        span = scaling.high_freq_factor - scaling.low_freq_factor
        blend = (scaling.original_max_position / wavelengths - scaling.low_freq_factor) / span
        blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
        stretched = torch.where(wavelengths > low, frequencies / scaling.factor, frequencies)
        return torch.where((wavelengths <= low) & (wavelengths >= high), blended, stretched)
    assert scaling.kind == "default", f"{scaling.kind} is refused when the configuration is read"
    return frequencies
