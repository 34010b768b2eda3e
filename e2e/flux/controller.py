"""Runs Flux's kustomize-controller on the host against a local cluster, and serves it tarballs of manifests.

    with KustomizeController(cluster) as flux:
        flux.publish({"chat.yaml": manifest})
        flux.sync("fleet", prune=True, wait=True)

The controller is the real program. What stands in for source-controller is an ExternalArtifact,
the kind by which Flux lets any other program provide a source: an HTTP server on loopback has the
tarball, and the object's status names its address and digest.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from e2e.cluster.access import Access
from e2e.flux import build
from e2e.flux.artifacts import Json, tarball_of
from e2e.flux.program import NAMESPACE, RunningController

SOURCE = "fleet"
KUSTOMIZATIONS = f"/apis/kustomize.toolkit.fluxcd.io/v1/namespaces/{NAMESPACE}/kustomizations"
ARTIFACTS = f"/apis/source.toolkit.fluxcd.io/v1/namespaces/{NAMESPACE}/externalartifacts"


class KustomizeController(RunningController):
    """The running controller, its one source, and the Kustomizations that apply from it."""

    def __init__(self, access: Access) -> None:
        super().__init__(access, build.KUSTOMIZE)

    def publish(self, files: Mapping[str, str]) -> str:
        """A new revision of the source, of these files (name -> content); returns the revision."""
        artifact = self.artifacts.add(tarball_of(files))
        source = {
            "apiVersion": "source.toolkit.fluxcd.io/v1",
            "kind": "ExternalArtifact",
            "metadata": {"name": SOURCE, "namespace": NAMESPACE},
        }
        self.create(ARTIFACTS, source)
        self.access.api("PATCH", f"{ARTIFACTS}/{SOURCE}/status", {"status": {"artifact": artifact}})
        return str(artifact["revision"])

    def sync(self, name: str, namespace: str, *, timeout: str = "2m", **spec: Any) -> None:
        """Create the Kustomization that keeps `namespace` as the source says, pruning, and waiting for health."""
        body: Json = {
            "apiVersion": "kustomize.toolkit.fluxcd.io/v1",
            "kind": "Kustomization",
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {
                "sourceRef": {"kind": "ExternalArtifact", "name": SOURCE},
                "targetNamespace": namespace,
                "interval": "1h",  # a test asks for each reconciliation
                "retryInterval": "1h",
                "timeout": timeout,
                "prune": True,
                "wait": True,
            }
            | spec,
        }
        self.access.api("POST", KUSTOMIZATIONS, body)

    def request(self, name: str) -> str:
        """Ask for a reconciliation as `flux reconcile` does; returns what status will name once it was handled."""
        moment = datetime.now(UTC).isoformat()
        annotations = {"reconcile.fluxcd.io/requestedAt": moment}
        self.access.api("PATCH", f"{KUSTOMIZATIONS}/{name}", {"metadata": {"annotations": annotations}})
        return moment

    def kustomization(self, name: str) -> Json:
        """The Kustomization as the API server has it now."""
        return self.access.api("GET", f"{KUSTOMIZATIONS}/{name}")

    def condition(self, name: str, kind: str) -> Json:
        """One condition of the Kustomization; empty where it is absent."""
        conditions = self.kustomization(name).get("status", {}).get("conditions", [])
        return next((one for one in conditions if one["type"] == kind), {})

    def is_ready(self, name: str, revision: str) -> bool:
        """Whether this revision was applied, and everything in it became healthy."""
        status = self.kustomization(name).get("status", {})
        ready = self.condition(name, "Ready")
        return bool(ready.get("status") == "True" and status.get("lastAppliedRevision") == revision)

    def was_handled(self, name: str, moment: str) -> bool:
        """Whether the requested reconciliation is over."""
        status = self.kustomization(name).get("status", {})
        return bool(status.get("lastHandledReconcileAt") == moment and not self.condition(name, "Reconciling"))

    def delete(self, name: str, limit: float = 120) -> None:
        """Delete the Kustomization; returns when the controller has pruned what it applied."""
        self.access.kubectl("delete", "kustomizations", name, "-n", NAMESPACE, "--ignore-not-found", timeout=limit)
