"""One thread: the tests share the machine, and two OpenMP threads on shared cores wait for each other."""

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from slipway_runtime.kernels import native

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def quicker_interpreter() -> Iterator[None]:
    from tests.runtime.interpreter import repeating_less  # it imports Triton, which only now knows how to run kernels

    with repeating_less():
        yield


@pytest.fixture
def torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without the compiled kernels."""
    monkeypatch.setattr(native, "library", lambda: None)
