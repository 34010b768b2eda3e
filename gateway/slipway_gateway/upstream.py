"""The HTTP client of replicas: sends a request once, and yields the answer as it arrives. No decisions, no retries.

UpstreamError
├── UnreachableError   no connection was made: the request never arrived
├── LostError          the connection broke after the request was sent
├── SilentError        nothing came for too long: no first byte of a stream, or a pause within it
│   └── HungError      within a stream, when all streams of the replica have stopped and another replica could go on
├── MovedError         the replica left the routing table, or was found to hang, before its first byte
├── BudgetError        another service is to answer, because nothing came in time: not the replica's failure
├── RevisionError      the answer is of another revision than the pod's label says
└── DeadlineError      the request's own deadline passed: not the replica's failure
"""

import asyncio
import math
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self
from weakref import WeakValueDictionary

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from slipway_api.names import HEADER_REQUEST_ID, HEADER_REVISION, HEADER_TOKEN_IDS, INTERNAL_HEADERS
from slipway_api.trust import NoTrustError, Trust
from slipway_gateway.hangs import LATE_SECONDS, Pace
from slipway_gateway.load_reports import LOAD_FORMAT, LOAD_FORMAT_HEADER, LOAD_HEADER
from slipway_gateway.picker.endpoints import STATIC_REVISION, Endpoint

# Response headers that are forwarded to the client. All others (Server, Date, Connection …) are dropped.
RESPONSE_HEADERS: Final = frozenset(
    {"content-type", "content-length", "cache-control", "retry-after", "retry-after-ms", "x-accel-buffering"}
)
RESPONSE_PREFIXES: Final = ("x-slipway-", "x-ratelimit-", "openai-")
# Request headers that are forwarded to the replica: no credentials, and none that only the gateway sets.
REQUEST_HEADERS: Final = ("content-type", "accept", "traceparent", "tracestate")
DEADLINE: Final = "the request's deadline passed"
MAX_CAUSES: Final = 10  # of an error
LOOKS: Final = 8  # at a hang, while no other replica can take the stream


class UpstreamError(Exception):
    """An attempt failed; the message is a short class of failure for logs and clients."""


class UnreachableError(UpstreamError):
    """No connection was made: the request never arrived."""


class LostError(UpstreamError):
    """The connection broke after the request was sent."""


class SilentError(UpstreamError):
    """Nothing came for too long: no first byte of a stream, or a pause within it."""


class HungError(SilentError):
    """All streams of the replica have stopped, for much longer than between their tokens."""


class MovedError(UpstreamError):
    """The replica left the routing table, or was found to hang, before its first byte."""


class BudgetError(UpstreamError):
    """Nothing came within the time after which another service is to answer: not the replica's failure."""


class RevisionError(UpstreamError):
    """The answer is of another revision than the pod's label says: it goes to nobody."""


class DeadlineError(UpstreamError):
    """The request's own deadline passed: not the replica's failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamTimeouts:
    """How long a replica may be silent. A stream has no limit on the whole: a long answer is a long answer."""

    connect_seconds: float = 2.0
    # Bytes that the other side's kernel does not acknowledge: its node is gone or cut off. TCP alone tries for minutes.
    unacknowledged_seconds: float = 6.0
    first_byte_seconds: float = 120.0  # of a stream, from the attempt's start; queueing and prefill happen in it
    stream_silence_seconds: float = 60.0  # between two pieces of an answer that has begun
    # A replica that is silent for so long hangs, by the rules of `hangs`. Only for streams that another replica can
    # continue: moving them costs a prefill.
    hang_seconds: float = 5.0
    # For the whole of a request, over all attempts; a service's spec.routing.requestTimeoutSeconds goes before it.
    request_seconds: float = 600.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why an attempt is ended. Not the error itself: it would refer to the frames that it was raised in, and they to
    whatever holds it."""

    kind: type[UpstreamError]
    reason: str

    def error(self) -> UpstreamError:
        """A new error."""
        return self.kind(self.reason)


MOVED: Final = Verdict(MovedError, "the replica hangs or left the fleet")


class FirstByteWait:
    """Bounds the time until the first byte of one attempt: `async with wait:` around everything before it."""

    __slots__ = ("_expiry", "_is_waiting", "_timeout", "_was_moved")

    def __init__(self, until: float, kind: type[UpstreamError], reason: str) -> None:
        """At `until`, of the event loop's clock, the wait ends with such an error."""
        self._timeout = asyncio.timeout_at(until)
        self._expiry = Verdict(kind, reason)
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
            raise (MOVED if self._was_moved else self._expiry).error() from None


class Reply:
    """A replica's answer from its first byte on."""

    __slots__ = ("_response", "_silence", "first", "first_at", "headers", "identity", "load_report", "status", "waited")

    def __init__(self, response: aiohttp.ClientResponse, first: bytes, silence: "Silence") -> None:
        self._response = response
        self._silence = silence
        self.status = response.status
        # Model, revision, tokenizer and adapter of a stream with marks (`stream_marks`); empty: it has no marks.
        self.identity = response.headers.get(HEADER_TOKEN_IDS, "")
        self.headers = _for_client(response.headers)
        self.load_report = response.headers.get(LOAD_HEADER, "")
        self.first = first  # b"": the answer has no body
        self.first_at = time.monotonic()
        self.waited = 0.0  # seconds for pieces after the first; a client that reads slowly does not add to them

    @property
    def is_stream(self) -> bool:
        """Whether these are server-sent events."""
        return self._response.content_type == "text/event-stream"

    def watch_for_hang(self, can_move: Callable[[], bool]) -> None:
        """From now on a hang of the replica ends the stream early, if another replica could continue it."""
        self._silence.watch_for_hang(can_move)

    async def read_whole(self, limit: int) -> None:
        """Read the rest into `first`, unless the answer says to be larger than that or does not say it."""
        length = self._response.content_length
        if length is None or length > limit:
            return
        while piece := await self.read_more():
            self.first += piece

    async def read_more(self) -> bytes:
        """What came after `first` and has not been read yet, as soon as there is something; b"" at the end.

        Reading no faster than the caller asks is the back-pressure.
        """
        self._silence.start()
        waiting_since = time.monotonic()
        try:
            piece = await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            verdict = self._silence.verdict or Verdict(LostError, "connection lost")
            raise verdict.error() from _without_frames(error)
        if self._silence.verdict is not None and not piece:
            raise self._silence.verdict.error()
        self._silence.stop()
        self.waited += time.monotonic() - waiting_since
        return piece


class Silence:
    """Closes a connection on which no byte arrived for too long while an answer was awaited, or at its deadline.

    One timer a connection, which looks again when it fires: moving a timer at every chunk costs a tenth of the whole.
    """

    __slots__ = (
        "_can_move",
        "_cut",
        "_deadline",
        "_due",
        "_handle",
        "_loop",
        "_pace",
        "_since",
        "_timeouts",
        "verdict",
    )

    def __init__(self, timeouts: UpstreamTimeouts, deadline: float, pace: Pace, cut: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeouts = timeouts
        self._deadline = deadline
        self._pace = pace
        self._cut = cut
        self._can_move: Callable[[], bool] | None = None  # None: a hang is not looked for
        self._since: float | None = None  # None: nothing is waited for now; the client's pace is not the replica's
        self._due = 0.0  # when `_check` should run
        self._handle = self._look_in(self._seconds_left(self._loop.time()))
        self.verdict: Verdict | None = None  # why the connection was closed

    def watch_for_hang(self, can_move: Callable[[], bool]) -> None:
        """Look for a hang of the whole replica, too."""
        self._can_move = can_move
        self._pace.last_at = max(self._pace.last_at, self._loop.time())  # the first byte has just come
        self._handle.cancel()
        self._due = self._loop.time()
        self._check()

    def start(self) -> None:
        """Start the timeout: bytes are awaited from now on."""
        self._since = self._loop.time()

    def stop(self) -> None:
        """Stop the timeout: bytes have arrived."""
        if self._since is not None:
            self._pace.observe(self._since, self._loop.time(), self._timeouts.hang_seconds)
            self._since = None

    def cancel(self) -> None:
        """Cancel the timer for good, because the connection is no longer used."""
        self._handle.cancel()

    def _seconds_left(self, now: float) -> float:
        """Until this connection is closed, if nothing comes."""
        since = now if self._since is None else self._since
        return min(since + self._timeouts.stream_silence_seconds, self._deadline) - now

    def _look_in(self, seconds: float) -> asyncio.TimerHandle:
        self._due = self._loop.time() + seconds
        return self._loop.call_later(seconds, self._check)

    def _check(self) -> None:
        now = self._loop.time()
        if now - self._due > LATE_SECONDS and now < self._deadline:
            # This process was late itself: what the replica sent meanwhile is read before it is judged.
            self._handle = self._look_in(LATE_SECONDS / 2)
            return
        left = self._seconds_left(now)
        if left <= 0:
            late = now >= self._deadline
            if late:
                self._close(DeadlineError, DEADLINE)
            else:
                self._close(SilentError, "timed out: the replica fell silent")
            return
        if self._can_move is not None:
            until_hung = self._seconds_until_hung(now)
            if until_hung <= 0 and self._can_move():
                self._close(HungError, "timed out: the replica hangs")
                return
            left = min(left, max(until_hung, self._timeouts.hang_seconds / LOOKS))
        self._handle = self._look_in(left)

    def _seconds_until_hung(self, now: float) -> float:
        limit = self._pace.hang_seconds(self._timeouts.hang_seconds)
        # This stream may only wait for its turn, while others of the replica go on.
        quiet_since = now if self._since is None else max(self._since, self._pace.last_at)
        return quiet_since + limit - now

    def _close(self, kind: type[UpstreamError], reason: str) -> None:
        self.verdict = Verdict(kind, reason)
        self._cut()


class Upstream:
    """The connections to all replicas."""

    def __init__(
        self,
        timeouts: UpstreamTimeouts | None = None,
        *,
        serving_headers: Callable[[Endpoint], Mapping[str, str]] = lambda _: {},
        trust: Trust | None = None,
    ) -> None:
        """`serving_headers` are added to each request: they prove to the endpoint that a gateway sends it.

        trust: the authorities that verify replicas that speak TLS; None: no such replica can be called.
        """
        self._serving_headers = serving_headers
        self._trust = trust or Trust()
        self.timeouts = timeouts or UpstreamTimeouts()
        self._session: aiohttp.ClientSession | None = None
        self._paces: WeakValueDictionary[str, Pace] = WeakValueDictionary()  # by endpoint, while it has answers open

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
        self,
        endpoint: Endpoint,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        wait: FirstByteWait,
        deadline: float = math.inf,
    ) -> AsyncIterator[Reply]:
        """POST `body` to the endpoint; yields once the first byte of the answer is here.

        At `deadline`, of the event loop's clock, an answer that has begun ends with DeadlineError.

        Leaving before the end closes the connection: that is how a cancelled request reaches the runtime.
        """
        response: aiohttp.ClientResponse | None = None
        silence: Silence | None = None
        try:
            async with wait:
                response = await self._post(endpoint, path, body, headers)
                first = await _read(response)
            del body  # it was sent and answered; the answer may take minutes
            pace = self._paces.setdefault(endpoint.name, Pace())
            silence = Silence(self.timeouts, deadline, pace, response.close)
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
            tls = tls_options(endpoint, self._trust)
            return await self._session.post(url, data=body, headers=headers, allow_redirects=False, **tls)
        except NoTrustError as error:
            raise UnreachableError("the replica's certificate cannot be verified: no authority is known") from error
        except aiohttp.ClientConnectorCertificateError as error:
            raise UnreachableError(f"the replica's certificate is refused: {_why(error.certificate_error)}") from error
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise UnreachableError("no connection") from _without_frames(error)
        except (aiohttp.ClientError, OSError) as error:
            raise LostError("connection lost") from _without_frames(error)

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


def tls_options(endpoint: Endpoint, trust: Trust) -> dict[str, Any]:
    """Arguments of a request to a replica that speaks TLS. Raises NoTrustError; plain text is never tried instead."""
    return {"ssl": trust.context, "server_hostname": endpoint.tls_name} if endpoint.tls_name else {}


def _why(error: Exception) -> str:
    """Why a certificate is refused: `certificate has expired`, `Hostname mismatch, …`."""
    return str(getattr(error, "verify_message", "") or type(error).__name__)


def answers_for_other(endpoint: Endpoint, reply: Reply) -> bool:
    """Whether the answer names another revision than the pod's label; engines that name none are believed."""
    named = reply.headers.get(HEADER_REVISION, "")
    return bool(named) and endpoint.revision not in (named, STATIC_REVISION)


async def _read(response: aiohttp.ClientResponse) -> bytes:
    try:
        return await response.content.readany()
    except (aiohttp.ClientError, OSError) as error:
        raise LostError("connection lost") from _without_frames(error)


def _without_frames(error: BaseException) -> BaseException:
    """The same error without its tracebacks, and those of its causes.

    aiohttp keeps errors in local variables of frames that are in these tracebacks: a cycle, which would hold the body
    of the request until the cyclic collector runs.
    """
    cause: BaseException | None = error
    for _ in range(MAX_CAUSES):  # causes may form a ring
        if cause is None:
            break
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
    return error


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
        if lower in RESPONSE_HEADERS or (lower.startswith(RESPONSE_PREFIXES) and lower not in INTERNAL_HEADERS):
            allowed[name] = value
    return allowed
