"""Out of memory: recognised in every wording; a step that meets it fails alone, a start that meets it is refused."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from slipway_runtime.models.config import DoesNotFitError

_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory", "cublas_status_alloc_failed")


class StepOutOfMemoryError(Exception):
    """The memory did not last for computing a step. Its samples and its KV are not there, all else is as before."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this tells of too little memory. torch.OutOfMemoryError is a RuntimeError, and so are those of graphs."""
    if isinstance(error, MemoryError | StepOutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _WORDS)


@contextmanager
def step_out_of_memory() -> Iterator[None]:
    """Raise StepOutOfMemoryError where the memory does not last."""
    try:
        yield
        return
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        told = (str(error) or type(error).__name__).splitlines()[0][:300]
    # Out here, where nothing holds the frames any more whose tensors fill the memory.
    raise StepOutOfMemoryError(told)


@contextmanager
def oom_refused(doing: str, device: torch.device) -> Iterator[None]:
    """Raise DoesNotFitError where the memory of this device, or of the host, does not last for what is being done."""
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
