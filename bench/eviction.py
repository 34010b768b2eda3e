"""Benchmark of eviction: one budget for adapters and KV against two LRUs with a fixed split, on a simulated machine.

    python -m bench eviction

The splits are chosen in hindsight: which of them is best differs from trace to trace. The policy was tuned on other
seeds and other shapes (100-104, see ADR 11) than those played here.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Final

from bench.figures import Figure, Section
from slipway_runtime.scheduling.trace import Machine, TraceRequest, play, skewed_trace

SEEDS: Final = range(5)
SPLITS: Final = (0.125, 0.25, 0.375, 0.5)  # the share of memory that is the adapters', always


def measure() -> Section:
    """Both shapes of trace."""
    hot = [skewed_trace(random.Random(seed).random, requests=300) for seed in SEEDS]
    flat = [
        skewed_trace(random.Random(seed).random, adapters=32, requests=300, exponent=0.9, prefix_tokens=64, gap_ms=50.0)
        for seed in SEEDS
    ]
    return Section(
        "Eviction: mean TTFT of 5 traces of 300 requests, in milliseconds of a simulated machine",
        (
            *_shape("64 adapters, Zipf 1.1, 128 shared tokens", hot),
            *_shape("32 adapters, Zipf 0.9, 64 shared tokens", flat),
        ),
    )


def _shape(name: str, traces: Sequence[list[TraceRequest]]) -> Iterator[Figure]:
    aware = [play(trace, dependency_aware=True) for trace in traces]
    splits = {
        share: [play(trace, Machine(adapter_share=share), dependency_aware=False) for trace in traces]
        for share in SPLITS
    }
    best = [min(results[index].mean_ttft_ms for results in splits.values()) for index in range(len(traces))]
    wins = sum(ours.mean_ttft_ms < theirs for ours, theirs in zip(aware, best, strict=True))
    for label, results in (("one budget", aware), *((f"{share:.1%} adapters", r) for share, r in splits.items())):
        ttft = sum(result.mean_ttft_ms for result in results) / len(results)
        invalid = sum(result.mean_invalid_share for result in results) / len(results)
        each = " ".join(f"{result.mean_ttft_ms:.0f}" for result in results)
        yield Figure(f"{name}: {label}", ttft, "ms", f"KV of absent adapters {invalid:.1%}; each: {each}")
    ratio = sum(result.mean_ttft_ms for result in aware) / sum(best)
    yield Figure(f"{name}: ÷ the best split of each trace", ratio, "×", f"faster on {wins} of {len(traces)}")
