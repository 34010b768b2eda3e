"""LoRA in the experts of a layer: adapter slots for the matrices of every expert, and the products with them.

Plain torch on every device. The tokens of an adapter are computed by a path of their own, expert by expert: in a step
of T tokens with K experts each, at most min(E, T · K) experts have four products of rank r before their activation and
two after it. The host reads which experts were chosen, so a step with such an adapter is never a CUDA graph.

All slots are allocated once, at the largest rank: E · 3 · (H + I) numbers for each rank, layer and slot.
"""

from collections.abc import Sequence
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

GATE, UP, DOWN = range(3)
PROJECTIONS: Final = ("gate_proj", "up_proj", "down_proj")  # in the order of GATE, UP and DOWN


class ExpertLora:
    """Adapter weights of all experts of one layer, in S slots with room for rank R."""

    __slots__ = ("_a", "_b", "_ranks", "_tile", "slots")

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        inner_size: int,
        *,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        tile: int = 0,
    ) -> None:
        """tile: rows of every matrix product; 0: any. With tiles a result does not depend on the rest of the batch."""
        inputs, outputs = (hidden_size, hidden_size, inner_size), (inner_size, inner_size, hidden_size)

        def empty(size: int) -> Tensor:
            return torch.zeros(num_slots, num_experts, max_rank, size, dtype=dtype, device=device)

        self._a = [empty(size) for size in inputs]  # of each projection: (S, E, R, in)
        self._b = [empty(size) for size in outputs]  # (S, E, R, out), with the scaling
        self._ranks = [[0] * len(inputs) for _ in range(num_slots)]  # 0: this slot does not change this projection
        self._tile = tile
        self.slots = 0  # bit s: slot s changes this layer

    def write(self, projection: int, slot: int, a: Tensor, b: Tensor) -> None:
        """Put an adapter's matrices, a (E, r, in) and b (E, r, out), into a slot that is empty."""
        rank = a.shape[1]
        self._a[projection][slot, :, :rank].copy_(a, non_blocking=True)
        self._b[projection][slot, :, :rank].copy_(b, non_blocking=True)
        self._ranks[slot][projection] = rank
        self.slots |= 1 << slot

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        if not self.slots & 1 << slot:
            return
        for weights in (*self._a, *self._b):
            weights[slot].zero_()
        self._ranks[slot] = [0] * len(self._a)
        self.slots &= ~(1 << slot)

    def add(self, x: Tensor, y: Tensor, projections: Sequence[int], slot: int, expert: int) -> None:
        """y += the LoRA output of one slot's projections of an expert, in place.

        x: (T, in)  y: (T, out), the outputs of the projections side by side.
        """
        start = 0
        for projection in projections:
            size = self._b[projection].shape[-1]
            if rank := self._ranks[slot][projection]:
                a, b = self._a[projection][slot, expert, :rank], self._b[projection][slot, expert, :rank]
                y[:, start : start + size] += self._multiplied(x, a, b)
            start += size

    def _multiplied(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        if not self._tile:
            return F.linear(x, a) @ b
        tiles = [F.pad(rows, (0, 0, 0, self._tile - len(rows))) for rows in torch.split(x, self._tile)]
        return torch.cat([F.linear(rows, a) @ b for rows in tiles])[: len(x)]

    @property
    def nbytes(self) -> int:
        """Memory of all slots."""
        return sum(weights.nbytes for weights in (*self._a, *self._b))
