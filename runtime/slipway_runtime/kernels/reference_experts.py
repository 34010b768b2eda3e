"""Mixture of experts (MoE) in plain torch: the reference. T tokens, each with K of E experts.

The inner activation is SwiGLU; gpt-oss clamps it: gate to at most `limit`, up to ± limit, and computes
(up + 1) · gate · sigmoid(1.702 · gate).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

CLAMPED_SLOPE = 1.702  # of gpt-oss's sigmoid


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Matrices of all experts of a layer; gate and up are the two halves of gate_up's outputs."""

    gate_up: Tensor  # (E, 2I, H)
    down: Tensor  # (E, H, I)
    gate_up_bias: Tensor | None = None  # (E, 2I)
    down_bias: Tensor | None = None  # (E, H)
    limit: float | None = None  # of the clamped SwiGLU

    @property
    def nbytes(self) -> int:
        """Memory of matrices and biases."""
        biases = (bias.nbytes for bias in (self.gate_up_bias, self.down_bias) if bias is not None)
        return self.gate_up.nbytes + self.down.nbytes + sum(biases)


def choose_experts(scores: Tensor, per_token: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """scores: (T, E) of the router -> weights (T, K) float32 and experts (T, K).

    normalize: the weights of a token sum to one, which is softmax over the chosen scores alone.
    """
    scores = scores.float()
    if normalize:
        top = scores.topk(per_token, dim=-1)
        return top.values.softmax(-1), top.indices
    top = scores.softmax(-1).topk(per_token, dim=-1)
    return top.values, top.indices


def gated(gate_up: Tensor, limit: float | None) -> Tensor:
    """The activation between the two products. gate_up: (R, 2I) -> (R, I)."""
    gate, up = gate_up.chunk(2, dim=-1)
    if limit is None:
        return F.silu(gate) * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * CLAMPED_SLOPE))


def mix_experts(x: Tensor, weights: Tensor, experts: Tensor, of: ExpertWeights) -> Tensor:
    """x: (T, H)  weights, experts: (T, K) -> (T, H): the weighted sum of the outputs of each token's experts."""
    out = x.new_zeros(x.shape[0], experts.shape[1], x.shape[1])
    for expert in sorted(set(experts.flatten().tolist())):
        token, place = torch.where(experts == expert)
        gate_up = F.linear(x[token], of.gate_up[expert], None if of.gate_up_bias is None else of.gate_up_bias[expert])
        inner = gated(gate_up, of.limit)
        out[token, place] = F.linear(inner, of.down[expert], None if of.down_bias is None else of.down_bias[expert])
    return (out * weights[:, :, None].to(x.dtype)).sum(1)
