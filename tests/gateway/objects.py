"""Pods and services as the API server would show them to a gateway."""

from typing import Any

from slipway_api.names import (
    LABEL_MANAGED_BY,
    LABEL_REVISION,
    LABEL_SERVICE,
    LABEL_STATE,
    MANAGED_BY,
    STATE_SERVING,
)

NAMESPACE = "team"
SERVICE = "chat"


def a_pod_object(
    name: str,
    *,
    service: str = SERVICE,
    namespace: str = NAMESPACE,
    address: str = "127.0.0.2",
    ready: bool = True,
    state: str = STATE_SERVING,
    revision: str = "r1",
    **labels: str,
) -> dict[str, Any]:
    ours = {
        LABEL_MANAGED_BY: MANAGED_BY,
        LABEL_SERVICE: service,
        LABEL_STATE: state,
        LABEL_REVISION: revision,
    }
    return {
        "metadata": {"name": name, "namespace": namespace, "labels": ours | labels},
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
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"model": {"uri": "file:///opt/slipway/models/tiny"}},
        "status": {"servedName": served_name, "revisions": revisions},
    }
