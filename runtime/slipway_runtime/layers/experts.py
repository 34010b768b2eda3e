"""A mixture of experts: a router chooses some experts for each token, and their outputs are summed by its weights.

On a CPU each expert has matrices of its own, in the machine's fastest form, and multiplies its tokens as one batch. On
a GPU all experts of a layer are one tensor, and one launch computes them all (`mix_experts`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from slipway_runtime.kernels.dispatch import Kernels
from slipway_runtime.kernels.reference_experts import ExpertWeights, gated
from slipway_runtime.layers.attention import StepContext
from slipway_runtime.layers.linear import Linear, Reduce
from slipway_runtime.layers.matmul import Matmul


class ExpertsMlp:
    """MoE MLP: router and experts of one layer."""

    __slots__ = ("_experts", "_kernels", "_normalize", "_per_token", "_reduce", "_router")

    def __init__(
        self,
        router: Linear,
        experts: "GroupedExperts | StackedExperts",
        kernels: Kernels,
        *,
        per_token: int,
        normalize: bool,
        reduce: Reduce | None = None,
    ) -> None:
        self._router = router
        self._experts = experts
        self._kernels = kernels
        self._per_token = per_token
        self._normalize = normalize
        self._reduce = reduce  # sums over ranks, which each have a part of every expert's inner features

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """x: (T, H) -> (T, H)."""
        weights, experts = self._kernels.choose_experts(self._router(x), self._per_token, normalize=self._normalize)
        y = self._experts(x, weights, experts)
        return y if self._reduce is None else self._reduce(y)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Empty: adapters change none of its matrices."""
        return ()

    @property
    def nbytes(self) -> int:
        """Memory of router and experts."""
        return self._router.nbytes + self._experts.nbytes


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
        num_tokens, per_token = experts.shape
        chosen, order = experts.flatten().sort(stable=True)
        rows = x.index_select(0, order // per_token)
        out = torch.empty_like(rows)
        start = 0
        for expert, count in enumerate(torch.bincount(chosen).tolist()):
            if not count:
                continue
            end = start + count
            out[start:end] = self._one(expert, rows[start:end])
            start = end
        # A token's experts are summed in the order of their weights, independent of the rest of the batch.
        placed = torch.empty_like(out)
        placed[order] = out
        return (placed.view(num_tokens, per_token, -1) * weights[:, :, None].to(x.dtype)).sum(1)

    def _one(self, expert: int, rows: Tensor) -> Tensor:
        gate_up, down = self._experts[expert]
        inner = gate_up(rows)
        if self._biases is not None:
            inner += self._biases[0][expert]
        y = down(self._kernels.swiglu(inner) if self._limit is None else gated(inner, self._limit))
        return y if self._biases is None else y.add_(self._biases[1][expert])

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

    @property
    def nbytes(self) -> int:
        """Memory of matrices and biases."""
        return self._weights.nbytes
