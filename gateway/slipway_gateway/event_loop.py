"""The gateway's event loop: uvloop, in which a socket has one owner (ADR 7).

`create_connection(sock=…)` gives the socket's descriptor to libuv, but the Python socket keeps its number until the
transport is closed. In uvloop 0.23 a transport that is closed while the connection is being made never tells the
socket: the peer reset it before TLS sent its first bytes, say, as a proxy does in front of an API server that is away.
Then the number is closed twice, the second time when the socket is collected, and by then it may be the descriptor of
a client's stream.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Final

import uvloop


class UvLoop(uvloop.Loop):
    """uvloop, where the socket that a connection was made from forgets its descriptor."""

    async def create_connection(self, *arguments: Any, sock: socket.socket | None = None, **options: Any) -> Any:
        """As `asyncio.AbstractEventLoop.create_connection`; a given `sock` cannot be used afterwards."""
        try:
            return await super().create_connection(*arguments, sock=sock, **options)
        finally:
            # libuv owns the descriptor now, and closes it with the transport, whatever has happened here.
            if sock is not None:
                sock.detach()


LOOPS: Final[dict[str, Callable[[], asyncio.AbstractEventLoop]]] = {
    "uvloop": UvLoop,
    "asyncio": asyncio.new_event_loop,
}
