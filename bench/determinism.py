"""Benchmark of `deterministic`: the same requests through two engines that differ in nothing else."""

import time
from pathlib import Path

from bench.figures import Figure, Section
from bench.servers import EMBEDDED_MODEL
from slipway_runtime.engine.build import build_engine
from slipway_runtime.engine.engine import Engine
from slipway_runtime.messages import Request, SamplingParams

PROMPT, OUTPUT, ROUNDS = 256, 32, 3  # tokens, tokens, the best of


def measure(model: Path = EMBEDDED_MODEL, at_once: tuple[int, ...] = (1, 8)) -> Section:
    """Prefill and decode apart, in one thread each."""
    figures = []
    engines = {
        on: build_engine(model, deterministic=on, threads=1, max_num_seqs=max(at_once), kv_cache_bytes=1 << 28)
        for on in (False, True)
    }
    for count in at_once:
        best = {on: (float("inf"), float("inf")) for on in engines}
        for number in range(ROUNDS):  # in turns: a busy neighbour hits both
            for on, engine in engines.items():
                times = _seconds(engine, count, number)
                best[on] = (min(best[on][0], times[0]), min(best[on][1], times[1]))
        for index, phase in enumerate(("prefill", "decode")):
            plain, fixed = best[False][index], best[True][index]
            tokens = count * (PROMPT if phase == "prefill" else OUTPUT)
            figures.append(
                Figure(
                    f"deterministic {phase}, {count} at once",
                    fixed / plain,
                    "times as long",
                    f"{tokens / fixed:,.0f} tok/s instead of {tokens / plain:,.0f}",
                )
            )
    return Section("What deterministic costs, 1 thread", tuple(figures))


def _seconds(engine: Engine, count: int, number: int) -> tuple[float, float]:
    """Until each of `count` requests has its first token, and from there to the last."""
    params = SamplingParams(max_tokens=OUTPUT + 1, temperature=0.0, ignore_eos=True)
    for index in range(count):
        # No two prompts begin alike: nothing comes from the prefix cache.
        prompt = (3 + (number * count + index) % 1000, *range(5, PROMPT + 4))
        engine.add(Request(id=f"{number}-{index}", prompt_token_ids=prompt, params=params, arrived=0.0), 0.0)
    waiting, started, first = {f"{number}-{index}" for index in range(count)}, time.perf_counter(), 0.0
    while engine.has_work:
        for output in engine.step(time.perf_counter()).outputs:
            waiting.discard(output.request_id)
        if not waiting and not first:
            first = time.perf_counter()
    return first - started, time.perf_counter() - first
