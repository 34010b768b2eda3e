"""Builds the children that are not pods: Service, PodDisruptionBudget, NetworkPolicy and boot list of the replicas.

They are applied server-side, whole, and only when what was applied last differs. Clients reach replicas through the
gateway; the Service reaches them directly, inside the cluster.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from slipway_api import names
from slipway_api.inference_service import DirectAccess, DisruptionBudget, InferenceService
from slipway_operator.core.actions import ABSENT, ApplyChild, DeleteChild
from slipway_operator.core.adapter.observed import AttachedAdapter
from slipway_operator.core.installation import Network
from slipway_operator.core.service.adapters import boot_list, config_map_name
from slipway_operator.core.service.rollout.revision import owner_reference

NAMESPACE_NAME: Final = "kubernetes.io/metadata.name"  # a label that the API server sets on every namespace


def children(
    service: InferenceService,
    *,
    desired: int,
    applied: Mapping[str, str],
    network: Network | None = None,
    allows_evictions: bool = False,
    draining: Iterable[str] = (),
    adapters: Sequence[AttachedAdapter] = (),
) -> tuple[ApplyChild | DeleteChild, ...]:
    """The children that differ from what was applied last. `network` None: no network policy is wanted.

    With `allows_evictions` the disruption budget holds up no eviction: the drain of a node has waited long enough.
    `draining` are the names of the replicas that drain.
    """
    manifests = [network_policy(service, network)] if network is not None else []
    if service.spec.runtime.lora is not None:
        manifests.append(boot_list_map(service, adapters))
    removed: tuple[DeleteChild, ...] = ()
    if service.spec.availability.pod_disruption_budget is DisruptionBudget.AUTO:
        manifests.append(disruption_budget(service, 0 if allows_evictions else desired, draining))
    elif applied.get(key := f"PodDisruptionBudget/{service.metadata.name}") != ABSENT:
        removed = (DeleteChild(key=key, name=service.metadata.name, reason="podDisruptionBudget is None"),)
    manifests.append(kube_service(service))
    wanted = [_child(manifest) for manifest in manifests]
    return (*removed, *(child for child in wanted if applied.get(child.key) != child.digest))


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


def boot_list_map(service: InferenceService, adapters: Sequence[AttachedAdapter]) -> dict[str, Any]:
    """The ConfigMap with the adapters that replicas load before they are ready."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(service) | {"name": config_map_name(service.metadata.name)},
        "data": {names.ADAPTERS_FILE: boot_list(adapters)},
    }


def network_policy(service: InferenceService, network: Network) -> dict[str, Any]:
    """The NetworkPolicy that limits connections to the replicas, where the cluster's network enforces policies.

    | port           | admits                                                                               |
    |----------------|--------------------------------------------------------------------------------------|
    | admin          | operator and gateway; namespaces that scrape metrics                                 |
    | serving        | every pod, where directAccess is Open; else the gateway and the installation's list  |
    """
    control = [_release_pods(network)]
    is_open = service.direct_access is DirectAccess.OPEN
    serving = {"ports": [_port(names.SERVING_PORT)]}
    if not is_open:
        serving["from"] = control + _namespaces(network.client_namespaces)
    admin = {"ports": [_port(names.ADMIN_PORT)], "from": control + _namespaces(network.metrics_namespaces)}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        # A user's own policy is likely to have the name of the service.
        "metadata": _metadata(service) | {"name": f"{service.metadata.name}-replicas"},
        "spec": {
            "podSelector": {"matchLabels": {names.LABEL_SERVICE: service.metadata.name}},
            "policyTypes": ["Ingress"],
            "ingress": [serving, admin],
        },
    }


def _port(number: int) -> dict[str, Any]:
    return {"port": number, "protocol": "TCP"}


def _release_pods(network: Network) -> dict[str, Any]:
    components = {"key": "app.kubernetes.io/component", "operator": "In", "values": ["operator", "gateway"]}
    return {
        "namespaceSelector": {"matchLabels": {NAMESPACE_NAME: network.release_namespace}},
        "podSelector": {"matchExpressions": [components]},
    }


def _namespaces(namespaces: tuple[str, ...]) -> list[dict[str, Any]]:
    return [{"namespaceSelector": {"matchLabels": {NAMESPACE_NAME: name}}} for name in namespaces]


def disruption_budget(service: InferenceService, desired: int, draining: Iterable[str] = ()) -> dict[str, Any]:
    """The PodDisruptionBudget: evictions leave all replicas but one, and a single one until its replacement is ready.

    Kubernetes counts again when a pod changes that the budget selects, but not when a pod leaves the selection. So the
    budget has an annotation that changes with the draining replicas: without it, a replica that began to drain counted
    as healthy until another pod changed, and the only serving one could be evicted (ADR 171).

    An integer, because percentages need `/scale`, which answers only when `spec.replicas` is set. Replicas that are
    not ready may always be evicted, or a broken one would hold its node for ever.
    """
    metadata = _metadata(service)
    if left := sorted(draining):
        digest = hashlib.sha256(" ".join(left).encode()).hexdigest()[:16]
        metadata["annotations"] = {names.ANNOTATION_DRAINING: digest}
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata,
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
