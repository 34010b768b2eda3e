"""A TCP pass-through on bare asyncio protocols: no HTTP at all, the least that Python can do with a stream.

It is the peer that `bench.capacity` divides the gateway's chunks a second by.
"""

import argparse
import asyncio

import uvloop
from aiohttp import web


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


async def serve(upstream: str, host: str, port: int, admin_port: int) -> None:
    """Serve until killed."""
    upstream_host, _, upstream_port = upstream.removeprefix("http://").partition(":")
    app = web.Application()

    async def ready(request: web.Request) -> web.Response:
        return web.Response()

    app.router.add_get("/ready", ready)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, admin_port).start()
    loop = asyncio.get_running_loop()
    await loop.create_server(lambda: Client(upstream_host, int(upstream_port)), host, port, backlog=1024)
    await asyncio.Event().wait()


def main() -> None:
    """`python -m bench.bare_pipe`."""
    parser = argparse.ArgumentParser(prog="python -m bench.bare_pipe")
    parser.add_argument("--upstream", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--admin-port", type=int, required=True)
    options = parser.parse_args()
    uvloop.run(serve(options.upstream, options.host, options.port, options.admin_port))


if __name__ == "__main__":
    main()
