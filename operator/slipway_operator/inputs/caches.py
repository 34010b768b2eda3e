"""The caches of custom resources, pods, nodes and revisions, kept current on the leader and on standbys.

kopf delivers objects of our kinds (see `handlers`), informers deliver pods and nodes, and lists check on all of them:
at the start, at a takeover, now and then, and soon after a watch has lost continuity. A change only wakes keys.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

import msgspec
import structlog

from slipway_api import names
from slipway_api.model_names import ModelNames, ObjectKind
from slipway_api.pod_labels import PodState
from slipway_api.types import ServiceKey
from slipway_kube.access import ReadAccess
from slipway_kube.backoff import Backoff
from slipway_kube.client import Client
from slipway_kube.errors import Forbidden, KubeError, NotFound
from slipway_kube.informer import Change, Informer
from slipway_kube.objects import Key as ObjectKey
from slipway_kube.objects import Node, Object, Pod
from slipway_kube.resources import (
    CONTROLLER_REVISIONS,
    INFERENCE_SERVICES,
    LORA_ADAPTERS,
    NAMESPACES,
    NODES,
    PODS,
    WARM_POOLS,
    Resource,
)
from slipway_operator.adapter_calls import AdapterCalls
from slipway_operator.controller.kinds import Key, StoredObject
from slipway_operator.controller.queue import Urgency
from slipway_operator.controller.store import ObjectStore, OnChange
from slipway_operator.core.installation import Defaults
from slipway_operator.core.observed import (
    Demand,
    GatewayCount,
    HubAnswer,
    KernelsKeys,
    OutcomesSince,
    Sample,
    ServiceOutcomes,
    ServingDigests,
    TokenDigests,
)
from slipway_operator.inputs.adapter_index import AdapterIndex
from slipway_operator.inputs.disruption import NodeCounts
from slipway_operator.inputs.engines import Engines
from slipway_operator.inputs.labels import intended_state
from slipway_operator.inputs.missing_kinds import MissingKinds
from slipway_operator.inputs.observer import PodIndex, PoolKey, pool_of, service_of
from slipway_operator.inputs.revisions import ControllerRevision, RevisionIndex
from slipway_operator.inputs.scraper import Target
from slipway_operator.inputs.templates import Templates
from slipway_operator.inputs.unselected import OwnedObjects
from slipway_operator.metrics import OperatorMetrics
from slipway_operator.replica_client import Address, address_of

log = structlog.get_logger()

CATCH_UP_SECONDS = 5.0
CHECK_DELAY_SECONDS = 2.0  # a relist reports many objects: one check follows them all

NEEDS: Mapping[str, tuple[Resource, ...]] = {
    INFERENCE_SERVICES.kind: (INFERENCE_SERVICES, PODS, CONTROLLER_REVISIONS),
    LORA_ADAPTERS.kind: (LORA_ADAPTERS, INFERENCE_SERVICES, PODS),
    WARM_POOLS.kind: (WARM_POOLS, PODS),
}
"""What a pass of each kind reads. A pass that cannot see its pods would create them again."""

Wake = Callable[[Key, Urgency], None]
OnPodChange = Callable[[Change, Pod | None, Pod | None, set[ServiceKey]], None]
OnRevisionChange = Callable[[set[ServiceKey]], None]
OnNodeChange = Callable[[Node | None, Node | None], None]
OnTargetChange = Callable[[str, "ReplicaTarget | None"], None]
ReplicaTarget = Target[Address, ServiceKey | PoolKey]


class Caches:
    """The caches, and the callbacks for their changes."""

    def __init__(
        self,
        client: Client,
        resources: Iterable[Resource],
        *,
        namespaces: tuple[str, ...],
        wake: Wake,
        on_drift: Callable[[int], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`resources` are those of our kinds; `on_drift` is called with how many objects differed from a list."""
        self._on_drift = on_drift
        self._client = client
        self._namespaces = namespaces
        self._wake = wake
        self._resources = {resource.kind: resource for resource in resources}
        self._object_listeners: dict[str, list[OnChange]] = {kind: [] for kind in self._resources}
        self._pod_listeners: list[OnPodChange] = []
        self._revision_listeners: list[OnRevisionChange] = []
        self._node_listeners: list[OnNodeChange] = []
        self._target_listeners: list[OnTargetChange] = []
        self._check_wanted = asyncio.Event()
        self._is_filled = False
        self._retry_wanted = asyncio.Event()
        self.missing = MissingKinds()
        self.access = ReadAccess(self._access_changed)
        self.stores = {kind: ObjectStore(kind, partial(self._changed, kind)) for kind in self._resources}
        self.pods = PodIndex()
        self.pod_informer = Informer(
            client,
            PODS,
            Pod,
            namespaces=namespaces,
            label_selector=names.MANAGED_SELECTOR,
            clock=monotonic,
            access=self.access,
        )
        self.owned_pods = OwnedObjects(client, PODS, Pod, self.pod_informer)
        self.owned_pods.on_change(self._saw_pod)
        self.pod_informer.on_relist(self._check_wanted.set)
        self.revisions = RevisionIndex()
        self.revision_informer = Informer(
            client,
            CONTROLLER_REVISIONS,
            ControllerRevision,
            namespaces=namespaces,
            label_selector=names.MANAGED_SELECTOR,
            clock=monotonic,
            access=self.access,
        )
        self.owned_revisions = OwnedObjects(client, CONTROLLER_REVISIONS, ControllerRevision, self.revision_informer)
        self.owned_revisions.on_change(self._saw_revision)
        self.node_counts = NodeCounts()
        self.node_informer = Informer(client, NODES, Node, clock=monotonic, access=self.access)
        self.node_informer.on_change(self._saw_node)
        self.engines = Engines(client, monotonic=monotonic)
        self.templates = Templates(client, monotonic=monotonic)
        self._namespace_listeners: list[Callable[[str], None]] = []
        # With a list of namespaces these may not be listed, and no other one is served.
        self.namespace_informer = None if namespaces else Informer(client, NAMESPACES, Object, clock=monotonic)
        if self.namespace_informer is not None:
            self.namespace_informer.on_change(self._saw_namespace)

    @property
    def nodes(self) -> Mapping[ObjectKey, Node]:
        """The cached nodes; none where RBAC does not allow listing them, and then all count as healthy."""
        return self.node_informer.cache

    def known(self) -> set[Key]:
        """The keys of all custom resources."""
        return set().union(*(store.keys() for store in self.stores.values()))

    def is_hidden(self, key: Key) -> bool:
        """Whether something that a pass of this object reads may not be listed in its namespace now."""
        refused = self.access.refused_in(key.namespace)
        if not refused:
            return False
        if LORA_ADAPTERS.plural in refused and self._has_adapters(key):
            return True  # its list of adapters would be written without them
        return any(resource.plural in refused for resource in NEEDS.get(key.kind, ()))

    def _has_adapters(self, key: Key) -> bool:
        stored = self.stores[key.kind].get(key) if key.kind == INFERENCE_SERVICES.kind else None
        return stored is not None and bool(stored.body.get("spec", {}).get("runtime", {}).get("lora"))

    def silent_seconds(self) -> float:
        """For how many seconds the watch of the pods has sent nothing, not even a bookmark."""
        return self.pod_informer.age()

    def on_object_change(self, kind: str, callback: OnChange) -> None:
        """Call `callback(key, old, new)` after each change of an object of this kind."""
        self._object_listeners[kind].append(callback)

    def on_pod_change(self, callback: OnPodChange) -> None:
        """Call `callback(change, old, new, services)` after each change of a pod."""
        self._pod_listeners.append(callback)

    def on_revision_change(self, callback: OnRevisionChange) -> None:
        """Call `callback(services)` after each change of a ControllerRevision."""
        self._revision_listeners.append(callback)

    def on_node_change(self, callback: OnNodeChange) -> None:
        """Call `callback(old, new)` after each change of a node."""
        self._node_listeners.append(callback)

    def on_namespace(self, callback: Callable[[str], None]) -> None:
        """Call `callback(name)` for each namespace that may have objects of ours."""
        self._namespace_listeners.append(callback)
        for name in self._namespaces:
            callback(name)

    def on_target_change(self, callback: OnTargetChange) -> None:
        """Tell (uid, target) of each change to a replica that should answer for its signals; None: not any more."""
        self._target_listeners.append(callback)

    # --- watch events -------------------------------------------------------------------------------------------------

    def heard(self, kind: str, type: str | None, body: Mapping[str, Any]) -> None:
        """Take in an object of ours from kopf's watch; `type` is None while it lists."""
        store = self.stores[kind]
        if type == "DELETED":
            store.remove(body)
        else:
            store.put(body)
        if type is None and self._is_filled:
            # kopf lists anew after a gap, without reporting deletions in it; an old version may mean a restored etcd.
            self._check_wanted.set()

    def _changed(self, kind: str, key: Key, old: StoredObject | None, new: StoredObject | None) -> None:
        for callback in self._object_listeners[kind]:
            callback(key, old, new)
        is_urgent = old is None or new is None or (old.uid, old.generation) != (new.uid, new.generation)
        self._wake(key, Urgency.URGENT if is_urgent else Urgency.NORMAL)

    def _saw_pod(self, change: Change, old: Pod | None, new: Pod | None) -> None:
        before = target_of(old) if old is not None else None
        after = target_of(new) if new is not None and change is not Change.DELETED else None
        for tell in self._target_listeners:
            if before is not None and (after is None or after.uid != before.uid):
                tell(before.uid, None)
            if after is not None and after != before:
                tell(after.uid, after)
        services = self.pods.saw(change, old, new)
        for callback in self._pod_listeners:
            callback(change, old, new, services)

    def _saw_revision(self, change: Change, old: ControllerRevision | None, new: ControllerRevision | None) -> None:
        services = self.revisions.saw(change, old, new)
        for callback in self._revision_listeners:
            callback(services)

    def _saw_node(self, change: Change, old: Node | None, new: Node | None) -> None:
        self.node_counts.saw(old, new if change is not Change.DELETED else None)
        for callback in self._node_listeners:
            callback(old, new)

    def _saw_namespace(self, change: Change, old: Object | None, new: Object | None) -> None:
        if new is not None:
            for callback in self._namespace_listeners:
                callback(new.name)

    # --- lists --------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run the informers, and check the custom resources when a watch may have missed events; until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.pod_informer.run())
            group.create_task(self.revision_informer.run())
            group.create_task(self.owned_pods.run())
            group.create_task(self.owned_revisions.run())
            group.create_task(self.node_informer.run())
            group.create_task(self.engines.run())
            group.create_task(self.templates.run())
            if self.namespace_informer is not None:
                group.create_task(self.namespace_informer.run())
            group.create_task(self._check_when_wanted())
            group.create_task(self._retry_refused())

    async def fill(self) -> None:
        """Return once custom resources and pods are listed; retries in an outage and until a CRD of ours is there."""
        backoff = Backoff(first=0.5, cap=15.0, least=0.5)
        while True:
            try:
                await self._correct()
                break
            except KubeError as exc:
                log.warning("cannot list our kinds yet", error=str(exc))
                await asyncio.sleep(backoff.next_delay())
        await self.pod_informer.synced.wait()
        await self.revision_informer.synced.wait()
        await self.engines.until_known()
        await self.templates.until_known()
        self._check_wanted.clear()
        self._is_filled = True
        log.info("caches are full", objects=len(self.known()), pods=len(self.pod_informer.cache))

    async def refresh(self) -> None:
        """Return after lists that began after this call: a standby's caches may lag, a leader's may not."""
        informers = (self.pod_informer, self.revision_informer, self.engines, self.templates)
        await asyncio.gather(self.fill(), *(one.refresh() for one in informers))
        await self._find_unselected()

    async def check(self) -> None:
        """Compare all caches with lists, and correct what the watches missed; raises at the end if a list failed."""
        await _each(self._check_kinds, self._check_pods, self._check_revisions, self._find_unselected)

    async def _check_kinds(self) -> None:
        await _each(*(partial(self._check_kind, kind) for kind in self.stores if kind not in self.missing))

    async def _check_kind(self, kind: str) -> None:
        store, listed = self.stores[kind], await self._read(kind)
        if listed is None:
            return
        if store.drifted(*listed):
            await asyncio.sleep(CATCH_UP_SECONDS)  # the watch may only be a moment behind
        self._count_drift(kind, len(store.correct(*listed)))

    async def _find_unselected(self) -> None:
        """Find objects of ours that lost the label by which the informers select, while no operator watched."""
        namespaces = {key.namespace for key in self.known()}
        await asyncio.gather(self.owned_pods.sweep(namespaces), self.owned_revisions.sweep(namespaces))

    def adopt(self, resource: Resource, raw: bytes) -> None:
        """Take in a pod or ControllerRevision of ours that the API server has, and no cache."""
        (self.owned_pods if resource is PODS else self.owned_revisions).adopt(raw)

    async def _check_pods(self) -> None:
        self._count_drift("pods", await self.pod_informer.drift())

    async def _check_revisions(self) -> None:
        self._count_drift("controllerrevisions", await self.revision_informer.drift())

    def _count_drift(self, what: str, objects: int) -> None:
        if objects:
            log.warning("a watch had missed something", what=what, objects=objects)
            self._on_drift(objects)

    async def _check_when_wanted(self) -> None:
        backoff = Backoff(first=CHECK_DELAY_SECONDS, cap=60.0, least=1.0)
        while True:
            await self._check_wanted.wait()
            await asyncio.sleep(backoff.next_delay())
            self._check_wanted.clear()
            try:
                await self._check_kinds()
            except KubeError as exc:
                log.info("cannot check our kinds yet", error=str(exc))
                self._check_wanted.set()
            else:
                backoff.reset()

    async def _correct(self) -> None:
        missing: list[str] = []
        is_listed = False
        for kind, store in self.stores.items():
            try:
                listed = await self._read(kind)
            except NotFound:
                missing.append(kind)
                if len(store) or len(missing) == len(self.stores):
                    raise
            else:
                if listed is not None:
                    store.correct(*listed)
                    is_listed = True
        if not is_listed:
            raise Forbidden(403, self.access.describe())  # our rights are the cause, and not the namespaces
        self.missing.note(missing)

    async def until_installed(self) -> str:
        """Return the name of a kind that was missing, once its CRD is installed."""
        return await self.missing.wait_until_installed(self._read)

    async def _read(self, kind: str) -> tuple[list[Mapping[str, Any]], int] | None:
        """Every object of a kind, and a version that none of the lists is older than; None: all lists were refused.

        Of a namespace whose list is refused it has the objects as last seen.
        """
        bodies: list[Mapping[str, Any]] = []
        versions: list[int] = []
        for namespace in self._namespaces or ("",):
            try:
                versions.append(await self._read_namespace(kind, namespace, bodies))
            except Forbidden as refusal:
                self.access.refuse(self._resources[kind].plural, namespace, refusal)
                self._retry_wanted.set()
                bodies += self.stores[kind].bodies(namespace)
        return (bodies, min(versions)) if versions else None

    async def _read_namespace(self, kind: str, namespace: str, into: list[Mapping[str, Any]]) -> int:
        """Append the objects of one namespace ("" for all); returns the oldest version of its pages."""
        resource = self._resources[kind]
        header = {"apiVersion": resource.api_version, "kind": resource.kind}
        versions: list[int] = []
        bodies: list[Mapping[str, Any]] = []
        async for page in self._client.list_pages(resource.path(namespace)):
            versions.append(int(page.metadata.resource_version))
            # Items of a list may lack apiVersion and kind; a reference to an object needs both.
            bodies.extend({**header, **msgspec.json.decode(item)} for item in page.items or ())
        into.extend(bodies)
        self.access.allow(resource.plural, namespace)
        return min(versions)

    async def _retry_refused(self) -> None:
        """List refused kinds until they can be read again: no watch reports that a Role is there."""
        backoff = Backoff(first=1.0, cap=30.0, least=0.5)
        while True:
            await self._retry_wanted.wait()
            await asyncio.sleep(backoff.next_delay())
            refused = [
                (kind, namespace)
                for kind, resource in self._resources.items()
                for namespace in self._namespaces or ("",)
                if (resource.plural, namespace) in self.access.refused
            ]
            if not refused:
                self._retry_wanted.clear()
                backoff.reset()
            for kind, namespace in refused:
                with suppress(KubeError):
                    await self._read_namespace(kind, namespace, [])
                    self._check_wanted.set()

    def _access_changed(self, namespace: str) -> None:
        for key in self.known():
            if namespace in ("", key.namespace):
                self._wake(key, Urgency.NORMAL)

    def publish(self, metrics: OperatorMetrics) -> None:
        """Register gauges of sizes and ages with the metrics."""
        metrics.watch(metrics.services, lambda: sum(len(store) for store in self.stores.values()))
        metrics.watch(metrics.pods, partial(len, self.pod_informer.cache))
        for name, informer in (
            ("pods", self.pod_informer),
            ("controllerrevisions", self.revision_informer),
            ("nodes", self.node_informer),
        ):
            metrics.watch(metrics.watch_age.labels(name), informer.age)
            metrics.watch(metrics.relists.labels(name), partial(getattr, informer, "relists"))
        metrics.add_refused_lists(lambda: self.access.refused)
        metrics.add_generations(lambda: {kind: store.bodies("") for kind, store in self.stores.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The inputs of a kind, passed to it when it is registered."""

    caches: Caches
    wake: Wake
    sample_of: Callable[[str], Sample | None]
    defaults: Defaults
    refuses_token: Callable[[str], bool] = lambda _uid: False
    mount_failure_of: Callable[[str], str] = lambda _uid: ""
    certificate_fault_of: Callable[[str], str] = lambda _namespace: ""
    tls_is_settled: Callable[[], bool] = lambda: True
    token_digests: TokenDigests
    serving_digests: ServingDigests
    kernels_key: KernelsKeys
    random_bytes: Callable[[int], bytes]
    asking_since: Callable[[], datetime]
    metrics: OperatorMetrics
    now: Callable[[], datetime]
    on_pool_sample: Callable[[Callable[[PoolKey], None]], None] = lambda _callback: None
    """Call a function with the pool of each sample that matters of a pod that waits."""
    hub_answer: Callable[[str, str], HubAnswer | None] = lambda _uri, _endpoint: None
    adapters: AdapterIndex = field(default_factory=AdapterIndex)
    model_names: ModelNames = field(default_factory=ModelNames)
    """The names of all services and adapters: who answers each, as the gateway decides it."""
    adapter_calls: AdapterCalls | None = None
    sample_listeners: list[Callable[[ServiceKey], None]] = field(default_factory=list)
    """Called with the service of a sample that shows more than load, such as another boot id."""
    gateways: Callable[[], GatewayCount | None] = lambda: None
    demand_of: Callable[[ServiceKey], Demand | None] = lambda _service: None
    waiting_adapters_of: Callable[[ServiceKey], Mapping[str, int]] = lambda _service: {}
    outcomes_of: Callable[[ServiceKey], OutcomesSince | None] = lambda _service: None
    service_outcomes_of: Callable[[ServiceKey], ServiceOutcomes | None] = lambda _service: None

    def wake_objects(self, objects: Iterable[tuple[ObjectKind, str]]) -> None:
        """Plan for objects whose names may have another holder now."""
        for kind, key in objects:
            namespace, _, name = key.partition("/")
            self.wake(Key(kind.value, namespace, name), Urgency.NORMAL)


async def _each(*steps: Callable[[], Awaitable[None]]) -> None:
    """Run every step, whatever becomes of the others, and then raise the first error."""
    errors: list[KubeError] = []
    for step in steps:
        try:
            await step()
        except KubeError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def target_of(pod: Pod) -> ReplicaTarget | None:
    """The replica to scrape; None while it cannot answer: its server does not run, or it is being deleted."""
    key = service_of(pod) or pool_of(pod)
    server = pod.container(names.SERVER_CONTAINER)
    if key is None or not pod.status.pod_ip or pod.is_terminating or server is None or server.state.running is None:
        return None
    return Target(
        uid=pod.uid,
        address=address_of(pod),
        service=key,
        is_draining=intended_state(pod) is PodState.DRAINING,
        is_starting=not server.started,
    )
