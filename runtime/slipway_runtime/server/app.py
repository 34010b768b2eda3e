"""The ASGI applications of a replica, for the serving port and the admin port, and their uvicorn servers.

Both run in one event loop. Signals are handled in `serve.py`, not by uvicorn: a SIGTERM begins a drain.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import httptools
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Message
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

import slipway_api
from slipway_api import names
from slipway_api.listening import bound_sockets
from slipway_api.served_certificate import Certificate
from slipway_runtime.server import (
    adapter_routes,
    admin,
    chat,
    completions,
    embeddings,
    errors,
    messages_api,
    models_api,
    responses,
    scoring,
    status_api,
    text_blocks,
    tokenize_api,
)
from slipway_runtime.server.middleware import ServingMiddleware
from slipway_runtime.server.model_choice import ModelChoice
from slipway_runtime.server.replica import Replica

_OFFER = frozenset({b"upgrade", b"connection", b"http2-settings"})
_TCP_NOTSENT_LOWAT = 25  # Linux; the socket module has no name for it before 3.12
MAX_OPEN_REQUESTS = 4096  # each is being read, waits in the engine's queue, or is being answered
MAX_OPEN_BODY_BYTES = 256 * 2**20  # of the requests whose answers have not begun; parsed, they take a few times as much


def serving_app(
    replica: Replica,
    *,
    max_body_bytes: int = 8 * 2**20,
    max_open_requests: int = MAX_OPEN_REQUESTS,
    max_open_body_bytes: int = MAX_OPEN_BODY_BYTES,
    adapter_endpoints: bool = False,
    token_digests: tuple[str, ...] = (),
    gateway_token_digests: tuple[str, ...] = (),
    has_metrics: bool = False,
) -> ASGIApp:
    """The application of the serving port.

    adapter_endpoints: clients may load and unload adapters.
    token_digests: SHA-256 of the accepted tokens; empty: no token is required.
    gateway_token_digests: SHA-256 of tokens that are not required; who shows one may set tenant and priority.
    has_metrics: `/metrics` is here too, not on the admin port alone.
    """
    app = FastAPI(
        title="Slipway runtime",
        version=slipway_api.__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a redirect would name the Host header of the request
    )
    app.state.replica = replica
    errors.install(app)
    generating = (chat.router, completions.router, responses.router, messages_api.router)
    exposition = status_api.exposition if has_metrics else status_api.no_exposition
    status = (status_api.router, status_api.probes, exposition, text_blocks.router)
    for router in (*generating, embeddings.router, scoring.router, models_api.router, tokenize_api.router, *status):
        app.include_router(router)
    if adapter_endpoints:
        app.include_router(adapter_routes.router)
    return ServingMiddleware(
        app,
        replica=replica,
        max_body_bytes=max_body_bytes,
        max_open_requests=max_open_requests,
        max_open_body_bytes=max_open_body_bytes,
        token_digests=token_digests,
        gateway_token_digests=gateway_token_digests,
    )


def admin_app(replica: Replica, choice: ModelChoice, *, token_digests: tuple[str, ...] = ()) -> FastAPI:
    """The application of the admin port, for the operator, the gateway and the kubelet."""
    app = FastAPI(
        title="Slipway runtime, admin port",
        version=slipway_api.__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.replica = replica
    app.state.model_choice = choice
    app.state.admin_token_digests = token_digests
    errors.install(app)
    for router in (admin.open_routes, admin.routes, status_api.probes, status_api.exposition):
        app.include_router(router)
    return app


class KeepsHttp(HttpToolsProtocol):
    """uvicorn's protocol for requests that offer to upgrade: they are answered over HTTP/1.1, with their bodies.

    Java's HttpClient and `curl --http2` offer h2c, Apache's client TLS. The parser stops after the headers of such a
    request, and takes what follows for another protocol; so a new parser reads the request again without the offer.
    """

    def on_headers_complete(self) -> None:
        """Begin the request, unless it has to be read again."""
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Add to the body."""
        if not self.parser.should_upgrade():
            super().on_body(body)

    def on_message_complete(self) -> None:
        """End the body."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        """Parse the data; once more without the offer of an upgrade, if there is one."""
        self._unset_keepalive_if_required()
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if self.parser.get_method() == b"CONNECT":  # it asks for a tunnel, with or without the header
                    self.send_400_response("This server is not a proxy.")
                    return
                data = self._without_offer() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
                return
            else:
                return

    def _without_offer(self) -> bytes:
        """The head of the request that was just parsed, without what offers or asks for another protocol."""
        kept = [(name, value) for name, value in self.headers if name not in _OFFER]
        options = b",".join(value for name, value in self.headers if name == b"connection").split(b",")
        if any(option.strip().lower() == b"close" for option in options):
            kept.append((b"connection", b"close"))
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        return b"\r\n".join([*lines, *(name + b": " + value for name, value in kept), b"", b""])


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield


async def _build_routes(app: ASGIApp) -> None:
    """Send a request through the application: FastAPI builds its routes at the first one, which takes 10 ms."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": names.PATH_HEALTH,
        "raw_path": names.PATH_HEALTH.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
        "client": None,
        "server": None,
    }

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        pass

    await app(scope, receive, send)


@contextlib.asynccontextmanager
async def listening(
    app: ASGIApp, host: str, port: int, *, certificate: Certificate | None = None
) -> AsyncIterator[int]:
    """Serve an application; yields its port once it listens. The exit waits a short time for open responses.

    With a certificate the port speaks TLS and nothing else.
    """
    sockets = bound_sockets(host, port)
    for one in sockets:
        # Limits the unsent bytes that the kernel buffers for a client that does not read; connections inherit it. It
        # does not limit throughput.
        one.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, 64 * 1024)
    config = uvicorn.Config(
        app,
        http=KeepsHttp,
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        server_header=False,
        backlog=2048,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
    )
    config.load()
    if certificate is not None:
        config.ssl = certificate.context  # its own would never read the files again
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=sockets), name=f"http {port}")
    try:
        while not server.started:
            if task.done():
                task.result()
                raise RuntimeError(f"the server on port {port} ended before it started")
            await asyncio.sleep(0.005)
        await _build_routes(app)
        yield sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task
        for one in sockets:
            one.close()
