"""A listening port with limits on its connections: on their number, in all and per client, and on slow clients.

aiohttp has no limit on how long a client may take to send its headers, so a protocol of ours stands between the
transport and aiohttp's and watches the phases of a connection:

| phase    | begins                                  | limit                   | what happens at the limit        |
|----------|-----------------------------------------|-------------------------|----------------------------------|
| headers  | connected, or first byte after idle     | header_seconds          | closed                           |
| request  | the headers are complete                | (body: request_body.py) | 408                              |
| idle     | the answer is written                   | idle_seconds            | closed (by aiohttp)              |
| stalled  | the client does not read what was sent  | write_stall_seconds     | aborted: the replica is released |
| unread   | answered before the body was here       | UNREAD_SECONDS or bytes | closed                           |

Bodies are never decompressed. A body that no handler has read costs a constant: at most UNREAD_BYTES of it are read,
and thrown away unparsed. Handlers that know their caller may raise the limit with `allow_unread`, so that the caller
can keep its connection.
"""

import asyncio
import logging
import resource
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final, cast

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler

from slipway_api.listening import bound_sockets
from slipway_api.served_certificate import Certificate
from slipway_gateway.protocol_errors import hide_server, with_own_errors

log = structlog.get_logger()

# aiohttp logs what it cannot parse with a traceback and parts of what the client sent, which may be a prompt.
# Requests that it can parse are in the access log.
QUIET = logging.getLogger("slipway_gateway.http")
QUIET.setLevel(logging.CRITICAL)

_REFUSAL_BODY: Final = (
    b'{"error":{"message":"Too many connections.","type":"ServiceUnavailableError","param":null,"code":503}}'
)
REFUSAL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_REFUSAL_BODY), _REFUSAL_BODY)
)
UNREAD_BYTES: Final = 64 * 1024  # of a refused request's body: most clients finish sending before they read the answer
UNREAD_SECONDS: Final = 2.0
MAY_SEND: Final = web.RequestKey("slipway.may_send", int)
OTHER_DESCRIPTORS: Final = 128  # files and sockets that are no connections of clients or to replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """The limits of one listening port."""

    connections: int = 10_000
    connections_per_client: int = 2_500  # a load balancer is one client, so this is generous
    header_seconds: float = 10.0
    idle_seconds: float = 75.0
    write_stall_seconds: float = 60.0

    def within_descriptors(self) -> "ConnectionLimits":
        """The same, with no more connections than the process may open: each may need one more to a replica."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY:
            return self
        most = max(1, (soft - OTHER_DESCRIPTORS) // 2)
        if most >= self.connections:
            return self
        return ConnectionLimits(
            connections=most,
            connections_per_client=min(self.connections_per_client, most),
            header_seconds=self.header_seconds,
            idle_seconds=self.idle_seconds,
            write_stall_seconds=self.write_stall_seconds,
        )


class Connections:
    """The open connections of one port."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.refused = 0
        self.timed_out: Counter[str] = Counter()  # by phase
        self._open: dict[asyncio.BaseTransport, Connection] = {}
        self._of_client: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, connection: "Connection") -> bool:
        """Count a new connection; False: there are too many, in all or of this client."""
        limits, client = self.limits, connection.client
        if len(self._open) >= limits.connections or self._of_client[client] >= limits.connections_per_client:
            self.refused += 1
            return False
        self._open[connection.transport] = connection
        self._of_client[client] += 1
        return True

    def forget(self, connection: "Connection") -> bool:
        """The connection is closed; False: it was never admitted."""
        if self._open.pop(connection.transport, None) is None:
            return False
        self._of_client[connection.client] -= 1
        if not self._of_client[connection.client]:
            del self._of_client[connection.client]
        return True

    @web.middleware
    async def track_request(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Middleware that notes in the connection when its request begins and ends."""
        connection = self._open.get(request.transport) if request.transport is not None else None
        if connection is None:
            return await handler(request)
        connection.begin_request()
        try:
            response = await handler(request)
        finally:
            connection.end_request()
            if not request.content.is_eof():
                connection.drop_rest(request.get(MAY_SEND))
        if not request.content.is_eof() and MAY_SEND not in request:
            response.force_close()
        return response


class Connection(asyncio.Protocol):
    """One client's connection: passes everything on to aiohttp's protocol and keeps the deadlines of its phases."""

    transport: asyncio.Transport

    def __init__(self, inner: asyncio.Protocol, connections: Connections) -> None:
        self._inner = inner
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._header_timer: asyncio.TimerHandle | None = None  # set while headers are awaited
        self._stall_timer: asyncio.TimerHandle | None = None  # set while the client does not read
        self._unread_timer: asyncio.TimerHandle | None = None  # set while the body of a stranger is thrown away
        self._may_send: int | None = None  # bytes that may still come of a body that nobody reads
        self._is_handling = False
        self.client = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Admit the connection, or close it with a 503."""
        # Not asserted: uvloop's transports have the methods of an asyncio.Transport, and another base.
        self.transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self.client = peer[0] if isinstance(peer, tuple) else ""
        if not self._connections.admit(self):
            self.transport.write(REFUSAL)
            self.transport.close()
            return
        self._inner.connection_made(transport)
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        """Bytes of the client."""
        if self.transport.is_closing():
            return
        if self._may_send is not None:
            self._may_send -= len(data)
            if self._unread_timer is not None:
                if self._may_send < 0:  # reading stops, and the client has until the timer to read its answer
                    self.transport.pause_reading()
                return
            if self._may_send < 0:
                self._close_unread()
                return
        elif not self._is_handling and self._header_timer is None:
            self._expect_headers()
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        """The client sends no more."""
        return self._inner.eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is closed."""
        self._stop_header_timer()
        self._stop_stall_timer()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
        if self._connections.forget(self):
            self._inner.connection_lost(error)

    def pause_writing(self) -> None:
        """The client does not read as fast as the answer is written."""
        self._inner.pause_writing()
        seconds = self._connections.limits.write_stall_seconds
        self._stall_timer = self._loop.call_later(seconds, self._expire, "stalled")

    def resume_writing(self) -> None:
        """The client has read most of it."""
        self._stop_stall_timer()
        self._inner.resume_writing()

    def begin_request(self) -> None:
        """The headers are complete."""
        self._is_handling = True
        self._may_send = None
        self._stop_header_timer()

    def end_request(self) -> None:
        """The answer is made; the next headers begin to count with their first byte."""
        self._is_handling = False

    def drop_rest(self, most: int | None) -> None:
        """The answer is made and the body is not here: read at most `most` bytes of it; None: the caller is unknown.

        What an unknown caller still sends does not reach aiohttp's parser, and its connection is closed.
        """
        self._may_send = UNREAD_BYTES if most is None else most
        if most is None and self._unread_timer is None:
            self._unread_timer = self._loop.call_later(UNREAD_SECONDS, self._close_unread)

    def _close_unread(self) -> None:
        self._connections.timed_out["unread"] += 1
        self.transport.close()

    def _expect_headers(self) -> None:
        seconds = self._connections.limits.header_seconds
        self._header_timer = self._loop.call_later(seconds, self._expire, "headers")

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _expire(self, phase: str) -> None:
        self._connections.timed_out[phase] += 1
        self.transport.abort()


class Listener:
    """One port that serves an application; `async with` it in a stack, `close` it to accept nothing new."""

    def __init__(
        self,
        app: web.Application,
        host: str,
        port: int,
        limits: ConnectionLimits,
        *,
        certificate: Certificate | None = None,
    ) -> None:
        """With a certificate, the port speaks TLS and nothing else."""
        self._certificate = certificate
        self.connections = Connections(limits)
        app.middlewares.insert(0, self.connections.track_request)
        app.on_response_prepare.append(hide_server)
        self._app = app
        self._host = host
        self.port = port
        self._servers: list[asyncio.Server] = []

    async def open(self, stack: AsyncExitStack) -> None:
        """Serve until the stack closes; a handler is cancelled when its client leaves."""
        runner = web.AppRunner(
            self._app,
            handler_cancellation=True,
            access_log=None,
            logger=QUIET,
            shutdown_timeout=1.0,
            keepalive_timeout=self.connections.limits.idle_seconds,
            auto_decompress=False,
        )
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        handlers = runner.server
        assert handlers is not None
        secured = self._certificate is not None
        sockets = bound_sockets(self._host, self.port)
        self.port = sockets[0].getsockname()[1]
        for bound in sockets:
            server = await asyncio.get_running_loop().create_server(
                lambda: Connection(with_own_errors(handlers()), self.connections),
                sock=bound,
                backlog=1024,
                ssl=self._certificate.context if self._certificate is not None else None,
                ssl_handshake_timeout=self.connections.limits.header_seconds if secured else None,
                ssl_shutdown_timeout=1.0 if secured else None,
            )
            self._servers.append(server)
            stack.callback(server.close)

    def close(self) -> None:
        """Accept no more connections; those that are open go on."""
        for server in self._servers:
            server.close()
