"""The parts of an engine, each built as the plan says: weights, adapters and their slots, KV on device and host."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from slipway_runtime.engine.decide import EnginePlan
from slipway_runtime.engine.options import EngineOptions
from slipway_runtime.kernels.dispatch import Kernels, capturable
from slipway_runtime.kernels.native import set_threads
from slipway_runtime.layers.experts import ExpertsMlp
from slipway_runtime.layers.lora import LoraBank
from slipway_runtime.messages import Loading
from slipway_runtime.models.adapter_modules import adapted_modules
from slipway_runtime.models.adapter_weights import HostAdapter, read_adapter
from slipway_runtime.models.checkpoint import Checkpoint
from slipway_runtime.models.config import DoesNotFitError
from slipway_runtime.models.decoder import Decoder, load_decoder
from slipway_runtime.models.quantize import DTYPE_NAMES, matmul_makers
from slipway_runtime.models.sharding import WHOLE, Shard
from slipway_runtime.scheduling.host_tier import HostTier
from slipway_runtime.storage.fetch import weights_digest
from slipway_runtime.storage.kernel_store import KernelCounts
from slipway_runtime.worker.adapter_slots import AdapterSlots
from slipway_runtime.worker.graphs import reserve_bytes
from slipway_runtime.worker.host_arena import HostArena
from slipway_runtime.worker.kv_cache import (
    CacheSize,
    available_memory_bytes,
    default_budget_bytes,
    free_bytes,
    size_cache,
)
from slipway_runtime.worker.profile import check_remainder, widest_step_bytes


def use_threads(options: EngineOptions) -> None:
    """Set the threads of torch and of our own kernels to this rank's part of the total."""
    threads = max(1, (options.threads or torch.get_num_threads()) // options.tensor_parallel_size)
    # torch's elementwise kernels split their work between threads, and compute the ends of a part in another way.
    torch.set_num_threads(1 if options.deterministic else threads)
    set_threads(threads)


def share_compiled_kernels(plan: EnginePlan) -> KernelCounts:
    """Share compiled kernels with the other replicas of the node, if the options have a key; the counts so far."""
    options = plan.options
    if plan.device.type != "cuda" or not options.kernels_key:
        return KernelCounts()
    from slipway_runtime.kernels.compile_cache import share_kernels  # so that Triton is not imported on a CPU

    return share_kernels(Path(options.kernels_directory), options.kernels_key, plan.device).counts


def load_weights(
    plan: EnginePlan, kernels: Kernels, on_progress: Callable[[Loading], object] = lambda _: None, share: Shard = WHOLE
) -> Decoder:
    """Load the decoder, or this rank's share of it, from disk; `on_progress` gets the progress."""
    reported = 0

    def report(done: int, total: int) -> None:
        nonlocal reported
        if done - reported >= total // 100 or done == total:  # a hundred messages, however large the model is
            reported = done
            on_progress(Loading(bytes_done=done, bytes_total=total))

    options = plan.options
    makers = matmul_makers(
        options.quantization, deterministic=options.deterministic, device=plan.device, dtype=plan.weight_dtype
    )
    with Checkpoint(plan.model_path, plan.dtype, plan.device, on_progress=report) as checkpoint:
        return load_decoder(
            plan.config,
            checkpoint,
            kernels,
            plan.max_model_len,
            makers,
            share,
            scores_tokens=not options.pooling,
        )


class StepBytes(NamedTuple):
    """Memory of a model beside weights and KV cache."""

    widest: int  # activations of the widest step
    graphs: int  # all captured graphs


class Beside(NamedTuple):
    """A draft model's memory beside its weights: its KV cache has as many blocks as that of the model."""

    bytes_per_token: int = 0
    steps: StepBytes = StepBytes(0, 0)


def step_bytes(plan: EnginePlan, decoder: Decoder, kernels: Kernels) -> StepBytes:
    """The memory that steps of a decoder take."""
    widest = widest_step_bytes(
        decoder,
        plan.own,
        kernels,
        tokens=plan.max_num_batched_tokens,
        rows=plan.max_samples,
        block_size=plan.options.block_size,
        dtype=plan.dtype,
        device=plan.device,
    )
    if plan.device.type != "cuda" or capturable(kernels) is None:
        return StepBytes(widest, 0)
    graphs = reserve_bytes(
        plan.own.shape,
        max_num_seqs=plan.max_num_seqs,
        max_model_len=plan.max_model_len,
        block_size=plan.options.block_size,
        dtype=DTYPE_NAMES[plan.dtype],
        with_adapters=plan.max_adapters > 0,
        deterministic=plan.options.deterministic,
    )
    return StepBytes(widest, graphs)


def size_pool(plan: EnginePlan, decoder: Decoder, kernels: Kernels, beside: Beside = Beside()) -> CacheSize:  # noqa: B008  immutable
    """How many blocks of KV there are: as asked for, or what the weights and the widest step leave.

    With several ranks, by the memory of this one; each has every block, and in it the heads that it computes.
    """
    ranks = plan.options.tensor_parallel_size
    asked = plan.options.kv_cache_bytes // ranks
    own = step_bytes(plan, decoder, kernels)
    # A step of the draft model never runs beside one of the model; graphs keep their memory.
    activations = max(own.widest, beside.steps.widest) + own.graphs + beside.steps.graphs
    if asked:
        check_remainder(asked, activations, free_bytes(plan.device))
    left = default_budget_bytes(plan.device, plan.options.gpu_memory_utilization, activations)
    if plan.device.type == "cpu":
        left //= ranks  # which share one memory; the last rank to load sees what all the others hold
    return size_cache(
        plan.own,
        dtype=plan.kv_dtype,
        block_size=plan.options.block_size,
        budget_bytes=asked or left,
        # Without kv_cache_bytes, memory is taken only as far as all rows at full length could use it.
        useful_tokens=None if asked or plan.device.type != "cpu" else plan.max_num_seqs * plan.max_model_len,
        draft_bytes_per_token=beside.bytes_per_token,
    )


def make_tier(plan: EnginePlan, size: CacheSize) -> tuple[HostTier, HostArena] | None:
    """The host tier, which decides, and the arena, which copies; None: offloading is off. Raises DoesNotFitError."""
    asked = plan.options.kv_cache_host_bytes // plan.options.tensor_parallel_size
    block_bytes = size.bytes_per_token * size.block_size
    if not asked:
        return None
    if (num_blocks := asked // block_bytes) < 1:
        raise DoesNotFitError(f"{asked} bytes of host memory hold no KV block of {block_bytes} bytes")
    if asked > (available := available_memory_bytes()):
        raise DoesNotFitError(
            f"{asked} bytes of host memory are requested for cold KV blocks, and {available} are available: "
            "lower --kv-cache-host-bytes or give the container more memory"
        )
    arena = HostArena(num_blocks, block_bytes, plan.config.num_layers, plan.device)
    arena.reserve()
    return HostTier(num_blocks, size.block_size), arena


def make_slots(
    plan: EnginePlan,
    decoder: Decoder,
    kernels: Kernels,
    make: Callable[[LoraBank, int], AdapterSlots] = AdapterSlots,
) -> AdapterSlots | None:
    """Empty slots in every linear layer, and in experts if the options ask for it; None: adapters are off."""
    if not plan.max_adapters:
        return None
    with_experts = decoder.layers if plan.options.lora_experts else ()
    bank = LoraBank(
        [linear for layer in decoder.layers for linear in layer.linears],
        kernels,
        [layer.mlp for layer in with_experts if isinstance(layer.mlp, ExpertsMlp)],
        num_slots=plan.max_adapters,
        max_rank=plan.max_rank,
        dtype=plan.dtype,
        device=plan.device,
        deterministic=plan.options.deterministic,
    )
    return make(bank, plan.max_num_seqs)


def adapter_reader(plan: EnginePlan, share: Shard = WHOLE) -> Callable[[Path, str], HostAdapter]:
    """Reads this rank's share of an adapter, by path and digest. Raises AdapterRefusedError."""
    # Reads all weights, so only where an adapter names a base model, and on one rank.
    base_digest = None if share.rank else cache(lambda: weights_digest(plan.model_path))

    def read(path: Path, digest: str) -> HostAdapter:
        return read_adapter(
            path,
            plan.config,
            max_rank=plan.max_rank,
            dtype=plan.dtype,
            digest=digest,
            base_digest=base_digest,
            pin_memory=plan.device.type == "cuda",
            share=share,
            of_experts=plan.options.lora_experts,
        )

    return read


def zero_adapters(plan: EnginePlan) -> list[HostAdapter]:
    """As many adapters of zeros as there are slots, for the warm-up; of this rank's share."""
    zeros: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, module in adapted_modules(plan.own, of_experts=plan.options.lora_experts).items():
        before = (module.experts, plan.max_rank) if module.experts else (plan.max_rank,)
        sizes = (module.in_size, module.out_size)
        a, b = (torch.zeros(*before, size, dtype=plan.dtype) for size in sizes)
        zeros[name] = a, b
    return [
        HostAdapter(digest=f"warm-{index}", rank=plan.max_rank, matrices=zeros, bytes=0)
        for index in range(plan.max_adapters)
    ]
