"""Runs Flux's helm-controller on the host against a local cluster, and serves it packaged charts.

    with HelmController(cluster) as flux:
        flux.publish("slipway", "0.1.0", chart.read_bytes())
        flux.apply(release)

The controller is the real program. source-controller does not run: the test writes the status of the OCIRepository, as
source-controller does when it has pulled the chart.
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from e2e.cluster.access import Access
from e2e.flux import build
from e2e.flux.artifacts import Json
from e2e.flux.program import NAMESPACE, RunningController

RELEASES = f"/apis/helm.toolkit.fluxcd.io/v2/namespaces/{NAMESPACE}/helmreleases"
REPOSITORIES = f"/apis/source.toolkit.fluxcd.io/v1/namespaces/{NAMESPACE}/ocirepositories"


class HelmController(RunningController):
    """The running controller; its sources are OCIRepositories, which have to exist before `publish`."""

    def __init__(self, access: Access) -> None:
        super().__init__(access, build.HELM)

    def publish(self, repository: str, tag: str, packaged: bytes) -> None:
        """Let an OCIRepository have pulled this chart (tar.gz) under a tag, which is its version."""
        artifact = self.artifacts.add(packaged)
        artifact["revision"] = f"{tag}@{artifact['digest']}"
        generation = self.access.api("GET", f"{REPOSITORIES}/{repository}")["metadata"]["generation"]
        ready = {
            "type": "Ready", "status": "True", "reason": "Succeeded", "message": "pulled",
            "lastTransitionTime": artifact["lastUpdateTime"], "observedGeneration": generation,
        }  # fmt: skip
        status = {"artifact": artifact, "observedGeneration": generation, "conditions": [ready]}
        self.access.api("PATCH", f"{REPOSITORIES}/{repository}/status", {"status": status})

    def apply(self, manifest: Mapping[str, Any]) -> None:
        """Apply a source or a HelmRelease as a Git repository does."""
        self.access.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(manifest))

    def request(self, name: str) -> str:
        """Ask for a reconciliation as `flux reconcile` does; returns what status contains once it was handled."""
        moment = datetime.now(UTC).isoformat()
        annotations = {"reconcile.fluxcd.io/requestedAt": moment}
        self.access.api("PATCH", f"{RELEASES}/{name}", {"metadata": {"annotations": annotations}})
        return moment

    def status(self, name: str) -> Json:
        """The status of a HelmRelease, for its present generation; empty until the controller has seen it."""
        release = self.access.api("GET", f"{RELEASES}/{name}")
        status: Json = release.get("status", {})
        return status if status.get("observedGeneration") == release["metadata"]["generation"] else {}

    def condition(self, name: str, kind: str) -> Json:
        """One condition of a HelmRelease; empty if it is absent."""
        return next((one for one in self.status(name).get("conditions", []) if one["type"] == kind), {})

    def is_ready(self, name: str) -> bool:
        """Whether the HelmRelease's present generation is released."""
        return self.condition(name, "Ready").get("status") == "True" and not self.condition(name, "Reconciling")

    def was_handled(self, name: str, moment: str) -> bool:
        """Whether the requested reconciliation is over."""
        return self.status(name).get("lastHandledReconcileAt") == moment and not self.condition(name, "Reconciling")

    def history(self, name: str) -> list[Json]:
        """The releases that the controller made, newest first."""
        return list(self.status(name).get("history", []))
