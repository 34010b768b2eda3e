"""Builds the parts of a gateway, opens its two ports, and shuts it down without cutting streams."""

import asyncio
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack

import structlog

from slipway_api.served_certificate import Certificate
from slipway_api.trust import TrustFile
from slipway_gateway.accounting import Accounting
from slipway_gateway.app import OPEN_WARNING, Admin, client_app
from slipway_gateway.batch.api import ENDPOINTS as BATCH_ENDPOINTS
from slipway_gateway.batch.api import BatchApi
from slipway_gateway.batch.store import BatchStore
from slipway_gateway.batch.worker import BatchWorker
from slipway_gateway.fleet import HANG_CHECK_SECONDS, Fleet, View, static_fleet
from slipway_gateway.journal import JournalMemory
from slipway_gateway.keys import GatewayKeys
from slipway_gateway.kv_feeds import KvFeeds
from slipway_gateway.listener import Listener
from slipway_gateway.metrics import Metrics
from slipway_gateway.overload import Ladder
from slipway_gateway.peers import Peers
from slipway_gateway.request_body import BodyReader
from slipway_gateway.requests import Requests
from slipway_gateway.settings import GatewaySettings
from slipway_gateway.shares import SharedCapacity
from slipway_gateway.startup import RouteStartup
from slipway_gateway.tenancy import Tenancy
from slipway_gateway.tenants import TenantFiles
from slipway_gateway.tracing import Tracing
from slipway_gateway.upstream import Upstream
from slipway_gateway.watch import Watch
from slipway_kube import auth
from slipway_kube.client import Client

log = structlog.get_logger()

SECONDS_TO_CUT = 5.0  # for error events to reach their clients


class Gateway:
    """One running gateway, in parts; `async with Gateway(settings) as gateway`, then `await gateway.leave()`."""

    def __init__(self, settings: GatewaySettings, fleet: Fleet | None = None) -> None:
        """With a `fleet` given, it is served as it is and nothing is watched."""
        self.settings = settings
        self.fleet = fleet or (static_fleet(settings.static) if settings.static else Fleet())
        self._watches = fleet is None and not settings.static
        limits = settings.connection_limits.within_descriptors()
        tenants = None
        if settings.tenants_file is not None and settings.keys_directory is not None:
            tenants = TenantFiles(settings.tenants_file, settings.keys_directory)
        self.metrics = Metrics(self.fleet, open_to_anyone=tenants is None)
        accounting = Accounting(
            self.metrics.registry, audit=tenants is not None if settings.audit is None else settings.audit
        )
        self._peers: Peers | None = None
        self.tenancy = Tenancy(
            accounting,
            tenants,
            gateways=self._count_gateways,
            max_tokens=settings.max_tokens,
            default_max_tokens=settings.default_max_tokens,
        )
        self.metrics.before_exposition.append(
            lambda: accounting.remove_stale(self.fleet.table.services, self.tenancy.tenant_names)
        )
        self._keys = GatewayKeys(settings.key_directory)
        trust = TrustFile(settings.internal_ca_file)
        self.upstream = Upstream(settings.upstream_timeouts, serving_headers=self._keys.serving_headers, trust=trust)
        self.kv_feeds = KvFeeds(
            self.fleet,
            serving_headers=self._keys.serving_headers,
            count=lambda event, number: self.metrics.kv_events.labels(event).inc(number),
            trust=trust,
        )
        self.metrics.kv_feeds.set_function(lambda: len(self.kv_feeds.live))
        self.requests = Requests(
            self.fleet,
            self.upstream,
            self.metrics,
            bodies=BodyReader(
                SharedCapacity(settings.max_bodies_bytes),
                max_bytes=settings.max_body_bytes,
                max_seconds=settings.body_seconds,
            ),
            connections=SharedCapacity(limits.connections),
            loading_seconds=settings.loading_wait_seconds,
            tenancy=self.tenancy,
            journals=JournalMemory(
                max_bytes=settings.max_handover_bytes, max_stream_bytes=settings.max_handover_stream_bytes
            ),
            handover_seconds=settings.handover_seconds,
            ladder=Ladder(settings.degrade_waiting, settings.degrade_max_tokens),
            kv_feeds=self.kv_feeds,
            tracing=Tracing(
                settings.otlp_endpoint,
                ratio=settings.trace_ratio,
                slow_seconds=settings.trace_slow_seconds,
                instance=settings.pod_name,
            ),
        )
        self.metrics.add_outcomes(self.requests.outcomes.report)
        self.admin = Admin(
            self.fleet,
            self.requests,
            self.metrics,
            tokens=self._tokens if self._watches else None,
            tenancy=self.tenancy,
            gateway=settings.pod_name,
        )
        certificate = Certificate(settings.tls_directory) if settings.tls_directory is not None else None
        self.metrics.add_certificate(certificate)
        inside = Certificate(settings.internal_tls_directory) if settings.internal_tls_directory is not None else None
        self.metrics.add_internal_tls(inside, trust)
        self.batches: BatchWorker | None = None
        if settings.batch_directory is not None:
            store = BatchStore(settings.batch_directory)
            handlers = dict.fromkeys(BATCH_ENDPOINTS, self.requests.handle)
            self.batches = BatchWorker(
                store,
                self.fleet,
                self.tenancy,
                handlers,
                concurrency=settings.batch_concurrency,
                limits=settings.batch_limits,
            )
            batch_api = BatchApi(store, self.batches, self.tenancy, settings.batch_limits)
        add_batches = batch_api.add_routes if self.batches is not None else lambda _: None
        self.routes_known = asyncio.Event()  # set when requests need not wait for the first routing table any longer
        if not self._watches:
            self.routes_known.set()
        self.client_listener = Listener(
            client_app(self.fleet, self.requests, more=add_batches, routes_known=self.routes_known),
            settings.bind,
            settings.port,
            limits,
            certificate=certificate,
        )
        self.admin_listener = Listener(self.admin.app(), settings.bind, settings.admin_port, limits, certificate=inside)
        self.metrics.add_listener("clients", self.client_listener.connections)
        self.metrics.add_listener("admin", self.admin_listener.connections)
        self.watching: asyncio.Task[None] | None = None
        self._stack = AsyncExitStack()

    @property
    def port(self) -> int:
        """The port for clients."""
        return self.client_listener.port

    @property
    def admin_port(self) -> int:
        """The port for probes and metrics."""
        return self.admin_listener.port

    async def __aenter__(self) -> "Gateway":
        if self.tenancy.is_open:
            log.warning(OPEN_WARNING)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.upstream)
            stack.callback(self.requests.access_log.refusals.flush)
            stack.push_async_callback(self.requests.mirror.close)
            stack.push_async_callback(self.requests.tracing.close)
            if self.settings.kv_events:
                await stack.enter_async_context(self.kv_feeds)
            if self._watches:
                self.fleet.view = lambda: View(synced=False, age_seconds=float("inf"))
                client = await stack.enter_async_context(Client(auth.load(), user_agent="slipway-gateway"))
                if self.settings.gateway_service and not self.tenancy.is_open:
                    self._peers = Peers(
                        client, self.settings.namespace, self.settings.gateway_service, default=self.settings.gateways
                    )
                    counting = asyncio.create_task(self._peers.run(), name="peers")
                    stack.push_async_callback(_cancel, counting)
                watch = Watch(client, self.fleet, namespaces=self.settings.watch_namespaces)
                self.admin.console.watch = watch
                startup = RouteStartup(
                    self.fleet,
                    watch,
                    self.routes_known,
                    self.settings.state_directory,
                    self.settings.startup_limits,
                    count=lambda outcome: self.metrics.snapshot_writes.labels(outcome).inc(),
                )
                self.watching = asyncio.create_task(_run_all(watch.run(), startup.run()), name="watch")
                stack.push_async_callback(_cancel, self.watching)
            if self.batches is not None:
                await stack.enter_async_context(self.batches)
            comparing = asyncio.create_task(self._compare_replicas(), name="hangs")
            stack.push_async_callback(_cancel, comparing)
            await self.admin_listener.open(stack)
            await self.client_listener.open(stack)
            self._stack = stack.pop_all()
        log.info("serving", address=self.settings.bind, port=self.port, admin_port=self.admin_port)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()

    async def _compare_replicas(self) -> None:
        while True:
            started = time.monotonic()
            await asyncio.sleep(HANG_CHECK_SECONDS)
            self.metrics.loop_lag.set(max(0.0, time.monotonic() - started - HANG_CHECK_SECONDS))
            self.fleet.check_hangs(self.settings.hang_seconds)

    async def leave(self, hurry: asyncio.Event | None = None) -> None:
        """Shut down without cutting a stream, if the streams end in time; setting `hurry` ends the wait."""
        hurry = hurry or asyncio.Event()
        started = time.monotonic()
        self.admin.leave()
        self.requests.leave()
        log.info("leaving", open_requests=self.requests.open)
        if self.batches is not None:
            await self.batches.stop()
        await _first_of(self.settings.propagation_seconds, hurry)
        self.client_listener.close()
        if not hurry.is_set():
            await _first_of(self.settings.drain_seconds, hurry, self.requests.idle)
        if self.requests.open:
            log.warning("cutting what still runs", open_requests=self.requests.open)
            self.requests.cut()
            await _first_of(SECONDS_TO_CUT, self.requests.idle)
        log.info("left", seconds=round(time.monotonic() - started, 1))

    def _count_gateways(self) -> int:
        return self._peers.count if self._peers is not None else self.settings.gateways

    def _tokens(self) -> list[str]:
        return self._keys.admin_tokens(self.settings.namespace, self.settings.pod_name)


async def _run_all(*parts: Coroutine[object, object, None]) -> None:
    """Run until cancelled; the failure of one part ends all."""
    async with asyncio.TaskGroup() as running:
        for part in parts:
            running.create_task(part)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _first_of(seconds: float, *events: asyncio.Event) -> None:
    """Return when one of the events is set, or after `seconds`."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
