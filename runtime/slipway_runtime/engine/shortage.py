"""A shortage of memory while an engine is built becomes one sentence for the user, not a traceback that comes back."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from slipway_runtime.models.config import DoesNotFitError

_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory", "cublas_status_alloc_failed")


@contextmanager
def shortage_refused(doing: str, device: torch.device) -> Iterator[None]:
    """Raise DoesNotFitError where the memory of this device, or of the host, does not last for what is being done."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError, and so are those of graphs
        if not isinstance(error, MemoryError) and not any(word in str(error).lower() for word in _WORDS):
            raise
        advice = (
            "lower gpuMemoryUtilization or maxNumSeqs, or take a larger GPU"
            if device.type == "cuda"
            else "give the container more memory, or set a smaller kvCache.bytes or maxNumSeqs"
        )
        raise DoesNotFitError(f"there is not enough memory on {device} for {doing}: {advice}") from error
