"""The HTTP client of replicas: sends a request once, and yields the answer as it arrives. No decisions, no retries.

UpstreamError
├── UnreachableError   no connection was made: the request never arrived
├── LostError          the connection broke after the request was sent
├── SilentError        nothing came for too long: no first byte of a stream, or a pause within it
├── MovedError         the replica left the routing table before its first byte
└── DeadlineError      the request's own deadline passed: not the replica's failure
"""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from slipway_api.names import HEADER_REQUEST_ID
from slipway_gateway.load_reports import LOAD_FORMAT, LOAD_FORMAT_HEADER, LOAD_HEADER
from slipway_gateway.picker.endpoints import Endpoint

# Response headers that are forwarded to the client. All others (Server, Date, Connection …) are dropped.
RESPONSE_HEADERS: Final = frozenset(
    {"content-type", "content-length", "cache-control", "retry-after", "retry-after-ms", "x-accel-buffering"}
)
RESPONSE_PREFIXES: Final = ("x-slipway-", "x-ratelimit-", "openai-")
# Request headers that are forwarded to the replica: no credentials, and none that only the gateway sets.
REQUEST_HEADERS: Final = ("content-type", "accept", "traceparent", "tracestate")


class UpstreamError(Exception):
    """An attempt failed; the message is a short class of failure for logs and clients."""


class UnreachableError(UpstreamError):
    """No connection was made: the request never arrived."""


class LostError(UpstreamError):
    """The connection broke after the request was sent."""


class SilentError(UpstreamError):
    """Nothing came for too long: no first byte of a stream, or a pause within it."""


class MovedError(UpstreamError):
    """The replica left the routing table before its first byte."""


class DeadlineError(UpstreamError):
    """The request's own deadline passed: not the replica's failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamTimeouts:
    """How long a replica may be silent. A stream has no limit on the whole: a long answer is a long answer."""

    connect_seconds: float = 2.0
    # Bytes that the other side's kernel does not acknowledge: its node is gone or cut off. TCP alone tries for minutes.
    unacknowledged_seconds: float = 10.0
    first_byte_seconds: float = 120.0  # of a stream, from the attempt's start; queueing and prefill happen in it
    stream_silence_seconds: float = 60.0  # between two pieces of an answer that has begun
    # For the first byte of an answer that is not streamed, from the request's last byte and over all attempts: such an
    # answer is silent while it is made, so its silence says nothing of the replica.
    request_seconds: float = 600.0


class FirstByteWait:
    """Bounds the time until the first byte of one attempt: `async with wait:` around everything before it."""

    __slots__ = ("_expiry", "_is_waiting", "_timeout", "_was_moved")

    def __init__(self, until: float, expiry: UpstreamError) -> None:
        """At `until`, of the event loop's clock, the wait ends with `expiry`."""
        self._timeout = asyncio.timeout_at(until)
        self._expiry = expiry
        self._is_waiting = False
        self._was_moved = False

    def move(self) -> None:
        """End the wait now with MovedError, so that another replica can answer."""
        if self._is_waiting and not self._timeout.expired():
            self._was_moved = True
            self._timeout.reschedule(asyncio.get_running_loop().time())

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._is_waiting = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_waiting = False
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            raise (MovedError("the replica left the fleet") if self._was_moved else self._expiry) from None


class Reply:
    """A replica's answer from its first byte on."""

    __slots__ = ("_response", "_silence", "first", "first_at", "headers", "load_report", "status", "waited")

    def __init__(self, response: aiohttp.ClientResponse, first: bytes, silence: "Silence") -> None:
        self._response = response
        self._silence = silence
        self.status = response.status
        self.headers = _for_client(response.headers)
        self.load_report = response.headers.get(LOAD_HEADER, "")
        self.first = first  # b"": the answer has no body
        self.first_at = time.monotonic()
        self.waited = 0.0  # seconds for pieces after the first; a client that reads slowly does not add to them

    @property
    def is_stream(self) -> bool:
        """Whether these are server-sent events."""
        return self._response.content_type == "text/event-stream"

    async def read_more(self) -> bytes:
        """What came after `first` and has not been read yet, as soon as there is something; b"" at the end.

        Reading no faster than the caller asks is the back-pressure.
        """
        self._silence.start()
        waiting_since = time.monotonic()
        try:
            piece = await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            if self._silence.expired:
                raise SilentError("timed out: the replica fell silent") from error
            raise LostError("connection lost") from error
        self.waited += time.monotonic() - waiting_since
        self._silence.stop()
        return piece


class Silence:
    """Closes a connection on which no byte arrived for too long while an answer was awaited.

    One timer a connection, which looks again when it fires: moving a timer at every chunk costs a tenth of the whole.
    """

    __slots__ = ("_cut", "_handle", "_loop", "_seconds", "_since", "expired")

    def __init__(self, seconds: float, cut: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._cut = cut
        self._since: float | None = None  # None: nothing is waited for now; the client's pace is not the replica's
        self._handle = self._loop.call_later(seconds, self._check)
        self.expired = False

    def start(self) -> None:
        """Start the timeout: bytes are awaited from now on."""
        self._since = self._loop.time()

    def stop(self) -> None:
        """Stop the timeout: bytes have arrived."""
        self._since = None

    def cancel(self) -> None:
        """Cancel the timer for good, because the connection is no longer used."""
        self._handle.cancel()

    def _check(self) -> None:
        left = self._seconds if self._since is None else self._since + self._seconds - self._loop.time()
        if left > 0:
            self._handle = self._loop.call_later(left, self._check)
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
        self._serving_headers = serving_headers
        self.timeouts = timeouts or UpstreamTimeouts()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Upstream":
        # The pool is unbounded: requests are bounded for each service before they come here, and a queue here would
        # hide the load. Idle connections close before uvicorn's 5 s do, or requests would run into closed ones.
        connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=4.0, use_dns_cache=False, socket_factory=self._socket
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.timeouts.connect_seconds),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,  # proxy variables are for egress from the cluster, not for its pods
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def attempt(
        self, endpoint: Endpoint, path: str, body: bytes, headers: Mapping[str, str], wait: FirstByteWait
    ) -> AsyncIterator[Reply]:
        """POST `body` to the endpoint; yields once the first byte of the answer is here.

        Leaving before the end closes the connection: that is how a cancelled request reaches the runtime.
        """
        response: aiohttp.ClientResponse | None = None
        silence: Silence | None = None
        try:
            async with wait:
                response = await self._post(endpoint, path, body, headers)
                first = await _read(response)
            del body  # it was sent and answered; the answer may take minutes
            silence = Silence(self.timeouts.stream_silence_seconds, response.close)
            yield Reply(response, first, silence)
        finally:
            if silence is not None:
                silence.cancel()
            if response is not None:
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
            return await self._session.post(url, data=body, headers=headers, allow_redirects=False)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise UnreachableError("no connection") from error
        except (aiohttp.ClientError, OSError) as error:
            raise LostError("connection lost") from error

    def _socket(self, address: Any) -> socket.socket:
        """A socket with a short TCP user timeout: a lost node sends no FIN."""
        family, kind, protocol, _, _ = address
        made = socket.socket(family, kind, protocol)
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        seconds = self.timeouts.unacknowledged_seconds
        for option, value in (
            ("TCP_KEEPIDLE", max(1, int(seconds / 2))),
            ("TCP_KEEPINTVL", max(1, int(seconds / 4))),
            ("TCP_KEEPCNT", 2),
            ("TCP_USER_TIMEOUT", int(seconds * 1000)),
        ):
            if hasattr(socket, option):
                made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        return made


async def _read(response: aiohttp.ClientResponse) -> bytes:
    try:
        return await response.content.readany()
    except (aiohttp.ClientError, OSError) as error:
        raise LostError("connection lost") from error


def request_headers(from_client: Mapping[str, str], request_id: str) -> dict[str, str]:
    """The allowed headers of the client, and the id under which all parts log this request."""
    headers = {name: from_client[name] for name in REQUEST_HEADERS if name in from_client}
    headers.setdefault("content-type", "application/json")
    headers[HEADER_REQUEST_ID] = request_id
    headers[LOAD_FORMAT_HEADER] = LOAD_FORMAT
    return headers


def _for_client(headers: Mapping[str, str]) -> CIMultiDict[str]:
    allowed: CIMultiDict[str] = CIMultiDict()
    for name, value in headers.items():
        lower = name.lower()
        if lower in RESPONSE_HEADERS or lower.startswith(RESPONSE_PREFIXES):
            allowed[name] = value
    return allowed
