"""Steps that fail in the middle of their computation, as they do where another process takes the device's memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from slipway_runtime.engine.engine import Engine

STOLEN = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.06 GiB free.\nSee documentation"


def out_of_memory() -> Exception:
    return torch.OutOfMemoryError(STOLEN)


@contextmanager
def failing(engine: Engine, times: int, error: Callable[[], Exception] = out_of_memory) -> Iterator[None]:
    """The next computations meet this in the last layer, when those before have written their KV."""
    layers = engine._sleeper._runner.decoder.layers
    left, last = iter(range(times)), layers[-1]

    def failing_layer(*inputs: object) -> torch.Tensor:
        if next(left, None) is not None:
            raise error()
        return last(*inputs)

    layers[-1] = failing_layer
    try:
        yield
    finally:
        layers[-1] = last
