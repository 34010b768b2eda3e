"""Kernels run in Triton's interpreter, on the CPU; with `-m gpu` they are compiled and run on the GPU instead."""

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    """Triton decides at its import whether kernels are interpreted; no other test, and no child, sees the variable."""
    if config.option.markexpr != "gpu":
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("TRITON_INTERPRET", "1")
            import slipway_runtime.kernels.gpu  # noqa: F401  imported for good


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where the kernels under test run; what they are compared with runs on the CPU."""
    from triton.runtime.interpreter import InterpretedFunction

    from slipway_runtime.kernels import norms

    interpreted = isinstance(norms._swiglu, InterpretedFunction)
    assert interpreted == (request.param == "cpu"), "the tests of the GPU want `-m gpu`, alone"
    if interpreted:
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # Triton imports more of itself at the first launch
    return torch.device(request.param)
