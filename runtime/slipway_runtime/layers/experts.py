"""A mixture of experts: a router chooses some experts for each token, and their outputs are summed by its weights.

On a CPU each expert has matrices of its own, in the machine's fastest form, and multiplies its tokens as one batch. On
a GPU all experts of a layer are one tensor, and one launch computes them all (`mix_experts`).

Adapters of experts (`expert_lora`) change the rows of their own tokens only: these are computed again, with the
adapter, after all rows were computed without.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

from slipway_runtime.kernels.dispatch import Kernels
from slipway_runtime.kernels.reference_experts import ExpertWeights, gated
from slipway_runtime.layers.attention import StepContext
from slipway_runtime.layers.decoder_layer import Adapted, DenseMlp
from slipway_runtime.layers.expert_lora import DOWN, GATE, UP, ExpertLora
from slipway_runtime.layers.linear import Linear, Reduce
from slipway_runtime.layers.matmul import Matmul
from slipway_runtime.layers.routing import Routing


class ExpertsMlp:
    """MoE MLP: router and experts of one layer, and the shared expert of all tokens where there is one."""

    __slots__ = (
        "_experts",
        "_reduce",
        "_router",
        "_routing",
        "_scales_input",
        "_shared",
        "_shared_gate",
        "lora",
        "name",
    )

    def __init__(
        self,
        router: Linear,
        experts: "GroupedExperts | StackedExperts",
        routing: Routing,
        *,
        scales_input: bool = False,
        shared: DenseMlp | None = None,
        shared_gate: Linear | None = None,
        reduce: Reduce | None = None,
        name: str = "",
    ) -> None:
        """name: of the experts in the checkpoint, such as "model.layers.3.mlp.experts".

        scales_input: the weight of a token's one expert multiplies the expert's input.

        shared_gate: its sigmoid weighs the shared expert.
        """
        self._router = router
        self._experts = experts
        self._routing = routing
        self._scales_input = scales_input
        self._shared = shared
        self._shared_gate = shared_gate
        self.name = name
        self.lora: ExpertLora | None = None
        self._reduce = reduce  # sums over ranks, which each have a part of every expert's inner features

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """x: (T, H) -> (T, H)."""
        weights, experts = self._routing(self._router(x.float() if self._routing.is_exact else x))
        if self._scales_input:
            y = self._mixed(x * weights.to(x.dtype), torch.ones_like(weights), experts, step)
        else:
            y = self._mixed(x, weights, experts, step)
        if self._shared is not None:
            added = self._shared(x, step)
            y = y + (added if self._shared_gate is None else added * self._shared_gate(x).sigmoid())
        return y if self._reduce is None else self._reduce(y)

    def _mixed(self, x: Tensor, weights: Tensor, experts: Tensor, step: StepContext) -> Tensor:
        """The experts' outputs, of the tokens of adapters with these. x: (T, H)  weights, experts: (T, K) -> (T, H)."""
        y = self._experts(x, weights, experts)
        if self.lora is None:
            return y
        for slot, tokens in step.expert_rows:
            if self.lora.slots & 1 << slot:
                rows, own, chosen = (all_of.index_select(0, tokens) for all_of in (x, weights, experts))
                y = y.index_copy(0, tokens, self._experts.with_adapter(rows, own, chosen, self.lora, slot))
        return y

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The matrices of the shared expert. Those of the others have slots of their own: `lora`."""
        return () if self._shared is None else self._shared.linears

    @property
    def adapted(self) -> tuple[Adapted, ...]:
        """Everything with adapter slots: the matrices of the shared expert, and the others."""
        return *self.linears, self

    def empty_lora(
        self, *, num_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device, tile: int
    ) -> ExpertLora:
        """Allocate the adapter slots of the experts. tile: see `ExpertLora`."""
        count, hidden, inner = self._experts.sizes
        self.lora = ExpertLora(
            count, hidden, inner, num_slots=num_slots, max_rank=max_rank, dtype=dtype, device=device, tile=tile
        )
        return self.lora

    @property
    def nbytes(self) -> int:
        """Memory of router and experts."""
        shared = 0 if self._shared is None else self._shared.nbytes
        return self._router.nbytes + self._experts.nbytes + shared


class GroupedExperts:
    """One matrix product per expert over all of its tokens. For CPUs: the host reads which experts are chosen."""

    __slots__ = ("_biases", "_experts", "_kernels", "_limit")

    def __init__(
        self,
        experts: Sequence[tuple[Matmul, Matmul]],
        kernels: Kernels,
        *,
        biases: tuple[Tensor, Tensor] | None = None,
        limit: float | None = None,
    ) -> None:
        """experts: gate_up and down of each  biases: (E, 2I) and (E, H)."""
        self._experts = experts
        self._biases = biases
        self._limit = limit
        self._kernels = kernels

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """x: (T, H)  weights, experts: (T, K) -> (T, H)."""
        return _one_by_one(x, weights, experts, self._one)

    def with_adapter(self, x: Tensor, weights: Tensor, experts: Tensor, lora: ExpertLora, slot: int) -> Tensor:
        """The same, for tokens that all have the adapter in this slot."""
        return _one_by_one(x, weights, experts, lambda expert, rows: self._one(expert, rows, lora, slot))

    def _one(self, expert: int, rows: Tensor, lora: ExpertLora | None = None, slot: int = 0) -> Tensor:
        gate_up, down = self._experts[expert]
        inner = gate_up(rows)
        if self._biases is not None:
            inner += self._biases[0][expert]
        if lora is not None:
            lora.add(rows, inner, (GATE, UP), slot, expert)
        activated = self._kernels.swiglu(inner) if self._limit is None else gated(inner, self._limit)
        y = down(activated)
        if self._biases is not None:
            y.add_(self._biases[1][expert])
        if lora is not None:
            lora.add(activated, y, (DOWN,), slot, expert)
        return y

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Experts, hidden and inner features."""
        down = self._experts[0][1]
        return len(self._experts), down.out_features, down.in_features

    @property
    def nbytes(self) -> int:
        """Memory of matrices and biases."""
        biases = 0 if self._biases is None else sum(bias.nbytes for bias in self._biases)
        return sum(gate_up.nbytes + down.nbytes for gate_up, down in self._experts) + biases


class StackedExperts:
    """One tensor for all experts. The host reads nothing back, so CUDA graphs can capture the step."""

    __slots__ = ("_kernels", "_weights")

    def __init__(self, weights: ExpertWeights, kernels: Kernels) -> None:
        self._weights = weights
        self._kernels = kernels

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """x: (T, H)  weights, experts: (T, K) -> (T, H)."""
        return self._kernels.mix_experts(x, weights, experts, self._weights)

    def with_adapter(self, x: Tensor, weights: Tensor, experts: Tensor, lora: ExpertLora, slot: int) -> Tensor:
        """The same, for tokens that all have the adapter in this slot: in plain torch, and the host waits."""
        of = self._weights

        def one(expert: int, rows: Tensor) -> Tensor:
            inner = F.linear(rows, of.gate_up[expert], None if of.gate_up_bias is None else of.gate_up_bias[expert])
            lora.add(rows, inner, (GATE, UP), slot, expert)
            activated = gated(inner, of.limit)
            y = F.linear(activated, of.down[expert], None if of.down_bias is None else of.down_bias[expert])
            lora.add(activated, y, (DOWN,), slot, expert)
            return y

        return _one_by_one(x, weights, experts, one)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Experts, hidden and inner features."""
        count, hidden, inner = self._weights.down.shape
        return count, hidden, inner

    @property
    def nbytes(self) -> int:
        """Memory of matrices and biases."""
        return self._weights.nbytes


def _one_by_one(x: Tensor, weights: Tensor, experts: Tensor, one: Callable[[int, Tensor], Tensor]) -> Tensor:
    """x: (T, H)  weights, experts: (T, K)  one: an expert's output for its rows -> (T, H)."""
    num_tokens, per_token = experts.shape
    chosen, order = experts.flatten().sort(stable=True)
    rows = x.index_select(0, order // per_token)
    out = torch.empty_like(rows)
    start = 0
    for expert, count in enumerate(torch.bincount(chosen).tolist()):
        if not count:
            continue
        end = start + count
        out[start:end] = one(expert, rows[start:end])
        start = end
    # A token's experts are summed in the order of their weights, independent of the rest of the batch.
    placed = torch.empty_like(out)
    placed[order] = out
    return (placed.view(num_tokens, per_token, -1) * weights[:, :, None].to(x.dtype)).sum(1)
