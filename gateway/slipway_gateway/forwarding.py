"""Forwards an answer to the client: every chunk at once, with back-pressure, and an error event when it breaks.

Once the first byte is out nothing can be taken back: a stream that breaks goes on from another replica (`handover`) or
ends with an error event, any other answer with an aborted connection. Never is a second answer written into one that
has begun.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, TypeVar

import structlog
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from slipway_api.anthropic_errors import REQUEST_ID_HEADER, is_anthropic
from slipway_api.names import (
    HEADER_ADAPTER,
    HEADER_DEGRADED,
    HEADER_FALLBACK_FROM,
    HEADER_MODEL,
    HEADER_REQUEST_ID,
    HEADER_REVISION,
)
from slipway_gateway.apis import error_event
from slipway_gateway.fleet import Lease
from slipway_gateway.journal import Journal
from slipway_gateway.metrics import Metrics
from slipway_gateway.request_body import OUTPUT_WEIGHT
from slipway_gateway.request_state import SHUTTING_DOWN, RequestState
from slipway_gateway.sse import Events, EventSplitter, reports_failure
from slipway_gateway.upstream import DEADLINE, DeadlineError, HungError, Reply, UpstreamError

MAX_UNREAD: Final = 16 * 1024  # bytes that the client has not read: the next piece waits for it in a task
IDENTIFYING_EVENTS: Final = 8  # the first ones of a stream, in which its id is looked for
REPORTED: Final = "the replica reported an internal error in the stream"
R = TypeVar("R", bound=web.StreamResponse)

log = structlog.get_logger()


class ForwardedResponse(web.StreamResponse):
    """An answer whose headers leave in one packet with its first piece, which is here already: one system call less.

    Its later pieces may be written without a task: the framing of chunks is all that the library would add.
    """

    _send_headers_immediately = False

    _opened: asyncio.Transport | None = None  # None: the answer has a length, so the library must count the bytes
    _client: asyncio.Transport | None = None  # the same, once the headers are out

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """As the library does; the headers leave with the first `write`."""
        writer = await super().prepare(request)
        self._opened = request.transport if "Transfer-Encoding" in self.headers else None
        return writer

    async def write(self, data: "bytes | bytearray | memoryview[int]") -> None:
        """As the library does, with its back-pressure."""
        await super().write(data)
        self._client = self._opened

    def can_write_now(self) -> bool:
        """Whether `write_now` may be called: the headers are out, and the client has read most of what was sent."""
        return self._client is not None and self._client.get_write_buffer_size() <= MAX_UNREAD

    def write_now(self, chunk: bytes) -> None:
        """Write a chunk to the client's connection. Raises ConnectionResetError if the client has left."""
        assert self._client is not None
        if self._client.is_closing():
            raise ConnectionResetError("the client left")
        self._client.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))


class Forwarder:
    """Forwards answers. `leaving`: clients shall connect anew; `cutting`: a cancelled stream gets an error event."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.leaving = False
        self.cutting = False

    async def forward(
        self,
        request: web.Request,
        reply: Reply,
        lease: Lease,
        record: RequestState,
        served_name: str,
        journal: Journal | None = None,
    ) -> ForwardedResponse:
        """Forward the answer piece by piece; `record.upstream_failed` says whether the replica broke it off.

        With a journal, a stream that broke off stays open if another replica can continue it: `journal.broken` says why
        it broke, and `handover` continues or ends it.
        """
        record.status, record.first_byte = reply.status, reply.first_at
        response = ForwardedResponse(status=reply.status, headers=reply.headers)
        response.headers.setdefault(HEADER_MODEL, record.model if record.adapter else served_name)
        response.headers.setdefault(HEADER_REVISION, record.revision)
        if record.adapter:
            response.headers.setdefault(HEADER_ADAPTER, record.adapter)
        if reply.is_stream:
            response.headers["X-Accel-Buffering"] = "no"  # nginx would hold events back; not every engine says so
            response.headers.setdefault("Cache-Control", "no-cache")
        self.sign(response, record)
        async with self.answering(request, record):
            await response.prepare(request)
            if not reply.is_stream:
                await self._forward_bytes(response, reply, record)
                return response
            broken = await self.forward_events(response, reply, lease, record, journal)
            if not broken or journal is None or not journal.broken:
                await self.end_stream(response, record, broken)
        return response

    @asynccontextmanager
    async def answering(self, request: web.Request, record: RequestState) -> AsyncIterator[None]:
        """Record whatever goes wrong inside, while an answer is being written, and abort the client's connection."""
        open_streams = self._metrics.open_streams.labels(*record.labels)
        open_streams.inc()
        try:
            yield
        except ConnectionResetError:  # the client left between two writes
            record.set_cancelled()
        except UpstreamError as failure:
            record.upstream_failed = not isinstance(failure, DeadlineError)
            _abort(request, record, str(failure))
        except asyncio.CancelledError:
            if not self.cutting:
                raise
            uncancel()
            _abort(request, record, SHUTTING_DOWN)
        except Exception:
            log.exception("forwarding failed", request_id=record.request_id)
            _abort(request, record, "internal error")
        finally:
            open_streams.dec()

    async def forward_events(
        self,
        response: ForwardedResponse,
        reply: Reply,
        lease: Lease,
        record: RequestState,
        journal: Journal | None = None,
    ) -> str:
        """Forward a stream event by event as far as it goes; empty, or why it broke off."""
        events: Events = EventSplitter()
        if journal is not None and reply.identity:
            events = journal.events()
        broken = ""

        feed, add_forwarded, progress = events.feed, record.add_forwarded, lease.progress

        def cut(piece: bytes, before: int) -> bytes:
            chunk = feed(piece)
            if journal is not None and not journal.id and before < IDENTIFYING_EVENTS:
                journal.read_identity(chunk)
            return chunk

        def forward_now(piece: bytes) -> bool:
            if not response.can_write_now():
                return False
            before = events.events
            if chunk := cut(piece, before):
                response.write_now(chunk)
                add_forwarded(chunk)
                progress((events.events - before) * OUTPUT_WEIGHT)
            return True

        try:
            try:
                piece = reply.first
                while piece:
                    before = events.events
                    if chunk := cut(piece, before):
                        await response.write(chunk)
                        add_forwarded(chunk)
                        progress((events.events - before) * OUTPUT_WEIGHT)
                    await reply.deliver(forward_now)
                    piece = await reply.read_more()
            except DeadlineError as failure:
                return str(failure)
            except UpstreamError as failure:
                broken = str(failure)
                if journal is not None:
                    journal.hung = isinstance(failure, HungError)
            if chunk := events.finish():
                await response.write(chunk)
                record.add_forwarded(chunk)
        except asyncio.CancelledError:
            if not self.cutting:
                raise
            uncancel()
            return SHUTTING_DOWN
        finally:
            record.events += events.events
        if events.is_complete:
            if reports_failure(b"".join(record.tail)):
                record.set_broken(REPORTED)
            return ""
        broken = events.handover or events.failure or broken or "the stream ended without saying why"
        record.upstream_failed = not events.handover
        if journal is not None and journal.can_resume and reply.identity:
            journal.broken = broken
        return broken

    async def end_stream(self, response: web.StreamResponse, record: RequestState, broken: str) -> None:
        """End a stream: with an error event of ours when it broke off."""
        if broken:
            self._metrics.broken_streams.labels(*record.labels).inc()
            record.set_broken(broken)
            status, kind = (504, "GatewayTimeoutError") if broken == DEADLINE else (502, "BadGatewayError")
            await response.write(error_event(record.path, f"The answer broke off: {broken}.", kind, status))
        await response.write_eof()

    async def _forward_bytes(self, response: web.StreamResponse, reply: Reply, record: RequestState) -> None:
        """Any other answer."""
        if reply.first:
            await response.write(reply.first)
        record.add_forwarded(reply.first)
        while piece := await reply.read_more():
            await response.write(piece)
            record.add_forwarded(piece)
        await response.write_eof()

    def sign(self, response: R, record: RequestState) -> R:
        """The same response under the request's id; closing its connection when this gateway is about to go."""
        response.headers.update(record.limit_headers)
        response.headers[HEADER_REQUEST_ID] = record.request_id
        if is_anthropic(record.path):
            response.headers[REQUEST_ID_HEADER] = record.request_id
        if record.fallback_from:
            response.headers[HEADER_FALLBACK_FROM] = record.fallback_from
        if record.degraded:
            response.headers[HEADER_DEGRADED] = record.degraded
        if self.leaving:
            response.force_close()
        return response


def uncancel() -> None:
    """Withdraw the cancellation of the current task, so that it can end its answer properly."""
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()


def _abort(request: web.Request, record: RequestState, reason: str) -> None:
    """Abort the client's connection: half an answer must not look complete."""
    record.set_broken(reason)
    if request.transport is not None:
        request.transport.abort()
