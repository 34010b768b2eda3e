"""Where the kernels under test run: interpreted on the CPU, or, with `-m gpu`, compiled on the GPU."""

import pytest
import torch

from slipway_runtime.kernels import reference
from slipway_runtime.kernels.dispatch import Kernels
from slipway_runtime.kernels.native import Native, fitting
from slipway_runtime.kernels.native.compile import HERE, LIBRARIES


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the kernels under test run; what they are compared with runs on the CPU."""
    from triton.runtime.interpreter import InterpretedFunction

    from slipway_runtime.kernels import norms

    interpreted = isinstance(norms._swiglu, InterpretedFunction)
    assert interpreted == (request.param == "cpu"), "the tests of the GPU want `-m gpu`, alone"
    return torch.device(request.param)


@pytest.fixture(scope="session", params=list(LIBRARIES))
def library(request: pytest.FixtureRequest) -> Native:
    """The compiled kernels, for each generation of processors that this one can stand in for."""
    return a_library(request.param)


@pytest.fixture
def compiled(library: Native, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """What serves a CPU through one of them."""
    from slipway_runtime.kernels import cpu

    monkeypatch.setattr(cpu, "_native", library)
    return cpu


@pytest.fixture(params=["reference", *LIBRARIES])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Each implementation that serves a CPU."""
    if request.param == "reference":
        return reference
    from slipway_runtime.kernels import cpu

    monkeypatch.setattr(cpu, "_native", a_library(request.param))
    return cpu


def a_library(name: str) -> Native:
    """One of the libraries; skips where this processor does not run it, or nobody could build it."""
    if name not in fitting():
        pytest.skip(f"this processor has no {name}")
    path = HERE / f"{name}.so"
    if not path.exists():
        pytest.skip("there was no compiler when the package was built")
    return Native(path)


@pytest.fixture(autouse=True)
def few_programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of these tests have short contexts, and the interpreter takes a millisecond for a program without work."""
    if "tmp_path" in request.fixturenames:
        monkeypatch.setattr("slipway_runtime.kernels.captured_plan.LEAST_PROGRAMS", 8)
