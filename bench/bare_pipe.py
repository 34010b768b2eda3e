"""A TCP pass-through on bare asyncio protocols: no HTTP at all, the least that Python can do with a stream.

It is the peer that `bench.capacity` divides the gateway's chunks a second by.
"""

import asyncio

from aiohttp import web

from bench.peer_main import Addresses, serve_until_killed


class Side(asyncio.Protocol):
    """One side of a connection; what it receives is written to the other one."""

    def __init__(self, other: "Side | None" = None) -> None:
        self.other = other
        self.transport: asyncio.Transport | None = None
        self.early = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """Pass it on."""
        if self.other is None or self.other.transport is None:
            self.early += data
        else:
            self.other.transport.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        """Close the other side, too."""
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()


class Client(Side):
    """The side of the client, which opens the other one."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__()
        self.address = (host, port)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connect to the upstream."""
        super().connection_made(transport)
        self.connecting = asyncio.ensure_future(self._connect())

    async def _connect(self) -> None:
        upstream = Side(self)
        await asyncio.get_running_loop().create_connection(lambda: upstream, *self.address)
        self.other = upstream
        if self.early and upstream.transport is not None:
            upstream.transport.write(self.early)


async def serve(at: Addresses) -> None:
    """Begin to serve."""
    upstream_host, _, upstream_port = at.upstream.removeprefix("http://").partition(":")
    app = web.Application()

    async def ready(request: web.Request) -> web.Response:
        return web.Response()

    app.router.add_get("/ready", ready)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, at.host, at.admin_port).start()
    loop = asyncio.get_running_loop()
    await loop.create_server(lambda: Client(upstream_host, int(upstream_port)), at.host, at.port, backlog=1024)


if __name__ == "__main__":
    serve_until_killed("bare_pipe", serve, has_upstream=True)
