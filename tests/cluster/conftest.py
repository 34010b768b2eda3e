from collections.abc import Iterator

import pytest

from e2e.cluster.launch import Cluster
from tests.cluster.pods import Pods


@pytest.fixture
def pods(cluster: Cluster) -> Iterator[Pods]:
    """A namespace of the cluster with Pod Security `restricted`, for one test."""
    pods = Pods(cluster)
    yield pods
    pods.remove()
