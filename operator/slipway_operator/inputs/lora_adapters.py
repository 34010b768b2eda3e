"""The controller's kind LoRAAdapter: builds `AdapterObserved` from caches, returns the core's plan as a `Decision`."""

from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, cast

from slipway_api import names
from slipway_api.inference_service import DirectAccess
from slipway_api.lora_adapter import AdapterPodStatus, LoRAAdapter, PlacementMode
from slipway_api.pod_labels import takes_requests
from slipway_api.service_template import with_inherited
from slipway_api.types import ServiceKey
from slipway_kube.informer import Change
from slipway_kube.objects import Pod
from slipway_kube.resources import INFERENCE_SERVICES, LORA_ADAPTERS, Resource
from slipway_operator.adapter_routes import routed_adapters
from slipway_operator.controller.kinds import Decision, Key, Memory, StoredObject
from slipway_operator.controller.queue import Urgency
from slipway_operator.core.adapter.observed import AdapterObserved, AdapterPod, Base, OnDemandAdapter, Rival
from slipway_operator.core.adapter.plan import plan
from slipway_operator.inputs.caches import Inputs
from slipway_operator.inputs.inference_services import served_name
from slipway_operator.inputs.labels import controller_of

KIND = LORA_ADAPTERS.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """In-memory state that one pass passes to the next; a new leader starts without it."""

    entries: dict[str, AdapterPodStatus] = field(default_factory=dict)
    counted: dict[str, datetime] = field(default_factory=dict)
    unrouted: dict[str, datetime] = field(default_factory=dict)
    written_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class PodFacts:
    """The facts of a pod that all adapters of its base share."""

    pod: Pod
    owner_uid: str
    takes_requests: bool
    """Labelled as serving, and not being deleted."""
    ready: bool
    unready_since: datetime | None
    restarts: int
    routed: frozenset[str]


class LoRAAdapters:
    """Observes one LoRAAdapter, and plans for it."""

    name: str = KIND
    resource: Resource = LORA_ADAPTERS

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._index = inputs.adapters
        self._services = inputs.caches.stores[INFERENCE_SERVICES.kind]
        self._facts: dict[str, PodFacts] = {}  # by uid
        inputs.caches.on_object_change(KIND, self._saw)
        inputs.caches.on_object_change(INFERENCE_SERVICES.kind, self._saw_service)
        inputs.caches.on_pod_change(self._saw_pod)
        inputs.sample_listeners.append(self._wake_all)
        assert inputs.adapter_calls is not None, "the manager passes them"
        self._calls = inputs.adapter_calls
        self._calls.on_news = self._heard

    # --- changes of the caches ----------------------------------------------------------------------------------------

    def _saw(self, key: Key, _old: StoredObject | None, new: StoredObject | None) -> None:
        bases = self._index.saw(key, new)
        self._inputs.wake_objects(
            self._inputs.model_names.set_adapter(f"{key.namespace}/{key.name}", self._index.names(key))
        )
        for base in bases:
            self._inputs.wake(Key(INFERENCE_SERVICES.kind, *base), Urgency.NORMAL)

    def _saw_service(self, key: Key, old: StoredObject | None, new: StoredObject | None) -> None:
        if _facts_of(old) == _facts_of(new):
            return
        self._wake_all(ServiceKey(key.namespace, key.name))

    def _saw_pod(self, change: Change, old: Pod | None, new: Pod | None, services: set[ServiceKey]) -> None:
        before = self._facts.get(old.uid) if old is not None else None
        if old is not None and (change is Change.DELETED or new is None or new.uid != old.uid):
            self._facts.pop(old.uid, None)
            self._calls.forget(old.uid)
        after = None if new is None or change is Change.DELETED else self._facts_of(new)
        if before is not None and after is not None and _without_routes(before) == _without_routes(after):
            changed = before.routed ^ after.routed
            if changed:
                for service in services:
                    self._heard(service, changed)
            return
        for service in services:
            self._wake_all(service)

    def _heard(self, service: ServiceKey, adapters: frozenset[str] | None) -> None:
        """Wake the adapters of these names, or all of the service."""
        if adapters is None:
            self._wake_all(service)
            return
        # What one replica has loaded decides what those of mode OnDemand leave.
        evictable = {one.name for one in self._index.of(service) if one.mode is PlacementMode.ON_DEMAND}
        for adapter in adapters | evictable:
            for key in self._index.key_of(service, adapter):
                self._inputs.wake(key, Urgency.NORMAL)

    def _wake_all(self, service: ServiceKey) -> None:
        for key in self._index.keys_of(service):
            self._inputs.wake(key, Urgency.NORMAL)

    # --- the interface `Kind` -----------------------------------------------------------------------------------------

    def observe(self, key: Key, stored: StoredObject, memory: Memory) -> AdapterObserved:
        """Build the snapshot from which the core decides."""
        adapter = LoRAAdapter.model_validate(stored.body)
        service = self._services.get(Key(INFERENCE_SERVICES.kind, *adapter.base))
        base = base_of(service) if service is not None else None
        pods: tuple[AdapterPod, ...] = ()
        if base is not None:
            facts = [self._facts_of(pod) for pod in self._inputs.caches.pods.of(adapter.base)]
            name = adapter.adapter_name
            pods = tuple(self._pod(one, name) for one in facts if one.owner_uid == base.uid and one.takes_requests)
        observed = AdapterObserved(
            adapter=adapter, base=base, rival=self._rival(key), pods=pods,
            on_demand=self._on_demand(adapter),
        )  # fmt: skip
        return self.with_memory(observed, memory)

    def with_memory(self, observed: AdapterObserved, memory: Memory) -> AdapterObserved:
        """The same observation with the results of earlier passes."""
        carried = cast("Carried | None", memory.carried)
        if carried is None:
            return replace(observed, failures=memory.failures)
        return replace(
            observed,
            failures=memory.failures,
            entries=carried.entries,
            counted=carried.counted,
            unrouted=carried.unrouted,
            written_at=carried.written_at,
        )

    def plan(self, observed: AdapterObserved, now: datetime) -> Decision:
        """Run the core's `plan`."""
        decided = plan(observed, now)
        return Decision(
            actions=decided.actions,
            status=decided.status.to_json() if decided.status is not None else None,
            status_before=observed.adapter.status.to_json(),
            notes=decided.notes,
            pod_uids={one.name: one.uid for one in observed.pods},
            requeue_after=decided.requeue_after,
            carried=Carried(
                entries=dict(decided.entries),
                counted=dict(decided.counted),
                unrouted=dict(decided.unrouted),
                written_at=decided.written_at,
            ),
        )

    def _on_demand(self, adapter: LoRAAdapter) -> tuple[OnDemandAdapter, ...]:
        """The adapters of the base in mode OnDemand, where this one has that mode: they make room for each other."""
        if adapter.spec.placement.mode is not PlacementMode.ON_DEMAND:
            return ()
        waiting = self._inputs.waiting_adapters_of(adapter.base)
        return tuple(
            OnDemandAdapter(
                name=one.name, priority=one.priority, pinned=one.pinned, waiting=waiting.get(one.name, 0)
            )
            for one in self._index.of(adapter.base)
            if one.mode is PlacementMode.ON_DEMAND
        )  # fmt: skip

    def _pod(self, facts: PodFacts, adapter: str) -> AdapterPod:
        uid = facts.pod.uid
        sample = self._inputs.sample_of(uid)
        return AdapterPod(
            name=facts.pod.name,
            uid=uid,
            ready=facts.ready,
            unready_since=facts.unready_since,
            restarts=facts.restarts,
            routed=adapter in facts.routed,
            boot_id=sample.boot_id if sample is not None else "",
            sampled_at=sample.at if sample is not None else None,
            listing=self._calls.listing(uid),
            silent_since=self._calls.silent_since(uid),
            probed=self._calls.probed(uid),
            route_failure=self._calls.route_failure(uid),
            outcome=self._calls.outcome(uid, adapter),
            busy=self._calls.is_busy(uid, adapter),
            is_listing=self._calls.is_listing(uid),
        )

    def _facts_of(self, pod: Pod) -> PodFacts:
        """The facts of a pod; computed once for each of its versions."""
        known = self._facts.get(pod.uid)
        if known is None or known.pod is not pod:
            known = self._facts[pod.uid] = pod_facts(pod)
        return known

    def _rival(self, key: Key) -> Rival | None:
        """The object of the namespace that has the adapter's name or its alias; a base always keeps its own names."""
        conflict = self._inputs.model_names.conflict_of_adapter(f"{key.namespace}/{key.name}")
        if conflict is None:
            return None
        return Rival(kind=conflict.kind.value, name=conflict.key.partition("/")[2], served_name=conflict.name)


def pod_facts(pod: Pod) -> PodFacts:
    """The facts of one pod."""
    owner = controller_of(pod)
    ready, server = pod.condition("Ready"), pod.container(names.SERVER_CONTAINER)
    restarts = server.restart_count if server is not None else 0
    was_ready = server is not None and (bool(server.started) or restarts > 0)
    return PodFacts(
        pod=pod,
        owner_uid=owner.uid if owner is not None else "",
        takes_requests=owner is not None
        and takes_requests(pod.name, pod.labels, pod.metadata.annotations, service=owner.name)
        and not pod.is_terminating,
        ready=pod.is_ready and bool(pod.status.pod_ip),
        unready_since=ready.last_transition_time if ready is not None and was_ready and not pod.is_ready else None,
        restarts=restarts,
        routed=routed_adapters(pod),
    )


def base_of(service: StoredObject) -> Base:
    """The facts of a stored InferenceService, also where its spec cannot be read."""
    spec, status = _mapping(with_inherited(service.body).get("spec")), _mapping(service.body.get("status"))
    propagation = _mapping(spec.get("drain")).get("endpointPropagationSeconds")
    return Base(
        name=str(service.body["metadata"]["name"]),
        uid=service.uid,
        desired=status.get("desiredReplicas"),
        has_room=isinstance(_mapping(spec.get("runtime")).get("lora"), dict),
        propagation_seconds=propagation if isinstance(propagation, int) else 5,
        is_closed=(_mapping(spec.get("routing")).get("directAccess") or status.get("directAccess"))
        == DirectAccess.GATEWAY_ONLY,
    )


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _facts_of(service: StoredObject | None) -> tuple[Base, str] | None:
    return None if service is None else (base_of(service), served_name(service))


def _without_routes(facts: PodFacts) -> tuple[Any, ...]:
    address = facts.pod.status.pod_ip
    return facts.owner_uid, facts.takes_requests, facts.ready, facts.unready_since, facts.restarts, address
