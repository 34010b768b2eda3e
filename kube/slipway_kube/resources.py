"""The URL paths of the Kubernetes kinds that Slipway uses: group, version, plural -> path."""

from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from slipway_api.names import GROUP, VERSION


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind of object, by the parts of its URL."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """The `apiVersion` of a manifest."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """The URL path of a collection (no name), an object, or one of its subresources.

        Without a namespace, the collection spans all namespaces.
        """
        parts = ["/apis", self.group, self.version] if self.group else ["/api", self.version]
        if namespace and self.namespaced:
            parts += ["namespaces", quote(namespace, safe="")]
        parts.append(self.plural)
        if name:
            parts.append(quote(name, safe=""))
        if subresource:
            parts.append(subresource)
        return "/".join(parts)


PODS: Final = Resource("", "v1", "pods", "Pod")
NODES: Final = Resource("", "v1", "nodes", "Node", namespaced=False)
NAMESPACES: Final = Resource("", "v1", "namespaces", "Namespace", namespaced=False)
SERVICES: Final = Resource("", "v1", "services", "Service")
SECRETS: Final = Resource("", "v1", "secrets", "Secret")
CONFIG_MAPS: Final = Resource("", "v1", "configmaps", "ConfigMap")
ENDPOINT_SLICES: Final = Resource("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice")
DISRUPTION_BUDGETS: Final = Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
NETWORK_POLICIES: Final = Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
CONTROLLER_REVISIONS: Final = Resource("apps", "v1", "controllerrevisions", "ControllerRevision")
LEASES: Final = Resource("coordination.k8s.io", "v1", "leases", "Lease")
EVENTS: Final = Resource("events.k8s.io", "v1", "events", "Event")
INFERENCE_SERVICES: Final = Resource(GROUP, VERSION, "inferenceservices", "InferenceService")
LORA_ADAPTERS: Final = Resource(GROUP, VERSION, "loraadapters", "LoRAAdapter")
WARM_POOLS: Final = Resource(GROUP, VERSION, "warmpools", "WarmPool")
SERVICE_TEMPLATES: Final = Resource(GROUP, VERSION, "servicetemplates", "ServiceTemplate", namespaced=False)
ENGINES: Final = Resource(GROUP, VERSION, "engines", "Engine", namespaced=False)
