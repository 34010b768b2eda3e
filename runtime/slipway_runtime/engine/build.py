"""Builds an engine: loads a checkpoint, sizes the KV cache, warms up, captures CUDA graphs.

decide.py decides the limits and parts.py builds the parts; here they are put together.
"""

import atexit
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import msgspec
import torch
from torch import Tensor

from slipway_runtime.engine.adapter_loader import AdapterLoader
from slipway_runtime.engine.decide import EnginePlan, decide
from slipway_runtime.engine.draft import LoadedDraft, decide_draft, finish_draft, load_draft
from slipway_runtime.engine.engine import Engine, LaunchThread, OverlappedEngine, launching
from slipway_runtime.engine.kv_events import KvEventPublisher
from slipway_runtime.engine.matchers import Grammars
from slipway_runtime.engine.options import EngineOptions
from slipway_runtime.engine.parts import (
    Beside,
    adapter_reader,
    load_weights,
    make_slots,
    make_tier,
    share_compiled_kernels,
    size_pool,
    use_threads,
    zero_adapters,
)
from slipway_runtime.engine.ranks import Ranks, SharedSleeper, SharedSlots
from slipway_runtime.engine.sleep import Sleeper
from slipway_runtime.engine.warmup import Masks, capture_steps, warm_up
from slipway_runtime.kernels.dispatch import kernels_for
from slipway_runtime.messages import EngineFacts, EngineFailed, Loading, SchedulerOutput, StepResult, WarmingUp
from slipway_runtime.models.decoder import Decoder
from slipway_runtime.models.pooling import SCORE, EmbeddingConfig, read_embedding_config
from slipway_runtime.models.quantize import name_of_format, quantization_warnings
from slipway_runtime.models.score_head import read_score_head
from slipway_runtime.models.sharding import WHOLE, Shard
from slipway_runtime.scheduling.block_pool import BlockPool, KvEvent
from slipway_runtime.scheduling.draft_model import DraftModel
from slipway_runtime.scheduling.host_tier import HostTier
from slipway_runtime.scheduling.scheduler import Scheduler
from slipway_runtime.worker.adapter_slots import AdapterSlots
from slipway_runtime.worker.kv_cache import CacheSize, allocate_cache
from slipway_runtime.worker.out_of_memory import oom_refused
from slipway_runtime.worker.pooling import Pooler
from slipway_runtime.worker.runner import Runner

_DEFAULTS = EngineOptions()
T = TypeVar("T")
MASK_THREADS: Final = 8  # at most; a mask takes 50 to 500 µs


class Compute(Protocol):
    """Executes a plan, alone or with other ranks."""

    def __call__(self, plan: SchedulerOutput, masks: Masks | None = None) -> StepResult: ...  # noqa: D102


def build_engine(
    model_path: Path,
    options: EngineOptions = _DEFAULTS,
    *,
    on_progress: Callable[[Loading | WarmingUp], object] = lambda _: None,
    on_death: Callable[[EngineFailed], object] = lambda _: None,
    directory: Path | None = None,
    **settings: object,
) -> Engine:
    """Load a checkpoint, size its KV cache and warm it up: seconds to minutes, and ready when it returns.

    `settings` replace fields of the options. Raises ModelRefusedError, a sentence for the user, for a
    checkpoint or settings that cannot be honoured. The facts hold the timings.

    With several ranks, `on_death` is called at once, on another thread, when a rank ends, which this engine cannot
    survive; `directory` is for the file where they meet.
    """
    options = msgspec.structs.replace(options, **{name: value for name, value in settings.items() if value is not None})
    started = time.perf_counter()
    plan = decide(model_path, options)
    draft_plan = decide_draft(plan)
    use_threads(options)
    kernels = share_compiled_kernels(plan)  # before anything is compiled
    ranks = Ranks(plan, directory=directory, on_death=on_death) if options.tensor_parallel_size > 1 else None
    model = _load(plan, draft_plan, ranks, on_progress)
    runner = model.runner
    loaded = time.perf_counter()

    on_progress(WarmingUp())
    compute: Compute = runner.execute if ranks is None else partial(ranks.execute, runner)
    execute = partial(_execute, compute, model.grammars)
    # With several ranks a step is not launched ahead: the others get its tokens from the host.
    launch = partial(_execute, runner.launch, model.grammars) if ranks is None else launching(execute)
    worker = LaunchThread(launch) if plan.overlap else None
    with oom_refused("the largest batch", plan.device):
        widest_step = _warm_up(_new_scheduler(plan, model), compute, model.slots, plan, worker)
    capture = partial(capture_steps, runner, plan.device, None if ranks is None else ranks.collective)
    graphs_failed = ""
    if not options.pooling:  # no step of embeddings is a decode step
        graphs_failed = capture() if ranks is None else ranks.capture(runner, capture)
    if model.draft is not None:
        with oom_refused("the largest batch of the draft model", plan.device):
            model.draft.warm_up()
        graphs_failed = graphs_failed or model.draft.capture()
    warm = time.perf_counter()

    scheduler = _new_scheduler(
        plan,
        model,
        tier=model.tier,
        kv_events=bool(options.kv_events_endpoint),
        draft_model=None if model.draft is None else model.draft.model(),
    )
    plan.fit_pool(model.max_model_len, scheduler.max_model_len)  # adapters may take a part of the pool
    facts = _facts(
        plan,
        model,
        max_model_len=scheduler.max_model_len,
        load_seconds=loaded - started,
        warmup_seconds=warm - loaded,
        widest_step_seconds=widest_step,
        graphs_failed=graphs_failed,
        kernels_compiled=kernels.compiled,
        kernels_shared=kernels.shared,
        kernels_refused=kernels.refused,
    )
    gc.collect()
    gc.freeze()  # the model lives as long as the process: the collector does not walk it again
    atexit.register(gc.unfreeze)  # or libraries report the model as leaked when the process ends
    make_sleeper = Sleeper if ranks is None else partial(SharedSleeper, ranks)
    sleeper = make_sleeper(
        runner,
        plan.device,
        load_weights=model.load_weights,
        allocate_cache=model.allocate_cache,
        capture=capture,
    )
    sleeper.beside = None if model.draft is None else model.draft.sleeper()
    parts: dict[str, Any] = {
        "grammars": model.grammars,
        "adapters": None if model.slots is None else _adapter_loader(plan, model.share, model.slots, scheduler, ranks),
        "publish": _publisher(options),
        "sleeper": sleeper,
    }
    if worker is not None:
        return OverlappedEngine(scheduler, worker, facts, **parts)
    return Engine(scheduler, execute, facts, **parts)


@dataclass(frozen=True, kw_only=True)
class _LoadedModel:
    """A model on its device, and what its scheduler and its engine are made from."""

    runner: Runner
    slots: AdapterSlots | None
    grammars: Grammars | None  # None without a tokenizer: structured output is then refused
    size: CacheSize
    max_model_len: int
    tier: HostTier | None
    embedding: EmbeddingConfig | None
    score_tokens: tuple[str, ...]
    weight_bytes: int  # of all ranks
    share: Shard
    load_weights: Callable[[], Decoder]  # again, after a sleep
    allocate_cache: Callable[[], list[Tensor]]
    draft: LoadedDraft | None


def _load(
    plan: EnginePlan,
    draft_plan: EnginePlan | None,
    ranks: Ranks | None,
    on_progress: Callable[[Loading | WarmingUp], object],
) -> _LoadedModel:
    """Load weights, adapter slots and grammars, and size and allocate the KV cache and its host tier."""
    options = plan.options
    share = WHOLE if ranks is None else ranks.share
    kernels = kernels_for(
        plan.device, plan.dtype, deterministic=options.deterministic, latent=plan.config.latent is not None
    )
    with oom_refused("the weights", plan.device):
        decoder = load_weights(plan, kernels, on_progress, share)
        weight_bytes = decoder.nbytes + (0 if ranks is None else ranks.wait_for_weights())
    with oom_refused("the adapters", plan.device):
        slots = make_slots(plan, decoder, kernels, AdapterSlots if ranks is None else partial(SharedSlots, ranks))
    with oom_refused("the draft model", plan.device):
        draft_weights = load_draft(draft_plan)
    # On a CPU the threads compute the model; on a GPU they are idle while it does.
    threads = min(MASK_THREADS, options.threads or torch.get_num_threads()) if plan.device.type == "cuda" else 1
    grammars = Grammars.beside(Path(options.tokenizer_path or plan.model_path), plan.eos_token_ids, threads=threads)
    with oom_refused("the KV cache", plan.device):
        size = size_pool(plan, decoder, kernels, Beside() if draft_weights is None else draft_weights.measure())
        size = size if ranks is None else ranks.agree(size)
        length = plan.fit_pool(plan.max_model_len, size.num_blocks * options.block_size)
        allocate = partial(allocate_cache, plan.own, size, plan.kv_dtype, plan.device)
        runner = Runner(
            decoder,
            allocate(),
            kernels,
            block_size=options.block_size,
            max_num_seqs=plan.max_num_seqs,
            max_model_len=length,
            eos_token_ids=plan.eos_token_ids,
            device=plan.device,
            num_tokens=None if grammars is None else grammars.num_tokens,
            adapters=slots,
        )
    num_tokens = plan.config.vocab_size if grammars is None else grammars.num_tokens
    draft = None
    if draft_weights is not None:
        with oom_refused("the KV cache of the draft model", plan.device):
            draft = finish_draft(draft_weights, size, num_tokens=num_tokens, shares_prefixes=options.prefix_caching)
    embedding, head = None, None
    if options.pooling:
        if options.pooling == "auto":
            head = read_score_head(
                plan.model_path, plan.config, options.score_tokens, dtype=plan.dtype, device=plan.device
            )
        if head is not None:
            embedding = EmbeddingConfig(pooling=SCORE, size=1)
        else:
            embedding = read_embedding_config(plan.model_path, options.pooling, plan.config.hidden_size)
        runner.pooler = Pooler(embedding.pooling, plan.max_num_seqs, embedding.size, plan.device, head)
    tier: HostTier | None = None
    with oom_refused("cold KV blocks in host memory", plan.device):
        if made := make_tier(plan, size):
            tier, runner.host = made
    # Only the runner refers to the decoder from here on: a sleeping engine frees it.
    return _LoadedModel(
        runner=runner,
        slots=slots,
        grammars=grammars,
        size=size,
        max_model_len=length,
        tier=tier,
        embedding=embedding,
        score_tokens=() if head is None else head.tokens,
        weight_bytes=weight_bytes,
        share=share,
        load_weights=partial(load_weights, plan, kernels, share=share),
        allocate_cache=allocate,
        draft=draft,
    )


def _facts(plan: EnginePlan, model: _LoadedModel, **measured: Any) -> EngineFacts:
    """Build the facts that the API server reads: limits, sizes, formats, and what was measured at the start."""
    options, embedding = plan.options, model.embedding
    return EngineFacts(
        vocab_size=plan.config.vocab_size,
        eos_token_ids=plan.eos_token_ids,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        block_size=options.block_size,
        num_blocks=model.size.num_blocks,
        bytes_per_token=model.size.bytes_per_token * model.share.size,
        weight_bytes=model.weight_bytes,
        dtype=str(plan.weight_dtype).removeprefix("torch."),
        device=plan.device.type,
        quantization=name_of_format(plan.config, options.quantization),
        warnings=quantization_warnings(plan.config, options.quantization),
        kv_dtype="" if options.kv_cache_dtype == "auto" else options.kv_cache_dtype,
        deterministic=options.deterministic,
        prefix_caching=options.prefix_caching,
        max_adapters=plan.max_adapters,
        max_cpu_adapters=plan.max_cpu_adapters,
        max_rank=plan.max_rank,
        speculation=options.speculation,
        draft_weight_bytes=0 if model.draft is None else model.draft.weight_bytes,
        draft_bytes_per_token=0 if model.draft is None else model.draft.size.bytes_per_token,
        host_blocks=0 if model.tier is None else model.tier.total,
        pooling=embedding.pooling if embedding is not None else "",
        embedding_size=embedding.size if embedding is not None else 0,
        score_tokens=model.score_tokens,
        is_matryoshka=embedding is not None and embedding.is_matryoshka,
        matryoshka_dimensions=embedding.dimensions if embedding is not None else (),
        **measured,
    )


def _adapter_loader(
    plan: EnginePlan, share: Shard, slots: AdapterSlots, scheduler: Scheduler, ranks: Ranks | None
) -> AdapterLoader:
    read = adapter_reader(plan, share)
    read = read if ranks is None else partial(ranks.read_adapter, read)
    return AdapterLoader(scheduler, read, keep=slots.keep, forget=slots.forget)


def _new_scheduler(
    plan: EnginePlan,
    model: _LoadedModel,
    *,
    tier: HostTier | None = None,
    kv_events: bool = False,
    draft_model: DraftModel | None = None,
) -> Scheduler:
    options, size = plan.options, model.size
    pool = BlockPool(size.num_blocks, options.block_size, shares_prefixes=options.prefix_caching)
    return Scheduler(
        pool,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_model_len=model.max_model_len,
        eos_token_ids=frozenset(plan.eos_token_ids),
        model=plan.content_key(),
        tenant_weights=options.tenant_weights,
        speculation_max_tokens=plan.draft_tokens,
        draft_model=draft_model,
        residency=plan.residency(pool, size.bytes_per_token * options.block_size),
        tier=tier,
        kv_events=kv_events,
    )


def _publisher(options: EngineOptions) -> Callable[[Sequence[KvEvent]], None] | None:
    """What sends the KV events of a step; None: nobody wants them."""
    if not options.kv_events_endpoint:
        return None
    return KvEventPublisher(options.kv_events_endpoint, options.kv_events_topic).publish


def _execute(
    compute: Callable[[SchedulerOutput, Masks | None], T], grammars: Grammars | None, plan: SchedulerOutput
) -> T:
    """Execute or launch a plan with the masks of its grammars, which are made while the model computes."""
    return compute(plan, None if grammars is None else grammars.masks(plan))


def _warm_up(
    scheduler: Scheduler, compute: Compute, slots: AdapterSlots | None, plan: EnginePlan, worker: LaunchThread | None
) -> float:
    """Warm up, on the thread that later steps run on and with adapters of zeros; the seconds of the widest step."""
    digests: list[str] = []
    if slots is not None:
        for adapter in zero_adapters(plan):
            slots.keep(adapter)
            scheduler.register_adapter(adapter.digest, 0.0)
            scheduler.note_adapter_loaded(adapter.digest, 0.0, num_bytes=0, rank=plan.max_rank)
            digests.append(adapter.digest)

    def execute(step: SchedulerOutput, masks: Masks) -> StepResult:
        masked = partial(compute, masks=masks)
        return masked(step) if worker is None else worker.call(launching(masked), step).result()

    widest_step = warm_up(scheduler, execute, vocab_size=plan.config.vocab_size, adapters=tuple(digests))
    for slot, digest in enumerate(digests):
        assert slots is not None
        slots.unload(slot)
        slots.forget(digest)
    return widest_step
