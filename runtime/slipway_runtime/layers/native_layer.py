"""Computes a decoder layer in one call of the compiled CPU kernels: no Python between its parts.

For dense layers whose matrices are packed for these kernels (float32, bfloat16, int8), on one rank. With adapters in
a step or a quantized KV cache `DecoderLayer` computes such a layer part by part; both give the same bits.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipway_runtime.kernels import native
from slipway_runtime.layers.linear import Linear
from slipway_runtime.layers.matmul_cpu import NativeBf16, NativeInt8, NativePacked
from slipway_runtime.layers.norm import RMSNorm
from slipway_runtime.layers.step import StepContext

if TYPE_CHECKING:
    from slipway_runtime.kernels import cpu_layer
    from slipway_runtime.layers.attention import Attention

_PACKED = (NativePacked, NativeBf16, NativeInt8)
_CACHES = (torch.float32, torch.bfloat16)  # codes of quantized caches are written with torch


class NativeLayer:
    """The addresses of a layer's weights, and the call."""

    __slots__ = ("_kept", "_layer", "_native", "_rotary_table")

    def __init__(
        self,
        attention: "Attention",
        linears: tuple[Linear, Linear, Linear, Linear],
        norms: tuple[RMSNorm, RMSNorm],
        library: native.Native,
        *,
        silu: bool,
    ) -> None:
        """linears: of the heads, of attention's output, gate and up, down."""
        from slipway_runtime.kernels import cpu_layer  # only importable where there is a library

        q_norm, k_norm, head_eps = attention.norms or (None, None, 0.0)
        scoring = attention.scoring
        sinks = None if scoring is None else scoring.sinks
        self._native = library
        self._rotary_table = attention.rotary_table
        self._kept = (linears, norms, q_norm, k_norm, sinks)  # the layer has only their addresses
        self._layer = cpu_layer.Layer(
            *(_matrix(linear) for linear in linears),
            norms[0].weight.data_ptr(),
            norms[1].weight.data_ptr(),
            _address(q_norm),
            _address(k_norm),
            _address(sinks),
            attention.num_q_heads,
            attention.num_kv_heads,
            attention.head_dim,
            attention.window or 0,
            int(silu),
            norms[0].eps,
            norms[1].eps,
            head_eps,
            attention.scale,
            0.0 if scoring is None else scoring.softcap or 0.0,
        )

    def computes(self, cache: Tensor, step: StepContext) -> bool:
        """Whether the call can compute this step: without adapters, on a cache that is not quantized."""
        return step.lora is None and cache.dtype in _CACHES

    def __call__(self, x: Tensor | None, stream: Tensor, cache: Tensor, step: StepContext) -> Tensor:
        """stream: (T, H), updated in place  x: (T, H), overwritten, or None -> (T, H)."""
        from slipway_runtime.kernels.cpu_layer import decoder_layer

        cos, sin, table = step.cos, step.sin, self._rotary_table
        if cos.shape[1] > 1:  # the model has several rotary tables
            cos, sin = cos[:, table : table + 1], sin[:, table : table + 1]
        return decoder_layer(self._native, self._layer, x, stream, cache, step.slots, cos, sin, step.plan)


def native_layer(
    attention: "Attention", gate_up: Linear, down: Linear, attention_norm: RMSNorm, mlp_norm: RMSNorm, *, silu: bool
) -> NativeLayer | None:
    """The one call for a layer of these parts; None: there is none."""
    linears = (attention.qkv, attention.out, gate_up, down)
    libraries = {linear.matmul.native for linear in linears if isinstance(linear.matmul, _PACKED)}
    if len(libraries) != 1 or any(linear.reduce or not isinstance(linear.matmul, _PACKED) for linear in linears):
        return None
    from slipway_runtime.kernels import cpu

    (library,) = libraries
    plain = [attention_norm.weight, mlp_norm.weight, *(linear.bias for linear in linears if linear.bias is not None)]
    if attention.kernels is not cpu or any(tensor.dtype != torch.float32 for tensor in plain):
        return None
    return NativeLayer(attention, linears, (attention_norm, mlp_norm), library, silu=silu)


def _matrix(linear: Linear) -> "cpu_layer.Matrix":
    from slipway_runtime.kernels.cpu_layer import BFLOAT16, BYTES, FLOAT32, WIDENED, Matrix

    matmul = linear.matmul
    assert isinstance(matmul, _PACKED), "`native_layer` has looked at it"
    form = {NativePacked: FLOAT32, NativeBf16: BFLOAT16, NativeInt8: BYTES}[type(matmul)]
    if isinstance(matmul, NativePacked) and matmul.is_widened:
        form = WIDENED
    scales, offsets = (matmul.scales, matmul.offsets) if isinstance(matmul, NativeInt8) else (None, None)
    return Matrix(
        form,
        matmul.in_features,
        matmul.out_features,
        matmul.packed.data_ptr(),
        _address(scales),
        _address(offsets),
        _address(linear.bias),
    )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
