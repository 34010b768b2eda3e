"""Vocabulary in."""

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor


class Embedding:
    """Token ids to vectors."""

    __slots__ = ("_dtype", "_scale", "weight")

    def __init__(self, weight: Tensor, *, shared: bool = False, scale: float = 1.0) -> None:
        """weight: (V, H)  scale: of the vectors, rounded to the model's type.

        Unless another layer shares it, it is kept in bfloat16 where that loses nothing.
        """
        self._dtype = weight.dtype
        self._scale = float(torch.tensor(scale, dtype=weight.dtype))
        half = weight.to(torch.bfloat16)  # what most checkpoints hold, whatever we compute in
        self.weight = half if not shared and torch.equal(half.to(weight.dtype), weight) else weight

    def __call__(self, token_ids: Tensor) -> Tensor:
        """(T,) -> (T, H)."""
        vectors = F.embedding(token_ids, self.weight).to(self._dtype)
        return vectors if self._scale == 1.0 else vectors.mul_(self._scale)
