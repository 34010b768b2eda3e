"""Adapters of this worker: those in host memory, and which of them sits in which slot.

Steps are executed one after the other, loads before the step's computation: a slot is never written while a step
reads it. A row that would compute with another adapter than it began with stops the step instead.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from slipway_runtime.kernels.dispatch import LoraPlan
from slipway_runtime.layers.lora import LoraBank
from slipway_runtime.messages import AdapterLoad
from slipway_runtime.models.adapters import HostAdapter

Ints = npt.NDArray[np.int64]


class AdapterSlots:
    """Slots 0 … `num_slots` - 1, and the adapters in host memory that may be copied into them."""

    def __init__(self, bank: LoraBank) -> None:
        self._bank = bank
        self._host: dict[str, HostAdapter] = {}
        self._digests = [""] * bank.num_slots
        # Counts what has been in a slot. The last entry stands for "no slot", which slot -1 finds by itself.
        self.epochs = np.zeros(bank.num_slots + 1, dtype=np.int64)

    @property
    def digests(self) -> tuple[str, ...]:
        """What each slot holds; empty: nothing."""
        return tuple(self._digests)

    @property
    def nbytes(self) -> int:
        """Device memory of all slots."""
        return self._bank.nbytes

    def keep(self, adapter: HostAdapter) -> None:
        """From now on plans may load this adapter. Any thread may call it."""
        self._host[adapter.digest] = adapter

    def forget(self, digest: str) -> None:
        """Give its host memory back. A slot that holds it goes on holding it."""
        self._host.pop(digest, None)

    def load(self, slot: int, adapter: HostAdapter) -> None:
        """Replace what is in a slot."""
        self.epochs[slot] += 1
        self._digests[slot] = ""  # if the copy fails, the slot holds nothing that anybody should use
        self._bank.write(slot, adapter.matrices)
        self._digests[slot] = adapter.digest

    def unload(self, slot: int) -> None:
        """Empty a slot."""
        self.epochs[slot] += 1
        self._digests[slot] = ""
        self._bank.clear(slot)

    def take_in(self, loads: Iterable[AdapterLoad]) -> None:
        """Execute the loads of a plan."""
        with torch.inference_mode():
            for load in loads:
                self.load(load.slot, self._host[load.digest])

    def plan(self, token_slots: Ints) -> LoraPlan | None:
        """What the linears of a step need. token_slots: (T,). None when no token has an adapter."""
        if token_slots.max(initial=-1) < 0:
            return None
        return self._bank.plan(token_slots)
