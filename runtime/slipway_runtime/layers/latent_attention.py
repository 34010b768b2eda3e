"""Multi-head latent attention (MLA, DeepSeek-V2): the cache has one compressed vector for each token.

    c = norm(x · Wc)                    (T, rank): the latent, from which all heads' keys and values are made
    r = rotate(x · Wr)                  (T, rotary): the rotated part of the keys, shared by all heads
    k_h = [c · K_hᵀ, r]   v_h = c · V_hᵀ

Keys and values are never made: q_h · k_h = (q_h · K_h) · c + q_r · r, and the sum of the values is the sum of the
latents, times V_hᵀ (the absorbed form). So this is attention with one key-value head of size rank + rotary whose
values are the first `rank` numbers of its keys, and the cache has one plane, [c, r].
"""

import torch
from torch import Tensor

from slipway_runtime.kernels import kv_pages
from slipway_runtime.kernels.dispatch import Kernels
from slipway_runtime.layers.attention import rotate_heads
from slipway_runtime.layers.linear import Linear
from slipway_runtime.layers.norm import RMSNorm
from slipway_runtime.layers.step import StepContext


class LatentAttention:
    """Attention over the latents of a sequence, in the absorbed form."""

    __slots__ = (
        "_key_up",
        "_kv_down",
        "_kv_norm",
        "_q_down",
        "_q_norm",
        "_q_up",
        "_rank",
        "_scale",
        "_value_up",
        "head_dim",
        "kernels",
        "num_q_heads",
        "out",
    )

    def __init__(
        self,
        kv_down: Linear,
        kv_norm: RMSNorm,
        q_down: Linear | None,
        q_norm: RMSNorm | None,
        q_up: Linear,
        key_up: Tensor,
        value_up: Tensor,
        out: Linear,
        *,
        kernels: Kernels,
        scale: float,
    ) -> None:
        """kv_down: x to [c, r]  q_down: None: q_up multiplies x  key_up: (Hq, P, rank)  value_up: (Hq, V, rank)."""
        self._kv_down = kv_down
        self._kv_norm = kv_norm
        self._q_down = q_down
        self._q_norm = q_norm
        self._q_up = q_up
        self._key_up = key_up
        self._value_up = value_up
        self._scale = scale
        self._rank = key_up.shape[2]
        self.out = out
        self.kernels = kernels
        self.num_q_heads = key_up.shape[0]
        self.head_dim = kv_down.out_features

    def __call__(self, x: Tensor, cache: Tensor, step: StepContext) -> Tensor:
        """x: (T, H) -> (T, H). cache: one plane, see `kv_pages`."""
        count, heads, rank = x.shape[0], self.num_q_heads, self._rank
        keys = self._kv_down(x, step).view(count, 1, self.head_dim)
        keys[..., :rank] = self._kv_norm(keys[..., :rank].contiguous())
        rotate_heads(keys[..., rank:], step.cos, step.sin)
        kv_pages.store(keys[:, None], cache, step.slots)
        compressed = x
        if self._q_down is not None and self._q_norm is not None:
            compressed = self._q_norm(self._q_down(x, step))
        q = self._q_up(compressed, step).view(count, heads, -1)
        plain = self._key_up.shape[1]
        rotate_heads(q[..., plain:], step.cos, step.sin)
        absorbed = torch.einsum("thp,hpr->thr", q[..., :plain], self._key_up)
        queries = torch.cat((absorbed, q[..., plain:]), dim=-1)
        attended = self.kernels.paged_attention(queries, keys[:, None], cache, step.plan, self._scale)
        latents = attended.view(count, heads, self.head_dim)[..., :rank]
        values = torch.einsum("thr,hvr->thv", latents, self._value_up)
        return self.out(values.flatten(1), step)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Its matrices, in the order in which they compute."""
        down = () if self._q_down is None else (self._q_down,)
        return self._kv_down, *down, self._q_up, self.out

    @property
    def nbytes(self) -> int:
        """Memory of its weights; norms are too small to count."""
        return sum(linear.nbytes for linear in self.linears) + self._key_up.nbytes + self._value_up.nbytes
