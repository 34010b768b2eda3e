"""A team keeps its fleet in Git: Flux's own controller applies it, waits for its health, mends it and prunes it."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from e2e.cluster.launch import Cluster
from e2e.flux import build
from e2e.flux.controller import KustomizeController
from e2e.manifests import as_yaml, static
from e2e.slipway import EXAMPLES, PLURALS, USER_NAMESPACE, Slipway, wait_for
from slipway_api import names

# Building the controller takes some minutes of its own the first time.
pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(1800)]

AGENT = "kustomize-controller/"
OPERATOR = "system:serviceaccount:slipway-system:slipway-operator"
WRITES = {"create", "update", "patch", "delete"}


@pytest.fixture(scope="module")
def flux(slipway: Slipway) -> Iterator[KustomizeController]:
    """The controller, running against the cluster on which Slipway is installed."""
    try:
        build.ensure(build.KUSTOMIZE)
    except build.ModulesNotReachedError as missing:
        pytest.skip(f"Flux's modules cannot be fetched: {missing}")
    with KustomizeController(slipway.access) as controller:
        yield controller


def fleet(replicas: int = 1) -> dict[str, str]:
    """One object of each of Slipway's kinds, a file each."""
    base, adapter = yaml.safe_load_all((EXAMPLES / "lora-adapter.yaml").read_text())
    pool, _ = yaml.safe_load_all((EXAMPLES / "warm-pool.yaml").read_text())
    base["spec"]["replicas"] = replicas
    adapter["spec"]["unload"]["drainSeconds"] = 1
    return {"base.yaml": as_yaml(base), "adapter.yaml": as_yaml(adapter), "pool.yaml": as_yaml(pool)}


FLEET = (("InferenceService", "lora"), ("LoRAAdapter", "sailor"), ("WarmPool", "standby"))


def ready(slipway: Slipway, kind: str, name: str) -> str:
    """The status of an object's Ready condition."""
    conditions = slipway.custom(kind, name).get("status", {}).get("conditions", [])
    return next((str(one["status"]) for one in conditions if one["type"] == "Ready"), "absent")


def versions(slipway: Slipway) -> dict[str, tuple[int, str]]:
    """Generation and resourceVersion of each object of the fleet."""
    found = {kind: slipway.custom(kind, name)["metadata"] for kind, name in FLEET}
    return {kind: (metadata["generation"], metadata["resourceVersion"]) for kind, metadata in found.items()}


def writes(cluster: Cluster, *, of_flux: bool) -> Counter[str]:
    """How often each object of Slipway's kinds was written, dry runs left out: by Flux, or by the operator (status)."""
    counted: Counter[str] = Counter()
    for event in cluster.audit():
        about = event.get("objectRef", {})
        if about.get("apiGroup") != names.GROUP or event["verb"] not in WRITES or "dryRun" in event["requestURI"]:
            continue
        by_flux = event.get("userAgent", "").startswith(AGENT)
        if by_flux if of_flux else (event["user"]["username"] == OPERATOR and about.get("subresource") == "status"):
            counted[f"{about['resource']}/{about['name']}"] += 1
    return counted


def is_gone(slipway: Slipway, kind: str, name: str) -> bool:
    """Whether the object exists no more."""
    listed = slipway.objects.list_namespaced_custom_object(names.GROUP, names.VERSION, USER_NAMESPACE, PLURALS[kind])
    return name not in {item["metadata"]["name"] for item in listed["items"]}


@pytest.mark.capability("OP-7")
def test_flux_applies_a_fleet_waits_for_it_changes_nothing_mends_drift_and_prunes(
    cluster: Cluster, clean: Slipway, flux: KustomizeController
) -> None:
    revision = flux.publish(fleet())
    flux.sync("fleet", USER_NAMESPACE)
    messages: set[str] = set()

    def applied() -> bool:
        messages.add(flux.condition("fleet", "Reconciling").get("message", ""))
        return flux.is_ready("fleet", revision)

    wait_for("Flux says that the fleet is healthy", applied, timeout=150, every=0.1)
    assert {kind: ready(clean, kind, name) for kind, name in FLEET} == {kind: "True" for kind, _ in FLEET}
    assert any("Running health checks" in message for message in messages), messages

    # Nothing has changed: nothing is written, although the operator has written status since.
    objects = {f"{PLURALS[kind]}/{name}" for kind, name in FLEET}
    before = versions(clean)
    moment = flux.request("fleet")
    wait_for("the second reconciliation", lambda: flux.was_handled("fleet", moment), timeout=60, every=0.1)
    assert versions(clean) == before
    assert writes(cluster, of_flux=True) == dict.fromkeys(objects, 1)
    assert set(writes(cluster, of_flux=False)) >= objects

    # A new revision is healthy when it is rolled out, not when it is applied.
    revision = flux.publish(fleet(replicas=2))
    wait_for("the new revision is healthy", lambda: flux.is_ready("fleet", revision), timeout=150, every=0.1)
    assert clean.service("lora")["status"]["readyReplicas"] == 2

    # Somebody changes the cluster by hand: what Git says comes back, and Flux waits until it is so.
    clean.access.kubectl("patch", "infsvc", "lora", "--type=merge", "-p", json.dumps({"spec": {"replicas": 1}}))
    moment = flux.request("fleet")
    wait_for("drift is mended", lambda: flux.was_handled("fleet", moment), timeout=150)
    assert clean.service("lora")["spec"]["replicas"] == 2
    clean.wait_ready("lora", replicas=2)

    # What is no longer in Git goes; then all of it.
    revision = flux.publish({"base.yaml": fleet(replicas=2)["base.yaml"]})
    wait_for("the smaller fleet is healthy", lambda: flux.is_ready("fleet", revision), timeout=150)
    for kind, name in FLEET[1:]:
        wait_for(f"{kind} is pruned", lambda kind=kind, name=name: is_gone(clean, kind, name), timeout=60)  # type: ignore[misc]
    flux.delete("fleet")
    wait_for("the service and its pods are gone", lambda: clean.is_gone("lora"), timeout=120)


@pytest.mark.capability("OP-7")
def test_flux_says_at_once_what_failed_and_at_its_timeout_what_is_still_in_progress(
    clean: Slipway, flux: KustomizeController
) -> None:
    broken = static("broken", 1)
    broken["spec"]["runtime"]["image"] = "registry.invalid/slipway/runtime:none"
    waiting: dict[str, Any] = static("waiting", 1)
    waiting["spec"]["resources"]["gpu"] = {"count": 1, "resourceName": "nvidia.com/gpu-of-tomorrow"}  # no node has one
    flux.publish({"broken/service.yaml": as_yaml(broken), "waiting/service.yaml": as_yaml(waiting)})
    flux.sync("broken", USER_NAMESPACE, path="./broken", timeout="10m")
    flux.sync("waiting", USER_NAMESPACE, path="./waiting", timeout="20s")

    def failure(name: str) -> str:
        condition = flux.condition(name, "Ready")
        return str(condition["message"]) if condition.get("reason") == "HealthCheckFailed" else ""

    # The first well before its timeout of ten minutes: kstatus calls it Failed.
    said = wait_for("Flux says that it failed", lambda: failure("broken"), timeout=120)
    assert "InferenceService/default/broken" in said
    assert "Failed" in said
    said = wait_for("Flux gives up waiting", lambda: failure("waiting"), timeout=90)
    assert "InferenceService/default/waiting" in said
    assert "InProgress" in said

    for name in ("broken", "waiting"):
        flux.delete(name)
        wait_for(f"{name} is pruned", lambda name=name: clean.is_gone(name), timeout=60)  # type: ignore[misc]
