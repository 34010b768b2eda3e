"""Faults caused by people: edited labels, deleted records, foreign objects in the way, replaced keys, lost gateways.

Each waits for the state of the world that Slipway owes after it, and raises if that does not come.
"""

import base64
import json
import secrets
import time

from e2e import checks
from e2e.chaos.stage import FIXED, REPLICAS, Stage, service
from e2e.cluster.access import CommandError
from e2e.manifests import as_yaml, static
from e2e.slipway import RELEASE_NAMESPACE, USER_NAMESPACE, wait_for
from slipway_api import names

DOOMED = "doomed"  # a watched namespace that is deleted
RESTORED_SECONDS = 60.0
GONE_SECONDS = 20.0
KEY_SECONDS = 75.0  # a kubelet updates a mounted Secret within about a minute
STRANGER = "stranger"


# Labels


def remove_state_label(stage: Stage) -> None:
    """The replica gets its label back or is replaced; until then no Service and no budget selects it."""
    victim = stage.replica()
    stage.kubectl("label", "pod", victim, f"{names.LABEL_STATE}-")
    wait_for(
        f"{victim} serves with its label again, or is replaced",
        lambda: label_of(stage, victim, names.LABEL_STATE) in (names.STATE_SERVING, "gone"),
        RESTORED_SECONDS,
    )


def change_service_label(stage: Stage) -> None:
    """The replica is restored or replaced, and no pod stays that belongs to nobody."""
    victim = stage.replica()
    stage.kubectl("label", "--overwrite", "pod", victim, f"{names.LABEL_SERVICE}={STRANGER}")
    wait_for(
        f"{victim} belongs to {FIXED} again, or is replaced",
        lambda: label_of(stage, victim, names.LABEL_SERVICE) in (FIXED, "gone"),
        RESTORED_SECONDS,
    )


def label_of(stage: Stage, pod: str, label: str) -> str:
    """The label's value; `gone` if the pod does not exist or is being deleted, empty without the label."""
    found = stage.kubectl("get", "pod", pod, "--ignore-not-found", "-o", "json")
    metadata = json.loads(found)["metadata"] if found.strip() else {"deletionTimestamp": "gone"}
    return "gone" if "deletionTimestamp" in metadata else str(metadata.get("labels", {}).get(label, ""))


# Records


def delete_revision_records(stage: Stage) -> None:
    """The record of the stable revision is stored again, and no replica is replaced."""
    before = checks.uids(checks.ready_pods(stage.slipway, FIXED))
    selector = f"{names.LABEL_SERVICE}={FIXED}"
    stage.kubectl("delete", "controllerrevision", "-l", selector)
    wait_for(
        "the record is stored again",
        lambda: stage.kubectl("get", "controllerrevision", "-l", selector, "-o", "name").strip(),
        RESTORED_SECONDS,
    )
    keep_replicas(stage, before)


def delete_lease(stage: Stage) -> None:
    """An operator leads again, and no replica is replaced."""
    before = checks.uids(checks.ready_pods(stage.slipway, FIXED))
    stage.kubectl("-n", RELEASE_NAMESPACE, "delete", "lease", "slipway-operator")
    wait_for("an operator leads", stage.slipway.leader, RESTORED_SECONDS)
    keep_replicas(stage, before)


def erase_status(stage: Stage) -> None:
    """The status is written again, and no replica is replaced."""
    before = checks.uids(checks.ready_pods(stage.slipway, FIXED))
    stage.kubectl("patch", "infsvc", FIXED, "--subresource=status", "--type=merge", "-p", '{"status": null}')
    stage.slipway.wait_ready(FIXED, replicas=REPLICAS, timeout=RESTORED_SECONDS)
    keep_replicas(stage, before)


def keep_replicas(stage: Stage, before: set[str]) -> None:
    """Raise unless these pods, and no others, are the replicas of the fixed service."""
    after = checks.uids(stage.slipway.pods(FIXED))
    assert after == before, f"replicas were replaced: {len(before - after)} are gone, {len(after - before)} are new"


# Foreign objects in the way of a drain


def drain_beside_foreign_children(stage: Stage) -> None:
    """The Service and the NetworkPolicy belong to somebody else: the drain ends, and both are made again afterwards."""
    stage.kubectl("create", "configmap", STRANGER)
    owner = json.loads(stage.kubectl("get", "configmap", STRANGER, "-o", "json"))["metadata"]["uid"]
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": STRANGER, "uid": owner, "controller": True}
    patch = json.dumps([{"op": "replace", "path": "/metadata/ownerReferences", "value": [reference]}])
    children = (f"service/{FIXED}", f"networkpolicy/{FIXED}-replicas")
    try:
        for child in children:
            stage.kubectl("patch", child, "--type=json", "-p", patch)
        drain(stage)
    finally:
        stage.kubectl("uncordon", "node-b")
        stage.kubectl("delete", "configmap", STRANGER)  # the garbage collector deletes what it owned
    for child in children:
        wait_for(f"{child} is ours again", lambda child=child: is_ours(stage, child), RESTORED_SECONDS)  # type: ignore[misc]


def drain_in_full_quota(stage: Stage) -> None:
    """No pod may be added, so no replica can be moved: none is lost, and the drain ends once the quota is gone."""
    pods = len(stage.slipway.core.list_namespaced_pod(USER_NAMESPACE).items)
    stage.kubectl("create", "quota", STRANGER, f"--hard=pods={pods}")
    try:
        wait_for(
            "the quota counts",
            lambda: stage.slipway.core.read_namespaced_resource_quota(STRANGER, USER_NAMESPACE).status.used or {},
        )
        try:
            drain(stage, timeout="30s")
        except CommandError:  # the disruption budget holds the replicas
            assert len(stage.replicas()) >= REPLICAS - 1, "more than one replica is unavailable"
        stage.kubectl("delete", "quota", STRANGER)
        drain(stage)
    finally:
        stage.kubectl("delete", "quota", STRANGER, "--ignore-not-found")
        stage.kubectl("uncordon", "node-b")


def drain(stage: Stage, timeout: str = "110s") -> None:
    """`kubectl drain node-b`; raises CommandError if it has not ended in time."""
    stage.kubectl("drain", "node-b", "--force", "--delete-emptydir-data", "--ignore-daemonsets", f"--timeout={timeout}")


def is_ours(stage: Stage, child: str) -> bool:
    """Whether the object exists, and an InferenceService owns it."""
    owners = json.loads(stage.kubectl("get", child, "-o", "json"))["metadata"].get("ownerReferences", [])
    return [owner["kind"] for owner in owners] == ["InferenceService"]


# Keys


def close_fixed_service(stage: Stage) -> None:
    """Replicas of the fixed service accept requests with the gateway's token alone."""
    stage.configure()
    closed = service(FIXED)
    closed["spec"]["routing"] = closed["spec"].get("routing", {}) | {"directAccess": "GatewayOnly"}
    stage.apply(closed)
    stage.wait_settled()


def replace_gateway_key(stage: Stage) -> None:
    """The key is overwritten without keeping the previous one: running replicas accept the old token alone."""
    key = base64.b64encode(secrets.token_hex(24).encode()).decode()
    patch = json.dumps({"data": {"current": key}})
    stage.kubectl("-n", RELEASE_NAMESPACE, "patch", "secret", "slipway-gateway-key", "-p", patch)
    time.sleep(KEY_SECONDS)


# Namespaces


def watch_doomed_namespace(stage: Stage) -> None:
    """Two namespaces are watched; one has a service and will be deleted."""
    stage.kubectl("create", "namespace", DOOMED)
    stage.configure(f"watchNamespaces={{{USER_NAMESPACE},{DOOMED}}}")
    there = static("there", 1)
    there["metadata"]["namespace"] = DOOMED
    stage.slipway.apply(as_yaml(there))
    wait_for("its replica exists", lambda: stage.slipway.pods("there", DOOMED))
    stage.wait_settled()


def delete_namespace(stage: Stage) -> None:
    """The namespace goes with its service, and a leader elected afterwards still carries out changes elsewhere."""
    stage.kubectl("delete", "namespace", DOOMED, "--wait=false")
    wait_for(
        f"{DOOMED} is gone", lambda: not stage.kubectl("get", "namespace", DOOMED, "--ignore-not-found"), timeout=120
    )
    stage.scale(REPLICAS + 1)
    stage.kill(stage.operators()[0], RELEASE_NAMESPACE)
    stage.scale(REPLICAS)


# Gateways


def lose_all_gateways(stage: Stage) -> None:
    """The Deployment is scaled to zero and back: no replica is replaced or removed because nobody reports load."""
    before = checks.uids(checks.ready_pods(stage.slipway, FIXED))
    gateways = len(stage.gateways())
    stage.kubectl("-n", RELEASE_NAMESPACE, "scale", "deployment/slipway-gateway", "--replicas=0")
    wait_for("no gateway is left", lambda: not stage.gateways())
    time.sleep(GONE_SECONDS)
    stage.kubectl("-n", RELEASE_NAMESPACE, "scale", "deployment/slipway-gateway", f"--replicas={gateways}")
    wait_for("every gateway is up", lambda: checks.deployment_is_up(stage.slipway, "slipway-gateway"), timeout=240)
    keep_replicas(stage, before)
