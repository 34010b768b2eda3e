"""Fixtures and hooks of every test: the local cluster, started on demand, and checks before and after the session."""

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import structlog

from e2e.cluster.fixtures import apiserver, cluster, own_apiserver
from e2e.cluster.pytest_hooks import (
    pytest_collection_finish,
    pytest_sessionfinish,
    pytest_sessionstart,
    pytest_terminal_summary,
    pytest_testnodedown,
)
from e2e.containerd.fixtures import machine, real_containers, released

__all__ = [
    "apiserver",
    "cluster",
    "machine",
    "own_apiserver",
    "pytest_collection_finish",
    "pytest_sessionfinish",
    "pytest_sessionstart",
    "pytest_terminal_summary",
    "pytest_testnodedown",
    "real_containers",
    "released",
]


# A test asserts states and counts, never how long an example took: a busy machine may take five times as long.
hypothesis.settings.register_profile("slipway", deadline=None)
hypothesis.settings.load_profile("slipway")


@pytest.fixture(autouse=True)
def _no_test_configures_the_log_of_this_process() -> Iterator[None]:
    """A part's log goes to the standard error of now, which pytest closes after the test: later tests would fail."""
    yield
    factory = structlog.get_config()["logger_factory"]
    assert not isinstance(factory, structlog.BytesLoggerFactory), "start the part in a process of its own"


# Modules whose first test takes minutes. With one of them last, the other process would wait; in the middle, its tests
# would be divided, and each process would compute the module's fixture.
LONGEST = ("tests/runtime/kernels/test_compiled.py",)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest modules first; all others in their order."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


def pytest_configure(config: pytest.Config) -> None:
    """Kernels run in Triton's interpreter, on the CPU; with `-m gpu` they are compiled and run on the GPU instead.

    So they are with `-m kernels` where there is a GPU.

    Triton decides at its first import, and other libraries import it too: so here, before any test module is.
    """
    compiled = ("gpu", "kernels") if Path("/dev/nvidiactl").exists() else ("gpu",)
    if config.option.markexpr not in compiled:
        os.environ["TRITON_INTERPRET"] = "1"
