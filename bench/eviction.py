"""Benchmark of eviction: the runtime's rule for adapters and KV in one budget, against other rules and fixed splits.

    python -m bench eviction

A simulated machine plays the same traces under each rule: adapters chosen by Zipf's law, flat and steep, with a
popularity that drifts, and in bursts. Two LRUs with a fixed split are the baseline; the best split of each trace is
chosen in hindsight, and differs from trace to trace.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from bench.eviction_rules import CostPerByte, OneLru, PrefixesFirst
from bench.figures import Figure, Section
from slipway_runtime.scheduling.block_pool import BlockPool
from slipway_runtime.scheduling.residency import EvictionRule
from slipway_runtime.scheduling.trace import Machine, TraceRequest, TraceResult, play, skewed_trace

SEEDS: Final = range(5)
REQUESTS: Final = 300
SPLITS: Final = (0.125, 0.25, 0.375, 0.5)  # the share of memory that is the adapters', always
SHAPES: Final = {
    "64 adapters, Zipf 1.1": {},
    "32 adapters, Zipf 0.9": {"adapters": 32, "exponent": 0.9, "prefix_tokens": 64, "gap_ms": 50.0},
    "drift": {"drift": 16},
    "bursts of up to 8": {"burst": 8},
}
RULES: Final[dict[str, Callable[[BlockPool, Machine], EvictionRule] | None]] = {
    "least popular (the runtime's)": None,
    "cost for each byte (GDSF)": CostPerByte,
    "one LRU": OneLru,
    "prefixes first": PrefixesFirst,
}


def measure() -> Section:
    """All shapes of trace."""
    title = f"Eviction: mean TTFT of {len(SEEDS)} traces of {REQUESTS} requests, in milliseconds of a simulated machine"
    return Section(title, tuple(figure for name in SHAPES for figure in _shape(name)))


def traces(shape: str, seeds: Sequence[int] = SEEDS, requests: int = REQUESTS) -> list[list[TraceRequest]]:
    """The traces of a shape."""
    return [skewed_trace(random.Random(seed).random, requests=requests, **SHAPES[shape]) for seed in seeds]  # type: ignore[arg-type]


def _shape(name: str) -> Iterator[Figure]:
    played = traces(name)
    by_rule = {label: [play(one, dependency_aware=True, rule=rule) for one in played] for label, rule in RULES.items()}
    splits = [[play(one, Machine(adapter_share=share), dependency_aware=False) for one in played] for share in SPLITS]
    ours = _mean([result.mean_ttft_ms for result in next(iter(by_rule.values()))])
    for label, results in by_rule.items():
        yield Figure(f"{name}: {label}", _mean([result.mean_ttft_ms for result in results]), "ms", _note(results))
    for label, results in list(by_rule.items())[1:]:
        yield Figure(f"{name}: ÷ {label}", ours / _mean([result.mean_ttft_ms for result in results]), "×")
    best = [min(results, key=lambda result: result.mean_ttft_ms) for results in zip(*splits, strict=True)]
    ratio = ours / _mean([result.mean_ttft_ms for result in best])
    yield Figure(f"{name}: ÷ two LRUs, the best split of each trace", ratio, "×", _note(best))


def _note(results: Sequence[TraceResult]) -> str:
    hits = _mean([result.prefix_hit_share for result in results])
    loads = _mean([result.loads for result in results])
    invalid = _mean([result.mean_invalid_share for result in results])
    seconds = loads * Machine().adapter_load_ms / 1000
    return f"{hits:.0%} of prompt tokens hit, {loads:.0f} loads ({seconds:.1f} s), KV of absent adapters {invalid:.0%}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
