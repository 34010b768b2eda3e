"""Runs Flux's helm-controller, and gives it a packaged chart at the source that a HelmRelease names.

source-controller, which would pull the chart from a registry, is left out: the OCIRepository's status names the chart's
archive on loopback and its digest.
"""

from pathlib import Path

from e2e.cluster.access import Access
from e2e.flux import build
from e2e.flux.controller import NAMESPACE, Controller, Json, reconcile_now

RELEASES = f"/apis/helm.toolkit.fluxcd.io/v2/namespaces/{NAMESPACE}/helmreleases"
SOURCES = f"/apis/source.toolkit.fluxcd.io/v1/namespaces/{NAMESPACE}/ocirepositories"


class HelmController(Controller):
    """The running helm-controller, and the HelmReleases that it installs."""

    def __init__(self, access: Access) -> None:
        super().__init__(access, build.HELM)

    def publish(self, source: Json, chart: Path, version: str) -> None:
        """The archive of a chart is what this OCIRepository has pulled."""
        stored = self.access.api("POST", SOURCES, source)
        status = {
            "observedGeneration": stored["metadata"]["generation"],
            "artifact": self.artifacts.add(chart.read_bytes(), version),
            "conditions": [
                {
                    "type": "Ready",
                    "status": "True",
                    "reason": "Succeeded",
                    "message": "stored artifact",
                    "observedGeneration": stored["metadata"]["generation"],
                    "lastTransitionTime": stored["metadata"]["creationTimestamp"],
                }
            ],
        }
        self.access.api("PATCH", f"{SOURCES}/{source['metadata']['name']}/status", {"status": status})

    def release(self, name: str) -> Json:
        """The HelmRelease as the API server has it now."""
        return self.access.api("GET", f"{RELEASES}/{name}")

    def condition(self, name: str, kind: str) -> Json:
        """One condition for its newest generation; empty if it is absent or of an older one."""
        release = self.release(name)
        conditions = release.get("status", {}).get("conditions", [])
        newest = release["metadata"]["generation"]
        return next((one for one in conditions if (one["type"], one["observedGeneration"]) == (kind, newest)), {})

    def reconcile(self, name: str) -> str:
        """Ask for a reconciliation as `flux reconcile` does; returns what status will name once it was handled."""
        body, moment = reconcile_now()
        self.access.api("PATCH", f"{RELEASES}/{name}", body)
        return moment

    def was_handled(self, name: str, moment: str) -> bool:
        """Whether the requested reconciliation is over, with success."""
        status = self.release(name).get("status", {})
        return status.get("lastHandledReconcileAt") == moment and self.condition(name, "Ready").get("status") == "True"
