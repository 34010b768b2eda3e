"""The fake API server with discovery, which kopf reads before it watches anything."""

from typing import Any

from slipway_api.names import API_VERSION, GROUP, VERSION
from slipway_kube.resources import INFERENCE_SERVICES, LORA_ADAPTERS, WARM_POOLS
from tests.fakes import FakeApiServer, Request

_VERSIONS = [{"groupVersion": API_VERSION, "version": VERSION}]
DISCOVERY: dict[str, dict[str, Any]] = {
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/api/v1": {
        "kind": "APIResourceList",
        "groupVersion": "v1",
        "resources": [
            {"name": "namespaces", "singularName": "namespace", "kind": "Namespace", "namespaced": False, "verbs": []}
        ],
    },
    "/apis": {
        "kind": "APIGroupList",
        "groups": [{"name": GROUP, "versions": _VERSIONS, "preferredVersion": _VERSIONS[0]}],
    },
    f"/apis/{API_VERSION}": {
        "kind": "APIResourceList",
        "groupVersion": API_VERSION,
        "resources": [
            one
            for resource in (INFERENCE_SERVICES, LORA_ADAPTERS, WARM_POOLS)
            for one in (
                {
                    "name": resource.plural,
                    "singularName": resource.kind.lower(),
                    "kind": resource.kind,
                    "namespaced": True,
                    "verbs": ["get", "list", "watch", "create", "update", "patch", "delete"],
                },
                {"name": f"{resource.plural}/status", "singularName": "", "kind": resource.kind, "namespaced": True},
            )
        ],
    },
}


class DiscoverableApiServer(FakeApiServer):
    """Knows which kinds it has."""

    def _do(self, request: Request) -> tuple[dict[str, Any], int]:
        return (DISCOVERY[request.path], 200) if request.path in DISCOVERY else super()._do(request)
