"""A platform team installs Slipway with Flux: its own helm-controller takes the manifest of gitops/ and the chart of a
release, upgrades, rolls back what does not start, restores what somebody changed, and uninstalls.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from e2e.cluster.launch import GATEWAY, Cluster
from e2e.cluster.paths import cluster_folder
from e2e.flux import build
from e2e.flux.controller import Json
from e2e.flux.helm_controller import RELEASES, HelmController
from e2e.manifests import as_yaml, static
from e2e.slipway import RELEASE_NAMESPACE, Slipway, wait_for
from release import chart

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(1800)]

MANIFESTS = Path(__file__).resolve().parents[2] / "gitops" / "install" / "flux.yaml"
VERSION = "0.1.0"
GATEWAYS = "deployment/slipway-gateway"


@pytest.fixture(scope="module")
def bare() -> Iterator[Cluster]:
    """A cluster of its own, on which Slipway is not installed."""
    try:
        build.ensure(build.HELM)
    except build.ModulesNotReachedError as missing:
        pytest.skip(f"Flux's modules cannot be fetched: {missing}")
    with Cluster(folder=cluster_folder("flux-helm"), publish=GATEWAY, nodes={"node-a": 2}) as cluster:
        cluster.wait_for_nodes()
        yield cluster


def patch(flux: HelmController, **spec: object) -> None:
    """Change the HelmRelease, as a commit would."""
    flux.access.api("PATCH", f"{RELEASES}/slipway", {"spec": spec})


def until_ready(flux: HelmController, what: str) -> None:
    """Wait until Flux says that the newest generation is applied and healthy, or that it will not try again."""

    def is_ready() -> bool:
        if stalled := flux.condition("slipway", "Stalled"):
            pytest.fail(f"{stalled['message']}: {flux.condition('slipway', 'Ready')['message']}")
        return bool(flux.condition("slipway", "Ready").get("status") == "True")

    wait_for(what, is_ready, timeout=300)


def of_the_release(cluster: Cluster, kind: str) -> dict[str, Json]:
    """The objects of this kind in the release's namespace, by name."""
    listed = json.loads(cluster.kubectl("get", kind, "-n", RELEASE_NAMESPACE, "-o", "json"))["items"]
    return {one["metadata"]["name"]: one for one in listed}


def keys(cluster: Cluster) -> dict[str, Json]:
    """The data of the Secrets that gateways and operator share; those in which Helm keeps releases are left out."""
    secrets = of_the_release(cluster, "secrets")
    return {name: one["data"] for name, one in secrets.items() if not one["type"].startswith("helm.sh/")}


def ready_gateways(cluster: Cluster) -> int:
    """How many gateways are ready."""
    status = of_the_release(cluster, "deployments")["slipway-gateway"].get("status", {})
    return int(status.get("readyReplicas", 0))


@pytest.mark.capability("PL-16")
def test_flux_installs_upgrades_rolls_back_restores_and_uninstalls(bare: Cluster, tmp_path: Path) -> None:
    source, release = yaml.safe_load_all(MANIFESTS.read_text())
    del release["spec"]["values"]["image"]  # the cluster has the images by the names of the chart's defaults
    archive = chart.package(VERSION, "", {}, tmp_path, helm=str(bare.tools / "helm"))
    with HelmController(bare) as flux:
        flux.publish(source, archive, VERSION)
        flux.access.api("POST", RELEASES, release)
        until_ready(flux, "Flux has installed Slipway")
        first_keys = keys(bare)
        assert first_keys
        slipway = Slipway(bare)
        wait_for("owners of the new kind are admitted", slipway.admits_owners, timeout=60)
        slipway.apply(as_yaml(static("chat", 1)))
        slipway.wait_ready("chat", replicas=1)

        # Nothing has changed: the release is not upgraded.
        before = of_the_release(bare, "deployments")
        moment = flux.reconcile("slipway")
        wait_for("the second reconciliation", lambda: flux.was_handled("slipway", moment), timeout=120)
        after = of_the_release(bare, "deployments")
        assert [one["metadata"]["generation"] for one in after.values()] == [
            one["metadata"]["generation"] for one in before.values()
        ]
        assert len(flux.release("slipway")["status"]["history"]) == 1

        # An upgrade: a value of the HelmRelease.
        replicas = ready_gateways(bare)
        patch(flux, values={"gateway": {"replicas": replicas + 1}})
        until_ready(flux, "the upgrade")
        assert ready_gateways(bare) == replicas + 1
        assert keys(bare) == first_keys, "an upgrade renders no key again"

        # An upgrade that does not start is rolled back, and requests have gateways meanwhile.
        remediation = {"retries": 0, "remediateLastFailure": True}
        broken = {"gateway": {"replicas": replicas + 1, "image": {"tag": "none"}}}
        patch(flux, timeout="20s", upgrade={"remediation": remediation}, values=broken)

        def was_rolled_back() -> bool:
            newest = flux.release("slipway")["status"]["history"][0]
            return newest["status"] == "deployed" and flux.condition("slipway", "Ready").get("status") == "False"

        wait_for("the upgrade that does not start is rolled back", was_rolled_back, timeout=180)
        wait_for("all gateways are back", lambda: ready_gateways(bare) == replicas + 1, timeout=60)
        assert keys(bare) == first_keys, "a rollback keeps the keys"
        slipway.wait_ready("chat", replicas=1)

        # What somebody changes by hand is restored.
        patch(flux, timeout="10m", values={"gateway": {"replicas": replicas + 1, "image": {"tag": None}}})
        until_ready(flux, "the corrected values")
        bare.kubectl("scale", GATEWAYS, "-n", RELEASE_NAMESPACE, "--replicas=1")
        moment = flux.reconcile("slipway")
        wait_for("drift is corrected", lambda: flux.was_handled("slipway", moment), timeout=120)
        wait_for("all gateways are back", lambda: ready_gateways(bare) == replicas + 1, timeout=60)

        # Uninstalling keeps the kinds and what users made of them.
        bare.kubectl("delete", "helmrelease", "slipway", "-n", release["metadata"]["namespace"], timeout=180)
        assert of_the_release(bare, "deployments") == {}
        assert slipway.services() == ["chat"]
