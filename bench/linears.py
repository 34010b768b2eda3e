"""Benchmark of the matrix products of one step: each weight format, against MKL's and oneDNN's own products."""

import os
import time
from collections.abc import Callable

import torch

from bench.figures import Figure, Section
from bench.shapes import linear_sizes
from slipway_runtime.kernels import native
from slipway_runtime.layers.matmul import Dense, Matmul
from slipway_runtime.layers.matmul_cpu import (
    MklPacked,
    NativeBf16,
    NativeInt8,
    NativePacked,
    OneDnnPacked,
    computes_bf16,
)
from slipway_runtime.layers.matmul_quantized import DynamicInt8

SHAPE = os.environ.get("SLIPWAY_BENCH_SHAPE", "135m")
THREADS = int(os.environ.get("SLIPWAY_BENCH_THREADS", "1").partition(",")[0])
LAYERS = 8  # enough that weights come from memory, as they do in a model
ROWS = (1, 8, 32, 128, 512)
# CPU time is steadier on a busy machine, but adds up the threads.
CLOCK = time.process_time if THREADS == 1 else time.perf_counter


def measure() -> Section:
    """The best of several rounds, with the forms interleaved, so that other load affects all of them."""
    torch.set_num_threads(THREADS)
    native.set_threads(THREADS)
    library = native.library()
    weights = [torch.randn(out, size) / size**0.5 for out, size in linear_sizes(SHAPE)[: 4 * LAYERS]]
    makers: dict[str, Callable[[torch.Tensor], Matmul]] = {
        "F.linear": Dense,
        "MKL": MklPacked,
        "oneDNN int8": DynamicInt8,
    }
    if computes_bf16():
        makers["oneDNN bf16"] = lambda weight: OneDnnPacked(weight.bfloat16())
    if library is not None:
        makers["ours bf16"] = lambda weight: NativeBf16(weight, library)
        makers["ours"] = lambda weight: NativePacked(weight, library)
        makers["ours, of bf16 numbers"] = lambda weight: NativePacked(weight.bfloat16().float(), library)
        if library.multiplies_bytes:
            makers["ours int8"] = lambda weight: NativeInt8(weight, library)
    forms = {name: [make(weight) for weight in weights] for name, make in makers.items()}
    figures = []
    for rows in ROWS:
        best = _best_seconds(forms, rows)
        figures += [Figure(f"{rows} rows: {name}", seconds * 1e3, "ms") for name, seconds in best.items()]
        pairs = (
            ("ours", "MKL"),
            ("ours, of bf16 numbers", "MKL"),
            ("ours bf16", "oneDNN bf16"),
            ("ours int8", "oneDNN int8"),
        )
        for ours, peer in pairs:
            if ours in best and peer in best:
                figures.append(Figure(f"{rows} rows: {ours}, speed ÷ {peer}", best[peer] / best[ours], "×"))
    return Section(f"Linears of {LAYERS} layers in the shape of {SHAPE}, {THREADS} thread(s)", tuple(figures))


def _best_seconds(forms: dict[str, list[Matmul]], rows: int) -> dict[str, float]:
    best = dict.fromkeys(forms, float("inf"))
    with torch.inference_mode():
        plain = {matmul.in_features: torch.randn(rows, matmul.in_features) for matmul in forms["F.linear"]}
        rounded = {size: x.bfloat16() for size, x in plain.items()}  # ours rounds rows itself, within its time
        for _ in range(15 if rows < 64 else 5):
            for name, matmuls in forms.items():
                inputs = rounded if name == "oneDNN bf16" else plain
                begun = CLOCK()
                for matmul in matmuls:
                    matmul(inputs[matmul.in_features])
                best[name] = min(best[name], CLOCK() - begun)
    return best
