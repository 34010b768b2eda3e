"""A minimal HTTP/1.1 client with keep-alive connections, for scraping ten thousand replicas.

A general client spends some 300 µs on a request; a fleet of 10,000 busy replicas is scraped 3,000 times a second. Only
a part of HTTP is needed: one request at a time on a connection, a body with Content-Length, no redirects.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from typing import cast

from slipway_api.trust import Trust

LONGEST_REPLY = 4 * 1024**2
LONGEST_HEAD = 64 * 1024
KEPT_AT_MOST = 12_000


class BadReply(OSError):  # noqa: N818  reads as a fact where it is raised
    """The reply is not of the part of HTTP/1.1 that this client supports."""


class ConnectionEnded(OSError):  # noqa: N818  reads as a fact where it is raised
    """The other side closed the connection before its reply was complete."""


class _Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.is_reusable = True
        self._reply: asyncio.Future[tuple[int, bytes]] | None = None
        self._buffer = bytearray()

    @property
    def is_open(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    async def exchange(self, request: bytes) -> tuple[int, bytes]:
        """Send a request and return status and body of its reply."""
        assert self.transport is not None
        self._reply = asyncio.get_running_loop().create_future()
        self._buffer.clear()
        self.transport.write(request)
        return await self._reply

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's, over TLS, is not a subclass

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(exc if isinstance(exc, OSError) else ConnectionEnded("the connection was closed"))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            reply = self._parse()
        except (ValueError, BadReply) as exc:
            self._fail(BadReply(str(exc)))
            self.close()
            return
        if reply is not None and self._reply is not None and not self._reply.done():
            self._reply.set_result(reply)

    def _fail(self, error: OSError) -> None:
        self.is_reusable = False
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(error)

    def _parse(self) -> tuple[int, bytes] | None:
        """Status and body once the reply is complete."""
        if len(self._buffer) > LONGEST_REPLY:
            raise BadReply(f"the reply is longer than {LONGEST_REPLY} bytes")
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > LONGEST_HEAD:
                raise BadReply(f"the head of the reply is longer than {LONGEST_HEAD} bytes")
            return None
        status_line, *lines = bytes(self._buffer[:end]).split(b"\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        if not status_line.startswith(b"HTTP/1.1 ") or b"content-length" not in headers:
            raise BadReply("not HTTP/1.1 with a Content-Length")
        length = int(headers[b"content-length"])
        if not 0 <= length <= LONGEST_REPLY:
            raise BadReply(f"a body of {length} bytes")
        body = self._buffer[end + 4 :]
        if len(body) < length:
            return None
        if headers.get(b"connection", b"").lower() == b"close":
            self.is_reusable = False
        return int(status_line[9:12]), bytes(body[:length])


Where = tuple[str, int, str]
"""Address, port, and the name in the certificate of the other side; no name: plain text."""


class KeptConnections:
    """Connections by `Where`, kept after a reply for the next request to the same replica."""

    def __init__(self, trust: Trust | None = None) -> None:
        """trust: the authorities that verify replicas that speak TLS; None: no such replica can be called."""
        self._trust = trust or Trust()
        self._idle: OrderedDict[Where, _Connection] = OrderedDict()

    def __len__(self) -> int:
        return len(self._idle)

    async def request(
        self,
        method: str,
        host: str,
        port: int,
        path: str,
        headers: Mapping[str, str],
        body: bytes | None,
        *,
        tls_name: str = "",
    ) -> tuple[int, bytes]:
        """Status and body of the reply. Raises OSError; the caller sets the deadline.

        tls_name: the name that its certificate must have; empty: plain text.
        """
        raw = _encode(method, host, port, path, headers, body)
        where = host, port, tls_name
        kept = self._idle.pop(where, None)
        if kept is not None and kept.is_open and kept.is_reusable:
            try:
                return await self._exchange(kept, where, raw)
            except (ConnectionEnded, ConnectionResetError, BrokenPipeError):
                pass  # the server had closed it while it was idle; every request here may be repeated
        loop = asyncio.get_running_loop()
        context = self._trust.context if tls_name else None
        _, fresh = await loop.create_connection(_Connection, host, port, ssl=context, server_hostname=tls_name or None)
        return await self._exchange(fresh, where, raw)

    def close(self) -> None:
        """Close all connections."""
        for connection in self._idle.values():
            connection.close()
        self._idle.clear()

    async def _exchange(self, connection: _Connection, where: Where, raw: bytes) -> tuple[int, bytes]:
        is_done = False
        try:
            reply = await connection.exchange(raw)
            is_done = True
            return reply
        finally:
            if is_done and connection.is_open and connection.is_reusable and where not in self._idle:
                self._idle[where] = connection
                if len(self._idle) > KEPT_AT_MOST:
                    self._idle.popitem(last=False)[1].close()
            else:
                connection.close()  # also when the deadline passed: a late reply must not answer the next request


def _encode(method: str, host: str, port: int, path: str, headers: Mapping[str, str], body: bytes | None) -> bytes:
    """The request as bytes. Header values are our own tokens and media types, never user input."""
    authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    lines = [f"{method} {path} HTTP/1.1", f"Host: {authority}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body is not None or method == "POST":
        lines.append(f"Content-Length: {len(body or b'')}")
    return "\r\n".join([*lines, "", ""]).encode("ascii") + (body or b"")
