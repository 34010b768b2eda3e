"""Connections to replicas: made when they are needed, kept for a few seconds after an answer, and used again.

The number of open connections has no limit here: requests are bounded for each service before they come, and a queue
here would hide the load. Idle ones are bounded for each replica.
"""

import asyncio
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final
from urllib.parse import urlsplit

from slipway_gateway.replica_connection import ReplicaConnection

KEEP_SECONDS: Final = 4.0  # idle ones close before uvicorn's 5 s do, or requests would run into closed ones
MAX_IDLE: Final = 256  # for each replica


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a replica listens, read from its URL."""

    host: str
    port: int
    name: str  # of the header Host
    prefix: str  # of the paths of all requests
    speaks_tls: bool


@lru_cache(maxsize=4096)
def origin_of(url: str) -> Origin:
    """The origin of `http://10.0.0.7:8000`."""
    parts = urlsplit(url)
    speaks_tls = parts.scheme == "https"
    port = parts.port or (443 if speaks_tls else 80)
    return Origin(parts.hostname or "", port, parts.netloc, parts.path.rstrip("/"), speaks_tls)


@dataclass(frozen=True, slots=True)
class Destination:
    """A kind of connection: requests of one destination may share them."""

    origin: Origin
    context: ssl.SSLContext | None = None  # None: plain text
    tls_name: str = ""  # that the certificate must have; empty: the host's


class ConnectionPool:
    """The connections to all replicas."""

    def __init__(self, *, connect_seconds: float, unacknowledged_seconds: float) -> None:
        self._connect_seconds = connect_seconds
        self._unacknowledged_seconds = unacknowledged_seconds
        self._idle: dict[Destination, dict[ReplicaConnection, float]] = {}  # since when; the last used ones are last
        self._sweep: asyncio.TimerHandle | None = None  # set while something is idle

    @property
    def idle(self) -> int:
        """How many connections are kept."""
        return sum(map(len, self._idle.values()))

    def take(self, destination: Destination) -> ReplicaConnection | None:
        """The idle connection that was used last; None: there is none."""
        connections = self._idle.get(destination)
        while connections:
            connection, since = connections.popitem()
            if not connections:
                del self._idle[destination]
            if not connection.is_closed and asyncio.get_running_loop().time() - since < KEEP_SECONDS:
                return connection
            connection.close()
        return None

    def give_back(self, destination: Destination, connection: ReplicaConnection) -> None:
        """Keep a connection for the next request, or close it if its answer was not read to the end."""
        connections = self._idle.setdefault(destination, {})
        if not connection.is_over or len(connections) >= MAX_IDLE:
            if not connections:
                del self._idle[destination]
            connection.close()
            return
        loop = asyncio.get_running_loop()
        connections[connection] = loop.time()
        if self._sweep is None:
            self._sweep = loop.call_later(KEEP_SECONDS, self._close_old)

    async def connect(self, destination: Destination) -> ReplicaConnection:
        """A new connection. Raises OSError, which TimeoutError and SSLError are."""
        origin, loop = destination.origin, asyncio.get_running_loop()
        async with asyncio.timeout(self._connect_seconds):
            addresses = await _addresses(origin.host, origin.port)
            for number, address in enumerate(addresses):
                left = len(addresses) - number
                try:
                    async with asyncio.timeout(self._connect_seconds / left if left > 1 else None):
                        return await self._connect_to(loop, address, destination)
                except ssl.SSLError:
                    raise
                except OSError:
                    if left == 1:
                        raise
        raise AssertionError("no name has no address")

    def close(self) -> None:
        """Close what is idle."""
        if self._sweep is not None:
            self._sweep.cancel()
        for connections in self._idle.values():
            for connection in list(connections):
                connection.close()
        self._idle.clear()

    async def _connect_to(
        self, loop: asyncio.AbstractEventLoop, address: Any, destination: Destination
    ) -> ReplicaConnection:
        family, kind, protocol, _, where = address
        made = socket.socket(family, kind, protocol)
        try:
            self._prepare(made)
            await loop.sock_connect(made, where)
            secured = destination.context is not None
            _, connection = await loop.create_connection(
                lambda: ReplicaConnection(partial(self._forget, destination)),
                sock=made,
                ssl=destination.context,
                server_hostname=(destination.tls_name or destination.origin.host) if secured else None,
            )
        except BaseException:
            made.close()
            raise
        return connection

    def _prepare(self, made: socket.socket) -> None:
        """Set a short TCP user timeout: a lost node sends no FIN."""
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        seconds = self._unacknowledged_seconds
        for option, value in (
            ("TCP_KEEPIDLE", max(1, int(seconds / 2))),
            ("TCP_KEEPINTVL", max(1, int(seconds / 4))),
            ("TCP_KEEPCNT", 2),
            ("TCP_USER_TIMEOUT", int(seconds * 1000)),
        ):
            if hasattr(socket, option):
                made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def _forget(self, destination: Destination, connection: ReplicaConnection) -> None:
        """A connection was closed, by whomever."""
        connections = self._idle.get(destination, {})
        if connections.pop(connection, None) is not None and not connections:
            del self._idle[destination]

    def _close_old(self) -> None:
        loop, self._sweep = asyncio.get_running_loop(), None
        oldest = loop.time() - KEEP_SECONDS
        for connections in list(self._idle.values()):
            for connection, since in list(connections.items()):
                if since > oldest:
                    break
                connection.close()  # and it is forgotten
        if self._idle:
            self._sweep = loop.call_later(KEEP_SECONDS / 2, self._close_old)


async def _addresses(host: str, port: int) -> Sequence[Any]:
    """What `getaddrinfo` returns; an address in figures needs no look-up."""
    flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except socket.gaierror:
        return await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
