"""An answer on its way to the client: every piece at once, at the client's pace, and never a silent end."""

import asyncio
from typing import TypeVar

from aiohttp import web

from slipway_api.names import HEADER_MODEL, HEADER_REQUEST_ID, HEADER_REVISION
from slipway_gateway.ask import OUTPUT_WEIGHT
from slipway_gateway.fleet import Lease
from slipway_gateway.journal import Record
from slipway_gateway.metrics import Metrics
from slipway_gateway.sse import EventSplitter, error_event
from slipway_gateway.upstream import LostError, Reply

R = TypeVar("R", bound=web.StreamResponse)


class Relay:
    """Hands answers on. `leaving`: ask clients to connect anew; `cutting`: a cancelled stream gets last words."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.leaving = False
        self.cutting = False

    async def pass_on(
        self, request: web.Request, reply: Reply, lease: Lease, record: Record, served_name: str
    ) -> web.StreamResponse:
        """Hand the answer on, piece by piece; the client's pace is the pace."""
        record.status, record.first_byte = reply.status, reply.first_at
        response = web.StreamResponse(status=reply.status, headers=reply.headers)
        response.headers.setdefault(HEADER_MODEL, served_name)
        response.headers.setdefault(HEADER_REVISION, record.revision)
        self.sign(response, record)
        open_streams = self._metrics.open_streams.labels(record.model)
        open_streams.inc()
        try:
            await response.prepare(request)
            if reply.is_stream:
                await self._pass_on_events(response, reply, lease, record)
            else:
                await self._pass_on_bytes(request, response, reply, record)
        except ConnectionResetError:  # our side of the client's connection: it left between two writes
            record.cancelled()
        finally:
            open_streams.dec()
        return response

    async def _pass_on_events(self, response: web.StreamResponse, reply: Reply, lease: Lease, record: Record) -> None:
        """A stream: whole events at once, and an error event of ours when it breaks."""
        splitter = EventSplitter()
        broken = ""
        try:
            chunk = splitter.feed(reply.first)
            await response.write(chunk)
            record.forward(chunk)
            while piece := await reply.more():
                before = splitter.events
                if chunk := splitter.feed(piece):
                    await response.write(chunk)
                    record.forward(chunk)
                    lease.progress((splitter.events - before) * OUTPUT_WEIGHT)
            if not splitter.is_complete:
                broken = "the stream ended without saying why"
        except LostError as lost:
            broken = str(lost)
        except asyncio.CancelledError:
            if not self.cutting:
                raise
            uncancel()
            broken = "the gateway is shutting down"
        finally:
            record.events = splitter.events
        if broken:
            self._metrics.broken_streams.labels(record.model).inc()
            record.broke(broken)
            await response.write(error_event(f"The answer broke off: {broken}.", "BadGatewayError", 502))
        await response.write_eof()

    async def _pass_on_bytes(
        self, request: web.Request, response: web.StreamResponse, reply: Reply, record: Record
    ) -> None:
        """Anything else: when it breaks, so does the client's connection, since half a body must not look whole."""
        try:
            if reply.first:
                await response.write(reply.first)
            record.forward(reply.first)
            while piece := await reply.more():
                await response.write(piece)
                record.forward(piece)
        except LostError as lost:
            record.broke(str(lost))
            if request.transport is not None:
                request.transport.abort()
            return
        await response.write_eof()

    def sign(self, response: R, record: Record) -> R:
        """The same response under the request's id; closing its connection when this gateway is about to go."""
        response.headers[HEADER_REQUEST_ID] = record.request_id
        if self.leaving:
            response.force_close()
        return response


def uncancel() -> None:
    """The current task was cancelled to end it politely: let it go on for its last words."""
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()
