"""Decoder layer: attention and MLP, each after a norm, added to the residual stream; the dense MLP."""

from typing import Protocol

from torch import Tensor

from slipway_runtime.kernels.dispatch import Kernels
from slipway_runtime.layers.attention import Attention, StepContext
from slipway_runtime.layers.linear import Linear
from slipway_runtime.layers.native_layer import NativeLayer, native_layer
from slipway_runtime.layers.norm import RMSNorm


class Mlp(Protocol):
    """MLP of a layer, computed for each token alone: dense, or a mixture of experts."""

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """x: (T, H) -> (T, H)."""

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Its matrices that adapters may change, in the order in which they compute."""

    @property
    def nbytes(self) -> int:
        """Memory of its weights."""


class DenseMlp:
    """Gated MLP: down(activation(gate) · up)."""

    __slots__ = ("down", "gate_up", "kernels", "silu")

    def __init__(self, gate_up: Linear, down: Linear, kernels: Kernels, *, activation: str = "silu") -> None:
        self.gate_up = gate_up
        self.down = down
        self.silu = activation == "silu"  # else GELU by tanh
        self.kernels = kernels

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """x: (T, H) -> (T, H)."""
        gate_up = self.gate_up(x, step)
        return self.down(self.kernels.swiglu(gate_up) if self.silu else self.kernels.geglu(gate_up), step)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Its matrices, in the order in which they compute."""
        return self.gate_up, self.down

    @property
    def nbytes(self) -> int:
        """Memory of its weights."""
        return self.gate_up.nbytes + self.down.nbytes


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)); Gemma norms the outputs too, OLMo the outputs alone."""

    __slots__ = (
        "_attention_norm",
        "_attention_out_norm",
        "_mlp_norm",
        "_mlp_out_norm",
        "_output_scale",
        "attention",
        "mlp",
        "native",
    )

    def __init__(
        self,
        attention: Attention,
        mlp: Mlp,
        attention_norm: RMSNorm | None,
        mlp_norm: RMSNorm | None,
        *,
        attention_out_norm: RMSNorm | None = None,
        mlp_out_norm: RMSNorm | None = None,
        output_scale: float = 1.0,
    ) -> None:
        """output_scale: of what attention and MLP add to the stream."""
        self.attention = attention
        self.mlp = mlp
        self._attention_norm = attention_norm
        self._mlp_norm = mlp_norm
        self._attention_out_norm = attention_out_norm
        self._mlp_out_norm = mlp_out_norm
        self._output_scale = output_scale
        self.native: NativeLayer | None = None  # None: always computed part by part
        is_plain = attention_out_norm is None and mlp_out_norm is None and output_scale == 1.0
        if isinstance(mlp, DenseMlp) and is_plain and attention_norm is not None and mlp_norm is not None:
            self.native = native_layer(attention, mlp.gate_up, mlp.down, attention_norm, mlp_norm, silu=mlp.silu)

    def __call__(self, x: Tensor | None, stream: Tensor, cache: Tensor, step: StepContext) -> Tensor:
        """stream: (T, H) residual, updated in place  x: (T, H) MLP output of the layer before -> of this layer.

        The caller adds the result to the stream, or passes it to the next layer. It may lie where x lay.
        """
        if self.native is not None and self.native.computes(cache, step):
            return self.native(x, stream, cache, step)
        attended = self.attention(_normed(self._attention_norm, x, stream), cache, step)
        if self._attention_out_norm is not None:
            attended = self._attention_out_norm(attended)
        if self._output_scale != 1.0:
            attended = attended * self._output_scale
        added = self.mlp(_normed(self._mlp_norm, attended, stream), step)
        if self._mlp_out_norm is not None:
            added = self._mlp_out_norm(added)
        return added if self._output_scale == 1.0 else added * self._output_scale

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Its matrices that adapters may change, in the order in which they compute."""
        return self.attention.qkv, self.attention.out, *self.mlp.linears

    @property
    def nbytes(self) -> int:
        """Memory of its weights; norms are too small to count."""
        return self.attention.qkv.nbytes + self.attention.out.nbytes + self.mlp.nbytes


def _normed(norm: RMSNorm | None, x: Tensor | None, stream: Tensor) -> Tensor:
    """Add x, if there is one, to the stream in place; the norm of the sum, or the sum itself. (T, H) -> (T, H)."""
    if norm is None:
        return stream if x is None else stream.add_(x)
    return norm(stream) if x is None else norm.after_adding(x, stream)
