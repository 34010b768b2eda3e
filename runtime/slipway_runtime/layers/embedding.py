"""Vocabulary in and out."""

import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

from slipway_runtime.layers.linear import Linear


class Embedding:
    """Token ids to vectors; tied models use the same matrix to score the next token."""

    __slots__ = ("weight",)

    def __init__(self, weight: Tensor) -> None:  # (V, H)
        self.weight = weight

    def __call__(self, token_ids: Tensor) -> Tensor:
        """(T,) -> (T, H)."""
        return F.embedding(token_ids, self.weight)

    def tied_head(self) -> Linear:
        """The output layer that shares this matrix."""
        return Linear(self.weight)
