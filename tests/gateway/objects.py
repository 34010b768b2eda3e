"""Pods and services as the API server would show them to a gateway."""

from typing import Any

from slipway_api.names import (
    ANNOTATION_SERVED_NAME,
    API_VERSION,
    LABEL_MANAGED_BY,
    LABEL_REVISION,
    LABEL_SERVICE,
    LABEL_STATE,
    MANAGED_BY,
    STATE_SERVING,
)

NAMESPACE = "team"
SERVICE = "chat"
SERVICE_UID = "uid-of-chat"


def a_pod_object(
    name: str,
    *,
    service: str = SERVICE,
    namespace: str = NAMESPACE,
    address: str = "127.0.0.2",
    ready: bool = True,
    state: str = STATE_SERVING,
    revision: str = "r1",
    owner_uid: str = SERVICE_UID,
    served_name: str = "",
    **labels: str,
) -> dict[str, Any]:
    """A pod with the labels of a replica, controlled by its service."""
    ours = {
        LABEL_MANAGED_BY: MANAGED_BY,
        LABEL_SERVICE: service,
        LABEL_STATE: state,
        LABEL_REVISION: revision,
    }
    owner = {"apiVersion": API_VERSION, "kind": "InferenceService", "name": service, "uid": owner_uid}
    metadata: dict[str, Any] = {"name": name, "namespace": namespace, "labels": ours | labels}
    if owner_uid:
        metadata["ownerReferences"] = [owner | {"controller": True}]
    if served_name:
        metadata["annotations"] = {ANNOTATION_SERVED_NAME: served_name}
    return {
        "metadata": metadata,
        "spec": {"containers": [{"name": "server", "image": "slipway/runtime:0.1.0"}]},
        "status": {
            "phase": "Running",
            "podIP": address,
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        },
    }


def a_service_object(
    name: str = SERVICE, *, namespace: str = NAMESPACE, served_name: str = "tiny", **weights: int
) -> dict[str, Any]:
    revisions = [{"name": f"{name}-{hash_[:5]}", "hash": hash_, "weight": weight} for hash_, weight in weights.items()]
    return {
        "metadata": {"name": name, "namespace": namespace, "uid": SERVICE_UID},
        "spec": {"model": {"uri": "file:///opt/slipway/models/tiny"}},
        "status": {"servedName": served_name, "revisions": revisions},
    }
