"""A real HTTP server that keeps the contract of the admin port: tokens, signals, drain."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from slipway_api import names
from slipway_api.admin_token import token_matches
from slipway_api.runtime_api import BlockCounts, DrainRequest, DrainStatus, QueueCounts, Signals, State


@dataclass
class RuntimeDouble:
    """One replica's admin port, its load set by the test."""

    digests: tuple[str, ...] = ()
    boot_id: str = "boot-1"
    kv_usage: float = 0.0
    running: int = 0
    waiting: int = 0
    draining: bool = False
    starting: str = ""
    blocks: int = 1000
    nonsense: bytes | None = None
    port: int = 0
    calls: list[str] = field(default_factory=list)
    drains: list[DrainRequest] = field(default_factory=list)

    def app(self) -> web.Application:
        """The routes of the admin port that the operator uses."""
        app = web.Application()
        app.router.add_get(names.PATH_SIGNALS, self._signals)
        app.router.add_get(names.PATH_STATE, self._state)
        app.router.add_post(names.PATH_DRAIN, self._drain)
        app.router.add_post(names.PATH_UNDRAIN, self._undrain)
        return app

    @asynccontextmanager
    async def serving(self, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator["RuntimeDouble"]:
        """Listen for as long as the block lasts; without a port, on a free one."""
        runner = web.AppRunner(self.app())
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, port)
            await site.start()
            self.port = runner.addresses[0][1]
            yield self
        finally:
            await runner.cleanup()

    def _check(self, request: web.Request) -> None:
        self.calls.append(f"{request.method} {request.path}")
        if not token_matches(request.headers.get(names.HEADER_ADMIN_TOKEN, ""), self.digests):
            raise web.HTTPUnauthorized(text="unknown admin token")

    async def _signals(self, request: web.Request) -> web.Response:
        self._check(request)
        if self.nonsense is not None:
            return web.Response(body=self.nonsense, content_type="application/json")
        signals = Signals(
            boot_id=self.boot_id,
            kv_usage=self.kv_usage,
            running=self.running,
            waiting=self.waiting,
            draining=self.draining,
            starting=self.starting,
        )
        return web.Response(body=signals.wire(), content_type="application/json")

    async def _state(self, request: web.Request) -> web.Response:
        self._check(request)
        state = State(
            boot_id=self.boot_id,
            model_name="chat",
            uptime_seconds=1.0,
            block_size=16,
            bytes_per_token=4096,
            max_model_len=4096,
            max_num_seqs=64,
            blocks=BlockCounts(total=self.blocks, live=0, cached=0, free=self.blocks),
            queue=QueueCounts(running=self.running, waiting=self.waiting),
            draining=self.draining,
        )
        return web.Response(body=state.wire(), content_type="application/json")

    async def _drain(self, request: web.Request) -> web.Response:
        self._check(request)
        self.drains.append(DrainRequest.model_validate_json(await request.read()))
        self.draining = True
        return self._status()

    async def _undrain(self, request: web.Request) -> web.Response:
        self._check(request)
        self.draining = False
        return self._status()

    def _status(self) -> web.Response:
        status = DrainStatus(draining=self.draining, running=self.running, waiting=self.waiting)
        return web.Response(body=status.wire(), content_type="application/json")
