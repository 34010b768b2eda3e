"""From a checkpoint on disk to a warm engine, within the memory and the limits that were given."""

import atexit
import gc
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from slipway_runtime.engine.adapters import Adapters
from slipway_runtime.engine.engine import Engine
from slipway_runtime.engine.kv_events import KvEventPublisher
from slipway_runtime.engine.matchers import Grammars
from slipway_runtime.engine.options import EngineOptions
from slipway_runtime.engine.overlap import OverlappedEngine, Worker
from slipway_runtime.engine.shortage import shortage_refused
from slipway_runtime.engine.warmup import Masks, warm_up
from slipway_runtime.kernels.dispatch import Kernels, kernels_for, refusal
from slipway_runtime.layers.lora import LoraBank
from slipway_runtime.messages import EngineFacts, Loading, StepPlan, StepResult, WarmingUp
from slipway_runtime.models.adapters import HostAdapter, lora_modules, read_adapter, slot_bytes
from slipway_runtime.models.config import DoesNotFitError, ModelConfig, ModelRefusedError, read_config
from slipway_runtime.models.decoder import Decoder, load_decoder
from slipway_runtime.models.quantize import choose_dtype, choose_kv_dtype, head_maker, matmul_maker
from slipway_runtime.models.weights import Checkpoint
from slipway_runtime.scheduling.block_pool import BlockPool
from slipway_runtime.scheduling.residency import Residency
from slipway_runtime.scheduling.scheduler import Scheduler
from slipway_runtime.storage.fetch import weights_digest
from slipway_runtime.worker.adapters import AdapterSlots
from slipway_runtime.worker.kv_cache import CacheSize, allocate_cache, default_budget_bytes, free_bytes, size_cache
from slipway_runtime.worker.profile import check_remainder, widest_step_bytes
from slipway_runtime.worker.runner import Runner

_DEFAULTS = EngineOptions()
_DRAFT_TOKENS = 4  # that a row may guess in a step, when speculation is on and nobody says how many
_RANK = 16  # of adapters, when they are on and nobody says


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What was decided before anything is loaded."""

    config: ModelConfig
    options: EngineOptions
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    eos_token_ids: tuple[int, ...]
    max_adapters: int
    max_cpu_adapters: int
    max_rank: int
    draft_tokens: int

    def residency(self, pool: BlockPool, block_bytes: int) -> Residency | None:
        """Adapters share one budget with KV where both live in the same memory: on a CPU."""
        if not self.max_adapters:
            return None
        shared = block_bytes if self.device.type == "cpu" else 0
        largest = slot_bytes(self.config, self.max_rank, self.dtype.itemsize)
        most = min(pool.total // 2, -(-self.max_cpu_adapters * largest // block_bytes))
        return Residency(
            pool,
            max_adapters=self.max_adapters,
            max_cpu_adapters=self.max_cpu_adapters,
            block_bytes=shared,
            most_blocks=most if shared else None,
        )


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
        # Elementwise kernels cut their work where threads meet, and compute the odd ends in another way.
        torch.set_num_threads(1 if options.deterministic else options.threads)
    started = time.perf_counter()
    plan = _decide(model_path, options)
    _check_device(plan)
    kernels = kernels_for(plan.device, deterministic=options.deterministic)
    with shortage_refused("the weights", plan.device):
        decoder, weight_bytes = _load(model_path, plan, kernels, on_news)
    with shortage_refused("the adapters", plan.device):
        slots = _slots(decoder, plan, kernels)
    # None where there is no tokenizer: an answer that a grammar binds can then only end.
    grammars = Grammars.beside(Path(options.tokenizer_path or model_path), plan.eos_token_ids)
    with shortage_refused("the KV cache", plan.device):
        size = _size_cache(plan, decoder, kernels)
        length = _fit_pool(plan.max_model_len, size.num_blocks * options.block_size, asked=options.max_model_len)
        runner = Runner(
            decoder,
            allocate_cache(plan.config, size, plan.kv_dtype, plan.device),
            kernels,
            block_size=options.block_size,
            max_num_seqs=plan.max_num_seqs,
            max_model_len=length,
            eos_token_ids=plan.eos_token_ids,
            device=plan.device,
            num_tokens=None if grammars is None else grammars.num_tokens,
            adapters=slots,
        )
    loaded = time.perf_counter()

    def new_scheduler(*, kv_events: bool) -> Scheduler:
        pool = BlockPool(size.num_blocks, options.block_size, shares_prefixes=options.prefix_caching)
        return Scheduler(
            pool,
            max_num_seqs=plan.max_num_seqs,
            max_num_batched_tokens=plan.max_num_batched_tokens,
            max_model_len=length,
            eos_token_ids=frozenset(plan.eos_token_ids),
            model=_content_key(model_path, plan),
            tenant_weights=options.tenant_weights,
            speculation_max_tokens=plan.draft_tokens,
            residency=plan.residency(pool, size.bytes_per_token * options.block_size),
            kv_events=kv_events,
        )

    on_news(WarmingUp())
    overlap = options.overlap if options.overlap is not None else plan.device.type == "cuda"
    worker = Worker(partial(_execute, runner, grammars)) if overlap else None
    with shortage_refused("the largest batch", plan.device):
        _warm_up(new_scheduler(kv_events=False), runner, slots, plan, worker)
    warm = time.perf_counter()
    scheduler = new_scheduler(kv_events=bool(options.kv_events_endpoint))
    _fit_pool(length, scheduler.max_model_len, asked=options.max_model_len)  # adapters may take a part of the pool
    facts = EngineFacts(
        vocab_size=plan.config.vocab_size,
        eos_token_ids=plan.eos_token_ids,
        max_model_len=scheduler.max_model_len,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        block_size=options.block_size,
        num_blocks=size.num_blocks,
        bytes_per_token=size.bytes_per_token,
        weight_bytes=weight_bytes,
        dtype=str(plan.dtype).removeprefix("torch."),
        device=str(plan.device),
        load_seconds=loaded - started,
        warmup_seconds=warm - loaded,
        quantization=options.quantization,
        kv_dtype="" if options.kv_cache_dtype == "auto" else options.kv_cache_dtype,
        deterministic=options.deterministic,
        max_adapters=plan.max_adapters,
        max_cpu_adapters=plan.max_cpu_adapters,
        max_rank=plan.max_rank,
        speculation=options.speculation,
    )
    gc.collect()
    gc.freeze()  # the model lives as long as the process: the collector need not look at it again
    atexit.register(gc.unfreeze)  # at the end it must, or libraries report what they think has leaked
    parts: dict[str, Any] = {
        "grammars": grammars,
        "adapters": None if slots is None else _adapters(scheduler, slots, plan, model_path),
        "publish": KvEventPublisher(options.kv_events_endpoint).publish if options.kv_events_endpoint else None,
    }
    if worker is not None:
        return OverlappedEngine(scheduler, worker, facts, **parts)
    return Engine(scheduler, partial(_execute, runner, grammars), facts, **parts)


def _decide(model_path: Path, options: EngineOptions) -> _Plan:
    config = read_config(model_path)
    on = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device)
    num_seqs = options.max_num_seqs or (32 if on.type == "cpu" else 256)
    num_batched_tokens = options.max_num_batched_tokens or max(num_seqs, 512 if on.type == "cpu" else 8192)
    if num_batched_tokens < num_seqs:
        raise ModelRefusedError(
            f"max_num_batched_tokens ({num_batched_tokens}) is smaller than max_num_seqs ({num_seqs}): "
            "a step must hold a token of each running sequence"
        )
    dtype = choose_dtype(options.dtype, config, on)
    return _Plan(
        config=config,
        options=options,
        device=on,
        dtype=dtype,
        kv_dtype=choose_kv_dtype(options.kv_cache_dtype, dtype),
        max_model_len=_longest(config, options.max_model_len, _affordable_tokens(config, options, on)),
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_batched_tokens,
        eos_token_ids=tuple(sorted({*config.eos_token_ids, *options.extra_eos_token_ids})),
        max_adapters=options.max_adapters,
        max_cpu_adapters=max(options.max_cpu_adapters, options.max_adapters),
        max_rank=(options.max_rank or _RANK) if options.max_adapters else 0,
        draft_tokens=(options.speculation_max_tokens or _DRAFT_TOKENS) if options.speculation != "none" else 0,
    )


def _check_device(plan: _Plan) -> None:
    if plan.device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(plan.device)
    types = {"dtype": plan.dtype, "kv_dtype": plan.kv_dtype}
    if why_not := refusal(plan.device, capability, head_dim=plan.config.head_dim, **types):
        raise ModelRefusedError(why_not)


def _load(model_path: Path, plan: _Plan, kernels: Kernels, on_news: Callable[[Loading], object]) -> tuple[Decoder, int]:
    """The decoder, and the bytes of its weights."""
    told = 0

    def tell(done: int, total: int) -> None:
        nonlocal told
        if done - told >= total // 100 or done == total:  # a hundred messages, however large the model is
            told = done
            on_news(Loading(bytes_done=done, bytes_total=total))

    quantization = plan.options.quantization
    with Checkpoint(model_path, plan.dtype, plan.device, on_progress=tell) as checkpoint:
        decoder = load_decoder(
            plan.config,
            checkpoint,
            kernels,
            plan.max_model_len,
            plan.dtype,
            plan.device,
            matmul_maker(quantization, deterministic=plan.options.deterministic, device=plan.device),
            head_maker(quantization, deterministic=plan.options.deterministic, device=plan.device),
        )
        return decoder, decoder.nbytes


def _size_cache(plan: _Plan, decoder: Decoder, kernels: Kernels) -> CacheSize:
    asked = plan.options.kv_cache_bytes
    activations = widest_step_bytes(
        decoder,
        plan.config,
        kernels,
        tokens=plan.max_num_batched_tokens,
        rows=plan.max_num_seqs,
        block_size=plan.options.block_size,
        dtype=plan.dtype,
        device=plan.device,
    )
    if asked:
        check_remainder(asked, activations, free_bytes(plan.device))
    return size_cache(
        plan.config,
        dtype=plan.kv_dtype,
        block_size=plan.options.block_size,
        budget_bytes=asked or default_budget_bytes(plan.device, plan.options.gpu_memory_utilization, activations),
        # Memory nobody asked for is taken only as far as all rows at full length could use it.
        useful_tokens=None if asked or plan.device.type != "cpu" else plan.max_num_seqs * plan.max_model_len,
    )


def _slots(decoder: Decoder, plan: _Plan, kernels: Kernels) -> AdapterSlots | None:
    if not plan.max_adapters:
        return None
    bank = LoraBank(
        [linear for layer in decoder.layers for linear in layer.linears],
        kernels,
        num_slots=plan.max_adapters,
        max_rank=plan.max_rank,
        dtype=plan.dtype,
        device=plan.device,
        deterministic=plan.options.deterministic,
    )
    return AdapterSlots(bank, plan.max_num_seqs)


def _adapters(scheduler: Scheduler, slots: AdapterSlots, plan: _Plan, model_path: Path) -> Adapters[HostAdapter]:
    base_digest = cache(lambda: weights_digest(model_path))  # reads all weights: only for adapters that name a base

    def read(path: Path, digest: str) -> HostAdapter:
        return read_adapter(
            path,
            plan.config,
            max_rank=plan.max_rank,
            dtype=plan.dtype,
            digest=digest,
            base_digest=base_digest,
            pin_memory=plan.device.type == "cuda",
        )

    return Adapters(scheduler, read, keep=slots.keep, forget=slots.forget)


def _execute(runner: Runner, grammars: Grammars | None, plan: StepPlan) -> StepResult:
    """One plan, with the masks of its grammars, which are made while the model computes."""
    return runner.execute(plan) if grammars is None else runner.execute(plan, grammars.masks(plan))


def _warm_up(
    scheduler: Scheduler, runner: Runner, slots: AdapterSlots | None, plan: _Plan, worker: Worker | None
) -> None:
    """Warm the thread that later steps run on, with adapters that change nothing."""
    digests: list[str] = []
    if slots is not None:
        nothing = {
            name: (
                torch.zeros(plan.max_rank, columns, dtype=plan.dtype),
                torch.zeros(plan.max_rank, rows, dtype=plan.dtype),
            )
            for name, (rows, columns) in lora_modules(plan.config).items()
        }
        for index in range(plan.max_adapters):
            adapter = HostAdapter(digest=f"warm-{index}", rank=plan.max_rank, matrices=nothing, bytes=0)
            slots.keep(adapter)
            scheduler.adapter_loading(adapter.digest, 0.0)
            scheduler.adapter_loaded(adapter.digest, 0.0, num_bytes=0, rank=plan.max_rank)
            digests.append(adapter.digest)

    def execute(step: StepPlan, masks: Masks) -> StepResult:
        compute = partial(runner.execute, masks=masks)
        return compute(step) if worker is None else worker.call(compute, step).result()

    warm_up(scheduler, execute, vocab_size=plan.config.vocab_size, adapters=tuple(digests))
    for slot, digest in enumerate(digests):
        assert slots is not None
        slots.unload(slot)
        slots.forget(digest)


def _content_key(model_path: Path, plan: _Plan) -> str:
    """What decides the KV of equal tokens, beside adapter and salt: the same on every replica of the same model."""
    config = hashlib.sha256((model_path / "config.json").read_bytes()).hexdigest()
    options = plan.options
    return f"{config}/{plan.dtype}/{options.quantization}/{options.kv_cache_dtype}/{options.deterministic}"


def _longest(config: ModelConfig, asked: int, affordable: int) -> int:
    """The context that the model can take and any pool could hold, or the part of it that was asked for."""
    if asked > config.max_position:
        raise ModelRefusedError(
            f"max_model_len is {asked}; this model takes at most {config.max_position}: its max_position_embeddings"
        )
    # Tables of positions are built for the whole length, and a config may claim sixteen million.
    return asked or max(1, min(config.max_position, affordable))


def _affordable_tokens(config: ModelConfig, options: EngineOptions, device: torch.device) -> int:
    """More than the KV cache will ever hold: all memory there is, at a byte a value."""
    memory = options.kv_cache_bytes or default_budget_bytes(device, 1.0)
    return memory // config.kv_bytes_per_token(1)


def _fit_pool(length: int, pool_tokens: int, asked: int) -> int:
    """A sequence must fit into the pool alone, or it could never finish."""
    if asked > pool_tokens:
        raise DoesNotFitError(
            f"max_model_len is {asked}, and the KV cache holds {pool_tokens} tokens: give it more memory or a shorter "
            "context"
        )
    return min(length, pool_tokens)
