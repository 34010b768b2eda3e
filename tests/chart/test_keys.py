"""Keys survive upgrades, rollbacks, renderings and uninstalls, with real helm and a real API server."""

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from e2e.cluster.access import Access
from tests.chart.lint import CHART, parsed
from tests.chart.rights import run_init_containers

pytestmark = pytest.mark.apiserver

RELEASE = "keys"  # another installation than that of the other tests
SECRETS = ("keys-admin-master", "keys-gateway-key")
VALUES = ("--set", "name=keys,crds.install=false,admissionWarnings.enabled=false,watchNamespaces={default}")


class Installation:
    """A release, and the init container of its operator, run with the rights of the operator's ServiceAccount."""

    def __init__(self, access: Access, folder: Path) -> None:
        self.access, self._folder = access, folder
        self.namespace = access.create_namespace()

    def helm(self, *arguments: str) -> str:
        return self.access.helm(*arguments, "--namespace", self.namespace)

    def upgrade(self, *settings: str) -> None:
        sets = [part for setting in settings for part in ("--set", setting)]
        self.helm("upgrade", "--install", RELEASE, str(CHART), *VALUES, *sets)
        self.start_operator()

    def template(self) -> str:
        return self.helm("template", RELEASE, str(CHART), *VALUES)

    def start_operator(self) -> None:
        """As a kubelet runs the init containers of a new pod of the operator's Deployment."""
        run_init_containers(self.access, RELEASE, self.namespace, self._folder)

    def keys(self) -> dict[str, dict[str, str]]:
        return {name: json.loads(self._get("secret", name))["data"] for name in SECRETS}

    def rotate(self) -> None:
        for name, data in self.keys().items():
            fresh = base64.b64encode(f"rotated-{name}".encode() * 2).decode()
            body = {"data": {"previous": data["current"], "current": fresh}}
            self.access.kubectl("-n", self.namespace, "patch", "secret", name, "--type=merge", "-p", json.dumps(body))

    def _get(self, kind: str, name: str) -> str:
        return self.access.kubectl("-n", self.namespace, "get", kind, name, "-o", "json")


@pytest.fixture
def installation(apiserver: Access, tmp_path: Path) -> Iterator[Installation]:
    made = Installation(apiserver, tmp_path)
    yield made
    made.helm("uninstall", RELEASE, "--ignore-not-found", "--wait=hookOnly")


def kubectl_apply(installation: Installation, *options: str) -> None:
    installation.access.kubectl("apply", *options, "-f", "-", stdin=installation.template())


CHANGES: dict[str, Callable[[Installation], object]] = {
    "upgrade": lambda it: it.upgrade("operator.logLevel=WARNING"),
    "rollback": lambda it: it.helm("rollback", RELEASE, "1"),
    "forced rollback, or one of Helm 3": lambda it: it.helm("rollback", RELEASE, "1", "--force-conflicts"),
    "helm template | kubectl apply, or Argo CD": kubectl_apply,
    "Flux, or Argo CD with server-side apply": lambda it: kubectl_apply(it, "--server-side", "--force-conflicts"),
    "uninstall": lambda it: it.helm("uninstall", RELEASE, "--wait=hookOnly"),
    "install again": lambda it: it.upgrade(),
}


@pytest.mark.capability("SE-3")
def test_no_change_of_a_release_replaces_a_key(installation):
    """review/shipping.md 4: after a rotation a rollback failed, or brought the retired key back."""
    installation.upgrade()
    first = installation.keys()
    installation.rotate()
    rotated = installation.keys()

    after = {}
    for name, change in CHANGES.items():
        change(installation)
        if name != "uninstall":
            installation.start_operator()
        after[name] = installation.keys()

    assert after == dict.fromkeys(CHANGES, rotated)
    assert all(len(base64.b64decode(data["current"])) >= 32 for data in first.values())
    assert len({data["current"] for data in first.values()}) == len(SECRETS)
    assert all(data["previous"] == first[name]["current"] for name, data in rotated.items())


def test_a_release_stores_no_key(installation):
    """review/shipping.md 4: both keys were in the Secrets in which helm stores a release."""
    installation.upgrade()

    manifests = parsed(installation.helm("get", "manifest", RELEASE))

    assert manifests
    assert [one["metadata"]["name"] for one in manifests if one["kind"] == "Secret"] == []


def test_keys_of_the_user_are_neither_created_nor_optional(installation):
    own = ("adminMaster.existingSecret=masters", "gatewayKey.existingSecret=mine")
    text = installation.helm(
        "template", RELEASE, str(CHART), *VALUES, *(part for one in own for part in ("--set", one))
    )
    manifests = {(one["kind"], one["metadata"]["name"]): one for one in parsed(text)}
    pod = manifests["Deployment", "keys-operator"]["spec"]["template"]["spec"]

    assert [one["name"] for one in pod["initContainers"]] == ["apply-engines"]
    assert ("Role", "keys-operator-keys") not in manifests
    assert {one["secret"]["secretName"]: "optional" in one["secret"] for one in pod["volumes"] if "secret" in one} == {
        "masters": False,
        "mine": False,
    }
