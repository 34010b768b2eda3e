"""LoRA adapter slots of this worker: adapters in host memory, the adapter in each device slot, the slot of each row.

Steps run one after the other, and a step's adapter loads run before its computation: a slot is never written while a
step reads it. If a row's slot was reloaded with another adapter, the step fails instead of using the wrong weights.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from slipway_runtime.kernels.dispatch import LoraPlan
from slipway_runtime.kernels.upload import Ints
from slipway_runtime.layers.lora import LoraBank
from slipway_runtime.messages import SchedulerOutput
from slipway_runtime.models.adapter_weights import HostAdapter


class AdapterSlots:
    """Device slots 0 … `bank.num_slots` - 1, and the adapters in host memory that a step may load into them."""

    def __init__(self, bank: LoraBank, max_num_seqs: int) -> None:
        self._bank = bank
        self._host: dict[str, HostAdapter] = {}
        self._digests = [""] * bank.num_slots
        self._row_slots = np.full(max_num_seqs, -1, dtype=np.int64)
        # How often each slot was reloaded, in total and when the row began. The last entry is for slot -1, no adapter.
        self._epochs = np.zeros(bank.num_slots + 1, dtype=np.int64)
        self._row_epochs = np.zeros(max_num_seqs, dtype=np.int64)

    @property
    def digests(self) -> tuple[str, ...]:
        """Digest of the adapter in each slot; "": the slot is empty."""
        return tuple(self._digests)

    @property
    def nbytes(self) -> int:
        """Device memory of all slots."""
        return self._bank.nbytes

    def keep(self, adapter: HostAdapter) -> None:
        """Keep an adapter in host memory, so that steps may load it. Any thread may call this."""
        self._host[adapter.digest] = adapter

    def forget(self, digest: str) -> None:
        """Free an adapter's host memory. A slot that holds the adapter keeps it."""
        self._host.pop(digest, None)

    def load(self, slot: int, adapter: HostAdapter) -> None:
        """Load an adapter into a slot in place of the old one. Rows that began before must not use the slot again."""
        self.unload(slot)
        with torch.inference_mode():
            self._bank.write(slot, adapter.matrices)
        self._digests[slot] = adapter.digest

    def unload(self, slot: int) -> None:
        """Clear a slot."""
        self._epochs[slot] += 1
        self._digests[slot] = ""
        with torch.inference_mode():
            self._bank.clear(slot)

    def update_states(self, plan: SchedulerOutput) -> None:
        """Execute the adapter loads of a scheduler output, and record the slots of its new rows."""
        for load in plan.adapter_loads:
            self.load(load.slot, self._host[load.digest])
        for new in plan.new_rows:
            assert new.adapter_slot < 0 or self._digests[new.adapter_slot], f"slot {new.adapter_slot} holds nothing"
            self._row_slots[new.row] = new.adapter_slot
            self._row_epochs[new.row] = self._epochs[new.adapter_slot]

    @property
    def num_slots(self) -> int:
        """Number of adapters that one step can use."""
        return self._bank.num_slots

    def slots_of(self, rows: Sequence[int], num_new: Sequence[int]) -> Ints | None:
        """Adapter slot of each new token, `num_new` per row; -1: no adapter. None: no row has an adapter."""
        row_ids = np.array(rows, dtype=np.int64)
        slots = self._row_slots[row_ids]
        if slots.max(initial=-1) < 0:
            return None
        stale = self._epochs[slots] != self._row_epochs[row_ids]
        assert not stale.any(), f"slot {slots[stale][0]} was given away under row {row_ids[stale][0]}"
        return slots.repeat(num_new)

    def plan(self, token_slots: Ints) -> LoraPlan:
        """LoRA plan of a step, for its linear layers. token_slots: (T,)."""
        return self._bank.plan(token_slots)

    def expert_rows(self, token_slots: Ints) -> tuple[tuple[int, Tensor], ...]:
        """The tokens of a step whose adapters change experts, by slot. token_slots: (T,)."""
        return self._bank.expert_rows(token_slots)
