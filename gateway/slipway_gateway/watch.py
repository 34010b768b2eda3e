"""Watches Pods and InferenceServices, and keeps the fleet's endpoints and service names current.

The fleet changes only by watch events and lists. While the API server does not answer, the last state stays: a broken
watch never empties the routing table.
"""

import asyncio
from collections.abc import Sequence

import structlog

from slipway_api import names
from slipway_gateway.fleet import Fleet, View
from slipway_gateway.picker.endpoints import Endpoint, Service
from slipway_kube.client import Client
from slipway_kube.informer import Change, Informer
from slipway_kube.objects import Object, OwnerReference, Pod, Slim
from slipway_kube.resources import INFERENCE_SERVICES, PODS

log = structlog.get_logger()


class RevisionStatus(Slim, frozen=True, gc=False):
    """One revision's share of the traffic."""

    hash: str = ""
    weight: int = 0


class ServiceStatus(Slim, frozen=True, gc=False):
    """The operator's status of a service."""

    served_name: str = ""
    revisions: tuple[RevisionStatus, ...] = ()


class DrainSpec(Slim, frozen=True, gc=False):
    """spec.drain."""

    handover: bool = True


class RoutingSpec(Slim, frozen=True, gc=False):
    """spec.routing."""

    request_timeout_seconds: int | None = None


class ServiceSpec(Slim, frozen=True, gc=False):
    """The few fields of the spec that take effect in the gateway."""

    drain: DrainSpec = DrainSpec()
    routing: RoutingSpec = RoutingSpec()


class InferenceService(Object, frozen=True, gc=False):
    """The few fields of an InferenceService that routing needs."""

    spec: ServiceSpec = ServiceSpec()
    status: ServiceStatus = ServiceStatus()


def endpoint_of(pod: Pod, port: int = names.SERVING_PORT) -> Endpoint | None:
    """The endpoint of this pod, or None while it must not get requests.

    Ready, labelled as serving, not being deleted, with an address, and controlled by the InferenceService of its label:
    labels alone would let anyone who may create pods receive the prompts of a service. The operator sets the label to
    draining before it calls the runtime, so a draining pod leaves the table before it stops accepting.
    """
    serving = pod.labels.get(names.LABEL_STATE) == names.STATE_SERVING
    owner = controlling_service(pod)
    if owner is None or not (serving and pod.is_ready and pod.status.pod_ip) or pod.is_terminating:
        return None
    address = pod.status.pod_ip
    digests = pod.metadata.annotations.get(names.ANNOTATION_SERVING_TOKEN_SHA256, "")
    host = f"[{address}]" if ":" in address else address
    return Endpoint(
        name=f"{pod.namespace}/{pod.name}",
        service=f"{pod.namespace}/{owner.name}",
        revision=pod.labels.get(names.LABEL_REVISION, ""),
        url=f"http://{host}:{port}",
        owner_uid=owner.uid,
        served_name=pod.metadata.annotations.get(names.ANNOTATION_SERVED_NAME, ""),
        token_digests=tuple(filter(None, digests.split(","))),
    )


def controlling_service(pod: Pod) -> OwnerReference | None:
    """The InferenceService that controls the pod, where it is also the one of its label."""
    for owner in pod.metadata.owner_references:
        is_service = owner.kind == INFERENCE_SERVICES.kind and owner.api_version.startswith(f"{names.GROUP}/")
        if owner.controller and is_service and owner.uid and owner.name == pod.labels.get(names.LABEL_SERVICE):
            return owner
    return None


def finishes_requests(pod: Pod | None) -> bool:
    """Whether a pod that left the table will still answer accepted requests, because it drains or is being deleted.

    One that is only unready (hung, its node silent) or that is already gone will not.
    """
    return pod is not None and (pod.is_terminating or pod.labels.get(names.LABEL_STATE, "") != names.STATE_SERVING)


def service_of(resource: InferenceService) -> Service:
    """The fields that routing needs. Before the operator wrote a status, the served name is the full name."""
    return Service(
        key=f"{resource.namespace}/{resource.name}",
        served_name=resource.status.served_name or resource.name,
        uid=resource.uid,
        created=resource.metadata.creation_timestamp,
        weights={revision.hash: revision.weight for revision in resource.status.revisions},
        request_seconds=resource.spec.routing.request_timeout_seconds,
        handover=resource.spec.drain.handover,
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
        """Whether everything was listed once, and how long ago the API server last sent something."""
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
        was_endpoint = self._fleet.table.endpoint(name) is not None
        self._fleet.set_endpoint(name, endpoint, finishes_requests=finishes_requests(new))
        if was_endpoint != (endpoint is not None):
            log.info("endpoint added" if endpoint else "endpoint removed", pod=name, change=str(change))

    def _service_changed(self, change: Change, old: InferenceService | None, new: InferenceService | None) -> None:
        resource = new or old
        assert resource is not None
        self._fleet.set_service(f"{resource.namespace}/{resource.name}", service_of(new) if new is not None else None)
