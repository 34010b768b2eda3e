"""Flux installs Slipway: its helm-controller, built from its Go module, releases the chart on a fresh API server.

No kubelet runs: a test runs the operator's init containers, and the HelmRelease does not wait for pods.
"""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster import build as cluster_build
from e2e.cluster.launch import Cluster
from e2e.cluster.paths import cluster_folder
from e2e.flux import build
from e2e.flux.helm_controller import HelmController
from e2e.slipway import wait_for
from release import chart
from tests.chart.rights import run_init_containers

# Building the controller takes some minutes of its own the first time.
pytestmark = [pytest.mark.apiserver, pytest.mark.full, pytest.mark.timeout(1800)]

MANIFESTS = Path(__file__).resolve().parents[2] / "gitops" / "install" / "flux.yaml"
NAMESPACE = "slipway-system"
DIGESTS = {
    part: f"sha256:{number:064x}" for number, part in enumerate(("operator", "gateway", "agent", "runtime"), start=1)
}

Json = dict[str, Any]


@pytest.fixture(scope="module")
def flux() -> Iterator[HelmController]:
    """The controller, on an API server of its own on which nothing was installed."""
    try:
        build.ensure(build.HELM)
    except build.ModulesNotReachedError as missing:
        pytest.skip(f"Flux's modules cannot be fetched: {missing}")
    with Cluster(light=True, folder=cluster_folder("flux-install")) as cluster, HelmController(cluster) as controller:
        yield controller


def documented() -> tuple[Json, Json]:
    """The OCIRepository and the HelmRelease of gitops/install/flux.yaml."""
    repository, release = yaml.safe_load_all(MANIFESTS.read_text())
    return repository, release


def for_an_api_server_alone(release: Json, **values: Any) -> Json:
    """The HelmRelease, without waiting for pods; retries are not waited for either."""
    spec = release["spec"]
    spec["install"] |= {"disableWait": True}
    spec["upgrade"] |= {"disableWait": True}
    spec["values"] |= values
    return release


def packaged(version: str, folder: Path) -> bytes:
    """The chart as a release packages it: with the registry and digests in its values."""
    folder.mkdir()
    helm = str(cluster_build.ensure() / "bin" / "helm")
    return chart.package(version, "registry.example.com/slipway", DIGESTS, folder, helm=helm).read_bytes()


def keys(flux: HelmController) -> dict[str, str]:
    """The key in each of the two Secrets that the operator creates."""
    listed = json.loads(flux.access.kubectl("-n", NAMESPACE, "get", "secrets", "-o", "json"))["items"]
    return {one["metadata"]["name"]: one["data"]["current"] for one in listed if "current" in one.get("data", {})}


def log_level(flux: HelmController) -> str:
    """The log level of the operator's Deployment in the cluster."""
    deployment = json.loads(flux.access.kubectl("-n", NAMESPACE, "get", "deployment", "slipway-operator", "-o", "json"))
    environment = deployment["spec"]["template"]["spec"]["containers"][0]["env"]
    return next(str(one["value"]) for one in environment if one["name"] == "SLIPWAY_LOG_LEVEL")


@pytest.mark.capability("PL-16", "SE-3")
def test_flux_installs_upgrades_rolls_back_and_restores_slipway_and_its_keys_stay(
    flux: HelmController, tmp_path: Path
) -> None:
    repository, release = documented()
    flux.apply(repository)
    flux.publish("slipway", "0.1.0", packaged("0.1.0", tmp_path / "first"))
    flux.apply(for_an_api_server_alone(release))

    wait_for("Slipway is installed", lambda: flux.is_ready("slipway"), timeout=180)

    crds = flux.access.kubectl("get", "crds", "-o", "name")
    assert "inferenceservices.slipway.dev" in crds
    images = flux.access.kubectl(
        "-n", NAMESPACE, "get", "deployments", "-o", "jsonpath={..containers[0].image}"
    ).split()
    assert {image.rpartition("@")[2] for image in images} == {DIGESTS["operator"], DIGESTS["gateway"]}
    assert all(image.startswith("registry.example.com/slipway/") for image in images)
    run_init_containers(flux.access, "slipway", NAMESPACE, tmp_path)
    first = keys(flux)
    assert len(first) == 2
    assert all(len(base64.b64decode(key)) >= 32 for key in first.values())

    # Nothing changed: no release is made. The operator's Secrets are not drift.
    moment = flux.request("slipway")
    wait_for("the reconciliation", lambda: flux.was_handled("slipway", moment), timeout=120)
    assert [one["version"] for one in flux.history("slipway")] == [1]

    # Somebody changes the cluster: the release comes back.
    flux.access.kubectl("-n", NAMESPACE, "set", "env", "deployment/slipway-operator", "SLIPWAY_LOG_LEVEL=DEBUG")
    assert log_level(flux) == "DEBUG"
    flux.request("slipway")
    wait_for("drift is corrected", lambda: log_level(flux) == "INFO", timeout=120)

    # A newer chart, and another value.
    flux.publish("slipway", "0.2.0", packaged("0.2.0", tmp_path / "second"))
    flux.apply(for_an_api_server_alone(release, operator={"logLevel": "WARNING"}))
    wait_for("the upgrade", lambda: flux.is_ready("slipway") and log_level(flux) == "WARNING", timeout=180)
    assert flux.history("slipway")[0]["chartVersion"].startswith("0.2.0+")

    # An upgrade that the API server refuses is rolled back.
    broken = for_an_api_server_alone(release, operator={"logLevel": "ERROR", "resources": {"limits": {"cpu": "none"}}})
    broken["spec"]["upgrade"]["remediation"]["retries"] = 0
    flux.apply(broken)
    wait_for("the rollback", lambda: flux.condition("slipway", "Remediated").get("status") == "True", timeout=180)
    assert flux.condition("slipway", "Remediated")["reason"] == "RollbackSucceeded"
    assert log_level(flux) == "WARNING"
    assert keys(flux) == first

    # Without the HelmRelease the release is uninstalled; running replicas would accept no other key.
    flux.access.kubectl("-n", "flux-system", "delete", "helmrelease", "slipway", "--timeout=120s", timeout=150)
    assert flux.access.kubectl("-n", NAMESPACE, "get", "deployments", "-o", "name") == ""
    assert "inferenceservices.slipway.dev" in flux.access.kubectl("get", "crds", "-o", "name")
    assert keys(flux) == first
