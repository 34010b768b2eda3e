"""Matrix product y = x Wᵀ: the `Matmul` protocol, `Dense`, and `Tiled` for results that do not depend on the batch.

A class stores weights in the form that it computes with.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

from slipway_runtime.layers.quantized_weight import Weight, dequantized


class Matmul(Protocol):
    """Multiplies rows of x by a weight matrix (out, in)."""

    out_features: int
    in_features: int

    @property
    def rows_are_independent(self) -> bool:
        """Whether a row's result depends on the row alone, bit for bit."""

    def __call__(self, x: Tensor) -> Tensor:
        """x: (T, in) -> (T, out), a new tensor."""

    @property
    def nbytes(self) -> int:
        """Memory of the weights, scales included."""


MakeMatmul = Callable[[Weight], Matmul]  # from a weight (out, in), plain or quantized


class Dense:
    """Unquantized weights and F.linear: the reference for the other classes."""

    __slots__ = ("in_features", "out_features", "weight")
    rows_are_independent = False

    def __init__(self, weight: Weight) -> None:  # (out, in)
        self.out_features, self.in_features = weight.shape
        self.weight = dequantized(weight)

    def __call__(self, x: Tensor) -> Tensor:
        """x: (T, in) -> (T, out)."""
        return F.linear(x, self.weight)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self.weight.nbytes


@dataclass(frozen=True, slots=True)
class MatmulMakers:
    """Functions that make the `Matmul` of a model's matrices."""

    layers: MakeMatmul = Dense
    head: MakeMatmul = Dense  # lm_head
    routers: MakeMatmul = Dense  # of mixtures of experts


ALL_DENSE: Final = MatmulMakers()


# Rows of a tile, by device type; the first that passes the check is used. A GPU reads the weights for 128 rows in the
# time that it takes for one, and a prompt of 8192 tokens takes 64 calls of each matrix instead of 512.
TILES = {"cuda": (128, 16)}
SMALL_TILES = (16,)


class RowsDifferError(Exception):
    """On this machine a row's result depends on its position in the tile."""


class Tiled:
    """Calls another `Matmul` always with the same number of rows; missing rows are zeros.

    Checked once on random rows: raises RowsDifferError if a row's result depends on its position in the tile.
    """

    __slots__ = ("_inner", "in_features", "out_features", "tile")
    rows_are_independent = True

    def __init__(self, inner: Matmul, *, like: Tensor) -> None:
        """like: has the dtype and device of the rows."""
        self._inner = inner
        self.in_features, self.out_features = inner.in_features, inner.out_features
        for self.tile in TILES.get(like.device.type, SMALL_TILES):
            if self._rows_are_equal(like):
                return
        raise RowsDifferError(
            f"a matrix of {self.out_features} × {self.in_features} gives a row another result in another place of "
            "its tile on this machine"
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x: (T, in) -> (T, out)."""
        num_rows = x.shape[0]
        out = x.new_empty(num_rows, self.out_features)
        for start in range(0, num_rows, self.tile):
            rows = x[start : start + self.tile]
            if len(rows) < self.tile:
                tile = x.new_zeros(self.tile, self.in_features)
                tile[: len(rows)] = rows
            else:
                tile = rows.contiguous()
            out[start : start + self.tile] = self._inner(tile)[: len(rows)]
        return out

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self._inner.nbytes

    def _rows_are_equal(self, like: Tensor) -> bool:
        """Whether rows give the same bits at two positions in the tile, and one row alone the same as among others."""
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(self.tile, self.in_features, generator=generator).to(like)
        expected = self(rows)
        turned = self(rows.roll(5, dims=0)).roll(-5, dims=0)
        alone = self(rows[-1:])
        return torch.equal(turned, expected) and torch.equal(alone[0], expected[-1])
