"""Multi-LoRA in plain torch: adapter slots of a linear layer, the reference, and the fallback on a CPU.

A linear holds J of the checkpoint's matrices, concatenated by outputs (q, k and v, say). An adapter of rank r adds
(x Aᵀ) B to the outputs of some of them, with A (r, in), B (r, out) and the adapter's scaling multiplied into B.
There are S adapter slots; every slot has room for rank R, and unused ranks are zero.

`lora_shrink` and `lora_expand` are the definition. `add_lora` is how a CPU computes it: every call costs
microseconds, so
- each adapter with many tokens is multiplied alone, with its rows gathered;
- tokens of many adapters, a few each, as in a decode step, are multiplied together with all slots at once, and results
  of slots other than the token's own are masked. Ranks are the outermost dimension of the weights, so that the used
  ranks of all slots are one matrix, whatever R is.
Tokens without an adapter are in no group: their outputs are unchanged, bit for bit.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

from slipway_runtime.kernels.upload import Ints

__all__ = ["LoraWeights", "add_lora", "lora_expand", "lora_shrink", "plan_lora"]

ALONE = 12  # an adapter with so many tokens in a step is multiplied alone
FEW = 3  # up to so many adapters in a step are multiplied alone, however few their tokens


class LoraWeights:
    """Adapter weights of one linear layer, in S slots with room for rank R."""

    __slots__ = ("a", "b", "columns", "columns_on_device", "ranks", "ranks_on_device", "slots", "views")

    def __init__(
        self,
        in_size: int,
        out_sizes: tuple[int, ...],
        *,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        num_parts, ends = len(out_sizes), np.cumsum(out_sizes)
        self.a = torch.zeros(num_parts, max_rank, num_slots, in_size, dtype=dtype, device=device)
        self.b = torch.zeros(max_rank, num_slots, int(ends[-1]), dtype=dtype, device=device)
        self.columns = (0, *(int(end) for end in ends))  # part j has the outputs columns[j] … columns[j + 1]
        self.columns_on_device = torch.tensor(self.columns, dtype=torch.int32, device=device)
        self.ranks = [[0] * num_slots for _ in out_sizes]  # 0: this slot does not change this part
        self.ranks_on_device = torch.zeros(num_parts, num_slots, dtype=torch.int32, device=device)
        self.slots = 0  # bit s: slot s changes this layer
        # A (r, in) and B (r, out of the part) of each part and slot: slicing them again costs more than using them.
        self.views: list[list[tuple[Tensor, Tensor] | None]] = [[None] * num_slots for _ in out_sizes]

    def write(self, part: int, slot: int, a: Tensor, b: Tensor) -> None:
        """Put an adapter's matrices, a (r, in) and b (r, out of the part), into a slot that is empty."""
        rank = a.shape[0]
        view = self.a[part, :rank, slot], self.b[:rank, slot, self.columns[part] : self.columns[part + 1]]
        for ours, theirs in zip(view, (a, b), strict=True):
            ours.copy_(theirs, non_blocking=True)
        self.views[part][slot] = view
        self.ranks[part][slot] = rank
        self.ranks_on_device[part, slot] = rank
        self.slots |= 1 << slot

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        if not self.slots & 1 << slot:
            return
        self.a[:, :, slot].zero_()
        self.b[:, slot].zero_()
        self.ranks_on_device[:, slot] = 0
        for views, ranks in zip(self.views, self.ranks, strict=True):
            views[slot], ranks[slot] = None, 0
        self.slots &= ~(1 << slot)

    @property
    def nbytes(self) -> int:
        """Memory of all slots."""
        return self.a.nbytes + self.b.nbytes


# --- the definition


def lora_shrink(x: Tensor, weights: LoraWeights, token_slots: Ints) -> Tensor:
    """x Aᵀ with the A of each token's slot, zeros for tokens without one. x: (T, in) -> (J, T, R) float32."""
    shrunk = x.new_zeros(weights.a.shape[0], x.shape[0], weights.a.shape[1], dtype=torch.float32)
    for token, slot in enumerate(token_slots.tolist()):
        if slot >= 0:
            shrunk[:, token] = weights.a[:, :, slot].float() @ x[token].float()
    return shrunk


def lora_expand(shrunk: Tensor, weights: LoraWeights, token_slots: Ints, y: Tensor) -> None:
    """y += shrunk B with the B of each token's slot, summed in float32 and rounded once. y: (T, out), in place."""
    for token, slot in enumerate(token_slots.tolist()):
        if slot >= 0:
            for part, (start, end) in enumerate(zip(weights.columns, weights.columns[1:], strict=False)):
                added = shrunk[part, token] @ weights.b[:, slot, start:end].float()
                y[token, start:end] = (y[token, start:end].float() + added).to(y.dtype)


# --- on a CPU


@dataclass(frozen=True, slots=True)
class SingleAdapterGroup:
    """Group of tokens of one adapter."""

    slot: int
    tokens: slice | Tensor  # a slice if they are adjacent
    padding: int = 0  # rows of zeros to add


@dataclass(frozen=True, slots=True)
class MixedAdapterGroup:
    """Group of tokens of several adapters."""

    slots: tuple[int, ...]
    tokens: Tensor | None  # None: all tokens of the step
    others: Tensor  # (tokens, 1, S), True where a slot is not the token's own


@dataclass(frozen=True, slots=True)
class LoraPlan:
    """LoRA plan of one step, shared by all layers: groups of tokens by adapter slot."""

    slots: int  # bit s: any token has slot s
    single: tuple[SingleAdapterGroup, ...]
    mixed: MixedAdapterGroup | None


def plan_lora(token_slots: Ints, num_slots: int, like: Tensor, *, tile: int = 0) -> LoraPlan:
    """Group the tokens of a step by slot; -1: no adapter. `like`: device.

    tile: rows of every matrix product; 0: any. With tiles a token's result does not depend on the rest of the batch.
    """
    used, counts = np.unique(token_slots[token_slots >= 0], return_counts=True)
    bits = sum(1 << int(slot) for slot in used)
    if tile:
        return LoraPlan(bits, tuple(_tiles(token_slots, used, tile, like)), None)
    few = used if len(used) <= FEW else used[counts >= ALONE]
    single = tuple(SingleAdapterGroup(int(slot), _tokens(np.flatnonzero(token_slots == slot), like)) for slot in few)
    rest = np.setdiff1d(used, few)
    if not len(rest):
        return LoraPlan(bits, single, None)
    members = np.flatnonzero(np.isin(token_slots, rest))
    others = np.arange(num_slots)[None, :] != token_slots[members, None]
    mixed = MixedAdapterGroup(
        slots=tuple(rest.tolist()),
        tokens=None if len(members) == len(token_slots) else torch.from_numpy(members).to(like.device),
        others=torch.from_numpy(others[:, None, :]).to(like.device),
    )
    return LoraPlan(bits, single, mixed)


def _tokens(members: Ints, like: Tensor) -> slice | Tensor:
    if members[-1] - members[0] == len(members) - 1:
        return slice(int(members[0]), int(members[-1]) + 1)
    return torch.from_numpy(members).to(like.device)


def _tiles(token_slots: Ints, used: Ints, tile: int, like: Tensor) -> list[SingleAdapterGroup]:
    found = []
    for slot in used.tolist():
        members = np.flatnonzero(token_slots == slot)
        for start in range(0, len(members), tile):
            some = members[start : start + tile]
            found.append(SingleAdapterGroup(slot, torch.from_numpy(some).to(like.device), padding=tile - len(some)))
    return found


def add_lora(x: Tensor, y: Tensor, weights: LoraWeights, plan: LoraPlan) -> None:
    """y += the LoRA output of each token's adapter, in place. x: (T, in)  y: (T, out)."""
    if not weights.slots & plan.slots:
        return  # none of the step's adapters changes this layer
    for group in plan.single:
        if weights.slots & 1 << group.slot:
            _add_single_adapter(x, y, weights, group)
    if plan.mixed is not None:
        _add_mixed_adapters(x, y, weights, plan.mixed)


def _add_single_adapter(x: Tensor, y: Tensor, weights: LoraWeights, group: SingleAdapterGroup) -> None:
    tokens = group.tokens
    rows = x[tokens] if isinstance(tokens, slice) else x.index_select(0, tokens)
    if group.padding:
        rows = F.pad(rows, (0, 0, 0, group.padding))
    for part, views in enumerate(weights.views):
        if (view := views[group.slot]) is None:
            continue
        a, b = view
        outputs = y[:, weights.columns[part] : weights.columns[part + 1]]
        if isinstance(tokens, slice):
            outputs[tokens].addmm_(F.linear(rows, a), b)
        else:
            added = F.linear(rows, a) @ b
            outputs.index_add_(0, tokens, added[: len(tokens)])


def _add_mixed_adapters(x: Tensor, y: Tensor, weights: LoraWeights, group: MixedAdapterGroup) -> None:
    rows = x if group.tokens is None else x.index_select(0, group.tokens)
    num_slots = weights.a.shape[2]
    for part, ranks in enumerate(weights.ranks):
        rank = max(ranks[slot] for slot in group.slots)
        if not rank:
            continue
        start, end = weights.columns[part : part + 2]
        shrunk = F.linear(rows, weights.a[part, :rank].view(rank * num_slots, -1))
        # Masked, not multiplied by zero: an overflow (inf) of one adapter must not reach the rows of another.
        shrunk.view(-1, rank, num_slots).masked_fill_(group.others, 0.0)
        b = weights.b[:rank, :, start:end].view(rank * num_slots, end - start)
        if group.tokens is None:
            y[:, start:end].addmm_(shrunk, b)
        else:
            y[:, start:end].index_add_(0, group.tokens, shrunk @ b)
