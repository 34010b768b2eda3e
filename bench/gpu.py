"""Benchmark of GPU kernels and whole steps: `python -m bench.gpu [--only NAMES] [--budget SECONDS] [--json FILE]`.

Parts run in the order of their worth: the tests that need a GPU, what the card reaches, attention beside torch's own,
whole steps beside the plan on paper (`bench.gpu_plan`), then the rest. Each part is printed, and appended to FILE as a
line of JSON, as soon as it ends, so a run that is cut off leaves what it had. A part that the budget has no room for is
named and left out; a part that fails is named too, and the others go on.

The plan is made for this card: its bandwidth and peak are those of a copy and of cuBLAS in the same run, not the data
sheet's. Steps are the runtime's own, with random weights, each launched before the one before it is read.

Without a network: any Python with torch, triton, numpy, msgspec, structlog and rich runs it from a checkout, with
PYTHONPATH=runtime:api:. in front; the first part needs pytest and hypothesis too.
"""

import argparse
import gc
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from bench import gpu_kernels
from bench.figures import Figure, Section
from bench.gpu_kernels import CONTEXTS, KV, PROMPTS, SHAPES, Ceilings, Timer
from bench.gpu_models import PUBLISHED
from bench.gpu_plan import CARDS, Card, Forms, Planned, decode, layers_of, prefill, table
from bench.gpu_steps import SAMPLED, Machine, plan_after, with_layers
from slipway_runtime.models.config import parse_config
from slipway_runtime.worker.capture import CudaCapture, free_device_memory

STEPS_TIMED = 16
STEPS = ((1, 1024), (32, 2048), (256, 1024))  # rows, context
ROOT = Path(__file__).parent.parent


class Here:
    """The card of this machine; what it reaches is measured once, when a part first needs it."""

    device = torch.device("cuda")

    @cached_property
    def timer(self) -> Timer:
        """Takes times with CUDA's events."""
        return gpu_kernels.on_gpu()

    @cached_property
    def ceilings(self) -> Ceilings:
        """The rates of a copy and of a matrix product on this card."""
        return gpu_kernels.ceilings(self.device, self.timer)


@dataclass(frozen=True)
class Part:
    """A part of the benchmark. seconds: on an H100, for the budget."""

    seconds: int
    run: Callable[[Here], Iterator[Figure]]


def _tests(here: Here) -> Iterator[Figure]:
    """The kernels against their definitions, first: a wrong kernel's time is worth nothing."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/runtime/kernels", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    last = (done.stdout.strip().splitlines() or [done.stderr.strip()[-200:]])[-1]
    yield Figure("pytest -m gpu tests/runtime/kernels: exit status", done.returncode, "", last, at_most=0)


def _ceilings(here: Here) -> Iterator[Figure]:
    yield Figure("copy", here.ceilings.bandwidth / 1e9, "GB/s", "1 GiB, read and written")
    yield Figure("product of bf16", here.ceilings.peak / 1e12, "TFLOP/s", "cuBLAS, 8192³")


def _decode(here: Here) -> Iterator[Figure]:
    for shape in SHAPES:
        yield from gpu_kernels.decode(shape, here.device, here.timer, here.ceilings, CONTEXTS, tuple(KV))


def _prefill(here: Here) -> Iterator[Figure]:
    for shape in SHAPES:
        yield from gpu_kernels.prefill(shape, here.device, here.timer, here.ceilings, PROMPTS)


def _rowwise(here: Here) -> Iterator[Figure]:
    for shape in SHAPES:
        yield from gpu_kernels.rowwise(shape, here.device, here.timer, here.ceilings)


def _steps(here: Here) -> Iterator[Figure]:
    card = card_here(here.ceilings.bandwidth, here.ceilings.peak)
    for shape in SHAPES:
        yield from whole_steps(shape.name, here.device, card, STEPS, PROMPTS)


def _quantized(here: Here) -> Iterator[Figure]:
    card = card_here(here.ceilings.bandwidth, here.ceilings.peak)
    for forms in (Forms(weights="int8"), Forms(weights="fp8"), Forms(kv="fp8")):
        settings = {"quantization": forms.weights, "kv_dtype": forms.kv}
        yield from whole_steps("Llama-3.1-8B", here.device, card, STEPS[1:2], (512, 2048), forms, **settings)


def _experts(here: Here) -> Iterator[Figure]:
    card = card_here(here.ceilings.bandwidth, here.ceilings.peak)
    yield from whole_steps("Qwen3-30B-A3B", here.device, card, STEPS[1:2], (2048,))


PARTS = {
    "tests": Part(120, _tests),
    "card": Part(3, _ceilings),
    "decode": Part(30, _decode),
    "prefill": Part(30, _prefill),
    "steps": Part(40, _steps),
    "quantized": Part(40, _quantized),
    "rows": Part(10, _rowwise),
    "experts": Part(40, _experts),
}


def measure(
    here: Here, parts: dict[str, Part], *, budget: float = math.inf, clock: Callable[[], float] = time.monotonic
) -> Iterator[tuple[str, Section]]:
    """The figures of each part as it ends. A part without room in what is left of the budget (seconds) has none."""
    begun = clock()
    for name, part in parts.items():
        left, at = budget - (clock() - begun), clock()
        figures: list[Figure] = []
        if part.seconds > left:
            title = f"{name}: left out, {left:.0f} s of the budget are left and it takes about {part.seconds} s"
            yield name, Section(title, ())
            continue
        try:
            figures += part.run(here)
            title = f"{name}: {clock() - at:.0f} s"
        except Exception as error:  # noqa: BLE001  whatever it is, the other parts have their time
            title = f"{name}: failed after {clock() - at:.0f} s, {type(error).__name__}: {str(error)[:300]}"
        yield name, Section(title, tuple(figures))


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
    forms: Forms = Forms(),  # noqa: B008  it has no state
    **settings: Any,
) -> Iterator[Figure]:
    """Decode steps (rows, context) and prompts (tokens) of a model, each ÷ its plan. settings: of the machine."""
    for rows, context in steps:
        planned = decode(model, card, rows, context, forms)
        with a_real_machine(model, device, rows, context, **settings) as machine:
            measured = step_seconds(machine, rows, context)
        yield _beside(planned, measured, forms)
    for tokens in prompts:
        planned = prefill(model, card, tokens, forms)
        with a_real_machine(model, device, 1, tokens, **settings) as machine:
            measured = prompt_seconds(machine, tokens)
        yield _beside(planned, measured, forms)


def _beside(planned: Planned, measured: float, forms: Forms) -> Figure:
    note = (
        f"measured {measured * 1e3:.2f} ms, planned {planned.seconds * 1e3:.2f}, "
        f"roofline {planned.roofline_seconds * 1e3:.2f}"
    )
    name = f"{planned.model}, {forms}, {planned.case}: measured ÷ planned"
    return Figure(name, measured / planned.seconds, "×", note)


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


def main() -> int:
    """Print each part as it ends, and append it to a file of JSON lines where one is named."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS), metavar="NAMES", help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS", help="start no part beyond it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append each part's figures there, a line of JSON")
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
    if unknown := set(options.only.split(",")) - PARTS.keys():
        parser.error(f"--only has {', '.join(sorted(unknown))}; the parts are {', '.join(PARTS)}")
    parts = {name: part for name, part in PARTS.items() if name in options.only.split(",")}
    if not torch.cuda.is_available():
        print("There is no GPU here that torch can use: nothing was measured.")
        return 0
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; estimated seconds: "
        + ", ".join(f"{name} {part.seconds}" for name, part in parts.items())
    )
    for name, section in measure(Here(), parts, budget=options.budget):
        console.print(section.table())
        if options.json:
            with options.json.open("a") as file:
                line = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "part": name}
                file.write(json.dumps(line | asdict(section)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
