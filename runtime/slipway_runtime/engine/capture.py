"""CUDA graph capture of decode steps while an engine is built; an engine whose capture fails works without graphs."""

import torch

from slipway_runtime.worker.graphs import Capture
from slipway_runtime.worker.out_of_memory import oom_refused
from slipway_runtime.worker.runner import Runner


def capture_or_say_why_not(runner: Runner, capture: Capture, device: torch.device) -> str:
    """Capture the CUDA graphs of decode steps; why that failed, or an empty string. Kernels are warm by then.

    Raises DoesNotFitError where memory is short: an engine that serves with none left would fail under load.
    """
    try:
        with oom_refused("the CUDA graphs of decode steps", device):
            runner.capture_graphs(capture)
    except RuntimeError as error:
        runner.graphs = None
        told = str(error).partition("\n")[0]
        return f"decode steps could not be captured as CUDA graphs, and are computed one by one: {told}"
    return ""
