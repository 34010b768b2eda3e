"""A shortage of memory while an engine is built becomes one sentence for the user, not a traceback that comes back."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from slipway_runtime.models.config import DoesNotFitError
from slipway_runtime.worker.shortage import StepOutOfMemoryError, is_shortage


@contextmanager
def shortage_refused(doing: str, device: torch.device) -> Iterator[None]:
    """Raise DoesNotFitError where the memory of this device, or of the host, does not last for what is being done."""
    try:
        yield
    except (MemoryError, RuntimeError, StepOutOfMemoryError) as error:
        if not is_shortage(error):
            raise
        advice = (
            "lower gpuMemoryUtilization or maxNumSeqs, or take a larger GPU"
            if device.type == "cuda"
            else "give the container more memory, or set a smaller kvCache.bytes or maxNumSeqs"
        )
        raise DoesNotFitError(f"there is not enough memory on {device} for {doing}: {advice}") from error
