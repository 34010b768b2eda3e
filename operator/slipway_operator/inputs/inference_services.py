"""The controller's kind InferenceService: builds `Observed` from caches, returns the core's plan as a `Decision`."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import cast

from slipway_api.engine_fields import SLIPWAY
from slipway_api.inference_service import InferenceService
from slipway_api.inference_status import ColdStart
from slipway_api.model_names import ServiceNames
from slipway_api.types import ServiceKey
from slipway_kube.informer import Change
from slipway_kube.objects import Node, Pod
from slipway_kube.resources import INFERENCE_SERVICES, Resource
from slipway_operator.controller.kinds import Decision, Key, Memory, StoredObject
from slipway_operator.controller.queue import Urgency
from slipway_operator.core import observed as seen
from slipway_operator.core.observed import Observed
from slipway_operator.core.service.plan import plan
from slipway_operator.core.service.replicas.access import with_recorded_access
from slipway_operator.core.templates import inherit
from slipway_operator.inputs.caches import Inputs
from slipway_operator.inputs.gpu_supply import read_supply
from slipway_operator.inputs.observer import node_facts, replica
from slipway_operator.inputs.pulls import Pulls
from slipway_operator.inputs.reading import read
from slipway_operator.inputs.warm_supply import WarmSupplies

KIND = INFERENCE_SERVICES.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """In-memory state that one pass passes to the next; a new leader starts without it."""

    recommendations: tuple[seen.PastRecommendation, ...] = ()
    scaling: seen.ScalingMemory = field(default_factory=seen.ScalingMemory)
    ready: frozenset[str] | None = None
    accounting: seen.AccountingMemory = field(default_factory=seen.AccountingMemory)


class InferenceServices:
    """Observes one InferenceService, and plans for it."""

    name: str = KIND
    resource: Resource = INFERENCE_SERVICES

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._store = inputs.caches.stores[KIND]
        self._supply = WarmSupplies(inputs)
        self._pulls = Pulls(inputs)
        self._cold_starts: dict[Key, ColdStart | None] = {}
        self._relying: dict[Key, set[Key]] = {}  # service -> those that name it as their fallback
        inputs.caches.on_object_change(KIND, self._saw)
        inputs.caches.on_pod_change(self._saw_pod)
        inputs.caches.on_revision_change(self._saw_revisions)
        inputs.caches.on_node_change(self._saw_node)
        inputs.caches.on_namespace(self._saw_namespace)
        inputs.caches.engines.on_change(self._saw_engine)
        inputs.caches.templates.on_change(self._saw_template)

    # --- changes of the caches ----------------------------------------------------------------------------------------

    def _saw(self, key: Key, old: StoredObject | None, new: StoredObject | None) -> None:
        if new is None:
            self._cold_starts.pop(key, None)
            self._inputs.metrics.accounts.remove(ServiceKey(key.namespace, key.name))
        names = ServiceNames(served_name(new), new.created_at) if new is not None else None
        self._inputs.wake_objects(self._inputs.model_names.set_service(f"{key.namespace}/{key.name}", names))
        self._note_fallback(key, fallback_of(key, old), fallback_of(key, new))
        if old is None or new is None:
            for other in self._relying.get(key, ()):
                self._inputs.wake(other, Urgency.NORMAL)

    def _note_fallback(self, key: Key, old: Key | None, new: Key | None) -> None:
        if old is not None and old != new:
            self._relying[old].discard(key)
        if new is not None:
            self._relying.setdefault(new, set()).add(key)

    def _saw_pod(self, _change: Change, old: Pod | None, new: Pod | None, services: set[ServiceKey]) -> None:
        urgency = Urgency.URGENT if is_failure(old, new) else Urgency.NORMAL
        for service in services:
            self._inputs.wake(Key(KIND, *service), urgency)

    def _saw_revisions(self, services: set[ServiceKey]) -> None:
        for service in services:
            self._inputs.wake(Key(KIND, *service), Urgency.NORMAL)

    def _saw_namespace(self, name: str) -> None:
        """A name that begins with a namespace is that namespace's own, also before there is an object in it."""
        self._inputs.wake_objects(self._inputs.model_names.know_namespaces([name]))

    def _saw_engine(self, name: str | None) -> None:
        """An Engine came, changed or went: each service that names it is planned anew. None: any of them may have."""
        self._wake_where(lambda stored: engine_name(stored) in ({name} if name else {engine_name(stored)} - {SLIPWAY}))

    def _saw_template(self, name: str | None) -> None:
        """A ServiceTemplate came, changed or went: likewise."""
        self._wake_where(lambda stored: name in template_names(stored) or (name is None and template_names(stored)))

    def _wake_where(self, is_concerned: Callable[[StoredObject], object]) -> None:
        for key in self._store.keys():  # noqa: SIM118  a method of the store
            stored = self._store.get(key)
            if stored is not None and is_concerned(stored):
                self._inputs.wake(key, Urgency.NORMAL)

    def _saw_node(self, old: Node | None, new: Node | None) -> None:
        before = node_facts(old) if old is not None else None
        after = node_facts(new) if new is not None else None
        node = new or old
        if before == after or node is None:
            return
        urgency = Urgency.NORMAL if after is not None and after.ready else Urgency.URGENT
        for service in self._inputs.caches.pods.on_node(node.name):
            self._inputs.wake(Key(KIND, *service), urgency)

    # --- the interface `Kind` -----------------------------------------------------------------------------------------

    def observe(self, key: Key, stored: StoredObject, memory: Memory) -> Observed:
        """Build the snapshot from which the core decides."""
        reading = read(stored.body)
        caches = self._inputs.caches
        service, inheritance = inherit(reading.service, caches.templates.seen())
        service = with_recorded_access(service, self._inputs.defaults.direct_access)
        pods = caches.pods.of(ServiceKey(key.namespace, key.name))
        node_names = {pod.spec.node_name for pod in pods if pod.spec.node_name}
        replicas = tuple(
            replace(
                replica(pod, self._inputs.sample_of(pod.uid)),
                refuses_token=self._inputs.refuses_token(pod.uid),
                mount_failure=self._inputs.mount_failure_of(pod.uid),
            )
            for pod in pods
        )
        gpu = service.spec.resources.gpu
        needs_supply = gpu.count > 0 and any(one.unschedulable for one in replicas)
        observed = Observed(
            service=service,
            gpu_supply=read_supply(gpu, caches.nodes.values()) if needs_supply else None,
            fault=reading.fault,
            inheritance=inheritance,
            engine=caches.engines.seen(service.spec.runtime.engine),
            name_conflict=self._inputs.model_names.conflict_of_service(f"{key.namespace}/{key.name}"),
            tls_is_settled=self._inputs.tls_is_settled(),
            certificate_fault=self._inputs.certificate_fault_of(key.namespace),
            lacks_fallback=self._lacks_fallback(service),
            replicas=replicas,
            nodes={
                name: node_facts(node)
                for name in sorted(node_names)
                if (node := caches.nodes.get(("", name))) is not None
            },
            defaults=self._inputs.defaults,
            disrupted=caches.node_counts.disrupted,
            revisions=caches.revisions.of(ServiceKey(key.namespace, key.name)),
            token_digests=self._inputs.token_digests,
            serving_digests=self._inputs.serving_digests,
            kernels_key=self._inputs.kernels_key,
            nonce_seed=self._inputs.random_bytes(32),
            asking_since=self._inputs.asking_since(),
            warm=self._supply.of(service),
            hub=self._hub_answer(service),
            pulls=self._pulls.of(service),
            adapters=self._inputs.adapters.of(ServiceKey(key.namespace, key.name)),
            gateways=self._inputs.gateways(),
            demand=self._inputs.demand_of(ServiceKey(key.namespace, key.name)),
            outcomes_since=self._inputs.outcomes_of(ServiceKey(key.namespace, key.name)),
            service_outcomes=self._inputs.service_outcomes_of(ServiceKey(key.namespace, key.name)),
        )
        # Of pods that are gone, or another's for good, nothing has to be remembered.
        memory.lost_claims &= {pod.uid for pod in observed.warm.pods} if observed.warm is not None else set()
        self._note_ages(observed)
        self._note_cold_start(key, service)
        return self.with_memory(observed, memory)

    def with_memory(self, observed: Observed, memory: Memory) -> Observed:
        """The same observation with the results of earlier passes and of the executor."""
        carried = cast(Carried, memory.carried or Carried())
        return replace(
            observed,
            recommendations=carried.recommendations,
            scaling_memory=carried.scaling,
            ready_before=carried.ready,
            accounting_memory=carried.accounting,
            taken_names=memory.taken_names,
            lost_claims=memory.lost_claims,
            applied=dict(memory.applied),
            failures=memory.failures,
            smoke_results=dict(memory.smoke_results),
        )

    def plan(self, observed: Observed, now: datetime) -> Decision:
        """Run the core's `plan`."""
        decided = plan(observed, now)
        service = observed.service
        self._inputs.metrics.accounts.set(service.key, decided.accounting)
        if decided.status is not None:
            self._inputs.metrics.accounts.set_conditions(service.key, decided.status.conditions)
        return Decision(
            actions=decided.actions,
            status=decided.status.to_json() if decided.status is not None else None,
            status_before=service.status.to_json() if service.status is not None else None,
            notes=decided.notes,
            pod_uids={one.name: one.uid for one in observed.replicas},
            requeue_after=decided.requeue_after,
            carried=Carried(
                recommendations=decided.recommendations,
                scaling=decided.scaling_memory,
                ready=decided.ready,
                accounting=decided.accounting.memory,
            ),
        )

    def _lacks_fallback(self, service: InferenceService) -> bool:
        fallback = service.spec.routing.fallback
        return fallback is not None and self._store.get(Key(KIND, service.key.namespace, fallback.service)) is None

    def _hub_answer(self, service: InferenceService) -> seen.HubAnswer | None:
        model = service.spec.model
        return self._inputs.hub_answer(model.uri, model.network.hub_endpoint)

    def _note_cold_start(self, key: Key, service: InferenceService) -> None:
        """Count a cold start once: when status shows another one than in the pass before."""
        start = service.status.performance.cold_start if service.status.performance is not None else None
        is_new = key in self._cold_starts and self._cold_starts[key] != start
        self._cold_starts[key] = start
        if start is not None and is_new:
            for phase, seconds in start:
                if seconds is not None:
                    self._inputs.metrics.cold_start.labels(phase.removesuffix("_seconds")).observe(float(seconds))

    def _note_ages(self, observed: Observed) -> None:
        now = self._inputs.now()
        for one in observed.replicas:
            if one.sample is not None and one.ready:
                self._inputs.metrics.signal_age.observe(max(0.0, (now - one.sample.at).total_seconds()))


def served_name(stored: StoredObject) -> str:
    """The served name of a stored object; also where its spec cannot be read."""
    spec = stored.body.get("spec")
    model = spec.get("model") if isinstance(spec, dict) else None
    name = model.get("servedName") if isinstance(model, dict) else None
    return name if name and isinstance(name, str) else str(stored.body["metadata"]["name"])


def fallback_of(key: Key, stored: StoredObject | None) -> Key | None:
    """The service that a stored object names as its fallback; None: none. Also where its spec cannot be read."""
    spec = stored.body.get("spec") if stored is not None else None
    routing = spec.get("routing") if isinstance(spec, dict) else None
    fallback = routing.get("fallback") if isinstance(routing, dict) else None
    name = fallback.get("service") if isinstance(fallback, dict) else None
    return Key(KIND, key.namespace, name) if name and isinstance(name, str) else None


def engine_name(stored: StoredObject) -> str:
    """The engine of a stored object; also where its spec cannot be read."""
    spec = stored.body.get("spec")
    runtime = spec.get("runtime") if isinstance(spec, dict) else None
    name = runtime.get("engine") if isinstance(runtime, dict) else None
    return name if name and isinstance(name, str) else SLIPWAY


def template_names(stored: StoredObject) -> frozenset[str]:
    """The ServiceTemplates that a stored object names; also where its spec cannot be read."""
    spec = stored.body.get("spec")
    references = spec.get("baseRefs") if isinstance(spec, dict) else None
    found = references if isinstance(references, list) else []
    return frozenset(str(one["name"]) for one in found if isinstance(one, dict) and "name" in one)


def is_failure(old: Pod | None, new: Pod | None) -> bool:
    """Whether this change removes a replica, so that its service is queued as urgent."""
    if old is None:
        return False
    if new is None:
        return not old.is_terminating
    has_failed = new.status.phase in ("Failed", "Unknown") and old.status.phase != new.status.phase
    return has_failed or (old.is_ready and not new.is_ready) or (new.is_terminating and not old.is_terminating)
