"""Mixture of experts (MoE) in plain torch: the reference. T tokens, each with K of E experts.

The inner activation is SwiGLU; gpt-oss clamps it: gate to at most `limit`, up to ± limit, and computes
(up + 1) · gate · sigmoid(1.702 · gate).
"""

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

CLAMPED_SLOPE = 1.702  # of gpt-oss's sigmoid
_E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True, slots=True)
class Mxfp4Matrices:
    """Matrices of all experts in MXFP4 (OCP Microscaling Formats 1.0): 32 columns of a row share a power of two."""

    codes: Tensor  # (E, out, in / 2) bytes of two E2M1 codes, low bits first
    scales: Tensor  # (E, out, in / 32) exponents, 127 more than they mean
    dtype: torch.dtype  # of the model

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, out, in)."""
        count, out_size, packed = self.codes.shape
        return count, out_size, 2 * packed

    @property
    def nbytes(self) -> int:
        """Memory of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def __getitem__(self, expert: int) -> Tensor:
        """The matrix of one expert as numbers, which bfloat16 holds exactly. (out, in)."""
        codes = self.codes[expert]
        return mxfp4_numbers(codes.view(len(codes), -1, 16), self.scales[expert], self.dtype)


@dataclass(frozen=True, slots=True)
class ByteMatrices:
    """Matrices of all experts in one-byte codes: `group` columns of a row share a factor."""

    codes: Tensor  # (E, out, in), int8 or float8_e4m3fn
    scales: Tensor  # (E, out, in / group), float32
    group: int
    dtype: torch.dtype  # of the model

    @property
    def shape(self) -> torch.Size:
        """(E, out, in)."""
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        """Memory of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def __getitem__(self, expert: int) -> Tensor:
        """The matrix of one expert as numbers. (out, in)."""
        scales = self.scales[expert].repeat_interleave(self.group, 1)[:, : self.shape[2]]
        return (self.codes[expert].float() * scales).to(self.dtype)


Matrices = Tensor | Mxfp4Matrices | ByteMatrices


def mxfp4_numbers(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """MXFP4: (…, groups, 16) bytes of two E2M1 codes, low bits first, (…, groups) exponents -> (…, groups · 32)."""
    table = torch.tensor(_E2M1, dtype=torch.float32, device=blocks.device)
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    numbers = torch.ldexp(table[codes.long()], (scales.int() - 127).unsqueeze(-1))
    return numbers.to(dtype).flatten(-2)


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Matrices of all experts of a layer; gate and up are the two halves of gate_up's outputs."""

    gate_up: Matrices  # (E, 2I, H)
    down: Matrices  # (E, H, I)
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
