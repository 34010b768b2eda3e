"""A dense matrix: y = x Wᵀ + b."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor


class Linear:
    """Weights (out, in), bias (out,) or none."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x: (T, in) -> (T, out)."""
        return F.linear(x, self.weight, self.bias)

    @classmethod
    def merged(cls, parts: Sequence["Linear"]) -> "Linear":
        """One matrix whose output is the outputs of the parts, side by side: one call instead of several."""
        weight = torch.cat([part.weight for part in parts])
        if all(part.bias is None for part in parts):
            return cls(weight)
        biases = [part.weight.new_zeros(part.weight.shape[0]) if part.bias is None else part.bias for part in parts]
        return cls(weight, torch.cat(biases))
