"""The gateway's event loop: uvloop, in which a socket has one owner (ADR 7).

`create_connection(sock=…)` gives the socket's descriptor to libuv, but the Python socket keeps its number until the
transport is closed. In uvloop 0.23 a transport that is closed while the connection is being made never tells the
socket: the peer reset it before TLS sent its first bytes, say, as a proxy does in front of an API server that is away.
Then the number is closed twice, the second time when the socket is collected, and by then it may be the descriptor of
a client's stream.

A connection that is given up between its TCP and its TLS handshake, and then broken by the peer, leaves a future with
the error that nobody awaits: it is inside uvloop, so `log_exception` is where it can be told from a mistake of ours.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Any, Final

import structlog
import uvloop

log = structlog.get_logger()


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


def log_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Exception handler of the event loop: a connection that broke is one line, anything else has its traceback.

    The exception of a task is never a mere connection's: some code of ours should have handled it.
    """
    error, is_of_task = context.get("exception"), isinstance(context.get("future"), asyncio.Task) or "task" in context
    if isinstance(error, ConnectionError | ssl.SSLError) and not is_of_task:
        log.warning("a connection broke", error=str(error), kind=type(error).__name__, seen_as=context.get("message"))
    else:
        loop.default_exception_handler(context)


LOOPS: Final[dict[str, Callable[[], asyncio.AbstractEventLoop]]] = {
    "uvloop": UvLoop,
    "asyncio": asyncio.new_event_loop,
}
