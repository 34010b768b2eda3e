"""In which form the matrices of a model compute: by the quantization asked for, the device, and determinism.

    quantization   on a CPU                                     on a GPU
    none           packed for the processor                     as they are
    int8           bytes × bytes where the processor does that  codes converted in the kernel, up to 256 rows
    fp8            codes back to numbers, then a product        float8 × float8 from compute capability 8.9 on

The embedding keeps its numbers. lm_head is rounded to int8 with the layers, a scale for each token; in fp8, whose
error is 3.5 times larger, it keeps the model's type. Where lm_head is tied to the embedding, they are one matrix as
long as both compute with it as it is; a packed or rounded head is a second one, and `Decoder.nbytes` counts both.
"""

import torch
from torch import Tensor

from slipway_runtime.kernels import native
from slipway_runtime.kernels.kv_pages import KV_DTYPES
from slipway_runtime.layers.matmul import MakeMatmul, Matmul
from slipway_runtime.layers.matmul_native import NativeInt8
from slipway_runtime.layers.matmul_prepacked import computes_bf16, prepacked
from slipway_runtime.layers.matmul_quantized import DynamicInt8, ScaledFp8, WeightOnly
from slipway_runtime.layers.matmul_tiled import RowsDifferError, Tiled
from slipway_runtime.models.config import ModelConfig, ModelRefusedError

QUANTIZATIONS = ("none", "int8", "fp8")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_SMALL_MODEL = 100_000_000  # parameters; below, float32 costs a CPU little memory and is the fastest it has


def choose_dtype(asked: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """auto: the checkpoint's own; on a CPU float32, unless the model is large and the CPU computes bfloat16."""
    if asked != "auto":
        if asked not in _DTYPES:
            raise ModelRefusedError(f"dtype is {asked!r}: auto, {', '.join(_DTYPES)} are known")
        return _DTYPES[asked]
    if device.type == "cpu":
        return torch.bfloat16 if computes_bf16() and config.num_parameters >= _SMALL_MODEL else torch.float32
    own = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    return own.get(config.dtype, torch.bfloat16)


def choose_kv_dtype(asked: str, dtype: torch.dtype) -> torch.dtype:
    """auto: the type of the model's numbers; else one that is rounded, with a scale per token and head."""
    if asked == "auto":
        return dtype
    if asked not in KV_DTYPES:
        raise ModelRefusedError(f"kv_cache_dtype is {asked!r}: auto, {', '.join(KV_DTYPES)} are known")
    return KV_DTYPES[asked]


def matmul_maker(quantization: str, *, deterministic: bool, device: torch.device) -> MakeMatmul:
    """What turns a layer's weight (out, in) into a way of multiplying with it; raises ModelRefusedError."""
    if quantization not in QUANTIZATIONS:
        raise ModelRefusedError(f"quantization is {quantization!r}: {', '.join(QUANTIZATIONS)} are known")
    dynamic = quantization == "int8" and device.type == "cpu" and DynamicInt8.works_here()

    def make(weight: Tensor) -> Matmul:
        chosen = _choose(weight, quantization, dynamic=dynamic)
        if not deterministic or chosen.rows_are_independent:
            return chosen
        try:
            return Tiled(chosen, like=weight)
        except RowsDifferError as error:
            raise ModelRefusedError(f"deterministic is not possible here: {error}") from error

    return make


def head_maker(quantization: str, *, deterministic: bool, device: torch.device) -> MakeMatmul:
    """The same for lm_head."""
    return matmul_maker("none" if quantization == "fp8" else quantization, deterministic=deterministic, device=device)


def _choose(weight: Tensor, quantization: str, *, dynamic: bool) -> Matmul:
    if quantization == "none":
        return prepacked(weight)
    if quantization == "int8":
        if dynamic and (library := native.library()) is not None and NativeInt8.fits(weight, library):
            return NativeInt8(weight, library)
        return DynamicInt8(weight) if dynamic else WeightOnly(weight, torch.int8)
    return ScaledFp8(weight) if ScaledFp8.fits(weight) else WeightOnly(weight, torch.float8_e4m3fn)
