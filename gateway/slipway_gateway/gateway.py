"""One running gateway: its parts wired together, its two doors opened, and the way it leaves."""

import asyncio
import logging
import time
from contextlib import AsyncExitStack

import structlog
from aiohttp import web

from slipway_gateway.app import OPEN_WARNING, Admin, client_app
from slipway_gateway.ask import BodyBudget
from slipway_gateway.fleet import Fleet, View, static_fleet
from slipway_gateway.keys import GatewayKeys
from slipway_gateway.metrics import Metrics
from slipway_gateway.requests import Requests
from slipway_gateway.settings import GatewaySettings
from slipway_gateway.upstream import Upstream
from slipway_gateway.watch import Watch
from slipway_kube import auth
from slipway_kube.client import Client

log = structlog.get_logger()

# aiohttp logs what it cannot parse with a traceback and parts of what the client sent, which may be a prompt.
# Requests that it can parse are logged by the journal.
QUIET = logging.getLogger("slipway_gateway.http")
QUIET.setLevel(logging.CRITICAL)
SECONDS_TO_CUT = 5.0  # for error events to reach their clients


class Gateway:
    """One running gateway, in parts; `async with Gateway(settings) as gateway`, then `await gateway.leave()`."""

    def __init__(self, settings: GatewaySettings, fleet: Fleet | None = None) -> None:
        """With a `fleet` given, it is served as it is and nothing is watched."""
        self.settings = settings
        self.fleet = fleet or (static_fleet(settings.static) if settings.static else Fleet())
        self._watches = fleet is None and not settings.static
        # Keys come with tenants; until they are configured, this gateway is open and says so wherever it can.
        self.metrics = Metrics(self.fleet, open_to_anyone=True)
        self._keys = GatewayKeys(settings.key_directory)
        self.upstream = Upstream(settings.timeouts, serving_headers=self._keys.serving_headers)
        self.requests = Requests(
            self.fleet,
            self.upstream,
            self.metrics,
            bodies=BodyBudget(each=settings.most_body_bytes, total=settings.most_bodies_bytes),
        )
        self.admin = Admin(
            self.fleet,
            self.requests,
            self.metrics,
            tokens=self._tokens if self._watches else None,
            open_to_anyone=True,
        )
        self.port = settings.port
        self.admin_port = settings.admin_port
        self.watching: asyncio.Task[None] | None = None
        self._stack = AsyncExitStack()
        self._door: web.TCPSite | None = None

    async def __aenter__(self) -> "Gateway":
        log.warning(OPEN_WARNING)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.upstream)
            if self._watches:
                self.fleet.view = lambda: View(synced=False, age_seconds=float("inf"))
                client = await stack.enter_async_context(Client(auth.load(), user_agent="slipway-gateway"))
                watch = Watch(client, self.fleet, namespaces=self.settings.watch_namespaces)
                self.watching = asyncio.create_task(watch.run(), name="watch")
                stack.push_async_callback(_cancel, self.watching)
            admin = await _listen(stack, self.admin.app(), self.settings.bind, self.settings.admin_port)
            self._door = await _listen(
                stack, client_app(self.fleet, self.requests), self.settings.bind, self.settings.port
            )
            self.port, self.admin_port = self._door.port, admin.port
            self._stack = stack.pop_all()
        log.info("serving", address=self.settings.bind, port=self.port, admin_port=self.admin_port)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()

    async def leave(self, hurry: asyncio.Event | None = None) -> None:
        """Go without cutting a stream, if the streams end in time; setting `hurry` ends the waiting."""
        hurry = hurry or asyncio.Event()
        started = time.monotonic()
        self.admin.leave()
        self.requests.leave()
        log.info("leaving", open_requests=self.requests.open)
        await _first_of(self.settings.propagation_seconds, hurry)
        assert self._door is not None
        await self._door.stop()
        if not hurry.is_set():
            await _first_of(self.settings.drain_seconds, hurry, self.requests.idle)
        if self.requests.open:
            log.warning("cutting what still runs", open_requests=self.requests.open)
            self.requests.cut()
            await _first_of(SECONDS_TO_CUT, self.requests.idle)
        log.info("left", seconds=round(time.monotonic() - started, 1))

    def _tokens(self) -> list[str]:
        return self._keys.admin_tokens(self.settings.namespace, self.settings.pod_name)


async def _listen(stack: AsyncExitStack, app: web.Application, host: str, port: int) -> web.TCPSite:
    """Serve `app` until the stack closes; a handler is cancelled when its client leaves."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, logger=QUIET, shutdown_timeout=1.0)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    site = web.TCPSite(runner, host, port, backlog=1024)
    await site.start()
    return site


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _first_of(seconds: float, *events: asyncio.Event) -> None:
    """Return when one of the events is set, or after `seconds`."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
