"""Benchmark of GPU kernels and whole steps, `python -m bench.gpu`: measured beside what the plan on paper says.

The plan (`bench.gpu_plan`) is made for this card: its bandwidth and peak are those of a copy and of cuBLAS in the same
run, not the data sheet's. So a ratio above 1 is a share of bandwidth or peak that was assumed too high, or time between
kernels. Prefill and decode are told apart. Steps are the runtime's own, with weights that mean nothing, each launched
before the one before it is read.
"""

import argparse
import gc
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.figures import Figure, Section
from bench.gpu_models import PUBLISHED
from bench.gpu_plan import CARDS, Card, Forms, Planned, decode, layers_of, prefill, table
from bench.gpu_steps import SAMPLED, Machine, plan_after, with_layers
from slipway_runtime.models.config import parse_config
from slipway_runtime.worker.capture import CudaCapture, free_device_memory

STEPS_TIMED = 16


@dataclass(frozen=True)
class Shape:
    """The dimensions of a model that say how many bytes a decode step reads."""

    name: str
    layers: int
    hidden: int
    inner: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    def kv_bytes(self, rows: int, context: int) -> int:
        """In bf16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim * rows * context


SHAPES = (
    Shape("Qwen3-0.6B", 28, 1024, 3072, 16, 8, 128, 151_936),
    Shape("Llama-3.1-8B", 32, 4096, 14_336, 32, 8, 128, 128_256),
)
STEPS = ((1, 1024), (1, 8192), (32, 2048), (256, 1024))  # rows, context
PROMPTS = (2048, 8192)


def measure() -> Section:
    """Needs a GPU."""
    bandwidth, peak = _copy_bandwidth(), _cublas_peak()
    figures = [
        Figure("copy bandwidth", bandwidth / 1e9, "GB/s", "1 GiB, read and written"),
        Figure("cuBLAS peak", peak / 1e12, "TFLOP/s", "8192³, bf16"),
    ]
    for shape in SHAPES:
        for rows, context in STEPS:
            figures += _decode(shape, rows, context, bandwidth)
        for length in (512, 2048, 8192):
            figures += _prefill(shape, length, peak)
        figures += _rowwise(shape, bandwidth)
        figures += whole_steps(shape.name, torch.device("cuda"), card_here(bandwidth, peak), STEPS, PROMPTS)
    return Section(f"kernels on {torch.cuda.get_device_name()}", tuple(figures))


def card_here(bandwidth: float, peak: float) -> Card:
    """This machine's GPU, with these bytes and operations a second."""
    facts = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Card(bandwidth, peak, facts.multi_processor_count, facts.total_memory)


def whole_steps(
    model: str,
    device: torch.device,
    card: Card,
    steps: Sequence[tuple[int, int]],
    prompts: Sequence[int],
    **settings: Any,
) -> Iterator[Figure]:
    """Decode steps (rows, context) and prompts (tokens) of a model, each ÷ its plan. settings: of the machine."""
    for rows, context in steps:
        planned = decode(model, card, rows, context)
        with a_real_machine(model, device, rows, context, **settings) as machine:
            measured = step_seconds(machine, rows, context)
        yield _beside(planned, measured)
    for tokens in prompts:
        planned = prefill(model, card, tokens)
        with a_real_machine(model, device, 1, tokens, **settings) as machine:
            measured = prompt_seconds(machine, tokens)
        yield _beside(planned, measured)


def _beside(planned: Planned, measured: float) -> Figure:
    note = f"measured {measured * 1e3:.2f} ms, planned {planned.seconds * 1e3:.2f}"
    return Figure(f"{planned.model}, {planned.case}: measured ÷ planned", measured / planned.seconds, "×", note)


@contextmanager
def a_real_machine(model: str, device: torch.device, rows: int, context: int, **settings: Any) -> Iterator[Machine]:
    """The model with all its layers, and room for the steps that are timed; on a GPU its steps are captured.

    Its memory is free afterwards, at once: runner and graphs refer to each other, and two machines of an 8B model with
    256 rows are more than a card has.
    """
    config = with_layers(parse_config(PUBLISHED[model]), layers_of(model))
    machine = Machine(config, device, rows=rows, longest=context + 2 * STEPS_TIMED, **settings)
    try:
        if device.type == "cuda":
            with torch.inference_mode():
                machine.runner.capture_graphs(CudaCapture(device))
        yield machine
    finally:
        machine.close()
        del machine
        gc.collect()
        if device.type == "cuda":
            free_device_memory()


def step_seconds(machine: Machine, rows: int, context: int) -> float:
    """Of a decode step, the mean of STEPS_TIMED, each launched before anything of the one before is read."""
    plan = machine.prepare([1] * rows, [context - 1] * rows, SAMPLED)  # as planned
    machine.runner.execute(plan)
    begun, pending = time.perf_counter(), []
    for _ in range(STEPS_TIMED):
        plan = plan_after(plan)
        pending.append(machine.runner.launch(plan))
        if len(pending) == 2:
            pending.pop(0)()
    pending.pop()()
    return (time.perf_counter() - begun) / STEPS_TIMED


def prompt_seconds(machine: Machine, tokens: int) -> float:
    """Of a prompt and its first sample, the best of three."""
    best = math.inf
    for _ in range(3):
        plan = machine.prepare([tokens], [0])
        begun = time.perf_counter()
        machine.runner.execute(plan)
        best = min(best, time.perf_counter() - begun)
    return best


def _seconds(run: Callable[[], object]) -> float:
    from triton.testing import do_bench  # flushes the L2 cache between runs

    return float(do_bench(run, warmup=25, rep=100, return_mode="median")) / 1e3


def _copy_bandwidth() -> float:
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source))


def _cublas_peak() -> float:
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    return 2 * 8192**3 / _seconds(lambda: a @ a)


def _moved(name: str, moved: int, seconds: float, bandwidth: float) -> list[Figure]:
    return [
        Figure(name, moved / seconds / 1e9, "GB/s", f"{seconds * 1e6:.1f} µs"),
        Figure(f"{name}, of the copy bandwidth", 100 * moved / seconds / bandwidth, "%"),
    ]


def _attention(shape: Shape, past: int, new: int, rows: int) -> Callable[[], object]:
    from slipway_runtime.kernels import gpu

    page = 16
    blocks = -(-(past + new) // page)
    like = torch.empty(0, dtype=torch.bfloat16, device="cuda")
    cache = like.new_zeros(rows * blocks + 1, 2, shape.kv_heads, page, shape.head_dim)
    tables = np.random.default_rng(0).permutation(rows * blocks).reshape(rows, blocks) + 1
    plan = gpu.plan_attention(np.full(rows, past), np.full(rows, new), tables, page, like)
    heads = torch.randn(rows * new, shape.q_heads + 2 * shape.kv_heads, shape.head_dim, device="cuda").to(like.dtype)
    kv = heads[:, shape.q_heads :].view(-1, 2, shape.kv_heads, shape.head_dim)
    q, scale = heads[:, : shape.q_heads], shape.head_dim**-0.5
    return lambda: gpu.paged_attention(q, kv, cache, plan, scale)


def _decode(shape: Shape, rows: int, context: int, bandwidth: float) -> list[Figure]:
    seconds = _seconds(_attention(shape, context - 1, 1, rows))
    moved = shape.kv_bytes(rows, context) // shape.layers
    return _moved(f"{shape.name} decode attention, {rows} × {context}", moved, seconds, bandwidth)


def _prefill(shape: Shape, length: int, peak: float) -> list[Figure]:
    seconds = _seconds(_attention(shape, 0, length, 1))
    flops = 2 * length * length * shape.q_heads * shape.head_dim  # two products, half of each: causal
    name = f"{shape.name} prefill attention, {length}"
    return [
        Figure(name, flops / seconds / 1e12, "TFLOP/s", f"{seconds * 1e6:.1f} µs"),
        Figure(f"{name}, of the cuBLAS peak", 100 * flops / seconds / peak, "%"),
    ]


def _rowwise(shape: Shape, bandwidth: float) -> list[Figure]:
    from slipway_runtime.kernels import gpu

    tokens = 4096

    def some(*size: int) -> torch.Tensor:
        return torch.randn(*size, device="cuda").to(torch.bfloat16)

    x, residual, weight = some(tokens, shape.hidden), some(tokens, shape.hidden), some(shape.hidden)
    gate_up, scores = some(tokens, 2 * shape.inner), some(256, shape.vocabulary).float()
    one = torch.ones(256, device="cuda")
    whole = torch.zeros(256, dtype=torch.int64, device="cuda")
    runs: list[tuple[str, int, Callable[[], object]]] = [
        ("add and norm", 4 * x.nbytes, lambda: gpu.add_rms_norm(x, residual, weight, 1e-5)),
        ("SwiGLU", gate_up.nbytes * 3 // 2, lambda: gpu.swiglu(gate_up)),
        ("sample of 256", scores.nbytes, lambda: gpu.sample(scores, one, whole, one, 0 * one, whole, whole)),
        (
            "sample of 256, top-p",
            scores.nbytes,
            lambda: gpu.sample(scores, one, whole, 0.9 * one, 0 * one, whole, whole),
        ),
    ]
    return [
        figure
        for name, moved, run in runs
        for figure in _moved(f"{shape.name} {name}", moved, _seconds(run), bandwidth)
    ]


def main() -> int:
    """Print, and write JSON where asked."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--plan", nargs=2, metavar=("MODEL", "CARD"), help="a roofline on paper; needs no GPU")
    parser.add_argument("--weights", choices=("none", "int8", "fp8"), default="none", help="of --plan")
    parser.add_argument("--kv", choices=("auto", "fp8", "int8"), default="auto", help="of --plan")
    options = parser.parse_args()
    if options.plan:
        model, card = options.plan
        if model not in PUBLISHED or card not in CARDS:
            parser.error(f"--plan takes one of {', '.join(PUBLISHED)} and one of {', '.join(CARDS)}")
        print(table(model, card, Forms(options.weights, options.kv)))
        return 0
    if not torch.cuda.is_available():
        print("There is no GPU here that torch can use: nothing was measured.")
        return 0
    from rich.console import Console

    section = measure()
    Console(width=None if sys.stdout.isatty() else 140).print(section.table())
    if options.json:
        options.json.write_text(json.dumps(asdict(section), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
