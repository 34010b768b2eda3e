"""Vocabulary in."""

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor


class Embedding:
    """Token ids to vectors."""

    __slots__ = ("_dtype", "weight")

    def __init__(self, weight: Tensor, *, shared: bool = False) -> None:
        """weight: (V, H). Unless another layer shares it, it is kept in bfloat16 where that loses nothing."""
        self._dtype = weight.dtype
        half = weight.to(torch.bfloat16)  # what most checkpoints hold, whatever we compute in
        self.weight = half if not shared and torch.equal(half.to(weight.dtype), weight) else weight

    def __call__(self, token_ids: Tensor) -> Tensor:
        """(T,) -> (T, H)."""
        return F.embedding(token_ids, self.weight).to(self._dtype)
