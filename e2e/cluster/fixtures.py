"""pytest fixtures: `apiserver`, the API server alone, and `cluster`, all of it; each is started once a session.

Nothing heavy is imported until a test asks for one of them.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from e2e.cluster.paths import cluster_folder

if TYPE_CHECKING:
    from e2e.cluster.launch import Cluster

SESSIONS = 4  # test sessions of one checkout that may have a cluster of one kind at the same time


@pytest.fixture(scope="session")
def apiserver() -> "Iterator[Cluster]":
    """etcd and kube-apiserver, ready in seconds: objects, CRDs, admission and RBAC, but nothing that runs pods.

    `apiserver.start_controllers()` adds the controller manager (garbage collection, namespace deletion).
    """
    from e2e.cluster.launch import Cluster

    with Cluster(light=True, folder=_free_folder("apiserver")) as cluster:
        yield cluster
        assert not cluster.ended, f"{cluster.ended} ended during the tests, see {cluster.logs}"


@pytest.fixture(scope="module")
def own_apiserver() -> "Iterator[Cluster]":
    """The same for one module whose tests act on all objects of a kind: those of other modules would be in the way."""
    from e2e.cluster.launch import Cluster

    with Cluster(light=True, folder=_free_folder("own")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def cluster() -> "Iterator[Cluster]":
    """The whole cluster: two nodes with 8 fake GPUs each, both Ready; the gateway's port is `port("gateway")`."""
    from e2e.cluster.launch import GATEWAY, Cluster

    published = GATEWAY | {"stand-in": ("stand-in", "stand-in", 8000)}  # the second one is for the cluster's own tests
    with Cluster(folder=_free_folder("tests"), publish=published) as cluster:
        cluster.wait_for_nodes()
        yield cluster
        assert not cluster.ended, f"{cluster.ended} ended during the tests, see {cluster.logs}"


def _free_folder(name: str) -> Path:
    """The first folder of this kind in which no other session runs a cluster."""
    from e2e.cluster.launcher_lock import is_locked

    worker = os.environ.get("PYTEST_XDIST_WORKER", "")  # two workers of one session must not choose the same folder
    folders = [cluster_folder(f"{name}{worker and '-' + worker}-{index}") for index in range(SESSIONS)]
    free = next((folder for folder in folders if not is_locked(folder)), None)
    if free is None:
        pytest.fail(f"{SESSIONS} test sessions of this checkout run a cluster already", pytrace=False)
    return free
