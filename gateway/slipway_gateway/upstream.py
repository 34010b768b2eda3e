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
import re
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self
from weakref import WeakValueDictionary

from multidict import CIMultiDict

from slipway_api.names import HEADER_REQUEST_ID, HEADER_REVISION, HEADER_TOKEN_IDS, INTERNAL_HEADERS
from slipway_api.trust import NoTrustError, Trust
from slipway_gateway.hangs import LATE_SECONDS, Pace
from slipway_gateway.load_reports import LOAD_FORMAT, LOAD_FORMAT_HEADER, LOAD_HEADER
from slipway_gateway.picker.endpoints import STATIC_REVISION, Endpoint
from slipway_gateway.replica_connection import ReplicaConnection
from slipway_gateway.replica_pool import ConnectionPool, Destination, Origin, origin_of

# Response headers that are forwarded to the client. All others (Server, Date, Connection …) are dropped.
RESPONSE_HEADERS: Final = frozenset(
    {"content-type", "content-length", "cache-control", "retry-after", "retry-after-ms", "x-accel-buffering"}
)
RESPONSE_PREFIXES: Final = ("x-slipway-", "x-ratelimit-", "openai-")
# Request headers that are forwarded to the replica: no credentials, and none that only the gateway sets.
REQUEST_HEADERS: Final = ("content-type", "accept", "traceparent", "tracestate")
DEADLINE: Final = "the request's deadline passed"
MAX_CAUSES: Final = 10  # of an error
# A kept connection that closes so soon after a request, without a byte, was closed before the request arrived.
RACE_SECONDS: Final = 0.25
_FORGED: Final = re.compile(r"[\r\n\0]")
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
LOST: Final = Verdict(LostError, "connection lost")


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

    __slots__ = ("_connection", "_silence", "first", "first_at", "headers", "identity", "is_stream", "load_report",
                 "status", "waited")  # fmt: skip

    def __init__(self, connection: ReplicaConnection, first: bytes, silence: "Silence") -> None:
        self._connection = connection
        self._silence = silence
        headers = connection.headers
        self.status = connection.status
        # Whether these are server-sent events.
        self.is_stream = headers.get("content-type", "").partition(";")[0].strip().lower() == "text/event-stream"
        # Model, revision, tokenizer and adapter of a stream with marks (`stream_marks`); empty: it has no marks.
        self.identity = headers.get(HEADER_TOKEN_IDS, "")
        self.headers = _for_client(headers)
        self.load_report = headers.get(LOAD_HEADER, "")
        self.first = first  # b"": the answer has no body
        self.first_at = time.monotonic()
        self.waited = 0.0  # seconds for pieces after the first; a client that reads slowly does not add to them

    def watch_for_hang(self, can_move: Callable[[], bool]) -> None:
        """From now on a hang of the replica ends the stream early, if another replica could continue it."""
        self._silence.watch_for_hang(can_move)

    async def read_whole(self, limit: int) -> None:
        """Read the rest into `first`, unless the answer says to be larger than that or does not say it."""
        length = self._connection.content_length
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
        piece = await self._connection.next_piece()
        if piece is None:
            raise (self._silence.verdict or LOST).error()
        self._silence.stop()
        self.waited += time.monotonic() - waiting_since
        return piece

    async def deliver(self, take: Callable[[bytes], bool]) -> None:
        """Pass each piece to `take` as soon as it is read, without a task switch, until it returns False.

        Returns when a piece is not taken, or when no more come: `read_more` has the piece, the end or the failure.
        """
        waiting_since = time.monotonic()
        await self._connection.deliver(self._silence.observing(take))
        self._silence.pause()
        self.waited += time.monotonic() - waiting_since


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

    def pause(self) -> None:
        """Stop the timeout, because nobody reads."""
        self._since = None

    def observing(self, take: Callable[[bytes], bool]) -> Callable[[bytes], bool]:
        """Start the timeout; the same function, which starts it anew with each piece."""
        clock, observe, least = self._loop.time, self._pace.observe, self._timeouts.hang_seconds
        since = self._since = clock()

        def observed(piece: bytes) -> bool:
            nonlocal since
            now = clock()
            observe(since, now, least)
            since = self._since = now
            return take(piece)

        return observed

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
        self.pool = ConnectionPool(
            connect_seconds=self.timeouts.connect_seconds,
            unacknowledged_seconds=self.timeouts.unacknowledged_seconds,
        )
        self._public_trust: ssl.SSLContext | None = None
        self._paces: WeakValueDictionary[str, Pace] = WeakValueDictionary()  # by endpoint, while it has answers open

    async def __aenter__(self) -> "Upstream":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.pool.close()

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
        destination = self._destination(endpoint)
        head = request_head(destination.origin, path, {**headers, **self._serving_headers(endpoint)}, len(body))
        connection, silence = self.pool.take(destination), None
        try:
            async with wait:
                first, was_sent = None, False
                if connection is not None:
                    sent, was_sent = time.monotonic(), True
                    first = await connection.send(head, body)
                    if first is None and not connection.has_answered and time.monotonic() - sent < RACE_SECONDS:
                        # It closed an idle connection while the request was on its way: most probably unread.
                        connection.close()
                        connection = None
                if connection is None:
                    connection = await self._connect(destination, was_sent=was_sent)
                    first = await connection.send(head, body)
                if first is None:
                    raise LOST.error()
            del body  # it was sent and answered; the answer may take minutes
            pace = self._paces.setdefault(endpoint.name, Pace())
            silence = Silence(self.timeouts, deadline, pace, connection.close)
            yield Reply(connection, first, silence)
        finally:
            if silence is not None:
                silence.cancel()
            if connection is not None:
                # After the last byte this keeps the connection; before it, it cuts the connection.
                self.pool.give_back(destination, connection)

    def _destination(self, endpoint: Endpoint) -> Destination:
        origin = origin_of(endpoint.url)
        if endpoint.tls_name:
            try:
                return Destination(origin, self._trust.context, endpoint.tls_name)
            except NoTrustError as error:
                message = "the replica's certificate cannot be verified: no authority is known"
                raise UnreachableError(message) from error
        if not origin.speaks_tls:
            return Destination(origin)
        if self._public_trust is None:
            self._public_trust = ssl.create_default_context()
        return Destination(origin, self._public_trust)

    async def _connect(self, destination: Destination, *, was_sent: bool) -> ReplicaConnection:
        """A new connection. `was_sent`: the request has been sent before, so the replica may have got it."""
        try:
            return await self.pool.connect(destination)
        except OSError as error:
            if was_sent:
                raise LOST.error() from _without_frames(error)
            reason = "no connection"
            if isinstance(error, ssl.SSLCertVerificationError):
                reason = f"the replica's certificate is refused: {_why(error)}"
            raise UnreachableError(reason) from _without_frames(error)


def _why(error: Exception) -> str:
    """Why a certificate is refused: `certificate has expired`, `Hostname mismatch, …`."""
    return str(getattr(error, "verify_message", "") or type(error).__name__)


def answers_for_other(endpoint: Endpoint, reply: Reply) -> bool:
    """Whether the answer names another revision than the pod's label; engines that name none are believed."""
    named = reply.headers.get(HEADER_REVISION, "")
    return bool(named) and endpoint.revision not in (named, STATIC_REVISION)


def _without_frames(error: BaseException) -> BaseException:
    """The same error without its tracebacks, and those of its causes.

    What connects keeps errors in local variables of frames that are in these tracebacks: a cycle, which would hold the
    body of the request until the cyclic collector runs.
    """
    cause: BaseException | None = error
    for _ in range(MAX_CAUSES):  # causes may form a ring
        if cause is None:
            break
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
    return error


def request_head(origin: Origin, path: str, headers: Mapping[str, str], length: int) -> bytes:
    """The head of a POST request. Raises ValueError if a line break in a value would forge another header."""
    lines = [f"POST {origin.prefix}{path} HTTP/1.1", f"Host: {origin.name}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    lines.append(f"Content-Length: {length}")
    if _FORGED.search("\t".join(lines)) or " " in path:
        raise ValueError("a header of the request has a line break")
    return "\r\n".join((*lines, "\r\n")).encode("utf-8", "surrogateescape")


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
