"""Fixtures of the stories: one cluster with Slipway installed; each story begins and ends without services."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from e2e import checks, user_fields
from e2e.cluster.launch import Cluster
from e2e.ledger import Ledger
from e2e.manifests import as_yaml
from e2e.scripted_server import ServedScripts, served_scripts
from e2e.slipway import Slipway, wait_for


@pytest.fixture(scope="session")
def slipway(cluster: Cluster) -> Slipway:
    """Slipway, installed with helm as the README says, where the API server refuses it any write of users' fields."""
    installation = Slipway(cluster)
    installation.install()
    for one in (user_fields.POLICY, user_fields.BINDING):
        installation.apply(as_yaml(one))
    return installation


@pytest.fixture
def clean(slipway: Slipway) -> Iterator[Slipway]:
    """Slipway without services, before and after."""
    delete_services(slipway)
    yield slipway
    delete_services(slipway)


@pytest.fixture
def breakable(cluster: Cluster, clean: Slipway) -> Iterator[Cluster]:
    """The cluster, to break nodes and components of; it is mended before the services of the story are deleted."""
    yield cluster
    checks.mend(cluster, clean)


@pytest.fixture
def open_ledger(clean: Slipway) -> Iterator[Callable[[str], Ledger]]:
    """Opens the ledger of a service, before a load of it begins; see `checks.no_request_lost`."""
    with ExitStack() as opened:
        yield lambda service: opened.enter_context(Ledger(clean, service))


def delete_services(slipway: Slipway) -> None:
    """Delete all services together, and wait until their pods are gone."""
    services = slipway.services()
    if services:
        slipway.access.kubectl("delete", "infsvc", *services, "--ignore-not-found", "--wait=false")
    for service in services:
        wait_for(f"{service} gone", lambda service=service: slipway.is_gone(service), timeout=120)  # type: ignore[misc]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedScripts]:
    """The addresses of a runtime whose model follows scripts, and of a gateway in front of it."""
    with served_scripts(tmp_path_factory.mktemp("scripted")) as urls:
        yield urls
