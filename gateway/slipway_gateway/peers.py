"""Counts the gateways that share the limits of tenants: the ready backends of the gateways' own Kubernetes Service."""

from slipway_kube.client import Client
from slipway_kube.informer import Informer
from slipway_kube.objects import EndpointSlice
from slipway_kube.resources import ENDPOINT_SLICES

SERVICE_NAME_LABEL = "kubernetes.io/service-name"


class Peers:
    """Watches the EndpointSlices of one Kubernetes Service. While the API server is away, the last count stays."""

    def __init__(self, client: Client, namespace: str, service: str, *, default: int) -> None:
        """`default` counts until the first list, and while no backend is ready."""
        self._default = default
        self._slices = Informer(
            client,
            ENDPOINT_SLICES,
            EndpointSlice,
            namespaces=[namespace],
            label_selector=f"{SERVICE_NAME_LABEL}={service}",
        )

    @property
    def count(self) -> int:
        """How many gateways get requests now."""
        return count_ready(list(self._slices.cache.values())) or self._default

    async def run(self) -> None:
        """Watch until cancelled."""
        await self._slices.run()


def count_ready(slices: "list[EndpointSlice]") -> int:
    """How many distinct pods are ready; one that is in two slices, or has two addresses, counts once."""
    return len(
        {
            endpoint.target_ref.uid if endpoint.target_ref is not None else endpoint.addresses
            for one in slices
            for endpoint in one.endpoints or ()
            if endpoint.conditions.ready is not False
        }
    )
