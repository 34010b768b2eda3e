"""Warm-up: runs real requests through a scheduler of their own, so that the first user waits for no first call.

What a first call allocates, compiles or pages in happens here, for every path that a request can reach: the widest
prefill, a context beyond one attention tile and one chunk, few tokens on such a context, full batches and single rows,
greedy and every kind of sampled sample, scores for logprobs, masks, drafts that are verified, and no, one and all
adapter slots. The scheduler and its requests are dropped afterwards.

Then decode steps and small steps with chunks are captured as CUDA graphs; an engine whose capture fails works without.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial

import msgspec
import torch

from slipway_runtime.messages import Grammar, Request, SamplingParams, SchedulerOutput, StepResult, TokenMasks
from slipway_runtime.scheduling.scheduler import Scheduler
from slipway_runtime.worker.capture import (
    Capture,
    CudaCapture,
    OtherRankFailedError,
    SharedCapture,
    StepNotCapturedError,
    first_line,
)
from slipway_runtime.worker.collective import Collective
from slipway_runtime.worker.out_of_memory import oom_refused
from slipway_runtime.worker.runner import Runner

LONG_CONTEXT = 1100  # beyond one part of a split attention, whose parts are then merged
WIDEST_BATCHES = 2  # the first ones begin with a step of max_num_batched_tokens
Masks = Callable[[], TokenMasks | None]

_SAMPLING = (
    SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=3, temperature=1.0, top_p=0.9, ignore_eos=True),
    SamplingParams(max_tokens=3, temperature=0.7, top_k=5, min_p=0.1, seed=1, ignore_eos=True),
    SamplingParams(
        max_tokens=3,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        min_tokens=2,
        logit_bias=((1, 1.0),),
        logprobs=5,
    ),
)


def warm_up(
    scheduler: Scheduler,
    execute: Callable[[SchedulerOutput, Masks], StepResult],
    *,
    vocab_size: int,
    adapters: tuple[str, ...] = (),
    stopwatch: Callable[[], float] = time.perf_counter,
) -> float:
    """Compute one batch after the other until every path was taken. adapters: digests that the scheduler may load.

    Returns the seconds of the widest step. It runs twice, as the first time includes what a first call costs.
    """
    widest = []
    for number, batch in enumerate(_batches(scheduler, adapters)):
        for request in batch:
            scheduler.add(request, 0.0)
        began = stopwatch()
        plan = scheduler.schedule(0.0)
        scheduler.update(execute(plan, partial(_all_allowed, plan, vocab_size)), 0.0)
        if number < WIDEST_BATCHES:
            widest.append(stopwatch() - began)
        while scheduler.has_work:
            plan = scheduler.schedule(0.0)
            scheduler.update(execute(plan, partial(_all_allowed, plan, vocab_size)), 0.0)
    return min(widest)


def _batches(scheduler: Scheduler, adapters: tuple[str, ...]) -> Iterator[list[Request]]:
    most = scheduler.max_model_len - 4
    widest = max(min(scheduler.max_num_batched_tokens, most), 1)

    def request(name: str, length: int, params: SamplingParams, adapter: str = "", token: int = 1) -> Request:
        return Request(
            id=f"warm-{name}", prompt_token_ids=(token,) * length, params=params, arrived=0.0, adapter=adapter
        )

    for samples in (_SAMPLING[:1], _SAMPLING):  # all rows plain, then mixed
        lengths = [widest, *[1] * (scheduler.max_num_seqs - 1)]
        yield [
            request(f"{len(samples)}-{index}", length, samples[index % len(samples)], token=index % 2)
            for index, length in enumerate(lengths)
        ]
    yield [request("long", max(min(LONG_CONTEXT, most), 1), _SAMPLING[0])]
    # Few new tokens on a long context, which other kernels attend: the rest of a prompt whose prefix is found, and
    # where none is, the last chunk of a prompt.
    few = LONG_CONTEXT + 4
    if not scheduler.pool.shares_prefixes:
        few = -(-LONG_CONTEXT // scheduler.max_num_batched_tokens) * scheduler.max_num_batched_tokens + 8
    yield [request("few", max(min(few, most), 1), _SAMPLING[0])]
    scored = request("scored", min(8, most), SamplingParams(max_tokens=2, prompt_logprobs=1, logprobs=0))
    bound = request("bound", min(8, most), _SAMPLING[1])
    yield [scored, msgspec.structs.replace(bound, grammar=Grammar(kind="regex", text=".*"))]
    if scheduler.speculation is not None:
        # A prompt that repeats itself gives draft tokens, in all rows at once: no step has more samples. The bias makes
        # the model accept them, so that each step drafts more than the one before: 3, 6, 12, 24, 32.
        longest = len(scheduler.speculation.accepted_by_position)
        length = min(2 * longest + 20, max(most - 4, 1))
        repeats = SamplingParams(max_tokens=length, temperature=0.0, logit_bias=((1, 100.0),), ignore_eos=True)
        yield [request(f"drafted-{index}", min(4, most), repeats) for index in range(scheduler.max_num_seqs)]
    for count in sorted({1, len(adapters)} if adapters else ()):
        yield [request(f"adapter-{count}-base", 2, _SAMPLING[0])]
        yield [
            request(f"adapter-{count}-{index}", min(widest // count, 32) or 1, _SAMPLING[0], adapters[index])
            for index in range(count)
        ]


def _all_allowed(plan: SchedulerOutput, vocab_size: int) -> TokenMasks | None:
    samples = sum(
        1 + (len(plan.drafts[index]) if plan.drafts else 0) for index, samples in enumerate(plan.samples) if samples
    )
    return TokenMasks(tuple(range(samples)), b"\xff" * (4 * -(-vocab_size // 32) * samples))


def capture_steps(runner: Runner, device: torch.device, collective: Collective | None = None) -> str:
    """Capture the steps of a runner on a GPU; why that failed, or an empty string. See `try_capture`.

    collective: of several ranks, which all capture at the same time.
    """
    if device.type != "cuda":
        return ""
    capture = CudaCapture(device)
    return try_capture(runner, capture if collective is None else SharedCapture(capture, collective), device)


def try_capture(runner: Runner, capture: Capture, device: torch.device) -> str:
    """Capture the CUDA graphs of a runner; why that failed, or an empty string. Kernels are warm by then.

    Raises DoesNotFitError where memory is short: an engine that serves with none left would fail under load. Of several
    ranks, those that have captured what another could not return an empty string, without graphs; what fails on one
    without the knowledge of the others is raised.
    """
    try:
        with oom_refused("the CUDA graphs", device):
            runner.capture_graphs(capture)
    except OtherRankFailedError:
        runner.graphs = None
    except RuntimeError as error:
        if isinstance(capture, SharedCapture) and not isinstance(error, StepNotCapturedError):
            raise
        runner.graphs = None
        return f"steps could not be captured as CUDA graphs, and are launched kernel by kernel: {first_line(error)}"
    return ""
