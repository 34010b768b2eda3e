"""Benchmark of engine features: gain of each, and its cost for requests that do not use it, in the same run.

    python -m bench features

Everything runs at the engine's Python API, greedy, on one thread. "Without" is always the same engine with the feature
switched off; the two alternate, and their CPU times are compared, so that other load on the machine counts for little.
On an idle machine, CPU time is wall time.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Final, TypeVar

import torch

from bench.figures import Figure, Section
from bench.servers import EMBEDDED_MODEL
from bench.shapes import adapter, checkpoint
from slipway_runtime.engine.build import build_engine
from slipway_runtime.engine.engine import Engine
from slipway_runtime.messages import EngineStats, FinishReason, LoadAdapter, Request, SamplingParams, UnloadAdapter
from slipway_runtime.models.adapter_files import adapter_digest

ROUNDS: Final = 3
_serials = count()
_T = TypeVar("_T")


def measure() -> Section:
    """All features."""
    torch.set_num_threads(1)
    return Section(
        "Features: with and without, CPU time, 1 thread",
        (*continuous_batching(), *prefix_cache(), *kv_memory(), *speculation(), *adapters()),
    )


def continuous_batching() -> Iterator[Figure]:
    """Requests whose answers differ in length, in static batches of the same size: a batch ends with its longest."""
    limits = {"max_num_seqs": 8, "kv_cache_bytes": 64 << 20}
    engine, other = (build_engine(EMBEDDED_MODEL, **limits) for _ in range(2))
    continuous = _busy(lambda: steps_of(engine, varied_lengths(64)))
    static = _busy(lambda: in_static_batches(other, varied_lengths(64), size=8))
    (seconds, (steps, texts)), (more_seconds, (more_steps, same_texts)) = continuous, static
    assert texts == same_texts, "static batches gave other answers"
    note = f"{more_steps} against {steps} steps, same greedy text"
    yield Figure("static batches of 8 ÷ continuous batching", more_seconds / seconds, "×", note)


def prefix_cache() -> Iterator[Figure]:
    """TTFT after a cached prefix of 2,000 tokens, and the cost of the lookup where nothing is cached."""
    engine = build_engine(checkpoint("135m"), dtype="fp32", max_model_len=2200, max_num_seqs=4, kv_cache_bytes=1 << 30)
    prefix = _tokens(2000, seed=1)
    cold = _ttft(engine, [*prefix, *_tokens(20, seed=2)])
    warm = median(_ttft(engine, [*prefix, *_tokens(20, seed=3 + index)]) for index in range(ROUNDS))
    note = f"{cold * 1e3:.0f} → {warm * 1e3:.0f} ms"
    yield Figure("prefix cache: TTFT, 2,000 shared tokens", cold / warm, "×", note, at_least=10)
    with_it, without = (build_engine(EMBEDDED_MODEL, max_num_seqs=16, prefix_caching=on) for on in (True, False))
    yield _cost("prefix cache: cost when nothing hits", with_it, without, _uniform, aim=1)


def kv_memory() -> Iterator[Figure]:
    """Filled share of the KV blocks of running requests, under heavy-tailed lengths."""
    engine = build_engine(EMBEDDED_MODEL, max_num_seqs=32, kv_cache_bytes=16 << 20)
    draw = random.Random(5)
    longest = engine.facts.max_model_len - 2
    shares: list[float] = []
    requests = []
    for index in range(96):
        length = min(longest // 2, max(4, round(draw.lognormvariate(4.0, 1.0))))
        output = min(longest // 2, max(4, round(draw.lognormvariate(4.0, 1.0))))
        requests.append(_request(_tokens(length, seed=index), output))

    def note(stats: EngineStats) -> None:
        if stats.blocks_live:
            computed = sum(sequence.num_computed for sequence in engine._scheduler._table.running)
            shares.append(computed / (stats.blocks_live * engine.facts.block_size))

    _run(engine, requests, note)
    share = 100 * sum(shares) / len(shares)
    yield Figure("KV memory of running requests that holds tokens", share, "%", "mean over steps", at_least=96)


def speculation() -> Iterator[Figure]:
    """Prompt lookup where answers repeat what came before, and where they do not.

    Greedy text of random weights soon repeats itself, so nearly all drafts are accepted: the speed is then the gain of
    a step that confirms five tokens over five steps. On a CPU that depends on the number of rows: the time of a step of
    one row is that of reading the weights; the time of more rows is arithmetic, of which a draft token costs as much as
    any other.
    """
    limits = {"dtype": "fp32", "max_model_len": 512, "max_num_seqs": 8, "kv_cache_bytes": 256 << 20}
    with_it = build_engine(checkpoint("135m"), speculation="promptLookup", speculation_max_tokens=4, **limits)
    without = build_engine(checkpoint("135m"), **limits)
    for rows in (1, 4, 8):
        before = with_it.stats(time.monotonic())
        plain, fast = _take_turns(without, with_it, partial(_repeating, rows))
        after = with_it.stats(time.monotonic())
        drafts, accepted = after.drafts - before.drafts, after.accepted_tokens - before.accepted_tokens
        note = f"same greedy text, {1 + accepted / max(drafts, 1):.2f} tokens a verified row"
        yield Figure(f"prompt lookup, repeating text, rows: {rows}; speed", plain / fast, "×", note)
    with_it = build_engine(EMBEDDED_MODEL, max_num_seqs=8, speculation="promptLookup", speculation_max_tokens=4)
    plain, fast = _take_turns(build_engine(EMBEDDED_MODEL, max_num_seqs=8), with_it, _random_sampling)
    yield Figure("prompt lookup, random text: speed", plain / fast, "×", "", at_least=0.95)


def adapters() -> Iterator[Figure]:
    """Cost of enabling adapters, and of serving eight of them in one batch."""
    # Adapters pay with blocks, up to half of them: all eight must fit, or one waits while the others are measured.
    limits = {"dtype": "fp32", "max_model_len": 256, "max_num_seqs": 8, "kv_cache_bytes": 1 << 30}
    without = build_engine(checkpoint("135m"), **limits)
    with_them = build_engine(checkpoint("135m"), max_adapters=8, max_cpu_adapters=8, max_rank=8, **limits)
    yield _cost("adapters enabled, none asked", with_them, without, _eight)
    for modules in (
        ("q_proj", "v_proj"),
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    ):
        digests = _load(with_them, [adapter("135m", number, rank=8, modules=modules) for number in range(8)])

        def mixed(digests: list[str] = digests) -> list[Request]:
            return [
                _request(request.prompt_token_ids, request.params.max_tokens, adapter=digest)
                for request, digest in zip(_eight(), digests, strict=True)
            ]

        name = f"8 adapters in a batch of 8, rank 8 on {'q, v' if len(modules) == 2 else 'all 7 modules'}: cost"
        yield _cost(name, with_them, without, _eight, mixed, aim=15)
        _unload(with_them, digests)


def _load(engine: Engine, folders: Sequence[Path]) -> list[str]:
    digests = [adapter_digest(folder) for folder in folders]
    for call, (folder, digest) in enumerate(zip(folders, digests, strict=True)):
        engine.control(LoadAdapter(call=call, digest=digest, path=str(folder)), time.monotonic())
    _await_replies(engine, len(digests))
    return digests


def _unload(engine: Engine, digests: Sequence[str]) -> None:
    for call, digest in enumerate(digests):
        engine.control(UnloadAdapter(call=call, digest=digest), time.monotonic())
    _await_replies(engine, len(digests))


def _await_replies(engine: Engine, waiting: int) -> None:
    deadline = time.monotonic() + 60
    while waiting and time.monotonic() < deadline:
        report = engine.step(time.monotonic()) if engine.has_work else None
        for reply in report.replies if report else ():
            assert not reply.error, reply.error
            waiting -= 1
        time.sleep(0.001)
    assert not waiting, "the adapters did not come or go"


def _uniform() -> list[Request]:
    return [_request(_tokens(48, seed=next(_serials)), 32) for _ in range(16)]


def _eight() -> list[Request]:
    return [_request(_tokens(32, seed=next(_serials)), 16) for _ in range(8)]


def _repeating(rows: int) -> list[Request]:
    phrase = _tokens(24, seed=9)
    return [_request(phrase * 4, 48) for _ in range(rows)]


def _random_sampling() -> list[Request]:
    return [_request(_tokens(48, seed=next(_serials)), 48, temperature=2.0) for _ in range(4)]


def _tokens(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(10, 1000) for _ in range(length)]


def _request(tokens: Sequence[int], max_tokens: int, *, adapter: str = "", temperature: float = 0.0) -> Request:
    serial = next(_serials)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=serial, ignore_eos=True)
    return Request(id=f"bench-{serial}", prompt_token_ids=tuple(tokens), params=params, arrived=0.0, adapter=adapter)


def _cost(
    name: str,
    with_it: Engine,
    without: Engine,
    requests: Callable[[], list[Request]],
    others: Callable[[], list[Request]] | None = None,
    aim: float = 2,
) -> Figure:
    """Of `others`, or of the same requests, with it. A cost of some percent drowns in the noise of whole runs, so every
    step is the best of its kind over all rounds: the two engines take equal steps.
    """
    plain: list[list[float]] = []
    busy: list[list[float]] = []
    for _ in range(3 * ROUNDS):
        plain.append(_step_seconds(without, requests()))
        busy.append(_step_seconds(with_it, (others or requests)()))
    one, other = (sum(map(min, zip(*rounds, strict=True))) for rounds in (plain, busy))
    return Figure(name, 100 * (other / one - 1), "%", "", at_most=aim)


def varied_lengths(count: int, *, shared: int = 0, repeated: bool = False) -> list[Request]:
    """Greedy requests of different lengths. `shared`: tokens of a common prefix; `repeated`: a phrase several times."""
    draw, prefix = random.Random(11), _tokens(shared, seed=10)
    requests = []
    for index in range(count):
        own = _tokens(24, seed=9) * 4 if repeated else _tokens(draw.randint(8, 40), seed=100 + index)
        requests.append(_request([*prefix, *own], draw.choice((4, 8, 16, 64))))
    return requests


def steps_of(engine: Engine, requests: Sequence[Request]) -> tuple[int, list[tuple[int, ...]]]:
    """How many steps the engine takes for all of these requests together, and the tokens of each."""
    tokens: dict[str, tuple[int, ...]] = {request.id: () for request in requests}
    before = engine.stats(time.monotonic()).steps
    for request in requests:
        engine.add(request, time.monotonic())
    while engine.has_work:
        for output in engine.step(time.monotonic()).outputs:
            assert output.finish_reason is not FinishReason.ERROR, output.error
            tokens[output.request_id] += tuple(output.token_ids)
    return engine.stats(time.monotonic()).steps - before, list(tokens.values())


def in_static_batches(engine: Engine, requests: Sequence[Request], *, size: int) -> tuple[int, list[tuple[int, ...]]]:
    """The same in static batches: the next `size` requests start when all of those before have ended."""
    batches = [steps_of(engine, requests[first : first + size]) for first in range(0, len(requests), size)]
    return sum(steps for steps, _ in batches), [text for _, texts in batches for text in texts]


def _busy(work: Callable[[], _T]) -> tuple[float, _T]:
    """CPU time of this process for some work, and its result."""
    began = time.process_time()
    result = work()
    return time.process_time() - began, result


def _take_turns(one: Engine, other: Engine, requests: Callable[[], list[Request]]) -> tuple[float, float]:
    """The best time of each over the same amount of work."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for engine, seconds in zip((one, other), times, strict=True):
            seconds.append(_seconds(engine, requests()))
    return min(times[0]), min(times[1])


def _seconds(engine: Engine, requests: Sequence[Request]) -> float:
    """CPU time of this process."""
    began = time.process_time()
    _run(engine, requests)
    return time.process_time() - began


def _step_seconds(engine: Engine, requests: Sequence[Request]) -> list[float]:
    """CPU time of each step until all of them have ended."""
    for request in requests:
        engine.add(request, time.monotonic())
    seconds = []
    while engine.has_work:
        began = time.process_time()
        stats = engine.step(time.monotonic()).stats
        seconds.append(time.process_time() - began)
    assert not stats.waiting, "a request waits for an adapter, and was not measured"
    return seconds


def _ttft(engine: Engine, tokens: Sequence[int]) -> float:
    return _seconds(engine, [_request(tokens, 1)])


def _run(engine: Engine, requests: Sequence[Request], on_step: Callable[[EngineStats], None] = lambda _: None) -> None:
    for request in requests:
        engine.add(request, time.monotonic())
    while engine.has_work:
        report = engine.step(time.monotonic())
        on_step(report.stats)
        assert all(output.finish_reason is not FinishReason.ERROR for output in report.outputs), "a request failed"
