"""Token embedding."""

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor


class Embedding:
    """Maps token ids to vectors."""

    __slots__ = ("_dtype", "_scale", "weight")

    def __init__(self, weight: Tensor, *, shared: bool = False, scale: float = 1.0) -> None:
        """weight: (V, H)  scale: factor of the vectors, rounded to the model's dtype.

        A weight that is not shared with another layer is kept in bfloat16 if that is exact.
        """
        self._dtype = weight.dtype
        self._scale = float(torch.tensor(scale, dtype=weight.dtype))
        half = weight.to(torch.bfloat16)  # the dtype of most checkpoints, whatever dtype computes
        self.weight = half if not shared and torch.equal(half.to(weight.dtype), weight) else weight

    def __call__(self, token_ids: Tensor) -> Tensor:
        """(T,) -> (T, H)."""
        vectors = F.embedding(token_ids, self.weight).to(self._dtype)
        return vectors if self._scale == 1.0 else vectors.mul_(self._scale)
