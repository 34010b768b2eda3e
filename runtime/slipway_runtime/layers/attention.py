"""Attention layer over the paged KV cache."""

import torch
from torch import Tensor

from slipway_runtime.kernels.dispatch import Kernels
from slipway_runtime.kernels.reference_attention import Scoring
from slipway_runtime.layers.linear import Linear
from slipway_runtime.layers.norm import LayerNorm, RMSNorm, SplitRMSNorm
from slipway_runtime.layers.step import StepContext

__all__ = ["Attention", "StepContext"]


def rotate_heads(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate heads in place by their positions. heads: (T, n, D)  cos, sin: (T, 1, D), see `Rotary`."""
    torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, dims=-1), sin, out=heads)


class Attention:
    """Projects x to q, k, v heads, applies rotary positions, stores keys and values, attends to the sequence so far."""

    __slots__ = (
        "head_dim",
        "kernels",
        "late_norms",
        "norms",
        "num_kv_heads",
        "num_q_heads",
        "out",
        "qkv",
        "rotary_table",
        "scale",
        "scoring",
        "wide_norms",
        "window",
    )

    def __init__(
        self,
        qkv: Linear,
        out: Linear,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
        window: int | None,
        kernels: Kernels,
        scale: float = 0.0,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        rotary_table: int = 0,
        wide_norms: tuple[RMSNorm | SplitRMSNorm | LayerNorm, RMSNorm | SplitRMSNorm | LayerNorm] | None = None,
        norms_after_rotation: bool = False,
    ) -> None:
        """scale: of the scores; 0: 1 / sqrt(head_dim)  softcap, sinks: see `Scoring`.

        rotary_table: index of the layer's table among those of the model.
        wide_norms: over all heads of q and of k, or of each head with weights of its own; q_norm and k_norm are of
        each head, before its rotation or after it.
        """
        self.qkv = qkv
        self.out = out
        self.num_q_heads = num_q_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.norms = None if q_norm is None or k_norm is None else (q_norm.weight, k_norm.weight, q_norm.eps)
        self.late_norms = norms_after_rotation
        self.window = window
        self.kernels = kernels
        self.scale = scale or head_dim**-0.5
        self.scoring = None if softcap is None and sinks is None else Scoring(softcap, sinks)
        self.rotary_table = rotary_table
        self.wide_norms = wide_norms

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Its matrices, in the order in which they compute."""
        return self.qkv, self.out

    @property
    def nbytes(self) -> int:
        """Memory of its weights; norms are too small to count."""
        return self.qkv.nbytes + self.out.nbytes

    def __call__(self, x: Tensor, cache: Tensor, step: StepContext) -> Tensor:
        """x: (T, H) -> (T, H)."""
        q_heads, kv_heads = self.num_q_heads, self.num_kv_heads
        projected = self.qkv(x, step)
        if self.wide_norms is not None:
            start = 0
            for norm, heads in zip(self.wide_norms, (q_heads, kv_heads), strict=True):
                part = projected[:, start : start + heads * self.head_dim]
                whole = part.contiguous()
                if isinstance(norm, LayerNorm):
                    whole = whole.view(x.shape[0], heads, self.head_dim)
                part.copy_(norm(whole).view(part.shape))
                start += heads * self.head_dim
        qkv = projected.view(x.shape[0], q_heads + 2 * kv_heads, self.head_dim)
        cos, sin, table = step.cos, step.sin, self.rotary_table
        if cos.shape[1] > 1:  # the model has several rotary tables
            cos, sin = cos[:, table : table + 1], sin[:, table : table + 1]
        if self.late_norms:  # rotated here, so that what the kernel rotates by nothing is normed after it
            rotate_heads(qkv[:, : q_heads + kv_heads], cos, sin)
            cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
        q = self.kernels.rope_and_store(qkv, cos, sin, cache, step.slots, q_heads, self.norms)
        kv = qkv[:, q_heads:].view(x.shape[0], 2, kv_heads, self.head_dim)
        attended = self.kernels.paged_attention(q, kv, cache, step.plan, self.scale, self.window, self.scoring)
        return self.out(attended, step)
