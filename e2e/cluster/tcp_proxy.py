"""A TCP proxy that forwards bytes as they arrive, without buffering.

A stream of tokens must arrive token by token, so Nagle's delay is off. When one side closes its direction, only that
direction is closed; when a side is reset, so is the other; and a side that reads slowly slows the other down.
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from typing import cast

from e2e.cluster.service_table import Address

CONNECT_LIMIT = 5.0  # seconds

Resolve = Callable[[], Address | None]


class Connection(asyncio.Protocol):
    """One of the two connections; what arrives here is written to `peer`."""

    def __init__(self, peer: "Connection | None" = None) -> None:
        self.peer = peer
        self.transport: asyncio.Transport | None = None
        self.has_ended = False  # EOF was received: this side sends nothing more

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        with contextlib.suppress(OSError):
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        self._peer_transport.write(data)

    def eof_received(self) -> bool:
        self.has_ended = True
        if self.peer is not None and self.peer.has_ended:
            self._peer_transport.close()  # what is still to be sent is sent first
            return False
        with contextlib.suppress(OSError):
            self._peer_transport.write_eof()
        return True  # the other direction stays open

    def connection_lost(self, error: Exception | None) -> None:
        if self.peer is not None and self.peer.transport is not None:
            if error or not self.has_ended:
                reset(self.peer.transport)
            else:
                self.peer.transport.close()

    def pause_writing(self) -> None:
        self._peer_transport.pause_reading()

    def resume_writing(self) -> None:
        self._peer_transport.resume_reading()

    @property
    def _peer_transport(self) -> asyncio.Transport:
        assert self.peer is not None
        assert self.peer.transport is not None
        return self.peer.transport


class AcceptedConnection(Connection):
    """The accepted connection: resolves and dials its target, and keeps the bytes that arrive until that is done."""

    def __init__(self, resolve: Callable[[Address], Address | None]) -> None:
        super().__init__()
        self._resolve = resolve
        self._early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connecting = asyncio.ensure_future(self._connect())

    def data_received(self, data: bytes) -> None:
        if self.peer is None:
            self._early.append(data)
            cast(asyncio.Transport, self.transport).pause_reading()
        else:
            super().data_received(data)

    def eof_received(self) -> bool:
        if self.peer is None:
            self.has_ended = True
            return True
        return super().eof_received()

    async def _connect(self) -> None:
        near = cast(asyncio.Transport, self.transport)
        target = self._resolve(near.get_extra_info("sockname")[:2])
        if target is None:
            reset(near)
            return
        peer = Connection(self)
        try:
            connection = asyncio.get_running_loop().create_connection(lambda: peer, *target)
            far, _ = await asyncio.wait_for(connection, CONNECT_LIMIT)
        except (OSError, TimeoutError):
            reset(near)
            return
        if near.is_closing():
            reset(far)
            return
        self.peer = peer
        far.write(b"".join(self._early))
        if self.has_ended:
            far.write_eof()
        elif self._early:
            near.resume_reading()
        self._early.clear()


def reset(transport: asyncio.Transport) -> None:
    """Reset a connection, so that the other end sees a failure and not a regular end."""
    given = transport.get_extra_info("socket")
    if given is not None and given.fileno() >= 0:  # else it is closed already
        with contextlib.suppress(OSError):
            given.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
