"""What this process knows of the cluster: our services, their pods, the nodes; hot on leader and standby alike.

Whatever changes only wakes the keys that it concerns. kopf delivers services, informers deliver pods and nodes, and
now and then a list checks on all of them.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import msgspec
import structlog

from slipway_api import names
from slipway_api.types import ServiceKey
from slipway_kube import resources
from slipway_kube.client import Client
from slipway_kube.errors import KubeError
from slipway_kube.informer import Change, Informer, OnChange
from slipway_kube.objects import Key, Node, Pod
from slipway_operator.controller.store import ServiceStore, key_of
from slipway_operator.inputs.disruption import NodeCounts
from slipway_operator.inputs.observer import PodIndex, node_facts, service_of
from slipway_operator.inputs.revisions import ControllerRevision, RevisionIndex
from slipway_operator.inputs.scraper import Target
from slipway_operator.metrics import OperatorMetrics
from slipway_operator.replica_client import Address

log = structlog.get_logger()

CATCH_UP_SECONDS = 5.0
RETRY_CAP_SECONDS = 15.0
HEADER = {"apiVersion": resources.INFERENCE_SERVICES.api_version, "kind": resources.INFERENCE_SERVICES.kind}

ReplicaTarget = Target[Address, ServiceKey]


class World:
    """The caches, and who is woken by their changes."""

    def __init__(
        self,
        client: Client,
        *,
        namespaces: tuple[str, ...],
        wake: Callable[[ServiceKey], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._namespaces = namespaces
        self._wake = wake
        self.services = ServiceStore(on_contest=wake)
        self.pods = PodIndex()
        self._targets: dict[str, ReplicaTarget] = {}
        self._pod_informer = Informer(
            client,
            resources.PODS,
            Pod,
            namespaces=namespaces,
            label_selector=names.MANAGED_SELECTOR,
            clock=monotonic,
        )
        self._pod_informer.on_change(self._saw_pod)
        self.revisions = RevisionIndex()
        self._revision_informer = Informer(
            client,
            resources.CONTROLLER_REVISIONS,
            ControllerRevision,
            namespaces=namespaces,
            label_selector=names.MANAGED_SELECTOR,
            clock=monotonic,
        )
        self._revision_informer.on_change(self._saw_revision)
        self.node_counts = NodeCounts()
        self._node_informer = Informer(client, resources.NODES, Node, clock=monotonic)
        self._node_informer.on_change(self._saw_node)

    @property
    def nodes(self) -> Mapping[Key, Node]:
        """Every node known; none where we may not list them, and then all are taken for healthy."""
        return self._node_informer.cache

    def known(self) -> set[ServiceKey]:
        """Every service that exists, and every one that left pods behind."""
        return {*self.services.keys(), *self.pods.services()}

    def targets(self) -> Iterable[ReplicaTarget]:
        """The replicas that should answer when asked for signals."""
        return (target for target in self._targets.values() if self._owns(target.service, target.address))

    def address_of(self, key: ServiceKey, uid: str) -> Address | None:
        """The admin port of this replica; None while it has no address, or is a pod that the service does not own."""
        pod = next((pod for pod in self.pods.of(key) if pod.uid == uid), None)
        address = _address(pod) if pod is not None and pod.status.pod_ip else None
        return address if address is not None and self._owns(key, address) else None

    def _owns(self, key: ServiceKey, address: Address) -> bool:
        """Whether the service controls the pod: to a pod that only carries its label, no token is ever sent."""
        service = self.services.get(key)
        return service is not None and service.uid == address.owner_uid

    def on_pod_change(self, callback: OnChange[Pod]) -> None:
        """Tell somebody else of each change to a pod, too."""
        self._pod_informer.on_change(callback)

    def on_revision_change(self, callback: OnChange[ControllerRevision]) -> None:
        """Tell `callback` of each change to a ControllerRevision, too."""
        self._revision_informer.on_change(callback)

    def silent_seconds(self) -> float:
        """For how long the watch of the pods has said nothing, not even a bookmark."""
        return self._pod_informer.age()

    # --- what is told to us -------------------------------------------------------------------------------------------

    def saw_service(self, type: str | None, body: Mapping[str, Any]) -> None:
        """Take in an InferenceService from the watch; `type` is None while it lists."""
        key = key_of(body)
        if type == "DELETED":
            self.services.remove(key, body["metadata"]["uid"])
        else:
            self.services.put(body)
        self._wake(key)

    def _saw_pod(self, change: Change, old: Pod | None, new: Pod | None) -> None:
        if old is not None:
            self._targets.pop(old.uid, None)
        if change is not Change.DELETED and new is not None and (target := target_of(new)) is not None:
            self._targets[new.uid] = target
        for key in self.pods.saw(change, old, new):
            self._wake(key)

    def _saw_revision(self, change: Change, old: ControllerRevision | None, new: ControllerRevision | None) -> None:
        for key in self.revisions.saw(change, old, new):
            self._wake(key)

    def _saw_node(self, change: Change, old: Node | None, new: Node | None) -> None:
        self.node_counts.saw(old, new if change is not Change.DELETED else None)
        before = node_facts(old) if old is not None else None
        after = node_facts(new) if new is not None else None
        node = new or old
        if before != after and node is not None:
            for key in self.pods.on_node(node.name):
                self._wake(key)

    # --- what we ask for ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep pods and nodes current, for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pod_informer.run())
            group.create_task(self._revision_informer.run())
            group.create_task(self._node_informer.run())

    async def fill(self) -> None:
        """Return once services and pods have been listed. Waits out an outage, and a CRD that is not installed yet."""
        attempt = 0
        while True:
            try:
                await self._list_services()
                break
            except KubeError as exc:
                log.warning("cannot list InferenceServices yet", error=str(exc))
                await asyncio.sleep(min(RETRY_CAP_SECONDS, 0.5 * 2**attempt))
                attempt += 1
        await self._pod_informer.synced.wait()
        await self._revision_informer.synced.wait()
        log.info("caches are full", services=len(self.services), pods=len(self._pod_informer.cache))

    async def refresh(self) -> None:
        """Return after fresh lists, begun after this call: a standby's caches may lag, a leader's may not."""
        await asyncio.gather(self.fill(), self._pod_informer.refresh(), self._revision_informer.refresh())

    async def check(self) -> int:
        """Compare with lists, correct what the watches missed, and say how many objects that were."""
        bodies, version = await self._read_services()
        if self.services.drifted(bodies, version):
            await asyncio.sleep(CATCH_UP_SECONDS)  # the watch may only be a moment behind
        missed = self.services.correct(bodies, version)
        for key in missed:
            self._wake(key)
        drift = len(missed) + await self._pod_informer.drift() + await self._revision_informer.drift()
        if drift:
            log.warning("the watches had missed something", services=sorted(map(str, missed)), objects=drift)
        return drift

    async def _list_services(self) -> None:
        bodies, version = await self._read_services()
        for key in self.services.correct(bodies, version):
            self._wake(key)

    async def _read_services(self) -> tuple[list[dict[str, Any]], int]:
        """Every InferenceService, and a version that none of the lists is older than."""
        bodies: list[dict[str, Any]] = []
        versions = []
        for namespace in self._namespaces or ("",):
            async for page in self._client.list_pages(resources.INFERENCE_SERVICES.path(namespace)):
                versions.append(int(page.metadata.resource_version))
                # Items of a list may lack apiVersion and kind; whoever refers to an object needs both.
                bodies.extend({**HEADER, **msgspec.json.decode(item)} for item in page.items or ())
        return bodies, min(versions)

    def publish(self, metrics: OperatorMetrics) -> None:
        """Let the metrics read sizes and ages from here."""
        metrics.watch(metrics.services, partial(len, self.services))
        metrics.watch(metrics.pods, partial(len, self._pod_informer.cache))
        for name, informer in (
            ("pods", self._pod_informer),
            ("nodes", self._node_informer),
            ("controllerrevisions", self._revision_informer),
        ):
            metrics.watch(metrics.watch_age.labels(name), informer.age)
            metrics.watch(metrics.relists.labels(name), partial(getattr, informer, "relists"))


def target_of(pod: Pod) -> ReplicaTarget | None:
    """The replica to ask for signals; None while it cannot answer: its server does not run, or is being deleted."""
    key = service_of(pod)
    server = pod.container(names.SERVER_CONTAINER)
    if key is None or not pod.status.pod_ip or pod.is_terminating or server is None or server.state.running is None:
        return None
    return Target(
        uid=pod.uid,
        address=_address(pod),
        service=key,
        is_draining=pod.labels.get(names.LABEL_STATE) == names.STATE_DRAINING,
        is_starting=not server.started,
    )


def _address(pod: Pod) -> Address:
    owner = next((reference.uid for reference in pod.metadata.owner_references if reference.controller), "")
    nonce = pod.metadata.annotations.get(names.ANNOTATION_ADMIN_NONCE, "")
    return Address(pod.namespace, pod.name, pod.status.pod_ip, nonce=nonce, owner_uid=owner)
