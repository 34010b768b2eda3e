"""Passes TCP connections on, byte by byte as they come: nothing is collected, and each side's end is the other's.

A stream of tokens must arrive token by token, so Nagle's delay is off. When one side has
said all it has, only that direction is closed; when it breaks, the other breaks too; and
a side that reads slowly slows the other down.
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


class Side(asyncio.Protocol):
    """One of the two connections; what arrives here leaves through `other`."""

    def __init__(self, other: "Side | None" = None) -> None:
        self.other = other
        self.transport: asyncio.Transport | None = None
        self.has_ended = False  # this side will send nothing more

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        with contextlib.suppress(OSError):
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        self._far.write(data)

    def eof_received(self) -> bool:
        self.has_ended = True
        if self.other is not None and self.other.has_ended:
            self._far.close()  # what is still to be sent is sent first
            return False
        with contextlib.suppress(OSError):
            self._far.write_eof()
        return True  # the other direction stays open

    def connection_lost(self, error: Exception | None) -> None:
        if self.other is not None and self.other.transport is not None:
            if error or not self.has_ended:
                _break(self.other.transport)
            else:
                self.other.transport.close()

    def pause_writing(self) -> None:
        self._far.pause_reading()

    def resume_writing(self) -> None:
        self._far.resume_reading()

    @property
    def _far(self) -> asyncio.Transport:
        assert self.other is not None
        assert self.other.transport is not None
        return self.other.transport


class Accepted(Side):
    """The side that was dialled: it finds out where to go on to, and holds what comes until it is there."""

    def __init__(self, resolve: Callable[[Address], Address | None]) -> None:
        super().__init__()
        self._resolve = resolve
        self._early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connecting = asyncio.ensure_future(self._connect())

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self._early.append(data)
            cast(asyncio.Transport, self.transport).pause_reading()
        else:
            super().data_received(data)

    def eof_received(self) -> bool:
        if self.other is None:
            self.has_ended = True
            return True
        return super().eof_received()

    async def _connect(self) -> None:
        near = cast(asyncio.Transport, self.transport)
        target = self._resolve(near.get_extra_info("sockname")[:2])
        if target is None:
            _break(near)
            return
        other = Side(self)
        try:
            connection = asyncio.get_running_loop().create_connection(lambda: other, *target)
            far, _ = await asyncio.wait_for(connection, CONNECT_LIMIT)
        except (OSError, TimeoutError):
            _break(near)
            return
        if near.is_closing():
            _break(far)
            return
        self.other = other
        far.write(b"".join(self._early))
        if self.has_ended:
            far.write_eof()
        elif self._early:
            near.resume_reading()
        self._early.clear()


def _break(transport: asyncio.Transport) -> None:
    """End a connection so that the other end sees a failure (a reset), not the regular end of what was said."""
    with contextlib.suppress(OSError):
        given = transport.get_extra_info("socket")
        given.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
