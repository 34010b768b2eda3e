"""Token embedding, whole or a tensor-parallel rank's part of it."""

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

from slipway_runtime.layers.linear import Reduce


class Embedding:
    """Maps token ids to vectors."""

    __slots__ = ("_dtype", "_first", "_reduce", "_scale", "weight")

    def __init__(
        self,
        weight: Tensor,
        *,
        shared: bool = False,
        scale: float = 1.0,
        first: int = 0,
        reduce: Reduce | None = None,
    ) -> None:
        """weight: (V, H)  scale: factor of the vectors, rounded to the model's dtype.

        A weight that is not shared with another layer is kept in bfloat16 if that is exact.

        With `reduce` the weight has only this rank's tokens: `first` and those that follow it.
        """
        self._first = first
        self._reduce = reduce
        self._dtype = weight.dtype
        self._scale = float(torch.tensor(scale, dtype=weight.dtype))
        half = weight.to(torch.bfloat16)  # the dtype of most checkpoints, whatever dtype computes
        self.weight = half if not shared and torch.equal(half.to(weight.dtype), weight) else weight

    def __call__(self, token_ids: Tensor) -> Tensor:
        """(T,) -> (T, H)."""
        if self._reduce is None:
            vectors = F.embedding(token_ids, self.weight).to(self._dtype)
        else:
            own = token_ids - self._first
            elsewhere = (own < 0) | (own >= len(self.weight))
            vectors = F.embedding(own.masked_fill_(elsewhere, 0), self.weight).to(self._dtype)
            vectors = self._reduce(vectors.masked_fill_(elsewhere[:, None], 0.0))
        return vectors if self._scale == 1.0 else vectors.mul_(self._scale)
