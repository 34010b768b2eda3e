"""Canary rollouts of the example service: its manifest, the edit that starts one, and the weights of its revisions."""

from typing import Any

from e2e.manifests import as_yaml, static
from e2e.slipway import Json, Slipway, wait_for

ANALYSIS = {
    "intervalSeconds": 5,
    "minRequests": 20,
    "failureLimit": 1,
    # On a shared machine, equal replicas differ by more than a fifth; the slow one here is slower by far more.
    "metrics": [{"type": "ErrorRate", "max": "0.05"}, {"type": "TTFTP95", "maxRegressionPercent": 200}],
}


def manifest(name: str, *steps: Json, **rollout: Any) -> Json:
    """A service of one replica that changes by canary in these steps; keywords are further fields of `spec.rollout`."""
    return static(
        name, 1, rollout={"strategy": "Canary", "canary": {"steps": list(steps), "analysis": ANALYSIS}, **rollout}
    )


def wait_served(slipway: Slipway, name: str, timeout: float = 120) -> str:
    """Wait until a revision of the service has served completely; its hash."""

    def served() -> str | None:
        status = slipway.service(name).get("status", {})
        return next((one["hash"] for one in status.get("revisions", []) if one.get("served")), None)

    return wait_for(f"the first revision of {name} has served", served, timeout)


def edit(slipway: Slipway, spec: Json, **runtime: Any) -> str:
    """Apply the manifest with other settings of the runtime; the hash of the new revision."""
    name = spec["metadata"]["name"]
    before = slipway.service(name)["status"]["updateRevision"]
    spec["spec"].setdefault("runtime", {}).update(runtime)
    slipway.apply(as_yaml(spec))

    def changed() -> str | None:
        update: str = slipway.service(name)["status"]["updateRevision"]
        return update if update != before else None

    return wait_for(f"the new revision of {name} is known", changed)


def weights(slipway: Slipway, name: str) -> dict[str, int]:
    """The weight of each revision of the service, by hash."""
    return {one["hash"]: one.get("weight", 0) for one in slipway.service(name)["status"]["revisions"]}
