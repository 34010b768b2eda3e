"""From Kubernetes to the fleet: which pods may be sent requests, and what services are called.

The fleet changes only when the API server says that something changed. When it says nothing, the last view stands:
a broken watch never empties the table.
"""

import asyncio
from collections.abc import Sequence
from datetime import UTC

import structlog

from slipway_api import names
from slipway_gateway.fleet import Fleet, View
from slipway_gateway.picker.endpoints import Endpoint, Service
from slipway_kube.client import Client
from slipway_kube.informer import Change, Informer
from slipway_kube.objects import Object, Pod, Slim
from slipway_kube.resources import INFERENCE_SERVICES, PODS

log = structlog.get_logger()


class RevisionStatus(Slim, frozen=True, gc=False):
    """One revision's share of the traffic."""

    hash: str = ""
    weight: int = 0


class ServiceStatus(Slim, frozen=True, gc=False):
    """What the operator says of a service."""

    served_name: str = ""
    revisions: tuple[RevisionStatus, ...] = ()


class InferenceService(Object, frozen=True, gc=False):
    """The few fields of an InferenceService that routing needs."""

    status: ServiceStatus = ServiceStatus()


def endpoint_of(pod: Pod, port: int = names.SERVING_PORT) -> Endpoint | None:
    """Where requests for this pod go, or None while it must not get any.

    Ready, labelled as serving, not being deleted, and with an address. The operator sets the label to draining
    before it tells the runtime, so a draining pod leaves the table before it stops accepting.
    """
    serving = pod.labels.get(names.LABEL_STATE) == names.STATE_SERVING
    service = pod.labels.get(names.LABEL_SERVICE)
    if not (serving and service and pod.is_ready and pod.status.pod_ip) or pod.is_terminating:
        return None
    address = pod.status.pod_ip
    digests = pod.metadata.annotations.get(names.ANNOTATION_SERVING_TOKEN_SHA256, "")
    host = f"[{address}]" if ":" in address else address
    return Endpoint(
        name=f"{pod.namespace}/{pod.name}",
        service=f"{pod.namespace}/{service}",
        revision=pod.labels.get(names.LABEL_REVISION, ""),
        url=f"http://{host}:{port}",
        token_digests=tuple(filter(None, digests.split(","))),
    )


def service_of(resource: InferenceService) -> Service:
    """What routing needs to know of it. Before the operator wrote a status, it is called by its own name."""
    created = resource.metadata.creation_timestamp
    return Service(
        key=f"{resource.namespace}/{resource.name}",
        served_name=resource.status.served_name or resource.name,
        created=created.astimezone(UTC).isoformat() if created else "",
        weights={revision.hash: revision.weight for revision in resource.status.revisions},
    )


class Watch:
    """Keeps a fleet current from Pods and InferenceServices."""

    def __init__(
        self,
        client: Client,
        fleet: Fleet,
        *,
        namespaces: Sequence[str] = (),
        serving_port: int = names.SERVING_PORT,
    ) -> None:
        self._fleet = fleet
        self._serving_port = serving_port
        self._pods = Informer(client, PODS, Pod, namespaces=namespaces, label_selector=names.MANAGED_SELECTOR)
        self._services = Informer(client, INFERENCE_SERVICES, InferenceService, namespaces=namespaces)
        self._pods.on_change(self._pod_changed)
        self._services.on_change(self._service_changed)
        fleet.view = self.view

    def view(self) -> View:
        """Whether we have seen everything once, and how long ago the API server last spoke."""
        synced = self._pods.synced.is_set() and self._services.synced.is_set()
        return View(synced=synced, age_seconds=max(self._pods.age(), self._services.age()))

    async def run(self) -> None:
        """Watch until cancelled."""
        async with asyncio.TaskGroup() as informers:
            informers.create_task(self._pods.run())
            informers.create_task(self._services.run())

    def _pod_changed(self, change: Change, old: Pod | None, new: Pod | None) -> None:
        pod = new or old
        assert pod is not None
        name = f"{pod.namespace}/{pod.name}"
        endpoint = endpoint_of(new, self._serving_port) if new is not None else None
        had = self._fleet.has_endpoint(name)
        self._fleet.set_endpoint(name, endpoint)
        if had != (endpoint is not None):
            log.info("endpoint added" if endpoint else "endpoint removed", pod=name, change=str(change))

    def _service_changed(self, change: Change, old: InferenceService | None, new: InferenceService | None) -> None:
        resource = new or old
        assert resource is not None
        self._fleet.set_service(f"{resource.namespace}/{resource.name}", service_of(new) if new is not None else None)
