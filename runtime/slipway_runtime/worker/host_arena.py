"""Host memory for offloaded KV blocks, and the copies between its slots and the KV cache on the device.

A slot holds a block's bytes of all layers, so a move is one copy in any number format. On a GPU the memory is pinned
and the copies are queued on the compute stream: in order with the steps, without blocking the host.

The memory is allocated in segments. torch rounds pinned memory up to a power of two, so one arena of 65 GiB would take
128; and after the arena was freed, segments are allocated again as slots are needed, not in one long pause.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from slipway_runtime.messages import Demote, FreeHostMemory, HostMove, Promote

SEGMENT_BYTES = 64 << 20


class HostArena:
    """Host slots 1 … `num_slots`, each of `block_bytes`."""

    def __init__(
        self,
        num_slots: int,
        block_bytes: int,
        num_layers: int,
        device: torch.device,
        *,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self._num_slots = num_slots
        self._slot_shape = (num_layers, block_bytes // num_layers)
        self._most = max(segment_bytes // block_bytes, 1)  # slots in a segment; the last one may have fewer
        self._pinned = device.type == "cuda"
        self._segments: list[Tensor] = []  # (slots, layers, bytes of a layer's block), uint8

    @property
    def nbytes(self) -> int:
        """Host memory allocated so far."""
        return sum(segment.nbytes for segment in self._segments)

    def reserve(self, slot: int | None = None) -> None:
        """Allocate the memory of the slots up to `slot`; None: of all slots. OOM raises torch's error."""
        wanted = self._num_slots if slot is None else slot
        while (taken := len(self._segments) * self._most) < wanted:
            shape = (min(self._most, self._num_slots - taken), *self._slot_shape)
            self._segments.append(torch.empty(shape, dtype=torch.uint8, pin_memory=self._pinned))

    def give_back(self) -> None:
        """Free the memory of all slots."""
        self._segments.clear()
        if self._pinned:
            torch.accelerator.memory.empty_host_cache()

    def make(self, moves: Iterable[HostMove], caches: list[Tensor]) -> None:
        """Execute the moves in order. caches: one per layer, all in one storage, as `allocate_cache` makes them."""
        blocks = _bytes_of_blocks(caches)
        for move in moves:
            match move:
                case Demote(block, slot):
                    self.reserve(slot)
                    self._slot(slot).copy_(blocks[:, block], non_blocking=True)
                case Promote(slot, block):
                    blocks[:, block].copy_(self._slot(slot), non_blocking=True)
                case FreeHostMemory():
                    self.give_back()

    def _slot(self, slot: int) -> Tensor:
        """Bytes of a slot: (layers, bytes of a layer's block)."""
        segment, place = divmod(slot - 1, self._most)
        return self._segments[segment][place]


def _bytes_of_blocks(caches: list[Tensor]) -> Tensor:
    """All caches as one view of their memory. (layers, blocks, bytes of a layer's block), uint8."""
    storage = caches[0].untyped_storage()
    assert all(cache.untyped_storage().data_ptr() == storage.data_ptr() for cache in caches), "one arena"
    whole = torch.empty(0, dtype=torch.uint8, device=caches[0].device).set_(storage)
    return whole.view(len(caches), len(caches[0]), -1)
