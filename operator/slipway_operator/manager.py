"""The manager of one operator process: leader election, caches, workers, and shutdown; independent of kopf.

Every replica keeps its caches current; only the holder of the Lease runs workers. A new holder refreshes its caches
before its first write. A holder that loses the Lease ends the process at once, because it may no longer write. On
SIGTERM it finishes the passes that run and releases the Lease, so that the next holder need not wait.
"""

import asyncio
import gc
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

from slipway_api.trust import Trust
from slipway_api.types import ServiceKey
from slipway_kube.client import Client
from slipway_kube.errors import KubeError, LeadershipLost
from slipway_kube.lease import Elector
from slipway_kube.objects import Pod
from slipway_kube.recorder import Recorder
from slipway_kube.resources import INFERENCE_SERVICES, LORA_ADAPTERS, WARM_POOLS, Resource
from slipway_kube.writer import Write, Writer
from slipway_operator.adapter_calls import AdapterCalls
from slipway_operator.adapter_client import AdapterClient
from slipway_operator.certificates import certificates_of_installation
from slipway_operator.clock import SYSTEM, Clock
from slipway_operator.controller.children import Children
from slipway_operator.controller.executor import Executor, StaleView
from slipway_operator.controller.hidden import HiddenObjects
from slipway_operator.controller.isolation import BackgroundCalls, FairSlots
from slipway_operator.controller.kinds import Key, Kind
from slipway_operator.controller.labels import LabelWriter
from slipway_operator.controller.queue import QueueClosed, Urgency, WorkQueue
from slipway_operator.controller.reconciler import Reconciler
from slipway_operator.controller.resync import Resync
from slipway_operator.ending import end_tasks, leave_at_once
from slipway_operator.hub_reader import HubReader
from slipway_operator.inputs.caches import Caches, Inputs, ReplicaTarget
from slipway_operator.inputs.child_watch import ChildWatch
from slipway_operator.inputs.demand import Changed
from slipway_operator.inputs.freshness import Freshness
from slipway_operator.inputs.gateways import Gateways, watch_pods
from slipway_operator.inputs.inference_services import InferenceServices
from slipway_operator.inputs.lora_adapters import LoRAAdapters, base_of
from slipway_operator.inputs.mount_failures import MountFailures
from slipway_operator.inputs.observer import PoolKey, pool_of, service_of
from slipway_operator.inputs.prometheus import Load, PrometheusSource, connect
from slipway_operator.inputs.scraper import Scraper
from slipway_operator.inputs.warm_pools import WarmPools
from slipway_operator.masters import GatewayKeys, Masters
from slipway_operator.metrics import OperatorMetrics
from slipway_operator.probes import Verdict
from slipway_operator.replica_client import Address, Dial, ReplicaClient
from slipway_operator.replicas_writer import replicas_performers
from slipway_operator.settings import OperatorSettings, installation_defaults
from slipway_operator.smoke_client import SmokeTests

log = structlog.get_logger()

WORKERS = 8
DRAIN_CALLS, DRAIN_CALLS_OF_A_SERVICE = 64, 8
SMOKE_TESTS = 16  # services whose replicas are asked at once
LOAD_PASSES_PER_SECOND = 200.0  # 1,000 busy services: each gets a pass every 5 s; 20 of them: every 0.1 s
RESYNC_SECONDS = (300.0, 600.0)
FIRST_PASSES_SECONDS = 15.0  # scraping begins after the first pass of every object, or so late
FINISH_SECONDS = 1.0  # after a clean stop the next leader starts within two seconds, so running passes get one


@dataclass(frozen=True, slots=True)
class Registration:
    """One kind that the controller reconciles: its resource, and the `Kind` that observes and plans it."""

    resource: Resource
    build: Callable[[Inputs], Kind]


KINDS = (
    Registration(INFERENCE_SERVICES, InferenceServices),
    Registration(LORA_ADAPTERS, LoRAAdapters),
    Registration(WARM_POOLS, WarmPools),
)


def exempt_caches_from_collection() -> None:
    """Keep the garbage collector from walking the filled caches again and again: each walk stops the event loop."""
    gc.collect()
    gc.freeze()


class Manager:
    """Builds the parts of the operator, starts and stops them."""

    def __init__(
        self,
        settings: OperatorSettings,
        client: Client,
        lease_client: Client,
        dial: Dial,
        metrics: OperatorMetrics,
        *,
        serving_dial: Dial,
        trust: Trust | None = None,
        on_lost: Callable[[str], None] = leave_at_once,
        on_synced: Callable[[], None] = lambda: None,
        resync_seconds: tuple[float, float] = RESYNC_SECONDS,
        clock: Clock = SYSTEM,
        kinds: Sequence[Registration] = KINDS,
    ) -> None:
        """`dial` reaches the admin ports of replicas, `serving_dial` their serving ports; both verify by `trust`.

        `on_synced` is called once every object has had its first pass by this leader.
        """
        self._metrics = metrics
        self._on_synced = on_synced
        self._on_lost = on_lost
        self._tasks: list[asyncio.Task[Any]] = []
        self._election: list[asyncio.Task[Any]] = []  # ends last, when nothing writes any more
        self._is_stopping, self.stopped = False, asyncio.Event()  # the second: `stop` has returned
        self._listed = asyncio.Event()
        self._pool_listeners: list[Callable[[PoolKey], None]] = []

        masters = Masters(settings.master_directory)
        masters.read()  # without one no pod could ever be asked for its signals: refuse to start
        gateway_keys = GatewayKeys(settings.gateway_key_directory)
        gateway_keys.read()  # without one no service could be closed to all but the gateway: refuse to start
        self._queue: WorkQueue[Key] = WorkQueue()
        self.caches = Caches(
            client,
            [kind.resource for kind in kinds],
            namespaces=settings.watch_namespaces,
            wake=self._queue.add,
            on_drift=metrics.drift.inc,
            monotonic=clock.monotonic,
        )
        self.elector = Elector(
            lease_client,
            namespace=settings.namespace,
            name=settings.lease_name,
            identity=settings.identity,
            incarnation=settings.pod_uid,
            may_lead=self._listed.is_set,
            clock=clock.lease,
        )
        writer = Writer(client, self.elector, on_write=self._count_write, clock=clock.monotonic)
        self.caches.pod_informer.on_change(writer.expectations.saw)
        self.caches.revision_informer.on_change(writer.expectations.saw)
        self._recorder = Recorder(writer, instance=settings.identity)
        replicas = ReplicaClient(dial, masters)
        self._scraper: Scraper[Address, Any] = Scraper(
            replicas.signals,
            replicas.state,
            on_news=self._wake_after_sample,
            on_error=lambda error: metrics.signal_errors.labels(type(error).__name__).inc(),
            is_ours=self._is_ours,
            now=clock.now,
        )
        self.caches.on_target_change(self._watch_replica)
        self._adapter_calls = AdapterCalls(
            client,
            writer,
            AdapterClient(dial, serving_dial, masters, gateway_keys),
            self.caches.owned_pods.get,
            is_closed=self._is_closed,
            now=clock.now,
        )
        self._prometheus = (
            PrometheusSource(connect(settings.prometheus_url), self._learn, on_error=self._count_prometheus)
            if settings.prometheus_url
            else None
        )
        self._gateway_keys = gateway_keys
        self._certificates = certificates_of_installation(
            settings, client, writer, trust or Trust(), metrics, self.caches.stores, wake=self._queue.add, clock=clock
        )
        self._gateways = Gateways(
            dial,
            gateway_keys.admin_tokens,
            on_change=self._demand_changed,
            on_presence=self._queue_services,
            now=clock.now,
            namespace=settings.namespace,
            selector=settings.gateway_selector,
        )
        self._gateway_pods = watch_pods(
            self._gateways, client, namespace=settings.namespace, selector=settings.gateway_selector
        )
        self._mounts = MountFailures(client, on_news=self._wake_owner, now=clock.now, monotonic=clock.monotonic)
        self.caches.on_pod_change(self._mounts.saw)
        self._hub = HubReader(settings.hub_endpoints, now=clock.now, on_done=self._queue.add)
        self._inputs = inputs = Inputs(
            caches=self.caches,
            wake=self._queue.add,
            sample_of=self._scraper.sample,
            refuses_token=self._scraper.refuses_token,
            mount_failure_of=self._mounts.of,
            certificate_fault_of=self._certificates.fault,
            tls_is_settled=self._certificates.is_settled,
            defaults=installation_defaults(settings),
            token_digests=masters.digests,
            serving_digests=gateway_keys.digests,
            kernels_key=masters.kernels_key,
            random_bytes=secrets.token_bytes,
            asking_since=lambda: self._scraper.asking_since,
            metrics=metrics,
            now=clock.now,
            on_pool_sample=self._pool_listeners.append,
            adapter_calls=self._adapter_calls,
            hub_answer=self._hub.answer,
            gateways=lambda: self._gateways.count(),
            demand_of=self._gateways.demand,
            waiting_adapters_of=self._gateways.waiting_adapters,
            outcomes_of=self._gateways.outcomes_since,
            service_outcomes_of=self._gateways.service_outcomes,
        )
        self._kinds: dict[str, Kind] = {kind.resource.kind: kind.build(inputs) for kind in kinds}
        self._drains: BackgroundCalls[Key] = BackgroundCalls(
            FairSlots(total=DRAIN_CALLS, per_owner=DRAIN_CALLS_OF_A_SERVICE),
            # The replica's next sample says that it drains, and queues the key.
            on_done=lambda _key, uid: self._scraper.ask_soon(uid),
        )
        self._smoke_tests = SmokeTests(
            client,
            serving_dial,
            gateway_keys,
            BackgroundCalls(FairSlots(total=SMOKE_TESTS, per_owner=1), on_done=lambda key, _uid: self._queue.add(key)),
            now=clock.now,
        )
        self._children = Children(client, writer, monotonic=clock.monotonic)
        self._namespaces = settings.watch_namespaces
        executor = Executor(
            client,
            writer,
            self._children,
            replicas,
            self._drains,
            self._smoke_tests,
            self._kinds,
            self.caches.stores,
            self.caches.owned_pods.get,
            metrics,
            adopt=self.caches.adopt,
            performers={
                **self._adapter_calls.performers,
                **self._hub.performers,
                **LabelWriter(writer).performers,
                **replicas_performers(writer),
            },
            now=clock.now,
            monotonic=clock.monotonic,
        )
        self._reconciler = Reconciler(
            client,
            writer,
            self._kinds,
            self.caches.stores,
            executor,
            self._recorder,
            metrics,
            now=clock.now,
            monotonic=clock.monotonic,
        )
        self._child_watch = ChildWatch(
            client,
            namespaces=settings.watch_namespaces,
            has_policies=settings.network_policy,
            recheck=self._reconciler.recheck_child,
            wake=self._queue.add,
            applied=self._reconciler.applied_children,
            access=self.caches.access,
            monotonic=clock.monotonic,
        )
        self._hidden = HiddenObjects(client, self.caches.stores, executor)
        self._resync = Resync(self.caches.known, self._resync_key, self.caches.check, period_seconds=resync_seconds)
        self._freshness = Freshness(
            self.caches.silent_seconds,
            partial(client.get, "/version"),
            monotonic=clock.monotonic,
            on_lag=metrics.loop_lag.set,
        )
        self.caches.publish(metrics)
        metrics.watch(metrics.queue_depth, partial(len, self._queue))
        metrics.watch(metrics.queue_active, lambda: self._queue.active)
        metrics.watch(metrics.gateways, lambda: found.answering if (found := self._gateways.count()) else 0)
        metrics.watch(metrics.is_leader, self.elector.is_leader)

    @property
    def kinds(self) -> Mapping[str, Kind]:
        """The kinds that are reconciled, by name."""
        return self._kinds

    def alive(self) -> Verdict:
        """For /livez."""
        return self._freshness.alive()

    def ready(self) -> Verdict:
        """For /readyz: a standby with full caches is ready too."""
        if not self._listed.is_set():
            refused = self.caches.access.describe()
            return False, "the first lists are not complete" + (f": {refused}" if refused else "")
        sentence = "leading" if self.elector.is_leader() else "standing by"
        return True, ", ".join(filter(None, (sentence, self.caches.missing.describe(), self.caches.access.describe())))

    def heard(self, kind: str, type: str | None, body: Mapping[str, Any]) -> None:
        """Store a custom resource of an event of kopf's watch."""
        self.caches.heard(kind, type, body)

    async def start(self) -> None:
        """Start everything; returns once our kinds and the pods are listed, so that kopf finds the kinds there.

        The Lease is looked at meanwhile, so that a dead holder's time runs while the caches fill.
        """
        self._tasks.append(self._spawn(self.caches.run(), "informers"))
        self._tasks.append(self._spawn(self._freshness.run(), "freshness"))
        self._election.append(self._spawn(self.elector.run(), "election"))
        await self.caches.fill()
        self._listed.set()
        self._tasks.append(self._spawn(self._resync.run(), "resync"))
        self._tasks.append(self._spawn(self._work_as_leader(), "leader"))
        self._tasks.append(self._spawn(self._leave_for_new_kind(), "missing kinds"))
        self._tasks.append(self._spawn(self._gateway_keys.watch(self._queue_services), "gateway key"))

    async def stop(self) -> None:
        """Finish the running passes, release the Lease, and end all tasks."""
        self._is_stopping = True
        if self.elector.is_leader():
            self._metrics.lease_transitions.labels("given back").inc()
            await self._finish_running_passes()
        await end_tasks(*self._tasks)
        await self._drains.stop()
        await self._smoke_tests.stop()
        await self._hub.stop()
        await self._adapter_calls.stop()
        await end_tasks(*self._election)  # when cancelled, it releases the Lease if it holds it
        self.stopped.set()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start a task that should run as long as the process: if the task ends earlier, the process ends too."""
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        if self._is_stopping or task.cancelled():
            return
        error = task.exception()
        if isinstance(error, LeadershipLost):
            self._metrics.lease_transitions.labels("lost").inc()
        self._on_lost(f"{task.get_name()} ended: {error!r}")

    async def _leave_for_new_kind(self) -> None:
        kind = await self.caches.until_installed()
        self._on_lost(f"the CRD of {kind} is installed now; the process starts again to watch it")

    async def _work_as_leader(self) -> None:
        await self.elector.leading.wait()
        self._metrics.lease_transitions.labels("gained").inc()
        log.info("leading", identity=self.elector.identity)
        await self.caches.refresh()
        await self._children.list_all(self._namespaces)
        for key in self.caches.known():
            self._queue.add(key)
        for number in range(WORKERS):
            self._tasks.append(asyncio.create_task(self._work(), name=f"worker-{number}"))
        self._tasks.append(self._spawn(self._recorder.run(), "recorder"))
        if self._prometheus is not None:
            self._tasks.append(self._spawn(self._prometheus.run(), "prometheus"))
        self._tasks.append(self._spawn(self._certificates.run(), "certificates"))
        self._tasks.append(self._spawn(self._gateway_pods.run(), "gateway pods"))
        self._tasks.append(self._spawn(self._gateways.run(), "gateways"))
        self._tasks.append(self._spawn(self._mounts.run(), "mount failures"))
        # Every object gets its first pass before the replicas' answers take their share of the one core.
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_PASSES_SECONDS):
                await self._queue.drained()
        self._tasks.append(self._spawn(self._child_watch.run(), "children"))
        self._on_synced()
        await self._scraper.run()

    async def _finish_running_passes(self) -> None:
        self._queue.close()
        try:
            async with asyncio.timeout(FINISH_SECONDS):
                await self._queue.drained()
                await self._recorder.flush()
        except TimeoutError:
            log.info("stopping with work left; the next leader does it", waiting=len(self._queue))

    async def _work(self) -> None:
        """One worker: takes keys until the queue is closed and empty."""
        while True:
            try:
                key = await self._queue.get()
            except QueueClosed:
                return
            try:
                with self._metrics.reconcile_seconds.time():
                    if self.caches.is_hidden(key):
                        outcome = await self._hidden.reconcile(key)
                    else:
                        outcome = await self._reconciler.reconcile(key)
            except Exception as exc:  # noqa: BLE001  one object must never stop the others
                self._failed(key, exc)
            else:
                self._queue.forget(key)
                if outcome.requeue_after is not None:
                    self._queue.add_after(key, outcome.requeue_after)
            finally:
                self._queue.done(key)

    def _failed(self, key: Key, exc: Exception) -> None:
        self._metrics.reconcile_errors.labels(type(exc).__name__).inc()
        seconds = self._queue.retry(key)
        if isinstance(exc, StaleView | KubeError):
            log.warning("pass failed", object=str(key), error=str(exc), again_in_seconds=round(seconds, 1))
        else:
            log.error("pass failed, by our mistake", object=str(key), exc_info=exc, again_in_seconds=round(seconds, 1))

    def _resync_key(self, key: Key) -> None:
        self._reconciler.forget_applied(key)
        self._queue.add(key, Urgency.BACKGROUND)

    def _wake_owner(self, pod: Pod) -> None:
        """Queue the service or the pool of a pod."""
        for owner in (service_of(pod), pool_of(pod)):
            if owner is not None and (key := _key_of(owner)).kind in self.caches.stores:
                self._queue.add(key)

    def _queue_services(self) -> None:
        """Queue every service: gateways came or went (RouteReady), or their key was replaced (ADR 172)."""
        for key in self.caches.stores[INFERENCE_SERVICES.kind].keys():  # noqa: SIM118  a method of the store
            self._queue.add(key)

    def _watch_replica(self, uid: str, target: ReplicaTarget | None) -> None:
        if target is None:
            self._scraper.forget(uid)
        else:
            self._scraper.watch(target)

    def _wake_after_sample(self, owner: ServiceKey | PoolKey, is_load: bool) -> None:
        """Queue the service of a sample that matters; passes for load alone are rate-limited over the whole fleet."""
        key = _key_of(owner)
        if key.kind not in self.caches.stores:
            return
        if isinstance(owner, PoolKey):
            for tell_pool in self._pool_listeners:
                tell_pool(owner)
        elif not is_load:
            for tell in self._inputs.sample_listeners:
                tell(owner)
        pause = len(self.caches.stores[key.kind]) / LOAD_PASSES_PER_SECOND if is_load else 0.0
        self._queue.add_after(key, pause, Urgency.BACKGROUND)

    def _is_closed(self, service: ServiceKey) -> bool:
        """Whether the replicas of a service answer only callers with its serving token."""
        stored = self.caches.stores[INFERENCE_SERVICES.kind].get(Key(INFERENCE_SERVICES.kind, *service))
        return stored is not None and base_of(stored).is_closed

    def _learn(self, load: Load) -> None:
        """Take a replica's load from Prometheus; a series with the name of no pod of ours is ignored."""
        pod = self.caches.owned_pods.get(load.namespace, load.pod)
        if pod is not None:
            self._scraper.learn(pod.uid, at=load.at, kv_usage=load.kv_usage, running=load.running, waiting=load.waiting)

    def _demand_changed(self, changed: Changed) -> None:
        """Queue the service; after a burst its replicas are asked for their load now, not at the idle interval."""
        key = Key(INFERENCE_SERVICES.kind, *changed.service)
        if self.caches.stores[key.kind].get(key) is None:
            return  # the gateway's view is behind ours, or ahead of it: then the object itself wakes its key
        self._queue.add(key, Urgency.URGENT)
        for adapter in changed.adapters:
            for one in self._inputs.adapters.key_of(changed.service, adapter):
                self._queue.add(one, Urgency.URGENT)
        if changed.has_grown:
            self._scraper.ask_service(changed.service)

    def _is_ours(self, target: ReplicaTarget) -> bool:
        """Whether the service controls the pod: to a pod that only carries its label, no token is ever sent."""
        key = _key_of(target.service)
        stored = self.caches.stores[key.kind].get(key) if key.kind in self.caches.stores else None
        return stored is not None and stored.uid == target.address.owner_uid

    def _count_write(self, write: Write, outcome: str) -> None:
        resource = f"{write.resource.plural}/{write.subresource}" if write.subresource else write.resource.plural
        self._metrics.writes.labels(write.verb, resource, outcome).inc()

    def _count_prometheus(self, error: Exception) -> None:
        self._metrics.prometheus_errors.labels(type(error).__name__).inc()


def _key_of(owner: ServiceKey | PoolKey) -> Key:
    """The object that a replica, or a pod that waits, belongs to."""
    return Key(WARM_POOLS.kind if isinstance(owner, PoolKey) else INFERENCE_SERVICES.kind, *owner)
