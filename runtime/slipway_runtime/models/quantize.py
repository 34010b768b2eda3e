"""Chooses dtypes and the `Matmul` class of each weight, by quantization, device and determinism.

    quantization   on a CPU                                     on a GPU
    none           packed for the processor                     as they are
    none, bfloat16 bfloat16 × float32 rows (compiled kernels)   as they are
    int8           bytes × bytes where the processor does that  codes converted in the kernel, up to 256 rows
    fp8            codes dequantized, then a product            float8 × float8 from compute capability 8.9 on

A quantized checkpoint keeps its codes where the machine multiplies them; else they are dequantized at load. If a
quantization is requested, they are dequantized and quantized again.

    codes                      on a CPU                                      on a GPU
    int8, a scale for a row    bytes × bytes, if its inputs were rounded     as int8 above
    float8, a scale for a row  dequantized at load                           float8 × float8, or dequantized each step
    float8, blocks of 128      dequantized at load                           codes converted in the kernel
    4 bits, groups             4 bits × bfloat16 (`matmul_quantized`)        4 bits × bfloat16, for a bfloat16 model
    4 bits, one group a row    dequantized at load                           dequantized at load

The embedding is not quantized. lm_head is quantized to int8 with the layers, a scale for each token; with fp8, whose
error is 3.5 times larger, it keeps the model's dtype. An lm_head that is tied to the embedding shares its matrix if
lm_head computes with it unpacked; a packed or quantized head is a second matrix, and `Decoder.nbytes` counts both.

Each rounding costs quality, and evaluations of one miss the other: weights that were quantized twice are warned of.

| the checkpoint holds | its origin, by config.json   | requested | warning                            |
|----------------------|------------------------------|-----------|------------------------------------|
| codes                |                              | int8, fp8 | codes are rounded again            |
| codes                | a model in another format    |           | rounded numbers were rounded again |
| numbers              | a model in four bits (NF4 …) | int8, fp8 | the same                           |
| anything else        |                              |           | none                               |

A model that was tuned on NF4 weights (QLoRA) and merged into bfloat16 looks like any other: the only trace is the name
of its base model in config.json.
"""

import re
from functools import partial
from typing import Final

import torch
from torch import Tensor

from slipway_api.memory import CPU_BF16_PARAMETERS
from slipway_runtime.kernels import native
from slipway_runtime.kernels.kv_pages import KV_DTYPES
from slipway_runtime.layers.matmul import MakeMatmul, Matmul, MatmulMakers, RowsDifferError, Tiled
from slipway_runtime.layers.matmul_cpu import NativeBf16, NativeInt8, computes_bf16, prepacked
from slipway_runtime.layers.matmul_quantized import DynamicInt8, GpuInt4, GroupedFp8, Int4, ScaledFp8, WeightOnly
from slipway_runtime.layers.quantized_weight import QuantizedWeight, Weight, dequantized
from slipway_runtime.models.config import ModelConfig, ModelRefusedError
from slipway_runtime.models.quantized_checkpoint import parse_quantization

QUANTIZATIONS = ("none", "int8", "fp8")
# Names of dtypes, as settings and the memory planner (`slipway_api.memory`) have them.
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPE_NAMES = {dtype: name for name, dtype in (DTYPES | KV_DTYPES).items()}


def choose_dtype(asked: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The model's dtype. auto, on a GPU: the checkpoint's if it has 16 bits, else bfloat16, also for int4 weights.

    auto, on a CPU: float32, or bfloat16 if the model is large and the CPU or the compiled kernels compute bfloat16.
    """
    if asked != "auto":
        if asked not in DTYPES:
            raise ModelRefusedError(f"dtype is {asked!r}: auto, {', '.join(DTYPES)} are known")
        return DTYPES[asked]
    if device.type == "cpu":
        capable = computes_bf16() or native.library() is not None
        return torch.bfloat16 if capable and config.num_parameters >= CPU_BF16_PARAMETERS else torch.float32
    form = parse_quantization(config.quantization)
    if form is not None and form.name == "int4":
        return torch.bfloat16  # of more range than the float16 in the config files of AWQ and GPTQ
    return torch.float16 if config.dtype == "float16" else torch.bfloat16


def activation_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of activations, norms and adapters in a model of this dtype.

    On a CPU with compiled kernels bfloat16 is the form of matrices and KV cache alone, and all between is float32.
    """
    compiled = device.type == "cpu" and dtype == torch.bfloat16 and native.library() is not None
    return torch.float32 if compiled else dtype


def choose_kv_dtype(asked: str, dtype: torch.dtype) -> torch.dtype:
    """The KV cache's dtype. auto: the model's; else a quantized one, with a scale per token and head."""
    if asked == "auto":
        return dtype
    if asked not in KV_DTYPES:
        raise ModelRefusedError(f"kv_cache_dtype is {asked!r}: auto, {', '.join(KV_DTYPES)} are known")
    return KV_DTYPES[asked]


def refusal_of_format(config: ModelConfig, quantization: str, device: torch.device) -> str:
    """Why this quantization of a model is not supported on this device, as a sentence; "": it is supported."""
    if config.experts is not None and device.type == "cuda" and quantization != "none":
        return f"quantization {quantization} of a mixture of experts is not supported on a GPU: set it to none"
    parse_quantization(config.quantization)  # raises ModelRefusedError
    return ""


def matmul_maker(
    quantization: str, *, deterministic: bool, device: torch.device, dtype: torch.dtype | None = None
) -> MakeMatmul:
    """A function that makes the `Matmul` of a layer's weight (out, in); raises ModelRefusedError.

    dtype: of unquantized matrices, where it is not that of the activations (`activation_dtype`).
    """
    if quantization not in QUANTIZATIONS:
        raise ModelRefusedError(f"quantization is {quantization!r}: {', '.join(QUANTIZATIONS)} are known")
    dynamic = quantization == "int8" and device.type == "cpu" and DynamicInt8.works_here()

    on_cpu = device.type == "cpu"

    def make(weight: Weight) -> Matmul:
        chosen = None
        if isinstance(weight, QuantizedWeight) and quantization == "none":
            chosen = _keep(weight, dynamic=on_cpu and weight.rounds_inputs and DynamicInt8.works_here())
        if chosen is None:
            chosen = _choose(dequantized(weight), quantization, dynamic=dynamic, dtype=dtype)
        if not deterministic or chosen.rows_are_independent:
            return chosen
        try:
            return Tiled(chosen, like=torch.empty(0, dtype=weight.dtype, device=device))
        except RowsDifferError as error:
            raise ModelRefusedError(f"deterministic is not possible here: {error}") from error

    return make


def matmul_makers(
    quantization: str, *, deterministic: bool, device: torch.device, dtype: torch.dtype | None = None
) -> MatmulMakers:
    """`matmul_maker` for each kind of matrix: fp8 does not quantize lm_head, and nothing does routers."""
    maker = partial(matmul_maker, deterministic=deterministic, device=device)
    of_head = "none" if quantization == "fp8" else quantization
    return MatmulMakers(maker(quantization, dtype=dtype), maker(of_head, dtype=dtype), maker("none"))


def _keep(weight: QuantizedWeight, *, dynamic: bool) -> Matmul | None:
    """A `Matmul` on the checkpoint's own codes, if this machine multiplies them; None: dequantize the weight."""
    if weight.bits == 4:
        if Int4.fits(weight):
            return Int4(weight)
        return GpuInt4(weight) if GpuInt4.fits(weight) else None
    if (codes := weight.as_one_scale_rows()) is None:
        return GroupedFp8(weight) if GroupedFp8.fits(weight) else None
    if weight.device.type == "cpu":
        if codes.codes.dtype != torch.int8 or not dynamic:
            return None
        library = native.library()
        fits = library is not None and NativeInt8.fits(codes, library)
        return NativeInt8(codes, library) if fits and library is not None else DynamicInt8(codes)
    if weight.rounds_inputs and codes.codes.dtype == torch.float8_e4m3fn and ScaledFp8.fits(codes):
        return ScaledFp8(codes)
    return WeightOnly(codes, codes.codes.dtype)


def _choose(weight: Tensor, quantization: str, *, dynamic: bool, dtype: torch.dtype | None) -> Matmul:
    if quantization == "none":
        if dtype == torch.bfloat16 and weight.dtype == torch.float32 and (library := native.library()) is not None:
            return NativeBf16(weight, library)
        return prepacked(weight)
    if quantization == "int8":
        library = native.library() if weight.device.type == "cpu" else None
        if library is not None and NativeInt8.fits(weight, library):
            return NativeInt8(weight, library)
        return DynamicInt8(weight) if dynamic else WeightOnly(weight, torch.int8)
    return ScaledFp8(weight) if ScaledFp8.fits(weight) else WeightOnly(weight, torch.float8_e4m3fn)


_ORIGINS: Final = (
    ("bitsandbytes NF4", re.compile(r"bnb|nf4|4-?bit|qlora", re.IGNORECASE)),
    ("AWQ", re.compile(r"awq", re.IGNORECASE)),
    ("GPTQ", re.compile(r"gptq", re.IGNORECASE)),
    ("GGUF", re.compile(r"gguf|q4_k|q4_0", re.IGNORECASE)),
)


def name_of_format(config: ModelConfig, asked: str) -> str:
    """Display name of the weights' quantization: the requested one, else the format of the checkpoint."""
    form = parse_quantization(config.quantization)
    return asked if asked != "none" or form is None else form.name


def quantization_warnings(config: ModelConfig, asked: str) -> tuple[str, ...]:
    """Warnings, as sentences, about weights that were quantized more than once."""
    form = parse_quantization(config.quantization)
    own = "" if form is None or config.quantization is None else str(config.quantization["quant_method"])
    found = []
    if form is not None and asked != "none":
        found.append(
            f"the checkpoint is quantized ({own}, {form.name}) and --quantization {asked} rounds it again: "
            "leave it at none, or use a checkpoint in high precision"
        )
    if form is not None or asked != "none":
        last = asked if asked != "none" else own
        found.extend(
            f"the weights were made from {config.derived_from[:120]}, which looks like {name}, and are quantized again "
            f"({last}): start from the model in high precision"
            for name, words in _ORIGINS
            if words.search(config.derived_from) and name.lower() != own
        )
    return tuple(found)
