"""One operator process without its shell: who may write, who works, and how to stop.

Every replica keeps hot caches; only the holder of the Lease runs workers. A new holder makes its caches fresh before
its first write; one that loses the Lease ends the process at once, because half-done work cannot be trusted; one that
is asked to stop finishes what it has in hand and gives the Lease back, so that the next one need not wait.
"""

import asyncio
import os
import random
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import structlog

from slipway_api.types import ServiceKey
from slipway_kube.client import Client
from slipway_kube.errors import KubeError, LeadershipLost
from slipway_kube.lease import Elector
from slipway_kube.recorder import Recorder
from slipway_kube.writer import Write, Writer
from slipway_operator.clock import SYSTEM, Clock
from slipway_operator.controller.executor import Executor, StaleView
from slipway_operator.controller.queue import QueueClosed, WorkQueue
from slipway_operator.controller.reconciler import Decide, Reconciler, Refused
from slipway_operator.core.observed import Defaults, Network
from slipway_operator.core.service.plan import plan
from slipway_operator.inputs.freshness import Freshness
from slipway_operator.inputs.observer import Observer
from slipway_operator.inputs.scraper import Scraper
from slipway_operator.inputs.world import World
from slipway_operator.masters import GatewayKeys, Masters
from slipway_operator.metrics import OperatorMetrics
from slipway_operator.probes import Verdict
from slipway_operator.replica_client import Address, Dial, ReplicaClient
from slipway_operator.settings import OperatorSettings

log = structlog.get_logger()

LEASE_NAME = "slipway-operator"
WORKERS = 8
RESYNC_SECONDS = (300.0, 600.0)
FINISH_SECONDS = 1.0  # a clean stop hands over within two seconds, so work in hand gets one


def leave_at_once(reason: str) -> None:
    """End the process without another await: what still runs may not write, and must not try."""
    log.error("leaving at once", reason=reason)
    os._exit(1)


class Manager:
    """Wires the parts together and runs them."""

    def __init__(
        self,
        settings: OperatorSettings,
        client: Client,
        lease_client: Client,
        dial: Dial,
        metrics: OperatorMetrics,
        *,
        on_lost: Callable[[str], None] = leave_at_once,
        resync_seconds: tuple[float, float] = RESYNC_SECONDS,
        clock: Clock = SYSTEM,
        decide: Decide = plan,
    ) -> None:
        self._metrics = metrics
        self._on_lost = on_lost
        self._resync_seconds = resync_seconds
        self.listed = asyncio.Event()
        """Set once our kind and the pods have been listed: from now on the shell may watch."""

        masters = Masters(settings.master_directory)
        masters.read()  # without one no pod could ever be asked for its signals: refuse to start
        gateway_keys = GatewayKeys(settings.gateway_key_directory)
        gateway_keys.read()  # without one no service could be closed to all but the gateway: refuse to start
        self._queue: WorkQueue[ServiceKey] = WorkQueue()
        self.world = World(
            client, namespaces=settings.watch_namespaces, wake=self._queue.add, monotonic=clock.monotonic
        )
        self.elector = Elector(
            lease_client,
            namespace=settings.namespace,
            name=LEASE_NAME,
            identity=settings.identity,
            clock=clock.lease,
        )
        writer = Writer(client, self.elector, on_write=self._count_write, clock=clock.monotonic)
        self.world.on_pod_change(writer.expectations.saw)
        self.world.on_revision_change(writer.expectations.saw)
        self._recorder = Recorder(writer, instance=settings.identity)
        replicas = ReplicaClient(dial, masters)
        self._scraper: Scraper[Address, ServiceKey] = Scraper(
            self.world.targets,
            replicas.signals,
            replicas.state,
            on_news=self._queue.add,
            on_error=self._count_silence,
            now=clock.now,
        )
        observer = Observer(
            self.world.pods,
            self.world.nodes,
            self._scraper.sample,
            self.world.services.namesakes,
            self.world.revisions,
            self.world.node_counts,
            defaults=Defaults(
                runtime_image=settings.runtime_image,
                gateway_url=settings.gateway_url,
                network=_network(settings),
            ),
            token_digests=masters.digests,
            serving_digests=gateway_keys.digests,
        )
        executor = Executor(
            client, writer, replicas, self.world.services, self.world.address_of, metrics, now=clock.now
        )
        self._reconciler = Reconciler(
            client, writer, self.world.services, observer, executor, self._recorder, metrics, decide, now=clock.now
        )
        self._freshness = Freshness(
            self.world.silent_seconds,
            partial(client.get, "/version"),
            monotonic=clock.monotonic,
            on_lag=metrics.loop_lag.set,
        )
        self.world.publish(metrics)
        metrics.watch(metrics.queue_depth, partial(len, self._queue))
        metrics.watch(metrics.queue_active, lambda: self._queue.active)
        metrics.watch(metrics.is_leader, self.elector.is_leader)

    def alive(self) -> Verdict:
        """For /livez."""
        return self._freshness.alive()

    def ready(self) -> Verdict:
        """For /readyz: a standby with full caches is ready too."""
        if not self.listed.is_set():
            return False, "the first lists are not complete"
        return True, "leading" if self.elector.is_leader() else "standing by"

    async def run(self, stop: asyncio.Event) -> None:
        """Keep caches hot, lead when it is our turn, and hand over when asked to stop."""
        stopping = asyncio.create_task(stop.wait(), name="stop")
        background = [
            asyncio.create_task(self.world.run(), name="informers"),
            asyncio.create_task(self._freshness.run(), name="freshness"),
        ]
        try:
            if await _unless(stopping, self.world.fill()):
                self.listed.set()
                background.append(asyncio.create_task(self._resync_for_ever(), name="resync"))
                await self._lead_until(stopping)
        finally:
            await _end(*background, stopping)

    async def _lead_until(self, stopping: asyncio.Task[Any]) -> None:
        """Campaign and work until asked to stop. A lost Lease ends the process through `on_lost`."""
        election = asyncio.create_task(self.elector.run(), name="election")
        work = asyncio.create_task(self._work_as_leader(), name="leader")
        try:
            done, _ = await asyncio.wait((election, work, stopping), return_when=asyncio.FIRST_COMPLETED)
            if stopping not in done:
                ended = done.pop()
                error = ended.exception()
                if isinstance(error, LeadershipLost):
                    self._metrics.lease_transitions.labels("lost").inc()
                self._on_lost(f"{ended.get_name()} ended: {error!r}")
            elif self.elector.is_leader():
                self._metrics.lease_transitions.labels("given back").inc()
        finally:
            await _end(work)
            await _end(election)  # cancelled, it gives the Lease back if it is ours

    async def _work_as_leader(self) -> None:
        await self.elector.leading.wait()
        self._metrics.lease_transitions.labels("gained").inc()
        log.info("leading", identity=self.elector.identity)
        await self.world.refresh()
        self._wake_all()
        tasks = [
            *(asyncio.create_task(self._work(), name=f"worker-{number}") for number in range(WORKERS)),
            asyncio.create_task(self._scraper.run(), name="scraper"),
            asyncio.create_task(self._recorder.run(), name="recorder"),
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            await self._finish_work_in_hand()
            await _end(*tasks)

    async def _finish_work_in_hand(self) -> None:
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
                    again = await self._reconciler.reconcile(key)
            except Exception as exc:  # noqa: BLE001  one service must never stop the others
                self._failed(key, exc)
            else:
                self._queue.forget(key)
                if again is not None:
                    self._queue.add_after(key, again)
            finally:
                self._queue.done(key)

    def _failed(self, key: ServiceKey, exc: Exception) -> None:
        self._metrics.reconcile_errors.labels(type(exc).__name__).inc()
        seconds = self._queue.retry(key)
        if isinstance(exc, Refused | StaleView | KubeError):
            log.warning("pass failed", service=str(key), error=str(exc), again_in_seconds=round(seconds, 1))
        else:
            log.error("pass failed, by our mistake", service=str(key), exc_info=exc, again_in_seconds=round(seconds, 1))

    async def _resync_for_ever(self) -> None:
        """Now and then, check the caches against lists, and look at every service anew."""
        while True:
            await asyncio.sleep(random.uniform(*self._resync_seconds))  # noqa: S311  replicas shall not list in step
            try:
                drift = await self.world.check()
            except KubeError as exc:
                log.warning("resync failed", error=str(exc))
                continue
            self._metrics.drift.inc(drift)
            self._reconciler.resync()
            self._wake_all()

    def _wake_all(self) -> None:
        for key in self.world.known():
            self._queue.add(key)

    def _count_write(self, write: Write, outcome: str) -> None:
        resource = f"{write.resource.plural}/{write.subresource}" if write.subresource else write.resource.plural
        self._metrics.writes.labels(write.verb, resource, outcome).inc()

    def _count_silence(self, error: Exception) -> None:
        self._metrics.signal_errors.labels(type(error).__name__).inc()


def _network(settings: OperatorSettings) -> Network | None:
    """Which pods a NetworkPolicy admits to the replicas; None: no policy is made."""
    if not settings.network_policy:
        return None
    return Network(
        release_namespace=settings.namespace,
        client_namespaces=settings.client_namespaces,
        metrics_namespaces=settings.metrics_namespaces,
    )


async def _unless(stopping: asyncio.Task[Any], work: Coroutine[Any, Any, None]) -> bool:
    """Do the work, or give it up when asked to stop first; says whether it was done."""
    task = asyncio.create_task(work)
    await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
    if stopping.done():
        await _end(task)
        return False
    task.result()
    return True


async def _end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel the tasks and wait until they are gone."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
