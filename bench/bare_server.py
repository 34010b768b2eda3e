"""An asyncio server that answers every request with an empty body: the least memory for a connection in Python."""

import argparse
import asyncio

import uvloop

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


async def serve(host: str, *ports: int) -> None:
    """Serve until killed."""
    loop = asyncio.get_running_loop()
    for port in ports:
        await loop.create_server(Answer, host, port, backlog=1024)
    await asyncio.Event().wait()


def main() -> None:
    """`python -m bench.bare_server`."""
    parser = argparse.ArgumentParser(prog="python -m bench.bare_server")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--admin-port", type=int, required=True)
    options = parser.parse_args()
    uvloop.run(serve(options.host, options.port, options.admin_port))


if __name__ == "__main__":
    main()
