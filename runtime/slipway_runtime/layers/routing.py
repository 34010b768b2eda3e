"""Choice of a token's experts from the router's scores.

| scores  | choice                                       | weights                             | models                |
|---------|----------------------------------------------|-------------------------------------|-----------------------|
| softmax | the best                                     | theirs, or with the sum 1           | Mixtral, Qwen, etc.   |
| softmax | the best in the groups with the best experts | theirs · scale                      | DeepSeek-V2           |
| softmax | the best after a correction                  | without it, with the sum 1          | ERNIE 4.5             |
| sigmoid | the best after a correction, in the groups   | without it, with the sum 1, · scale | DeepSeek-V3, Kimi,    |
|         | whose two best experts have the largest sum  |                                     | GLM, dots, MiniMax-M2 |
| sigmoid | the best                                     | theirs                              | Llama 4               |

The first is one launch on a GPU (`Kernels.choose_experts`); the others are in torch, and a CUDA graph can capture them.
"""

import torch
from torch import Tensor

from slipway_runtime.kernels.dispatch import Kernels


class Routing:
    """Chooses the experts of each token, and their weights."""

    __slots__ = (
        "_correction",
        "_groups",
        "_groups_per_token",
        "_kernels",
        "_normalize",
        "_per_token",
        "_scale",
        "_sigmoid",
        "is_exact",
    )

    def __init__(
        self,
        kernels: Kernels,
        *,
        per_token: int,
        normalize: bool,
        sigmoid: bool = False,
        correction: Tensor | None = None,
        groups: int = 1,
        groups_per_token: int = 1,
        scale: float = 1.0,
    ) -> None:
        """correction: (E,), added to the scores for the choice alone."""
        self._kernels = kernels
        self._per_token = per_token
        self._normalize = normalize
        self._sigmoid = sigmoid
        self._correction = correction
        self._groups = groups
        self._groups_per_token = groups_per_token
        self._scale = scale
        self.is_exact = sigmoid or correction is not None  # the router multiplies in float32

    def __call__(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """scores: (T, E) of the router -> weights (T, K) float32 and experts (T, K)."""
        if not self.is_exact and self._groups == 1:
            weights, experts = self._kernels.choose_experts(scores, self._per_token, normalize=self._normalize)
            return weights if self._scale == 1.0 else weights * self._scale, experts
        scores = scores.float()
        scores = scores.sigmoid() if self._sigmoid else scores.softmax(-1)
        choice = scores if self._correction is None else scores + self._correction
        if self._groups > 1:
            choice = self._within_groups(choice)
        experts = choice.topk(self._per_token, dim=-1).indices
        weights = scores.gather(1, experts)
        if self._normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self._scale, experts

    def _within_groups(self, choice: Tensor) -> Tensor:
        """The scores, -inf for the experts of groups that are not chosen. (T, E) -> (T, E)."""
        grouped = choice.view(len(choice), self._groups, -1)
        best = 2 if self._correction is not None else 1
        of_group = grouped.topk(min(best, grouped.shape[2]), dim=-1).values.sum(-1)
        chosen = torch.zeros_like(of_group, dtype=torch.bool)
        chosen.scatter_(1, of_group.topk(self._groups_per_token, dim=-1).indices, True)
        return grouped.masked_fill(~chosen[:, :, None], float("-inf")).flatten(1)
