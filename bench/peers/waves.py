"""The interface of every engine driver, ours and the peers': waves of equal requests, timed at the engine's Python API.

stdin (JSON):  checkpoint, shape, weights (none|int8), dtype (fp32|bf16), threads, rounds, concurrency, prompt_tokens,
               max_tokens, clock (wall|cpu: the process's CPU time, for one thread on a busy machine), and the peer's
               own settings
stdout, last line (JSON):  ttft [s], gaps [s], tokens_per_second, prefill_tokens_per_second, decode_tokens_per_second,
                           at_once (the most requests that were between their first and their last token),
                           settings (version and settings, for the table), setup_seconds (load and compile: not counted)

A wave is `concurrency` requests at once, greedy, of the same lengths; the next one starts when it has ended, so that
an engine without continuous batching is not at a disadvantage. Prefill and decode are told apart: prefill ends when
every request of the wave has its first token. Standard library only: the peers' environments import this file.
"""

import json
import random
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

# Adds the requests of a wave and calls `tick(index)` whenever request `index` got a token, until all have ended.
Wave = Callable[[Sequence[list[int]], int, Callable[[int], None]], None]


@dataclass
class Timings:
    """Arrival times of the tokens of one wave."""

    begun: float
    clock: Callable[[], float]
    ticks: dict[int, list[float]] = field(default_factory=dict)

    def tick(self, index: int) -> None:
        """Request `index` has one more token."""
        self.ticks.setdefault(index, []).append(self.clock())


def drive(task: dict[str, Any], wave: Wave, clock: Callable[[], float] = time.perf_counter) -> dict[str, Any]:
    """Run all waves of a task, after one that only warms up, and sum up."""
    count, length, tokens = task["concurrency"], task["prompt_tokens"], task["max_tokens"]
    draw = random.Random(0)

    def fresh() -> list[list[int]]:  # no two alike: a prefix cache must not help
        return [[draw.randrange(10, 4000) for _ in range(length)] for _ in range(count)]

    wave([prompt[:32] for prompt in fresh()], min(4, tokens), lambda index: None)
    ttft: list[float] = []
    gaps: list[float] = []
    prefill = decode = 0.0
    at_once = 0
    for _ in range(task["rounds"]):
        prompts, timings = fresh(), Timings(clock(), clock)
        wave(prompts, tokens, timings.tick)
        ended = clock()
        assert sorted(timings.ticks) == list(range(count)), "a request got no token"
        assert all(len(ticks) == tokens for ticks in timings.ticks.values()), "every answer has the asked length"
        first = [ticks[0] for ticks in timings.ticks.values()]
        ttft += [tick - timings.begun for tick in first]
        gaps += [later - earlier for ticks in timings.ticks.values() for earlier, later in pairwise(ticks)]
        at_once = max(at_once, _most_at_once(timings.ticks.values()))
        prefill += max(first) - timings.begun
        decode += ended - max(first)
    made = task["rounds"] * count
    return {
        "at_once": at_once,
        "ttft": ttft,
        "gaps": gaps,
        "tokens_per_second": made * tokens / (prefill + decode),
        "prefill_tokens_per_second": made * length / prefill,
        "decode_tokens_per_second": made * (tokens - 1) / decode if decode else 0.0,
    }


def _most_at_once(answers: Collection[Sequence[float]]) -> int:
    """The largest number of answers that had begun and not ended at one moment: what the engine made of the load."""
    changes = sorted([(ticks[0], 1) for ticks in answers] + [(ticks[-1], -1) for ticks in answers])
    return max(accumulate(change for _, change in changes))


def main(open_engine: Callable[[dict[str, Any]], Wave]) -> None:
    """Read the task, open the engine, drive it, print the result. `open_engine` may describe itself in `settings`."""
    task = json.load(sys.stdin)
    begun = time.perf_counter()
    wave = open_engine(task)
    setup = time.perf_counter() - begun
    clock = time.process_time if task.get("clock") == "cpu" else time.perf_counter
    result = drive(task, wave, clock) | {"settings": task.get("settings", ""), "setup_seconds": setup}
    print(json.dumps(result), flush=True)
