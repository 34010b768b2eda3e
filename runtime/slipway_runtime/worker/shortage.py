"""A shortage of memory, whatever words it is told in; and what becomes of a step that meets one."""

from collections.abc import Iterator
from contextlib import contextmanager

_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory", "cublas_status_alloc_failed")


class StepOutOfMemoryError(Exception):
    """The memory did not last for computing a step. Its draws and its KV are not there, all else is as before."""


def is_shortage(error: BaseException) -> bool:
    """Whether this tells of too little memory. torch.OutOfMemoryError is a RuntimeError, and so are those of graphs."""
    if isinstance(error, MemoryError | StepOutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _WORDS)


@contextmanager
def step_shortage() -> Iterator[None]:
    """Raise StepOutOfMemoryError where the memory does not last."""
    try:
        yield
        return
    except (MemoryError, RuntimeError) as error:
        if not is_shortage(error):
            raise
        told = (str(error) or type(error).__name__).splitlines()[0][:300]
    # Out here, where nothing holds the frames any more whose tensors fill the memory.
    raise StepOutOfMemoryError(told)
