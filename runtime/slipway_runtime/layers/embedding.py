"""Vocabulary in and out."""

import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor


class Embedding:
    """Token ids to vectors; tied models use the same matrix to score the next token."""

    __slots__ = ("weight",)

    def __init__(self, weight: Tensor) -> None:  # (V, H)
        self.weight = weight

    def __call__(self, token_ids: Tensor) -> Tensor:
        """(T,) -> (T, H)."""
        return F.embedding(token_ids, self.weight)
