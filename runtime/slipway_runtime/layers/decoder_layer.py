"""Decoder layer: attention and MLP, each after a norm, added to the residual stream; the dense MLP."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

from slipway_runtime.kernels.dispatch import Kernels
from slipway_runtime.layers.attention import Attention, StepContext
from slipway_runtime.layers.latent_attention import LatentAttention
from slipway_runtime.layers.linear import Linear
from slipway_runtime.layers.native_layer import NativeLayer, native_layer
from slipway_runtime.layers.norm import Norm, RMSNorm


class Adapted(Protocol):
    """A linear layer, or the experts of a layer: something with adapter slots. `lora` is None if adapters are off."""

    lora: Any


class Mlp(Protocol):
    """MLP of a layer, computed for each token alone: dense, or a mixture of experts."""

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """x: (T, H) -> (T, H)."""

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Its matrices that adapters may change, in the order in which they compute."""

    @property
    def adapted(self) -> tuple[Adapted, ...]:
        """Everything with adapter slots: its linears, and its experts if there are any."""

    @property
    def nbytes(self) -> int:
        """Memory of its weights."""


class DenseMlp:
    """Gated MLP: down(activation(gate) · up); without a gate down(activation(up))."""

    __slots__ = ("activation", "down", "gate_up", "has_gate", "kernels")

    def __init__(
        self, gate_up: Linear, down: Linear, kernels: Kernels, *, activation: str = "silu", has_gate: bool = True
    ) -> None:
        """activation: silu, gelu_pytorch_tanh or, without a gate only, relu2. gate_up: up alone without a gate."""
        self.gate_up = gate_up
        self.down = down
        self.activation = activation
        self.has_gate = has_gate
        self.kernels = kernels

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """x: (T, H) -> (T, H)."""
        inner = self.gate_up(x, step)
        if self.has_gate:
            inner = self.kernels.swiglu(inner) if self.activation == "silu" else self.kernels.geglu(inner)
        else:
            inner = _PLAIN[self.activation](inner)
        return self.down(inner, step)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Its matrices, in the order in which they compute."""
        return self.gate_up, self.down

    @property
    def adapted(self) -> tuple[Adapted, ...]:
        """Everything with adapter slots: its linears."""
        return self.linears

    @property
    def nbytes(self) -> int:
        """Memory of its weights."""
        return self.gate_up.nbytes + self.down.nbytes


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


_PLAIN: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": _squared_relu,
    "silu": F.silu,
}


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)); Gemma norms the outputs too, OLMo the outputs alone."""

    __slots__ = (
        "_attention_norm",
        "_attention_out_norm",
        "_mlp_norm",
        "_mlp_out_norm",
        "_output_scale",
        "_parallel",
        "attention",
        "mlp",
        "native",
    )

    def __init__(
        self,
        attention: Attention | LatentAttention,
        mlp: Mlp,
        attention_norm: Norm | None,
        mlp_norm: Norm | None,
        *,
        attention_out_norm: Norm | None = None,
        mlp_out_norm: Norm | None = None,
        output_scale: float = 1.0,
        parallel: bool = False,
    ) -> None:
        """output_scale: of what attention and MLP add to the stream. parallel: both read the attention's norm."""
        self.attention = attention
        self.mlp = mlp
        self._attention_norm = attention_norm
        self._mlp_norm = mlp_norm
        self._attention_out_norm = attention_out_norm
        self._mlp_out_norm = mlp_out_norm
        self._output_scale = output_scale
        self._parallel = parallel
        self.native: NativeLayer | None = None  # None: always computed part by part
        is_plain = attention_out_norm is None and mlp_out_norm is None and output_scale == 1.0
        if not isinstance(attention, Attention) or attention.late_norms or parallel:
            return
        if not (isinstance(mlp, DenseMlp) and mlp.has_gate and is_plain):
            return
        if isinstance(attention_norm, RMSNorm) and isinstance(mlp_norm, RMSNorm):
            silu = mlp.activation == "silu"
            self.native = native_layer(attention, mlp.gate_up, mlp.down, attention_norm, mlp_norm, silu=silu)

    def __call__(self, x: Tensor | None, stream: Tensor, cache: Tensor, step: StepContext) -> Tensor:
        """stream: (T, H) residual, updated in place  x: (T, H) MLP output of the layer before -> of this layer.

        The caller adds the result to the stream, or passes it to the next layer. It may lie where x lay.
        """
        if self.native is not None and self.native.computes(cache, step):
            return self.native(x, stream, cache, step)
        normed = _normed(self._attention_norm, x, stream)
        attended = self.attention(normed, cache, step)
        if self._parallel:
            return attended.add_(self.mlp(normed, step))
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
        return *self.attention.linears, *self.mlp.linears

    @property
    def adapted(self) -> tuple[Adapted, ...]:
        """Everything with adapter slots, in the same order for all copies of a model."""
        return *self.attention.linears, *self.mlp.adapted

    @property
    def nbytes(self) -> int:
        """Memory of its weights; norms are too small to count."""
        return self.attention.nbytes + self.mlp.nbytes


def _normed(norm: Norm | None, x: Tensor | None, stream: Tensor) -> Tensor:
    """Add x, if there is one, to the stream in place; the norm of the sum, or the sum itself. (T, H) -> (T, H)."""
    if norm is None:
        return stream if x is None else stream.add_(x)
    return norm(stream) if x is None else norm.after_adding(x, stream)
