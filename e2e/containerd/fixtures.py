"""pytest fixtures of real nodes: `real_containers` skips where there can be none, `machine` runs one a session."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from e2e.containerd.machine import Machine
    from e2e.slipway import Slipway


@pytest.fixture(scope="session")
def real_containers() -> None:
    """Skips the test, with the reason, if this machine cannot run a real node."""
    from e2e.containerd import preflight

    if sentences := preflight.missing(preflight.this_machine()):
        pytest.skip(" ".join(sentences))


@pytest.fixture(scope="session")
def machine(real_containers: None) -> "Iterator[Machine]":
    """Two real nodes, on which NetworkPolicies are enforced."""
    from e2e.containerd.machine import Machine

    with Machine(nodes=2, policies=True) as machine:
        yield machine
        assert not machine.ended, f"{machine.ended} ended during the tests, see {machine.logs}"


@pytest.fixture(scope="session")
def released(machine: "Machine") -> "Slipway":
    """Slipway on the first of those nodes, installed from images of a release."""
    from e2e.containerd import release

    return release.install(machine)
