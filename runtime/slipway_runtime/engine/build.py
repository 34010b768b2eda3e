"""From a checkpoint on disk to a warm engine, within the memory and the limits that were given."""

import atexit
import gc
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from slipway_runtime.engine.engine import Engine
from slipway_runtime.engine.options import EngineOptions
from slipway_runtime.kernels.dispatch import kernels_for
from slipway_runtime.messages import EngineFacts, Loading, Request, SamplingParams, WarmingUp
from slipway_runtime.models.config import ModelConfig, ModelRefusedError, read_config
from slipway_runtime.models.decoder import load_decoder
from slipway_runtime.models.weights import Checkpoint
from slipway_runtime.scheduling.block_pool import BlockPool
from slipway_runtime.scheduling.scheduler import Scheduler
from slipway_runtime.worker.kv_cache import allocate_cache, default_budget_bytes, size_cache
from slipway_runtime.worker.runner import Runner

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_DEFAULTS = EngineOptions()
_SMALL_MODEL = 100_000_000  # parameters; below, float32 costs a CPU little memory and is the fastest it has


def build_engine(
    model_path: Path,
    options: EngineOptions = _DEFAULTS,
    *,
    on_news: Callable[[Loading | WarmingUp], object] = lambda _: None,
    **settings: object,
) -> Engine:
    """Load a checkpoint, size its KV cache and warm it up: seconds to minutes, and ready when it returns.

    `settings` are fields of the options, over those given. Raises ModelRefusedError, a sentence for the user, for a
    checkpoint or settings that cannot be honoured. The facts hold the timings.
    """
    options = msgspec.structs.replace(options, **{name: value for name, value in settings.items() if value is not None})
    if options.threads:
        torch.set_num_threads(options.threads)
    started = time.perf_counter()
    config = read_config(model_path)
    on = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device)
    number_format = choose_dtype(options.dtype, config, on)
    length = _longest(config, options.max_model_len)
    num_seqs = options.max_num_seqs or (32 if on.type == "cpu" else 256)
    num_batched_tokens = options.max_num_batched_tokens or max(num_seqs, 512 if on.type == "cpu" else 8192)
    if num_batched_tokens < num_seqs:
        raise ModelRefusedError(
            f"max_num_batched_tokens ({num_batched_tokens}) is smaller than max_num_seqs ({num_seqs}): "
            "a step must hold a token of each running sequence"
        )

    kernels = kernels_for(on)
    with Checkpoint(model_path, number_format, on) as checkpoint:
        decoder = load_decoder(config, checkpoint, kernels, length, number_format, on)
        weight_bytes = checkpoint.bytes
    size = size_cache(
        config,
        dtype=number_format,
        block_size=options.block_size,
        budget_bytes=options.kv_cache_bytes or default_budget_bytes(on, options.gpu_memory_utilization),
        # Memory nobody asked for is taken only as far as all rows at full length could use it.
        useful_tokens=None if options.kv_cache_bytes or on.type != "cpu" else num_seqs * length,
    )
    length = _fit_pool(length, size.num_blocks * options.block_size, asked=options.max_model_len)
    eos = tuple(sorted({*config.eos_token_ids, *options.extra_eos_token_ids}))
    runner = Runner(
        decoder,
        allocate_cache(config, size, number_format, on),
        kernels,
        block_size=options.block_size,
        max_num_seqs=num_seqs,
        max_model_len=length,
        eos_token_ids=eos,
        device=on,
    )
    loaded = time.perf_counter()

    def new_scheduler() -> Scheduler:
        return Scheduler(
            BlockPool(size.num_blocks, options.block_size),
            max_num_seqs=num_seqs,
            max_num_batched_tokens=num_batched_tokens,
            max_model_len=length,
            eos_token_ids=frozenset(eos),
        )

    on_news(WarmingUp())
    warm_up(new_scheduler(), runner)
    warm = time.perf_counter()
    facts = EngineFacts(
        vocab_size=config.vocab_size,
        eos_token_ids=eos,
        max_model_len=length,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_batched_tokens,
        block_size=options.block_size,
        num_blocks=size.num_blocks,
        bytes_per_token=size.bytes_per_token,
        weight_bytes=weight_bytes,
        dtype=str(number_format).removeprefix("torch."),
        device=str(on),
        load_seconds=loaded - started,
        warmup_seconds=warm - loaded,
    )
    gc.collect()
    gc.freeze()  # the model lives as long as the process: the collector need not look at it again
    atexit.register(gc.unfreeze)  # at the end it must, or libraries report what they think has leaked
    return Engine(new_scheduler(), runner.execute, facts)


def warm_up(scheduler: Scheduler, runner: Runner) -> None:
    """Run real requests through a scheduler of their own: the widest prefill, full and single batches, both draws.

    What a first call allocates, compiles or pages in happens here. Nothing of it stays but the warmth: the blocks
    are free again, and the prefixes are known only to this scheduler.
    """
    longest = min(scheduler.max_num_batched_tokens, scheduler.max_model_len - 4)
    lengths = [longest] + [1] * (scheduler.max_num_seqs - 1)
    for index, length in enumerate(lengths):
        params = SamplingParams(max_tokens=3, temperature=float(index % 2), top_p=0.9, ignore_eos=True)
        request = Request(
            id=f"warm-{index}", prompt_token_ids=(index % 2,) * max(length, 1), params=params, arrived=0.0
        )
        scheduler.add(request, 0.0)
    while scheduler.has_work:
        scheduler.update(runner.execute(scheduler.schedule(0.0)), 0.0)


def choose_dtype(asked: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """auto: the checkpoint's own; on a CPU float32, unless the model is large and the CPU computes bfloat16."""
    if asked != "auto":
        if asked not in _DTYPES:
            raise ModelRefusedError(f"dtype is {asked!r}: auto, {', '.join(_DTYPES)} are known")
        return _DTYPES[asked]
    if device.type == "cpu":
        computes_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return torch.bfloat16 if computes_bf16 and config.num_parameters >= _SMALL_MODEL else torch.float32
    own = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    return own.get(config.dtype, torch.bfloat16)


def _longest(config: ModelConfig, asked: int) -> int:
    """The context that the model can take, or the part of it that was asked for."""
    possible = min(config.max_position, config.sliding_window or config.max_position)
    if asked > possible:
        why = "its sliding window" if possible == config.sliding_window else "its max_position_embeddings"
        raise ModelRefusedError(f"max_model_len is {asked}; this model takes at most {possible}: {why}")
    return asked or possible


def _fit_pool(length: int, pool_tokens: int, asked: int) -> int:
    """A sequence must fit into the pool alone, or it could never finish."""
    if asked > pool_tokens:
        raise ModelRefusedError(
            f"max_model_len is {asked}, and the KV cache holds {pool_tokens} tokens: give it more memory or a shorter "
            "context"
        )
    return min(length, pool_tokens)
