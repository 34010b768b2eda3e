"""An asyncio server that answers every request with an empty body: the least memory for a connection in Python."""

import asyncio

from bench.peer_main import Addresses, serve_until_killed

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


class Answer(asyncio.Protocol):
    """One connection; each block of data that ends a request's headers is answered."""

    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """Answer."""
        if data.endswith(b"\r\n\r\n"):
            self.transport.write(ANSWER)


async def serve(at: Addresses) -> None:
    """Begin to serve."""
    loop = asyncio.get_running_loop()
    for port in (at.port, at.admin_port):
        await loop.create_server(Answer, at.host, port, backlog=1024)


if __name__ == "__main__":
    serve_until_killed("bare_server", serve)
