"""LoRA in the linear layers: static adapter slots in device memory, and the LoRA plan of a step.

The slots of all layers are allocated once and written in place, so loading and unloading an adapter allocates nothing,
and captured CUDA graphs stay valid.
"""

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from slipway_runtime.kernels.dispatch import Kernels, LoraPlan
from slipway_runtime.kernels.reference_lora import LoraWeights
from slipway_runtime.kernels.upload import Ints
from slipway_runtime.layers.expert_lora import PROJECTIONS, ExpertLora
from slipway_runtime.layers.experts import ExpertsMlp
from slipway_runtime.layers.linear import Linear
from slipway_runtime.layers.step import StepContext

TILE = 16  # rows of one matrix product in deterministic mode


class LoraLinear:
    """LoRA hook of one linear layer."""

    __slots__ = ("_kernels", "weights")

    def __init__(self, weights: LoraWeights, kernels: Kernels) -> None:
        self.weights = weights
        self._kernels = kernels

    def __call__(self, x: Tensor, y: Tensor, step: StepContext) -> None:
        """x: (T, in)  y: (T, out), added to in place."""
        self._kernels.add_lora(x, y, self.weights, step.lora)


class LoraBank:
    """Adapter slots of all linear layers of a model."""

    def __init__(
        self,
        linears: Iterable[Linear],
        kernels: Kernels,
        experts: Iterable[ExpertsMlp] = (),
        *,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        deterministic: bool = False,
    ) -> None:
        self.num_slots = num_slots
        self.max_rank = max_rank
        self._kernels = kernels
        self._tile = TILE if deterministic else 0
        self._like = torch.empty(0, dtype=dtype, device=device)
        self._weights: list[LoraWeights | ExpertLora] = []
        self._experts: list[ExpertLora] = []
        self._places: dict[str, tuple[LoraWeights | ExpertLora, int]] = {}
        for linear in linears:
            sizes = tuple(part.end - part.start for part in linear.parts)
            weights = LoraWeights(
                linear.in_features, sizes, num_slots=num_slots, max_rank=max_rank, dtype=dtype, device=device
            )
            linear.lora = LoraLinear(weights, kernels)
            self._weights.append(weights)
            self._places.update({part.name: (weights, index) for index, part in enumerate(linear.parts)})
        for mlp in experts:
            lora = mlp.empty_lora(num_slots=num_slots, max_rank=max_rank, dtype=dtype, device=device, tile=self._tile)
            self._weights.append(lora)
            self._places.update({f"{mlp.name}.{name}": (lora, index) for index, name in enumerate(PROJECTIONS)})
            self._experts.append(lora)

    @property
    def nbytes(self) -> int:
        """Memory of all slots, empty or not."""
        return sum(weights.nbytes for weights in self._weights)

    def write(self, slot: int, matrices: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Load an adapter into a slot. matrices: by module, as `HostAdapter` has them."""
        self.clear(slot)
        for module, (a, b) in matrices.items():
            weights, part = self._places[module]
            weights.write(part, slot, a, b)

    def clear(self, slot: int) -> None:
        """Clear a slot: tokens that use it are computed by the base model alone."""
        for weights in self._weights:
            weights.clear(slot)

    def plan(self, token_slots: Ints) -> LoraPlan:
        """LoRA plan of one step, shared by all hooks. token_slots: (T,), -1 for tokens without an adapter."""
        return self._kernels.plan_lora(token_slots, self.num_slots, self._like, tile=self._tile)

    def expert_rows(self, token_slots: Ints) -> tuple[tuple[int, Tensor], ...]:
        """The tokens of a step whose adapters change experts, by slot. token_slots: (T,)."""
        slots = 0
        for lora in self._experts:
            slots |= lora.slots
        return tuple(
            (slot, torch.from_numpy(np.flatnonzero(token_slots == slot)).to(self._like.device))
            for slot in np.unique(token_slots).tolist()
            if slot >= 0 and slots & 1 << slot
        )
