"""The listening port, with limits on its connections: on their number, and on how long headers may take."""

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import Final, cast

from aiohttp import web
from aiohttp.typedefs import Handler

from slipway_api.listening import bound_sockets
from slipway_api.served_certificate import Certificate

MOST_CONNECTIONS: Final = 128
HEADER_SECONDS: Final = 10.0
IDLE_SECONDS: Final = 75.0

# aiohttp logs unparsable requests together with parts of their content.
_QUIET = logging.getLogger("slipway_agent.http")
_QUIET.setLevel(logging.CRITICAL)


class _Connection(asyncio.Protocol):
    """Passes everything on to aiohttp's protocol; closes a client that is one too many, or whose headers take long."""

    transport: asyncio.Transport

    def __init__(self, inner: asyncio.Protocol, open_: "dict[asyncio.BaseTransport, _Connection]") -> None:
        self._inner = inner
        self._open = open_
        self._timer: asyncio.TimerHandle | None = None  # set while headers are awaited
        self._is_handling = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Admit the connection or close it."""
        self.transport = cast(asyncio.Transport, transport)
        if len(self._open) >= MOST_CONNECTIONS:
            self.transport.abort()
            return
        self._open[transport] = self
        self._inner.connection_made(transport)
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        """Bytes of the client."""
        if self.transport not in self._open:
            return
        if not self._is_handling and self._timer is None:
            self._expect_headers()
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        """The client sends no more."""
        return self._inner.eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is closed."""
        self._stop_timer()
        if self._open.pop(self.transport, None) is not None:
            self._inner.connection_lost(error)

    def pause_writing(self) -> None:
        """The client does not read."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """The client reads again."""
        self._inner.resume_writing()

    def begin_request(self) -> None:
        """The headers are complete."""
        self._is_handling = True
        self._stop_timer()

    def end_request(self) -> None:
        """The answer is made."""
        self._is_handling = False

    def _expect_headers(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(HEADER_SECONDS, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Port:
    """One port that serves an application until its stack closes."""

    def __init__(self, app: web.Application, host: str, port: int, certificate: Certificate | None = None) -> None:
        """With a certificate it speaks TLS and nothing else."""
        app.middlewares.insert(0, self._track)
        app.on_response_prepare.append(_hide_server)
        self._app = app
        self._host = host
        self.port = port
        self._certificate = certificate
        self._open: dict[asyncio.BaseTransport, _Connection] = {}

    async def open(self, stack: AsyncExitStack) -> None:
        """Listen; raises OSError."""
        runner = web.AppRunner(
            self._app,
            handler_cancellation=True,
            access_log=None,
            logger=_QUIET,
            shutdown_timeout=1.0,
            keepalive_timeout=IDLE_SECONDS,
            auto_decompress=False,
        )
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        handlers = runner.server
        assert handlers is not None
        sockets = bound_sockets(self._host, self.port)
        self.port = sockets[0].getsockname()[1]
        for bound in sockets:
            server = await asyncio.get_running_loop().create_server(
                lambda: _Connection(handlers(), self._open),
                sock=bound,
                backlog=MOST_CONNECTIONS,
                ssl=self._certificate.context if self._certificate is not None else None,
                ssl_handshake_timeout=HEADER_SECONDS if self._certificate is not None else None,
            )
            stack.callback(server.close)

    @web.middleware
    async def _track(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        connection = self._open.get(request.transport) if request.transport is not None else None
        if connection is None:
            return await handler(request)
        connection.begin_request()
        try:
            return await handler(request)
        finally:
            connection.end_request()


async def _hide_server(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.pop("Server", None)
