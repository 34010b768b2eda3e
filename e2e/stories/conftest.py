"""One cluster with Slipway installed, for all stories; each story removes what it applied."""

from collections.abc import Iterator

import pytest

from e2e.cluster.launch import Cluster
from e2e.slipway import Slipway


@pytest.fixture(scope="session")
def slipway(cluster: Cluster) -> Slipway:
    """Slipway, installed with helm as the README says."""
    installation = Slipway(cluster)
    installation.install()
    return installation


@pytest.fixture
def clean(slipway: Slipway) -> Iterator[Slipway]:
    """Slipway without services, before and after."""
    yield slipway
    for service in slipway.services():
        slipway.delete(service)
