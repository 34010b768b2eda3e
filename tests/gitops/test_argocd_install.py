"""Argo CD installs Slipway: what it renders, applies and prunes changes no key."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster.access import Access
from tests.chart.lint import CHART
from tests.chart.rights import run_init_containers

pytestmark = pytest.mark.apiserver

MANIFEST = Path(__file__).resolve().parents[2] / "gitops" / "install" / "argocd.yaml"
NAME = "argo"  # another installation than that of the other tests
TRACKING = "argocd.argoproj.io/tracking-id"
KINDS = (
    "serviceaccounts,secrets,configmaps,services,deployments,roles,rolebindings,clusterroles,clusterrolebindings,"
    "networkpolicies,poddisruptionbudgets,customresourcedefinitions,validatingadmissionpolicies,"
    "validatingadmissionpolicybindings"
)

Json = dict[str, Any]


def application() -> Json:
    found: Json = yaml.safe_load(MANIFEST.read_text())
    return found


class ArgoCD:
    """The parts of Argo CD's sync that decide about keys: `helm template`, server-side apply, and pruning.

    Argo CD prunes objects that carry its tracking annotation and are not rendered any more.
    """

    def __init__(self, access: Access, folder: Path) -> None:
        self.access, self._folder = access, folder
        self.namespace = access.create_namespace()
        values = application()["spec"]["source"]["helm"]["valuesObject"] | {"name": NAME, "crds": {"install": False}}
        self._values = folder / "values.yaml"
        self._values.write_text(yaml.safe_dump(values | {"watchNamespaces": [self.namespace]}))

    def render(self, *settings: str) -> str:
        sets = [part for setting in settings for part in ("--set", setting)]
        options = ["--namespace", self.namespace, "--values", self._values, "--include-crds", *sets]
        return self.access.helm("template", "slipway", CHART, *options)

    def sync(self, *settings: str) -> None:
        rendered = [one for one in yaml.safe_load_all(self.render(*settings)) if one]
        for one in rendered:
            one["metadata"].setdefault("annotations", {})[TRACKING] = f"{NAME}:{identity(one)}"
        options = ("--server-side", "--force-conflicts", "--field-manager=argocd-controller")
        self.access.kubectl("apply", *options, "-f", "-", stdin=yaml.safe_dump_all(rendered))
        wanted = {identity(one) for one in rendered}
        for key, one in self.tracked().items():
            if key not in wanted:
                namespace = one["metadata"].get("namespace", "default")
                self.access.kubectl("delete", one["kind"], one["metadata"]["name"], "-n", namespace, "--wait=false")

    def tracked(self) -> dict[str, Json]:
        """Every object in the cluster with this Application's annotation."""
        listed = json.loads(self.access.kubectl("get", KINDS, "--all-namespaces", "-o", "json"))["items"]
        mine = [
            one for one in listed if one["metadata"].get("annotations", {}).get(TRACKING, "").startswith(f"{NAME}:")
        ]
        return {identity(one): one for one in mine}

    def start_operator(self) -> None:
        run_init_containers(self.access, NAME, self.namespace, self._folder)

    def keys(self) -> dict[str, str]:
        listed = json.loads(self.access.kubectl("-n", self.namespace, "get", "secrets", "-o", "json"))["items"]
        return {one["metadata"]["name"]: one["data"]["current"] for one in listed}


def identity(one: Json) -> str:
    return f"{one['kind']}/{one['metadata'].get('namespace', '')}/{one['metadata']['name']}"


@pytest.fixture
def argocd(apiserver: Access, tmp_path: Path) -> Iterator[ArgoCD]:
    running = ArgoCD(apiserver, tmp_path)
    yield running
    for one in running.tracked().values():
        namespace = one["metadata"].get("namespace", "default")
        apiserver.kubectl("delete", one["kind"], one["metadata"]["name"], "-n", namespace, "--wait=false")


@pytest.mark.capability("PL-16")
def test_the_chart_takes_the_values_of_the_application_and_renders_them_twice_alike(argocd: ArgoCD) -> None:
    registry = application()["spec"]["source"]["helm"]["valuesObject"]["image"]["registry"]
    first = argocd.render()

    assert argocd.render() == first
    deployments = [one for one in yaml.safe_load_all(first) if one and one["kind"] == "Deployment"]
    images = {one["image"] for made in deployments for one in made["spec"]["template"]["spec"]["containers"]}
    assert len(images) == len(deployments)
    assert all(image.startswith(f"{registry}/") for image in images)


def versions(argocd: ArgoCD) -> dict[str, int | str]:
    """The version of each tracked object; of those with a generation, which a status does not change, that one."""
    found = {key: one["metadata"] for key, one in argocd.tracked().items()}
    return {key: one.get("generation") or one["resourceVersion"] for key, one in found.items()}


@pytest.mark.capability("PL-16", "SE-3")
def test_a_second_sync_writes_nothing_and_no_sync_or_prune_touches_a_key(argocd: ArgoCD) -> None:
    argocd.sync()
    argocd.start_operator()
    keys = argocd.keys()
    before = versions(argocd)

    argocd.sync()

    assert versions(argocd) == before
    assert len(before) > 10
    assert len(keys) == 2
    assert all(len(base64.b64decode(key)) >= 32 for key in keys.values())

    # Another commit: objects are pruned, and others change.
    argocd.sync("admissionWarnings.enabled=false", "networkPolicy.enabled=false", "operator.logLevel=DEBUG")
    argocd.start_operator()
    pruned = set(before) - set(argocd.tracked())
    assert {key.partition("/")[0] for key in pruned} == {
        "NetworkPolicy",
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicyBinding",
    }
    assert argocd.keys() == keys
