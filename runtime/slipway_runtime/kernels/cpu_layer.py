"""A decoder layer in one call of the compiled kernels: the structures of `native/layer.cpp`, and the call.

`layers.native_layer` decides which layers are computed so.
"""

import ctypes
from ctypes import c_float, c_int64, c_void_p

import torch
from torch import Tensor

from slipway_runtime.kernels.cpu import KINDS, AttentionPlan
from slipway_runtime.kernels.native import Native

FLOAT32, BFLOAT16, BYTES, WIDENED = range(4)  # forms of a matrix; WIDENED: float32, stored as bfloat16


class Matrix(ctypes.Structure):
    """A packed matrix, with its bias."""

    _fields_ = (
        ("form", c_int64),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("packed", c_void_p),
        ("scales", c_void_p),
        ("offsets", c_void_p),
        ("bias", c_void_p),
    )


class Layer(ctypes.Structure):
    """Addresses and sizes of a layer's weights; they must stay alive elsewhere."""

    _fields_ = (
        ("heads", Matrix),
        ("output", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("sinks", c_void_p),
        ("query_heads", c_int64),
        ("kv_heads", c_int64),
        ("size", c_int64),
        ("window", c_int64),
        ("silu", c_int64),
        ("attention_eps", c_float),
        ("mlp_eps", c_float),
        ("head_eps", c_float),
        ("scale", c_float),
        ("softcap", c_float),
    )


class _Step(ctypes.Structure):
    """What all layers of a step share."""

    _fields_ = (
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("angles_stride", c_int64),
        ("slots", c_void_p),
        ("tiles", c_void_p),
        ("tables", c_void_p),
        ("positions", c_void_p),
        ("num_tiles", c_int64),
        ("width", c_int64),
        ("num_scores", c_int64),
        ("page", c_int64),
        ("rows", c_int64),
    )


def decoder_layer(
    native: Native,
    layer: Layer,
    x: Tensor | None,
    stream: Tensor,
    cache: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    plan: AttentionPlan,
) -> Tensor:
    """Compute a layer. stream: (T, H), updated in place  x: (T, H), overwritten, or None -> the MLP's output (T, H).

    cos, sin: (T, 1, D), of the layer's rotary table  slots: (T,).
    """
    assert stream.dtype == torch.float32, "the compiled kernels take float32"
    key = (cos.data_ptr(), slots.data_ptr())
    step = plan.memo.get(key)
    if step is None:
        step = plan.memo[key] = _Step(
            cos.data_ptr(),
            sin.data_ptr(),
            cos.stride(0),
            slots.data_ptr(),
            plan.tiles.data_ptr(),
            plan.tables.data_ptr(),
            plan.positions.data_ptr(),
            len(plan.tiles),
            plan.tables.shape[1],
            plan.num_scores,
            plan.block_size,
            stream.shape[0],
        )
    layer_address = ctypes.addressof(layer)
    size = native.layer_scratch(layer_address, stream.shape[0])
    scratch = plan.memo.get("scratch")
    if scratch is None or scratch.numel() < size:
        scratch = plan.memo["scratch"] = torch.empty(size, dtype=torch.uint8)
    added = torch.empty_like(stream) if x is None else x
    native.decoder_layer(
        layer_address,
        ctypes.addressof(step),
        None if x is None else x.data_ptr(),
        stream.data_ptr(),
        added.data_ptr(),
        cache.data_ptr(),
        KINDS[cache.dtype],
        scratch.data_ptr(),
    )
    return added
