"""The children that are not pods: the Kubernetes Service in front of the replicas, and their disruption budget.

They are applied server-side, whole, and only when what was applied last differs. Replicas stand behind the gateway;
the Service is for those who want to reach them past it, inside the cluster.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from slipway_api import names
from slipway_api.inference_service import InferenceService
from slipway_operator.core.actions import ApplyChild
from slipway_operator.core.service.revision import owner_reference


def children(service: InferenceService, *, desired: int, applied: Mapping[str, str]) -> tuple[ApplyChild, ...]:
    """What has to be applied for the children to be as they should be."""
    # The Service comes last: it is the one whose name may be somebody else's, and a refusal ends the pass.
    wanted = (_child(disruption_budget(service, desired)), _child(kube_service(service)))
    return tuple(child for child in wanted if applied.get(child.key) != child.digest)


def kube_service(service: InferenceService) -> dict[str, Any]:
    """Port 80 to the serving port of every replica that is ready and not draining."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(service),
        "spec": {
            "selector": _serving(service),
            "ports": [{"name": "http", "port": 80, "targetPort": names.SERVING_PORT, "protocol": "TCP"}],
        },
    }


def disruption_budget(service: InferenceService, desired: int) -> dict[str, Any]:
    """How many replicas evictions must leave: all but one, and the only one until its successor is ready.

    An integer, because percentages need `/scale`, which answers only when `spec.replicas` is set. Replicas that are
    not ready may always be evicted, or a broken one would hold its node for ever.
    """
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(service),
        "spec": {
            "minAvailable": max(desired - 1, min(desired, 1)),
            "selector": {"matchLabels": _serving(service)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def _serving(service: InferenceService) -> dict[str, str]:
    return {names.LABEL_SERVICE: service.metadata.name, names.LABEL_STATE: names.STATE_SERVING}


def _metadata(service: InferenceService) -> dict[str, Any]:
    return {
        "name": service.metadata.name,
        "namespace": service.metadata.namespace,
        "labels": {
            names.LABEL_MANAGED_BY: names.MANAGED_BY,
            "app.kubernetes.io/name": service.metadata.name,
            names.LABEL_SERVICE: service.metadata.name,
        },
        "ownerReferences": [owner_reference(service)],
    }


def _child(manifest: dict[str, Any]) -> ApplyChild:
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    kind, name = manifest["kind"], manifest["metadata"]["name"]
    return ApplyChild(key=f"{kind}/{name}", manifest=manifest, digest=digest, reason=f"{kind} {name} should be so")
