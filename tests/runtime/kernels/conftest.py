"""Where the kernels under test run: interpreted on the CPU, or, with `-m gpu`, compiled on the GPU."""

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the kernels under test run; what they are compared with runs on the CPU."""
    from triton.runtime.interpreter import InterpretedFunction

    from slipway_runtime.kernels import norms

    interpreted = isinstance(norms._swiglu, InterpretedFunction)
    assert interpreted == (request.param == "cpu"), "the tests of the GPU want `-m gpu`, alone"
    return torch.device(request.param)
