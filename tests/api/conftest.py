"""A real API server that knows the kinds, with a namespace for services that no operator reconciles."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster.access import Access
from tests.api.manifests import NAMESPACE

CRDS = Path(__file__).resolve().parents[2] / "crds"


@pytest.fixture(scope="package")
def api(apiserver: Access) -> Iterator[Access]:
    """The API server; what was stored is removed at the end."""
    apiserver.serve_kinds(CRDS)
    apiserver.kubectl("create", "namespace", NAMESPACE)
    yield apiserver
    apiserver.kubectl("delete", "infsvc", "--all", "-n", NAMESPACE, "--wait=false")
