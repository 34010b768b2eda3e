"""One attempt at one replica: bytes go there and come back as they come. No decisions, no retries.

UpstreamError
├── UnreachableError   no connection was made: the request never arrived
└── LostError          the connection broke, or fell silent, after the request was sent
"""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from slipway_api.names import HEADER_REQUEST_ID
from slipway_gateway.picker.endpoints import Endpoint

# What a replica may say to a client. Everything else (Server, Date, Connection …) is between us and the replica.
RESPONSE_HEADERS: Final = frozenset(
    {"content-type", "content-length", "cache-control", "retry-after", "retry-after-ms", "x-accel-buffering"}
)
RESPONSE_PREFIXES: Final = ("x-slipway-", "x-ratelimit-", "openai-")
# What a client may say to a replica: nothing that proves who it is, and nothing that only we may say.
REQUEST_HEADERS: Final = ("content-type", "accept", "traceparent", "tracestate")


class UpstreamError(Exception):
    """An attempt failed; the message is a short class of failure for logs and clients."""


class UnreachableError(UpstreamError):
    """No connection was made: the request never arrived."""


class LostError(UpstreamError):
    """The connection broke, or fell silent, after the request was sent."""


@dataclass(frozen=True, slots=True)
class UpstreamTimeouts:
    """There is no limit on the whole: a long answer is a long answer."""

    connect_seconds: float = 2.0
    silence_seconds: float = 600.0  # without one byte; an answer that is not streamed is silent while it is made


class Reply:
    """A replica's answer from its first byte on."""

    __slots__ = ("_response", "_silence", "first", "first_at", "headers", "status")

    def __init__(self, response: aiohttp.ClientResponse, first: bytes, silence: "Silence") -> None:
        self._response = response
        self._silence = silence
        self.status = response.status
        self.headers = _for_client(response.headers)
        self.first = first  # b"": the answer has no body
        self.first_at = time.monotonic()

    @property
    def is_stream(self) -> bool:
        """Whether these are server-sent events."""
        return self._response.content_type == "text/event-stream"

    async def more(self) -> bytes:
        """What came after `first` and has not been read yet, as soon as there is something; b"" at the end.

        Reading no faster than the caller asks is the back-pressure.
        """
        try:
            piece = await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise LostError("timed out" if self._silence.expired else "connection lost") from error
        self._silence.heard()
        return piece


class Silence:
    """Cuts a connection on which nothing was heard for too long.

    One timer a connection, which looks again when it fires: moving a timer at every chunk costs a tenth of the whole.
    """

    __slots__ = ("_cut", "_handle", "_heard_at", "_loop", "_seconds", "expired")

    def __init__(self, seconds: float, cut: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._cut = cut
        self._heard_at = self._loop.time()
        self._handle = self._loop.call_later(seconds, self._look)
        self.expired = False

    def heard(self) -> None:
        """Something came."""
        self._heard_at = self._loop.time()

    def stop(self) -> None:
        """Nobody waits any more."""
        self._handle.cancel()

    def _look(self) -> None:
        left = self._heard_at + self._seconds - self._loop.time()
        if left > 0:
            self._handle = self._loop.call_later(left, self._look)
        else:
            self.expired = True
            self._cut()


class Upstream:
    """The connections to all replicas."""

    def __init__(
        self,
        timeouts: UpstreamTimeouts | None = None,
        *,
        serving_headers: Callable[[Endpoint], Mapping[str, str]] = lambda _: {},
    ) -> None:
        """`serving_headers` are added to each request: they prove to the endpoint that a gateway sends it."""
        timeouts = timeouts or UpstreamTimeouts()
        self._serving_headers = serving_headers
        self._silence_seconds = timeouts.silence_seconds
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect_seconds)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Upstream":
        # The pool is unbounded: the runtime's admission bounds what is open, and a queue here would hide it.
        # Idle connections close before uvicorn's 5 s do, or requests would run into closed ones.
        connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=4.0, use_dns_cache=False, socket_factory=_keepalive_socket
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=self._timeout,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,  # a proxy variable is for the way out of the cluster, not for its pods
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def attempt(
        self, endpoint: Endpoint, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[Reply]:
        """POST `body` to the endpoint; yields once the first byte of the answer is here.

        Leaving before the end closes the connection: that is how a cancelled request reaches the runtime.
        """
        response = await self._post(endpoint, path, body, headers)
        silence = Silence(self._silence_seconds, response.close)
        try:
            try:
                first = await response.content.readany()
            except (aiohttp.ClientError, OSError) as error:
                raise LostError("timed out" if silence.expired else "connection lost") from error
            yield Reply(response, first, silence)
        finally:
            silence.stop()
            # After the last byte this gives the connection back; before it, it cuts the connection.
            response.release() if response.content.at_eof() else response.close()

    async def _post(
        self, endpoint: Endpoint, path: str, body: bytes, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        """Send the request; returns with the answer's headers."""
        assert self._session is not None, "used outside `async with`"
        url = URL(endpoint.url + path, encoded=True)
        headers = {**headers, **self._serving_headers(endpoint)}
        try:
            async with asyncio.timeout(self._silence_seconds):
                return await self._session.post(url, data=body, headers=headers, allow_redirects=False)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise UnreachableError("no connection") from error
        except TimeoutError as error:
            raise LostError("timed out") from error
        except (aiohttp.ClientError, OSError) as error:
            raise LostError("connection lost") from error


def request_headers(from_client: Mapping[str, str], request_id: str) -> dict[str, str]:
    """The allowed part of what the client said, and the id under which all parts log this request."""
    headers = {name: from_client[name] for name in REQUEST_HEADERS if name in from_client}
    headers.setdefault("content-type", "application/json")
    headers[HEADER_REQUEST_ID] = request_id
    return headers


def _for_client(headers: Mapping[str, str]) -> CIMultiDict[str]:
    allowed: CIMultiDict[str] = CIMultiDict()
    for name, value in headers.items():
        lower = name.lower()
        if lower in RESPONSE_HEADERS or lower.startswith(RESPONSE_PREFIXES):
            allowed[name] = value
    return allowed


def _keepalive_socket(address: Any) -> socket.socket:
    """A socket that notices within 20 s that the other machine is gone: a lost node sends no FIN."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 20_000)):
        if hasattr(socket, option):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return made
