"""Decides before any pod whether a model fits its hardware: number formats, and memory by arithmetic.

| known                               | checked                                                                   |
|-------------------------------------|---------------------------------------------------------------------------|
| `resources.gpu.product`, catalogue  | the kernels run on it; fp8 where it is asked for                          |
| ... and `model.shape`               | weights + adapters + reserve + KV cache of one request fit its memory     |
| `model.shape`, no GPU, memory limit | weights + adapters + reserve + `kvCache.bytes` fit `resources.limits`      |

The processor is not known. `dtype: auto` on a CPU is planned as what the runtime chooses wherever its compiled kernels
run: bf16 for 100 million parameters or more. So a refusal holds on every processor; where they do not run, weights and
KV cache take twice as much. The embedding, which is fp32 there, counts like the other weights: `model.shape` has no
vocabulary.

What is not known is not guessed: the runtime plans again with the checkpoint and the device at hand, and says
DoesNotFit itself.
"""

from dataclasses import replace
from typing import Final

from slipway_api.engine_fields import SLIPWAY
from slipway_api.gpu_catalogue import GPUFacts, find_gpu
from slipway_api.inference_service import InferenceServiceSpec
from slipway_api.memory import (
    CPU_BF16_PARAMETERS,
    LATENT_PLANES,
    DoesNotFit,
    Fits,
    ModelShape,
    Needs,
    footprint,
    plan,
)
from slipway_api.runtime_spec import Dtype, KVDtype, Quantization, SpeculationMethod
from slipway_api.types import parse_quantity

GIB: Final = 1 << 30

Fit = Fits | DoesNotFit | None
"""None: too little is known before the first pod."""


def check_fit(spec: InferenceServiceSpec) -> Fit:
    """Whether the model of this spec fits its hardware; of a foreign engine's memory nothing is known."""
    if spec.runtime.engine != SLIPWAY:
        return None
    gpu = spec.resources.gpu
    if gpu.count == 0:
        return _check_host(spec)
    facts = find_gpu(gpu.product) if gpu.product else None
    if facts is None:
        return None
    if (refusal := _unsupported(spec, facts)) is not None:
        return refusal
    shape = model_shape(spec)
    if shape is None or spec.runtime.kv_cache.fixed_bytes is not None:
        return None  # a pool of fixed size is checked by the runtime, which measures what is beside it
    planned = _plan(shape, spec, facts, gpus=gpu.count)
    if isinstance(planned, DoesNotFit):
        each = " each" if gpu.count > 1 else ""
        return DoesNotFit(f"on {gpu.count} × {facts.name}{each}: {planned.message}{_more_gpus(shape, spec, facts)}")
    return planned if spec.runtime.max_model_len else None  # without a length, a count of requests says nothing


def _plan(shape: ModelShape, spec: InferenceServiceSpec, facts: GPUFacts, *, gpus: int) -> Fits | DoesNotFit:
    needs = replace(needs_of(spec), tensor_parallel_size=gpus)
    utilization = float(spec.runtime.kv_cache.gpu_memory_utilization)
    return plan(shape, needs, memory_bytes=facts.memory_bytes, utilization=utilization)


def _more_gpus(shape: ModelShape, spec: InferenceServiceSpec, facts: GPUFacts) -> str:
    """The advice to share the model between more GPUs of the same product, where that would do."""
    for gpus in (2, 4, 8):
        copies_heads = gpus % shape.kv_heads == 0  # more GPUs than key-value heads
        divides_heads = shape.heads % gpus == 0 and (shape.kv_heads % gpus == 0 or copies_heads)
        if gpus > spec.resources.gpu.count and divides_heads and isinstance(_plan(shape, spec, facts, gpus=gpus), Fits):
            return f", or set resources.gpu.count and runtime.tensorParallelSize to {gpus}"
    return ""


# Numbers of a head in q and in o of latent attention, to estimate its matrices; DeepSeek-V3 has 102, GLM-4.7-Flash 266.
_LATENT_HEAD: Final = 128


def model_shape(spec: InferenceServiceSpec) -> ModelShape | None:
    """The planner's view of `model.shape`."""
    shape = spec.model.shape
    if shape is None:
        return None
    planned = ModelShape(
        layers=shape.layers,
        hidden=shape.hidden_size,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim or shape.hidden_size // shape.heads,
        parameters=shape.parameters,
        experts=shape.experts,
        experts_per_token=shape.experts_per_token,
        moe_intermediate=shape.moe_intermediate_size,
    )
    if not shape.latent_size:
        return planned
    attention = 2 * shape.hidden_size * shape.heads * _LATENT_HEAD
    return replace(
        planned, kv_heads=1, head_dim=shape.latent_size, kv_planes=LATENT_PLANES, attention_parameters=attention
    )


def needs_of(spec: InferenceServiceSpec) -> Needs:
    """The planner's view of `spec.runtime`."""
    runtime, on_gpu, dtype = spec.runtime, spec.resources.gpu.count > 0, planned_dtype(spec)
    lora, speculation = runtime.lora, runtime.speculation
    return Needs(
        dtype=dtype.value,
        # On a CPU bf16 is the form of matrices and KV cache; all between is fp32.
        activation_dtype=Dtype.FP32.value if dtype is Dtype.BF16 and not on_gpu else "",
        quantization=runtime.quantization.value,
        kv_dtype=runtime.kv_cache.dtype.value,
        block_size=runtime.block_size,
        max_model_len=runtime.max_model_len or runtime.block_size,  # at least a block, where the model decides
        max_num_seqs=runtime.max_num_seqs,
        max_num_batched_tokens=runtime.max_num_batched_tokens,
        draft_tokens=0 if speculation.method is SpeculationMethod.NONE else speculation.max_tokens,
        max_adapters=lora.max_adapters if lora else 0,
        max_rank=lora.max_rank if lora else 0,
        lora_experts=lora.experts if lora else False,
        on_gpu=on_gpu,
        tensor_parallel_size=runtime.tensor_parallel_size,
    )


def planned_dtype(spec: InferenceServiceSpec) -> Dtype:
    """The number format of the weights, as the runtime resolves `auto`; on a GPU that of the checkpoint, 16 bits."""
    if spec.runtime.dtype is not Dtype.AUTO:
        return spec.runtime.dtype
    shape = model_shape(spec)
    is_small = shape is not None and shape.all_parameters < CPU_BF16_PARAMETERS
    return Dtype.FP32 if is_small and not spec.resources.gpu.count else Dtype.BF16


def _unsupported(spec: InferenceServiceSpec, facts: GPUFacts) -> DoesNotFit | None:
    capability = ".".join(map(str, facts.compute_capability))
    if not facts.is_supported:
        return DoesNotFit(
            f"{facts.name} has compute capability {capability}, and the runtime's kernels need 8.0 or newer: "
            "choose another resources.gpu.product"
        )
    if facts.has_fp8:
        return None
    if spec.runtime.quantization is Quantization.FP8:
        return DoesNotFit(
            f"{facts.name} cannot multiply fp8 (compute capability {capability}, fp8 needs 8.9): "
            "set runtime.quantization to int8"
        )
    if spec.runtime.kv_cache.dtype is KVDtype.FP8:
        return DoesNotFit(
            f"{facts.name} has no fp8 (compute capability {capability}, fp8 needs 8.9): "
            "set runtime.kvCache.dtype to int8"
        )
    return None


def missing_on_host(spec: InferenceServiceSpec) -> list[str]:
    """The fields that a service without GPUs must set for its memory to be checked."""
    known = {
        "model.shape": spec.model.shape,
        "runtime.kvCache.bytes": spec.runtime.kv_cache.fixed_bytes,
        "resources.limits.memory": spec.resources.limits.get("memory"),
    }
    return [field for field, value in known.items() if value is None]


def _check_host(spec: InferenceServiceSpec) -> DoesNotFit | None:
    """Without a GPU, weights and KV cache are part of the container's memory."""
    shape, limit = model_shape(spec), spec.resources.limits.get("memory")
    pool = spec.runtime.kv_cache.fixed_bytes
    if shape is None or limit is None or pool is None:
        return None
    memory = int(parse_quantity(str(limit)))
    host = int(parse_quantity(spec.runtime.kv_cache.host_bytes)) if spec.runtime.kv_cache.host_bytes else 0
    taken = footprint(shape, needs_of(spec))
    total = taken.total + pool + host
    if total <= memory:
        return None
    dtype = planned_dtype(spec).value
    parts = f"weights {_gib(taken.weights)} ({dtype}) + reserve {_gib(taken.reserve)} + KV cache {_gib(pool)}"
    parts += f" + adapter slots {_gib(taken.adapters)}" if taken.adapters else ""
    parts += f" + host cache {_gib(host)}" if host else ""
    return DoesNotFit(
        f"{parts} = {_gib(total)} exceed resources.limits.memory {_gib(memory)}: "
        "raise the limit, lower runtime.kvCache.bytes, or set runtime.quantization to int8"
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
