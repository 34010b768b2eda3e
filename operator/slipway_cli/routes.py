"""The split of a service as objects of the Gateway API: an HTTPRoute, and a pool of replicas for each revision. Pure.

Each revision that has traffic becomes a backend with its weight of `status.revisions`. With an endpoint picker it is
an InferencePool (Gateway API Inference Extension), whose picker chooses the replica by what our runtime reports under
vLLM's names. Without one it is a Service, which spreads connections. Both select the replicas that serve: one that
drains has another `slipway.dev/state` and leaves its pool with that label.
"""

from dataclasses import dataclass
from typing import Any, Final

from slipway_api import names
from slipway_api.inference_service import DirectAccess, InferenceService

API: Final = "gateway.networking.k8s.io/v1"
INFERENCE_GROUP: Final = "inference.networking.k8s.io"


class NotExportedError(ValueError):
    """The service cannot be called around our gateway; the message says why."""


@dataclass(frozen=True, slots=True)
class Options:
    """Where the route is attached, and what it matches."""

    gateway: str  # the name of a Gateway, or <namespace>/<name>
    hostnames: tuple[str, ...] = ()
    endpoint_picker: tuple[str, int] | None = None  # a Service of the namespace and its port; None: plain Services
    model_header: str = ""  # a header that has the served name, where the mesh reads it from bodies; empty: none


def export_routes(service: InferenceService, options: Options) -> list[dict[str, Any]]:
    """The objects, pools first; raises NotExportedError."""
    if service.direct_access is DirectAccess.GATEWAY_ONLY:
        raise NotExportedError("its replicas answer only Slipway's gateway: spec.routing.directAccess is GatewayOnly")
    weights = {one.hash: one.weight for one in service.status.revisions if one.weight}
    if not weights:
        raise NotExportedError("no revision of it has traffic yet")
    pools = [_pool(service, revision, options) for revision in weights]
    backends = [
        _reference(pool) | {"port": names.SERVING_PORT, "weight": weight}
        for pool, weight in zip(pools, weights.values(), strict=True)
    ]
    return [*pools, _route(service, backends, options)]


def _pool(service: InferenceService, revision: str, options: Options) -> dict[str, Any]:
    """The replicas of one revision that serve."""
    labels = {
        names.LABEL_SERVICE: service.metadata.name,
        names.LABEL_REVISION: revision,
        names.LABEL_STATE: names.STATE_SERVING,
    }
    name = f"{service.metadata.name}-{revision[:5]}"
    if options.endpoint_picker is None:
        ports = [{"name": "http", "port": names.SERVING_PORT, "targetPort": names.SERVING_PORT}]
        return _object("v1", "Service", service, name, {"selector": labels, "ports": ports})
    picker, port = options.endpoint_picker
    spec = {
        "selector": {"matchLabels": labels},
        "targetPorts": [{"number": names.SERVING_PORT}],
        "endpointPickerRef": {"name": picker, "port": {"number": port}, "failureMode": "FailOpen"},
    }
    return _object(f"{INFERENCE_GROUP}/v1", "InferencePool", service, name, spec)


def _reference(pool: dict[str, Any]) -> dict[str, Any]:
    group = "" if pool["kind"] == "Service" else INFERENCE_GROUP
    return {"group": group, "kind": pool["kind"], "name": pool["metadata"]["name"]}


def _route(service: InferenceService, backends: list[dict[str, Any]], options: Options) -> dict[str, Any]:
    namespace, _, gateway = options.gateway.rpartition("/")
    match: dict[str, Any] = {"path": {"type": "PathPrefix", "value": "/v1"}}
    if options.model_header:
        served_name = service.status.served_name or service.served_name
        match["headers"] = [{"type": "Exact", "name": options.model_header, "value": served_name}]
    seconds = service.spec.routing.request_timeout_seconds
    spec: dict[str, Any] = {
        "parentRefs": [{"name": gateway} | ({"namespace": namespace} if namespace else {})],
        "rules": [{"matches": [match], "backendRefs": backends, "timeouts": {"request": f"{seconds}s"}}],
    }
    if options.hostnames:
        spec["hostnames"] = list(options.hostnames)
    return _object(API, "HTTPRoute", service, service.metadata.name, spec)


def _object(api_version: str, kind: str, service: InferenceService, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    """An object that goes with its service when that is deleted."""
    owner = {
        "apiVersion": names.API_VERSION,
        "kind": "InferenceService",
        "name": service.metadata.name,
        "uid": service.metadata.uid,
    }
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": service.metadata.namespace,
        "labels": {names.LABEL_SERVICE: service.metadata.name},
    }
    if service.metadata.uid:
        metadata["ownerReferences"] = [owner]
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": spec}
