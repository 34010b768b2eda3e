"""OOM (out of memory) errors: recognises them; raises StepOutOfMemoryError in a step, DoesNotFitError at the start."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from slipway_runtime.models.config import DoesNotFitError

_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory", "cublas_status_alloc_failed")


class StepOutOfMemoryError(Exception):
    """Computing a step ran out of memory. The step has no samples and no KV; all other state is unchanged."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is an OOM. torch.OutOfMemoryError is a RuntimeError, and so are OOM errors of CUDA graphs."""
    if isinstance(error, MemoryError | StepOutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _WORDS)


@contextmanager
def step_out_of_memory() -> Iterator[None]:
    """Raise an OOM error as StepOutOfMemoryError."""
    try:
        yield
        return
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        told = (str(error) or type(error).__name__).splitlines()[0][:300]
    # Raised outside of `except`: the old error's frames, whose tensors fill the memory, are no longer referenced.
    raise StepOutOfMemoryError(told)


@contextmanager
def oom_refused(doing: str, device: torch.device) -> Iterator[None]:
    """Raise an OOM error of the device or the host as DoesNotFitError. doing: the activity, for the message."""
    try:
        yield
    except (MemoryError, RuntimeError, StepOutOfMemoryError) as error:
        if not is_out_of_memory(error):
            raise
        advice = (
            "lower gpuMemoryUtilization or maxNumSeqs, or take a larger GPU"
            if device.type == "cuda"
            else "give the container more memory, or set a smaller kvCache.bytes or maxNumSeqs"
        )
        raise DoesNotFitError(f"there is not enough memory on {device} for {doing}: {advice}") from error
