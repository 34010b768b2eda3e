"""Forwards an answer to the client: every chunk at once, with back-pressure, and an error event when it breaks.

Once the first byte is out nothing can be taken back: a stream that breaks ends with an error event, any other answer
with an aborted connection. Never is a second answer written into one that has begun.
"""

import asyncio
from typing import TypeVar

import structlog
from aiohttp import web

from slipway_api.names import HEADER_ADAPTER, HEADER_MODEL, HEADER_REQUEST_ID, HEADER_REVISION
from slipway_gateway.access_log import SHUTTING_DOWN, RequestRecord
from slipway_gateway.fleet import Lease
from slipway_gateway.metrics import Metrics
from slipway_gateway.request_body import OUTPUT_WEIGHT
from slipway_gateway.sse import EventSplitter, error_event
from slipway_gateway.upstream import Reply, UpstreamError

R = TypeVar("R", bound=web.StreamResponse)

log = structlog.get_logger()


class Forwarder:
    """Forwards answers. `leaving`: clients shall connect anew; `cutting`: a cancelled stream gets an error event."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.leaving = False
        self.cutting = False

    async def forward(
        self, request: web.Request, reply: Reply, lease: Lease, record: RequestRecord, served_name: str
    ) -> web.StreamResponse:
        """Forward the answer piece by piece; `record.upstream_failed` says whether the replica broke it off."""
        record.status, record.first_byte = reply.status, reply.first_at
        response = web.StreamResponse(status=reply.status, headers=reply.headers)
        response.headers.setdefault(HEADER_MODEL, record.model if record.adapter else served_name)
        response.headers.setdefault(HEADER_REVISION, record.revision)
        if record.adapter:
            response.headers.setdefault(HEADER_ADAPTER, record.adapter)
        self.sign(response, record)
        open_streams = self._metrics.open_streams.labels(*record.labels)
        open_streams.inc()
        try:
            await response.prepare(request)
            if reply.is_stream:
                await self._forward_events(response, reply, lease, record)
            else:
                await self._forward_bytes(response, reply, record)
        except ConnectionResetError:  # the client left between two writes
            record.set_cancelled()
        except UpstreamError as failure:
            record.upstream_failed = True
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
        return response

    async def _forward_events(
        self, response: web.StreamResponse, reply: Reply, lease: Lease, record: RequestRecord
    ) -> None:
        """A stream: whole events at once, and an error event of ours when it breaks."""
        splitter = EventSplitter()
        broken = ""
        try:
            chunk = splitter.feed(reply.first)
            await response.write(chunk)
            record.add_forwarded(chunk)
            while piece := await reply.read_more():
                before = splitter.events
                if chunk := splitter.feed(piece):
                    await response.write(chunk)
                    record.add_forwarded(chunk)
                    lease.progress((splitter.events - before) * OUTPUT_WEIGHT)
            if not splitter.is_complete:
                record.upstream_failed = True
                broken = "the stream ended without saying why"
        except UpstreamError as failure:
            record.upstream_failed = True
            broken = str(failure)
        except asyncio.CancelledError:
            if not self.cutting:
                raise
            uncancel()
            broken = SHUTTING_DOWN
        finally:
            record.events = splitter.events
        if broken:
            self._metrics.broken_streams.labels(*record.labels).inc()
            record.set_broken(broken)
            await response.write(error_event(f"The answer broke off: {broken}.", "BadGatewayError", 502))
        await response.write_eof()

    async def _forward_bytes(self, response: web.StreamResponse, reply: Reply, record: RequestRecord) -> None:
        """Any other answer."""
        if reply.first:
            await response.write(reply.first)
        record.add_forwarded(reply.first)
        while piece := await reply.read_more():
            await response.write(piece)
            record.add_forwarded(piece)
        await response.write_eof()

    def sign(self, response: R, record: RequestRecord) -> R:
        """The same response under the request's id; closing its connection when this gateway is about to go."""
        response.headers[HEADER_REQUEST_ID] = record.request_id
        if self.leaving:
            response.force_close()
        return response


def uncancel() -> None:
    """Withdraw the cancellation of the current task, so that it can end its answer properly."""
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()


def _abort(request: web.Request, record: RequestRecord, reason: str) -> None:
    """Abort the client's connection: half an answer must not look complete."""
    record.set_broken(reason)
    if request.transport is not None:
        request.transport.abort()
