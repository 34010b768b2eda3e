"""A weight matrix of a quantized checkpoint: w[o, i] = (code[o, i] - zero[o, g]) · scale[o, g].

g is the group of column i: `group` adjacent columns share a scale. One scale per row is a group as wide as the matrix.
A checkpoint that was quantized in activation order (act-order, desc_act) has groups of columns that are not adjacent:
its codes are stored sorted by group, and `order` has the input that each column multiplies.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

SMALLEST_GROUP: Final = 32  # columns that share a scale, as the kernels multiply them


@dataclass(frozen=True, slots=True)
class OneScaleRows:
    """A matrix that is already quantized: codes (out, in), scales (out,) in float32, and the model's dtype."""

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """(out, in)."""
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        """Device of the codes."""
        return self.codes.device


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Codes with their scales, and the dtype that the model computes in."""

    codes: Tensor  # (out, in): int8, float8_e4m3fn, or uint8 with the values 0 … 2**bits - 1
    scales: Tensor  # (out, groups), float32
    group: int  # columns
    dtype: torch.dtype
    zeros: Tensor | None = None  # (out, groups), float32; None: 0
    order: Tensor | None = None  # (in,) the input of each column; None: columns are in order
    bits: int = 8
    rounds_inputs: bool = False  # the publisher's evaluation rounded the rows of x to the same format

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def device(self) -> torch.device:
        """Device of the codes."""
        return self.codes.device

    def __len__(self) -> int:
        """Number of rows (outputs), as of a tensor."""
        return self.codes.shape[0]

    def rows(self, wanted: Tensor | slice) -> "QuantizedWeight":
        """Some outputs, or all of them in another order."""
        zeros = None if self.zeros is None else self.zeros[wanted]
        return replace(self, codes=self.codes[wanted], scales=self.scales[wanted], zeros=zeros)

    def columns(self, wanted: slice) -> "QuantizedWeight | None":
        """Some inputs, copied; None: this cuts groups into parts of too few columns, or their inputs are not adjacent.

        A cut in the middle of groups halves them, with the same scales: 192 of 384 columns in groups of 128 are three
        groups of 64.
        """
        if self.order is not None:
            return None
        start, stop, _ = wanted.indices(self.shape[1])
        codes, scales, zeros = self.codes[:, start:stop].contiguous(), self.scales, self.zeros
        if scales.shape[1] == 1:
            return replace(self, codes=codes, group=stop - start)
        part = math.gcd(self.group, start) if stop == self.shape[1] else math.gcd(self.group, start, stop)
        if part < SMALLEST_GROUP:
            return None
        own = torch.arange(start, stop, part, device=scales.device) // self.group
        zeros = None if zeros is None else zeros[:, own]
        return replace(self, codes=codes, scales=scales[:, own], zeros=zeros, group=part)

    def dequantized(self) -> Tensor:
        """(out, in), in the type that the model computes in."""
        scales = self.scales.repeat_interleave(self.group, 1)[:, : self.shape[1]]
        w = self.codes.float()
        if self.zeros is not None:
            w -= self.zeros.repeat_interleave(self.group, 1)[:, : self.shape[1]]
        w = w.mul_(scales).to(self.dtype)
        if self.order is None:
            return w
        placed = torch.empty_like(w)
        placed[:, self.order] = w
        return placed

    def as_one_scale_rows(self) -> OneScaleRows | None:
        """The weight as codes with one scale per row; None: it has groups, zeros, an order or other codes."""
        if self.scales.shape[1] != 1 or self.zeros is not None or self.order is not None:
            return None
        if self.codes.dtype not in (torch.int8, torch.float8_e4m3fn):
            return None
        return OneScaleRows(self.codes, self.scales[:, 0].contiguous(), self.dtype)


Weight = Tensor | QuantizedWeight


def dequantized(weight: Weight) -> Tensor:
    """A weight as a plain tensor (out, in)."""
    return weight.dequantized() if isinstance(weight, QuantizedWeight) else weight


def select_rows(weight: Weight, wanted: Tensor | slice) -> Weight:
    """Some outputs, or all of them in another order."""
    return weight.rows(wanted) if isinstance(weight, QuantizedWeight) else weight[wanted]


def concatenated(weights: Sequence[Weight]) -> Weight:
    """Concatenate the outputs of matrices with the same inputs; dequantized if their formats differ."""
    if len(weights) == 1:
        return weights[0]
    first = weights[0]
    if isinstance(first, QuantizedWeight) and all(
        isinstance(other, QuantizedWeight) and _is_alike(first, other) for other in weights
    ):
        alike = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
        zeros = [weight.zeros for weight in alike if weight.zeros is not None]
        return replace(
            first,
            codes=torch.cat([weight.codes.view(torch.uint8) for weight in alike]).view(first.codes.dtype),
            scales=torch.cat([weight.scales for weight in alike]),
            zeros=torch.cat(zeros) if zeros else None,
        )
    return torch.cat([dequantized(weight) for weight in weights])


def _is_alike(one: QuantizedWeight, other: QuantizedWeight) -> bool:
    same_order = (one.order is None) == (other.order is None) and (
        one.order is None or other.order is None or torch.equal(one.order, other.order)
    )
    return (
        same_order
        and one.codes.dtype == other.codes.dtype
        and (one.group, one.bits, one.shape[1]) == (other.group, other.bits, other.shape[1])
        and (one.zeros is None) == (other.zeros is None)
        and one.rounds_inputs == other.rounds_inputs
    )
