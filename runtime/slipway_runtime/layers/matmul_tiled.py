"""A fixed number of rows at a time: a row's result does not depend on how many rows there are, or where it stands."""

import torch
from torch import Tensor

from slipway_runtime.layers.matmul import Matmul

TILE = 16  # rows


class RowsDifferError(Exception):
    """This machine's arithmetic gives a row another result in another place of a tile."""


class Tiled:
    """Another way of multiplying, always called with TILE rows; those that are missing are zeros.

    Checked once on random rows: raises RowsDifferError where a place in the tile matters to the library underneath.
    """

    __slots__ = ("_inner", "in_features", "out_features")
    rows_are_independent = True

    def __init__(self, inner: Matmul, *, like: Tensor) -> None:
        """like: the type and device of the rows."""
        self._inner = inner
        self.in_features, self.out_features = inner.in_features, inner.out_features
        self._check(like)

    def __call__(self, x: Tensor) -> Tensor:
        """x: (T, in) -> (T, out)."""
        num_rows = x.shape[0]
        out = x.new_empty(num_rows, self.out_features)
        for start in range(0, num_rows, TILE):
            rows = x[start : start + TILE]
            if len(rows) < TILE:
                tile = x.new_zeros(TILE, self.in_features)
                tile[: len(rows)] = rows
            else:
                tile = rows.contiguous()
            out[start : start + TILE] = self._inner(tile)[: len(rows)]
        return out

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self._inner.nbytes

    def _check(self, like: Tensor) -> None:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(TILE, self.in_features, generator=generator).to(like)
        expected = self(rows)
        turned = self(rows.roll(5, dims=0)).roll(-5, dims=0)
        alone = self(rows[-1:])
        if not (torch.equal(turned, expected) and torch.equal(alone[0], expected[-1])):
            raise RowsDifferError(
                f"a matrix of {self.out_features} × {self.in_features} gives a row another result in another place of "
                "its tile on this machine"
            )
