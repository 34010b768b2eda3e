"""Adapters of this worker: those in host memory, which of them sits in which slot, and which row uses it.

Steps are executed one after the other, the loads of a plan before its computation: a slot is never written while a
step reads it. A row whose slot was given to another adapter stops the step, rather than go on with foreign weights.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from slipway_runtime.kernels.dispatch import LoraPlan
from slipway_runtime.layers.lora import LoraBank
from slipway_runtime.messages import SchedulerOutput
from slipway_runtime.models.adapters import HostAdapter

Ints = npt.NDArray[np.int64]


class AdapterSlots:
    """Slots 0 … `bank.num_slots` - 1, and the adapters in host memory that plans may copy into them."""

    def __init__(self, bank: LoraBank, max_num_seqs: int) -> None:
        self._bank = bank
        self._host: dict[str, HostAdapter] = {}
        self._digests = [""] * bank.num_slots
        self._row_slots = np.full(max_num_seqs, -1, dtype=np.int64)
        # How often each slot changed hands, and how often it had when the row began. No slot, -1, is the last entry.
        self._epochs = np.zeros(bank.num_slots + 1, dtype=np.int64)
        self._row_epochs = np.zeros(max_num_seqs, dtype=np.int64)

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
        """Replace what is in a slot. No row that began before may use the slot any more."""
        self.unload(slot)
        with torch.inference_mode():
            self._bank.write(slot, adapter.matrices)
        self._digests[slot] = adapter.digest

    def unload(self, slot: int) -> None:
        """Empty a slot."""
        self._epochs[slot] += 1
        self._digests[slot] = ""
        with torch.inference_mode():
            self._bank.clear(slot)

    def update_states(self, plan: SchedulerOutput) -> None:
        """Execute the loads of a plan, and learn which slots its new rows use."""
        for load in plan.adapter_loads:
            self.load(load.slot, self._host[load.digest])
        for new in plan.new_rows:
            assert new.adapter_slot < 0 or self._digests[new.adapter_slot], f"slot {new.adapter_slot} holds nothing"
            self._row_slots[new.row] = new.adapter_slot
            self._row_epochs[new.row] = self._epochs[new.adapter_slot]

    @property
    def num_slots(self) -> int:
        """How many adapters compute at the same time."""
        return self._bank.num_slots

    def slots_of(self, rows: Sequence[int], num_new: Sequence[int]) -> Ints | None:
        """The slot of each token, `num_new` of each of these rows, -1 without an adapter. None: no token has one."""
        row_ids = np.array(rows, dtype=np.int64)
        slots = self._row_slots[row_ids]
        if slots.max(initial=-1) < 0:
            return None
        stale = self._epochs[slots] != self._row_epochs[row_ids]
        assert not stale.any(), f"slot {slots[stale][0]} was given away under row {row_ids[stale][0]}"
        return slots.repeat(num_new)

    def plan(self, token_slots: Ints) -> LoraPlan:
        """What the linears of a step need. token_slots: (T,)."""
        return self._bank.plan(token_slots)
