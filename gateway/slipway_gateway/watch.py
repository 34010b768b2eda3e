"""Watches Pods, InferenceServices and LoRAAdapters, and keeps the fleet's endpoints and names current.

The fleet changes only by watch events and lists. While the API server does not answer, the last state stays: a broken
watch never empties the routing table.
"""

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Final

import structlog

from slipway_api import internal_tls, names
from slipway_api.conditions import ConditionType, Reason
from slipway_api.lora_adapter import PlacementMode
from slipway_api.pod_labels import PodState, read_state, takes_requests
from slipway_gateway.fleet import Fleet, View
from slipway_gateway.kinds import (
    Alias,
    Autoscaling,
    ConditionFacts,
    InferenceService,
    LoRAAdapter,
    RolloutSpec,
    ServiceStatus,
)
from slipway_gateway.panic import PanicMode, is_silent
from slipway_gateway.picker.endpoints import Adapter, Endpoint, Service, WaitLimits
from slipway_kube.access import ReadAccess
from slipway_kube.client import Client
from slipway_kube.informer import Change, Informer
from slipway_kube.objects import Object, OwnerReference, Pod
from slipway_kube.resources import INFERENCE_SERVICES, LORA_ADAPTERS, NAMESPACES, PODS

log = structlog.get_logger()

# If the kind LoRAAdapter is not installed, or Namespaces may not be listed, that list never succeeds: the gateway then
# serves without adapters, or knows only the namespaces of its objects.
OPTIONAL_SECONDS: Final = 5.0


def endpoint_of(pod: Pod, port: int = names.SERVING_PORT, *, on_silent_node: bool = False) -> Endpoint | None:
    """The endpoint of this pod, or None while it must not get requests.

    Ready, not being deleted, with an address, controlled by an InferenceService, and with that service's labels of a
    serving replica: labels alone would let anyone who may create pods receive the prompts of a service. The operator
    sets the state to draining before it calls the runtime, so a draining pod leaves the table before it refuses any.
    With `on_silent_node`, of a pod that is not ready only because its node does not answer.
    """
    owner = controlling_service(pod)
    is_ready = is_silent(pod) if on_silent_node else pod.is_ready
    if owner is None or not (is_ready and pod.status.pod_ip) or pod.is_terminating:
        return None
    if not takes_requests(pod.name, pod.labels, pod.metadata.annotations, service=owner.name):
        return None
    address = pod.status.pod_ip
    digests = pod.metadata.annotations.get(names.ANNOTATION_SERVING_TOKEN_SHA256, "")
    host = f"[{address}]" if ":" in address else address
    speaks_tls = pod.spec.secret_of(internal_tls.VOLUME) == internal_tls.REPLICAS_SECRET
    return Endpoint(
        name=f"{pod.namespace}/{pod.name}",
        service=f"{pod.namespace}/{owner.name}",
        revision=pod.labels.get(names.LABEL_REVISION, ""),
        url=f"{'https' if speaks_tls else 'http'}://{host}:{port}",
        owner_uid=owner.uid,
        served_name=pod.metadata.annotations.get(names.ANNOTATION_SERVED_NAME, ""),
        token_digests=tuple(filter(None, digests.split(","))),
        adapters=frozenset(filter(None, pod.metadata.annotations.get(names.ANNOTATION_ADAPTERS, "").split(","))),
        node=pod.spec.node_name,
        engine=pod.metadata.annotations.get(names.ANNOTATION_ENGINE, ""),
        tls_name=internal_tls.replicas_name(pod.namespace) if speaks_tls else "",
    )


def controlling_service(pod: Pod) -> OwnerReference | None:
    """The InferenceService that controls the pod; `Fleet` compares its uid with the service's."""
    for owner in pod.metadata.owner_references:
        is_service = owner.kind == INFERENCE_SERVICES.kind and owner.api_version.startswith(f"{names.GROUP}/")
        if owner.controller and is_service and owner.uid:
            return owner
    return None


def finishes_requests(pod: Pod | None) -> bool:
    """Whether a pod that left the table will still answer accepted requests.

    It does if it drains, if it is being deleted, or if it is ready and only its labels were edited. One that is only
    unready (hung, its node silent) or that is already gone does not.
    """
    return pod is not None and (pod.is_terminating or pod.is_ready or read_state(pod.labels) is not PodState.SERVING)


def service_of(resource: InferenceService) -> Service:
    """The fields that routing needs. Before the operator wrote a status, the served name is the full name."""
    revisions, fallback = resource.status.revisions, resource.spec.routing.fallback
    hedging = resource.spec.routing.hedging
    return Service(
        key=f"{resource.namespace}/{resource.name}",
        served_name=resource.status.served_name or resource.name,
        uid=resource.uid,
        created=resource.metadata.creation_timestamp,
        weights={revision.hash: revision.weight for revision in revisions},
        withheld=withheld_revisions(resource.rollout, resource.status),
        mirrors={revision.hash: revision.mirror_percent for revision in revisions if revision.mirror_percent},
        desired_replicas=resource.status.desired_replicas,
        activation=activation_of(resource.autoscaling),
        is_suspended=resource.spec.suspend,
        stalled=cannot_start(resource.status.conditions),
        max_num_seqs=resource.spec.runtime.max_num_seqs,
        strategy=resource.spec.routing.known_strategy,
        request_seconds=resource.spec.routing.request_timeout_seconds,
        fallback=f"{resource.namespace}/{fallback.service}" if fallback.service else "",
        fallback_seconds=fallback.after_seconds,
        hedged_prompt_tokens=hedging.max_prompt_tokens if hedging is not None else 0,
        handover=resource.drain.handover,
        latency_limits=resource.slo.latency_limits,
    )


def cannot_start(conditions: Iterable[ConditionFacts]) -> str:
    """The reason of Stalled, if the operator says that no replica can start for it; empty: a replica may come.

    Stalled alone does not say so: it may be about a new revision while the stable one starts, or about a child.
    """
    by_type = {one.type: one for one in conditions}
    stalled, route = by_type.get(ConditionType.STALLED), by_type.get(ConditionType.ROUTE_READY)
    if stalled is None or stalled.status != "True":
        return ""
    return stalled.reason if route is None or route.reason == Reason.CANNOT_START else ""


def withheld_revisions(rollout: RolloutSpec, status: ServiceStatus) -> frozenset[str]:
    """Revisions that get no request by chance, also while no other one has a ready replica.

    One that was rolled back; and a new one that has no weight, because the operator has not admitted it to traffic yet:
    it waits for its gates, or for the first step of its strategy. Without gates and with RollingUpdate a weight of 0
    only means that the status lags behind the pods.
    """
    withheld = {status.failed_revision}
    weights = {one.hash: one.weight for one in status.revisions}
    update = status.update_revision
    if update != status.current_revision and status.current_revision and not weights.get(update, 0):
        has_steps = rollout.strategy in ("Canary", "BlueGreen")
        if has_steps or (rollout.gates is not None and status.canary.gate != "Passed"):
            withheld.add(update)
    return frozenset(withheld - {""})


def activation_of(autoscaling: Autoscaling | None) -> WaitLimits | None:
    """The limits of waiting for a service that demand brings back from zero; None: demand does not."""
    if autoscaling is None or autoscaling.scale_to_zero is None or autoscaling.mode != "Active":
        return None
    activation = autoscaling.scale_to_zero.activation
    return WaitLimits(
        requests=activation.max_queued_requests,
        bytes=bytes_of(activation.max_queued_bytes),
        seconds=activation.max_wait_seconds,
    )


_UNITS: Final[dict[str, int]] = {
    "": 1,
    **{f"{prefix}i": 1024**power for power, prefix in enumerate("KMGTPE", 1)},
    **{prefix: 1000**power for power, prefix in enumerate("kMGTPE", 1)},
}


def bytes_of(quantity: str | int) -> int:
    """A quantity of bytes as a number: 256Mi, 1G, 5000. The kind's validation admits no other form."""
    text = str(quantity)
    digits = text.rstrip("KkMGTPEi")
    return int(digits or 0) * _UNITS.get(text[len(digits) :], 1)


def adapter_of(resource: LoRAAdapter) -> Adapter | None:
    """The adapter as routing sees it; None while it must get no requests: being deleted, or its name is another's."""
    stalled = next((one for one in resource.status.conditions if one.type == "Stalled" and one.status == "True"), None)
    has_conflict = stalled is not None and stalled.reason == "NameConflict"
    if has_conflict or resource.is_terminating or not resource.spec.base_ref.name:
        return None
    alias = resource.spec.alias or Alias()
    return Adapter(
        key=f"{resource.namespace}/{resource.name}",
        name=resource.spec.adapter_name or resource.name,
        service=f"{resource.namespace}/{resource.spec.base_ref.name}",
        alias=alias.name,
        alias_weight=alias.weight,
        created=resource.metadata.creation_timestamp,
        # A request for one that cannot be loaded would wait in vain.
        stalled=stalled.reason if stalled is not None else "",
        on_demand=stalled is None
        and resource.spec.placement is not None
        and resource.spec.placement.mode == PlacementMode.ON_DEMAND,
    )


class Watch:
    """Keeps a fleet current from Pods, InferenceServices and LoRAAdapters."""

    def __init__(
        self,
        client: Client,
        fleet: Fleet,
        *,
        namespaces: Sequence[str] = (),
        serving_port: int = names.SERVING_PORT,
    ) -> None:
        self._fleet = fleet
        self._panic = PanicMode(fleet)
        self._serving_port = serving_port
        self._access = access = ReadAccess()
        self.pods = Informer(
            client, PODS, Pod, namespaces=namespaces, label_selector=names.MANAGED_SELECTOR, access=access
        )
        self.services = Informer(client, INFERENCE_SERVICES, InferenceService, namespaces=namespaces, access=access)
        self.adapters = Informer(client, LORA_ADAPTERS, LoRAAdapter, namespaces=namespaces, access=access)
        self.pods.on_change(self._pod_changed)
        self.services.on_change(self._service_changed)
        self.adapters.on_change(self._adapter_changed)
        # A name with a namespace is that namespace's own, also before there is an object in it.
        self.namespaces = None if namespaces else Informer(client, NAMESPACES, Object)
        if self.namespaces is not None:
            self.namespaces.on_change(self._namespace_changed)
        fleet.table.know_namespaces(namespaces)
        self._others_synced_at: float | None = None
        fleet.view = self.view

    def view(self) -> View:
        """Whether everything that may be read was listed once, and how long ago the API server last sent something."""
        others = self.pods.synced.is_set() and self.services.synced.is_set()
        if others and self._others_synced_at is None:
            self._others_synced_at = time.monotonic()
        optional = self.adapters.synced.is_set() and (self.namespaces is None or self.namespaces.synced.is_set())
        return View(
            synced=others and (optional or self._has_waited()),
            age_seconds=max(self.pods.age(), self.services.age()),
            refused=tuple(sorted(self._access.refused)),
            refusal=self._access.describe(),
        )

    def _has_waited(self) -> bool:
        return self._others_synced_at is not None and time.monotonic() - self._others_synced_at > OPTIONAL_SECONDS

    async def run(self) -> None:
        """Watch until cancelled."""
        async with asyncio.TaskGroup() as informers:
            informers.create_task(self.pods.run())
            informers.create_task(self.services.run())
            informers.create_task(self._panic.run())
            informers.create_task(self.adapters.run())
            if self.namespaces is not None:
                informers.create_task(self.namespaces.run())

    def _namespace_changed(self, change: Change, old: Object | None, new: Object | None) -> None:
        if new is not None:
            self._fleet.table.know_namespaces([new.name])

    def _pod_changed(self, change: Change, old: Pod | None, new: Pod | None) -> None:
        pod = new or old
        assert pod is not None
        name = f"{pod.namespace}/{pod.name}"
        self._fleet.table.know_namespaces([pod.namespace])
        endpoint = endpoint_of(new, self._serving_port) if new is not None else None
        was_endpoint = self._fleet.table.endpoint(name) is not None
        silent = endpoint_of(new, self._serving_port, on_silent_node=True) if new is not None else None
        self._panic.set_endpoint(name, endpoint, silent, finishes_requests=finishes_requests(new))
        if was_endpoint != (endpoint is not None):
            log.info("endpoint added" if endpoint else "endpoint removed", pod=name, change=str(change))

    def _service_changed(self, change: Change, old: InferenceService | None, new: InferenceService | None) -> None:
        resource = new or old
        assert resource is not None
        self._fleet.set_service(f"{resource.namespace}/{resource.name}", service_of(new) if new is not None else None)

    def _adapter_changed(self, change: Change, old: LoRAAdapter | None, new: LoRAAdapter | None) -> None:
        resource = new or old
        assert resource is not None
        self._fleet.table.know_namespaces([resource.namespace])
        self._fleet.set_adapter(f"{resource.namespace}/{resource.name}", adapter_of(new) if new is not None else None)
