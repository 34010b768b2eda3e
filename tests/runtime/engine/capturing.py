"""Captures of ranks on a CPU, in this process and in those that it starts: a rank fails in one of them, if it is told.

What a rank runs before each capture gathers logits from all ranks over gloo, as on GPUs over NCCL.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from slipway_runtime.engine import build, warmup
from slipway_runtime.worker.capture import Capture, CapturedGraph, SharedCapture
from slipway_runtime.worker.collective import Collective
from slipway_runtime.worker.runner import Runner

ROOT = Path(__file__).parents[3]
FAULT = "TEST_CAPTURE_FAULT"  # rank, phase and number of the capture that fails, such as `1 record 2`
CAPTURES = 4


class FaultyCapture:
    """Runs like `CudaCapture`; its record computes nothing."""

    def __init__(self, rank: int) -> None:
        self._number = 0
        name, phase, number = os.environ[FAULT].split()
        self._fails = (phase, int(number)) if int(name) == rank else None

    def run(self, compute: Callable[[], object]) -> None:
        self._number += 1
        self._may_fail("run")
        compute()

    def record(self, compute: Callable[[], object]) -> CapturedGraph:
        self._may_fail("record")
        return CapturedGraph(compute)

    def _may_fail(self, phase: str) -> None:
        if self._fails == (phase, self._number):
            raise RuntimeError("operation not permitted when stream is capturing\nand more")


def _capture_graphs(runner: Runner, capture: Capture) -> None:
    hidden = torch.zeros(2, runner.decoder._norm.weight.shape[0])
    with torch.inference_mode():
        runner.graphs = [capture(lambda: runner.decoder.logits(hidden)) for _ in range(CAPTURES)]  # type: ignore[assignment]
    runner.graphs = None  # these compute no steps


def _capture_steps(runner: Runner, device: torch.device, collective: Collective | None = None) -> str:
    assert collective is not None
    return warmup.try_capture(runner, SharedCapture(FaultyCapture(collective.rank), collective), device)


def install_here() -> None:
    """For a process that is started: called before anything else is imported."""
    Runner.capture_graphs = _capture_graphs  # type: ignore[method-assign]
    warmup.capture_steps = _capture_steps


def fail_in(fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks of engines that are built from now on capture on a CPU, and one of them fail. fault: as FAULT."""
    (folder / "sitecustomize.py").write_text(
        "import sys\nif '-m' in sys.orig_argv and 'slipway_runtime.engine.rank' in sys.orig_argv:\n"
        "    from tests.runtime.engine.capturing import install_here\n    install_here()\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT), *sys.path]))
    monkeypatch.setenv(FAULT, fault)
    monkeypatch.setattr(Runner, "capture_graphs", _capture_graphs)
    monkeypatch.setattr(build, "capture_steps", _capture_steps)
