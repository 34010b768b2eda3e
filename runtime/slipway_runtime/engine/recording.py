"""Recording decode steps while an engine is built: what a GPU gains from it, it must not depend on."""

import torch

from slipway_runtime.engine.shortage import shortage_refused
from slipway_runtime.worker.graphs import Record
from slipway_runtime.worker.runner import Runner


def record_or_say_why_not(runner: Runner, record: Record, device: torch.device) -> str:
    """Record; a sentence where that failed and every step is computed as planned. Kernels are warm by then.

    Raises DoesNotFitError where memory is short: an engine that serves with none left would fail under load.
    """
    try:
        with shortage_refused("the recordings of decode steps", device):
            runner.record_graphs(record)
    except RuntimeError as error:
        runner.graphs = None
        return f"decode steps could not be recorded, and are computed one by one: {error}".splitlines()[0]
    return ""
