"""Benchmark of a decode step on a CPU: its parts, one call a layer against part by part, and the floor of its weights.

A step is what the engine does for each token: schedule, compute, sample, update. Times are CPU time of the process, the
best of some steps; the ways of computing alternate from step to step, so that other load affects all of them.
"""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Final
from unittest.mock import patch

import torch

from bench.figures import Figure, Section
from bench.shapes import checkpoint, linear_sizes
from slipway_runtime.engine.build import build_engine
from slipway_runtime.engine.engine import Engine
from slipway_runtime.kernels import native
from slipway_runtime.layers.native_layer import NativeLayer
from slipway_runtime.messages import Request, SamplingParams

SHAPE = os.environ.get("SLIPWAY_BENCH_SHAPE", "135m")
ROWS = (1, 8, 32)
STEPS = int(os.environ.get("SLIPWAY_BENCH_STEPS", "24"))
PROMPT = 32
_FORMS: Final = {  # options of the engine, bytes of a weight
    "fp32": ({"dtype": "fp32"}, 2),  # the checkpoint has bfloat16, whose numbers stay so (ADR 103)
    "bf16": ({"dtype": "bf16"}, 2),
    "int8": ({"dtype": "bf16", "quantization": "int8"}, 1),
}
_PARTS: Final = {
    "linear": "matrices",
    "linear_widened": "matrices",
    "linear_bf16": "matrices",
    "linear_bytes": "matrices",
    "attend_pages": "attention",
    "rms_norm": "norms, rotation, activation",
    "add_rms_norm": "norms, rotation, activation",
    "rope_and_store": "norms, rotation, activation",
    "swiglu": "norms, rotation, activation",
}


def measure() -> Section:
    """Every form of weights at every batch size."""
    torch.set_num_threads(1)
    weights = sum(out * size for out, size in linear_sizes(SHAPE))
    bandwidth = _read_bandwidth()
    figures = [Figure("memory read by one thread", bandwidth / 1e9, "GB/s")]
    for form, (options, size) in _FORMS.items():
        figures.append(Figure(f"{form}: floor of a step, weights read once", weights * size / bandwidth * 1e3, "ms"))
        figures += _form(form, options)
    return Section(f"Decode steps on a CPU: {SHAPE}, one thread, prompts of {PROMPT}, CPU time", tuple(figures))


def _form(form: str, options: dict[str, Any]) -> Iterator[Figure]:
    engine = _an_engine(options)
    torch_engine = None
    if form == "bf16":
        with patch.object(native, "library", lambda: None):
            torch_engine = _an_engine(options)
    for rows in ROWS:
        best, parts = _steps(engine, rows)
        whole, by_part = best["one call a layer"], best["part by part"]
        yield Figure(f"{form}, {rows} rows: step", whole * 1e3, "ms", f"{rows / whole:.0f} tok/s")
        yield Figure(f"{form}, {rows} rows: speed ÷ part by part", by_part / whole, "×")
        for part, seconds in parts.items():
            yield Figure(f"{form}, {rows} rows: {part}", seconds / by_part * 100, "%", "of a step part by part")
        rest = 1 - sum(parts.values()) / by_part
        yield Figure(f"{form}, {rows} rows: Python, embedding, sampling", rest * 100, "%", "of a step part by part")
        if torch_engine is not None:
            theirs = _steps(torch_engine, rows)[0]["part by part"]
            yield Figure(f"{form}, {rows} rows: speed ÷ torch alone", theirs / whole, "×", "oneDNN and the reference")


def _an_engine(options: dict[str, Any]) -> Engine:
    return build_engine(
        checkpoint(SHAPE),
        max_model_len=PROMPT + 4 * STEPS,
        max_num_seqs=max(ROWS),
        max_num_batched_tokens=max(ROWS) * PROMPT,
        kv_cache_bytes=1 << 30,
        threads=1,
        prefix_caching=False,
        **options,
    )


def _steps(engine: Engine, rows: int) -> tuple[dict[str, float], dict[str, float]]:
    """The best seconds of a decode step by the way of computing, and the parts of the best one part by part."""
    params = SamplingParams(max_tokens=3 * STEPS + 2, temperature=0.0, ignore_eos=True)
    for index in range(rows):
        prompt = tuple(10 + (7 * index + 3 * at) % 3000 for at in range(PROMPT))
        engine.add(Request(id=f"{index}", prompt_token_ids=prompt, params=params, arrived=0.0), time.monotonic())
    engine.step(time.monotonic())
    best: dict[str, float] = {}
    parts: dict[str, float] = {}
    plain = patch.object(NativeLayer, "computes", lambda *_: False)
    for _ in range(STEPS):
        best["one call a layer"] = min(best.get("one call a layer", 9.0), _timed(engine))
        with plain:
            best["part by part"] = min(best.get("part by part", 9.0), _timed(engine))
            own = _parts(engine)
        parts = {name: min(seconds, parts.get(name, 9.0)) for name, seconds in own.items()}
    while engine.has_work:
        engine.step(time.monotonic())
    return best, parts


def _timed(engine: Engine) -> float:
    begun = time.process_time()
    engine.step(time.monotonic())
    return time.process_time() - begun


def _parts(engine: Engine) -> dict[str, float]:
    """Seconds in each kind of compiled function during one step."""
    library = native.library()
    if library is None:
        return {}
    spent: defaultdict[str, float] = defaultdict(float)

    def timed(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*given: object) -> object:
            begun = time.process_time()
            try:
                return function(*given)
            finally:
                spent[_PARTS[name]] += time.process_time() - begun

        return call

    originals = {name: getattr(library, name) for name in _PARTS if hasattr(library, name)}
    try:
        for name, function in originals.items():
            setattr(library, name, timed(name, function))
        engine.step(time.monotonic())
    finally:
        for name, function in originals.items():
            setattr(library, name, function)
    return dict(spent)


def _read_bandwidth() -> float:
    """Bytes a second of a sum over memory that no cache holds."""
    numbers = torch.ones(64 << 20)
    best = 9.0
    for _ in range(8):
        begun = time.process_time()
        numbers.sum()
        best = min(best, time.process_time() - begun)
    return numbers.nbytes / best
