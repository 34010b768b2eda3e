"""Continues a stream on another replica when its own was lost, hangs or goes away; the client sees one stream.

1. The gateway asks each replica for marks in its streams (`slipway_api.stream_marks`), takes them out, and keeps the
   request and the tokens so far (`journal`). Replicas of vLLM report their tokens in another form (`engine_streams`).
2. A stream that breaks off goes to another replica of the same revision, as the same request with the tokens so far.
   That replica brings its detokenizer, stop strings, tool parser and grammar to where the other ones stood, and sends
   only what is new. Sampling is keyed by seed and position, and the gateway has fixed the seed.
3. If no other replica takes it within some seconds, or none can be ready by then, it ends with an error event.

A handover spends nothing of the retry budget: the request was accepted, and the streams of one dead replica must not
compete for twenty retries. A request that kills its replicas is stopped by `MAX_CRASHES`.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

import structlog
from aiohttp import web

from slipway_api.names import HEADER_DEADLINE, HEADER_TOKEN_IDS
from slipway_api.stream_marks import REPORT, RESUME
from slipway_api.words import count
from slipway_gateway.apis import GENERATING_PATHS
from slipway_gateway.engine_streams import VLLM, EngineJournal, can_continue
from slipway_gateway.fleet import Fleet
from slipway_gateway.forwarding import ForwardedResponse, Forwarder, uncancel
from slipway_gateway.health import AttemptFailure
from slipway_gateway.journal import Journal, JournalMemory, prepare
from slipway_gateway.metrics import Metrics
from slipway_gateway.picker.endpoints import Endpoint, Route
from slipway_gateway.picker.pick import Picked
from slipway_gateway.picker.scorers import RoutingRequest
from slipway_gateway.request_body import Body, InferenceRequest
from slipway_gateway.request_state import SHUTTING_DOWN, AttemptKind, RequestState
from slipway_gateway.upstream import (
    FirstByteWait,
    Reply,
    SilentError,
    UnreachableError,
    Upstream,
    UpstreamError,
    request_headers,
)

log = structlog.get_logger()

MAX_CRASHES: Final = 3  # of replicas under one stream: the request itself may be the cause
LOOK_SECONDS: Final = 0.1  # between two looks for a replica that can take the stream
RETRY_SECONDS: Final = 0.5  # until a replica that failed may be asked again, if there is no other
DEADLINE_GRACE_SECONDS: Final = 1.0  # the replica ends a late answer itself, and says so properly


class Leg(Enum):
    """How an attempt to continue a stream ended."""

    COMPLETE = "complete"
    BROKEN = "broken"  # the replica continued it, and then the stream broke off again
    NOT_TAKEN = "not_taken"  # another replica may take it
    REFUSED = "refused"  # no replica will take it


@dataclass(slots=True)
class Interrupted:
    """A stream that broke off, with everything that is needed to continue it."""

    request: web.Request
    response: ForwardedResponse
    journal: Journal
    routing: RoutingRequest
    record: RequestState
    deadline: float  # of the whole request, of the event loop's clock
    adapter: str  # key of the adapter that answers; empty: the service itself
    failed: dict[str, float] = field(default_factory=dict)  # by endpoint: when it may be asked again


class Handover:
    """Keeps the journals of streams, and continues those that break off."""

    def __init__(
        self,
        fleet: Fleet,
        upstream: Upstream,
        forwarder: Forwarder,
        metrics: Metrics,
        *,
        memory: JournalMemory,
        wait_seconds: float,
    ) -> None:
        """`wait_seconds`: how long a stream may wait for a replica that takes it."""
        self._fleet = fleet
        self._upstream = upstream
        self._forwarder = forwarder
        self._metrics = metrics
        self._memory = memory
        self._wait_seconds = wait_seconds

    def seed(self, path: str, inference: InferenceRequest, body: Body, service: str) -> int:
        """Give the body a seed if its stream may be handed over; the number of its answers, 0 if it may not."""
        if not (inference.stream and path in GENERATING_PATHS and self._is_on(service)):
            return 0
        body.content, answers = prepare(body.content)
        return answers

    def journal(
        self, endpoint: Endpoint, path: str, content: bytes, answers: int, headers: dict[str, str], *, has_seed: bool
    ) -> Journal | None:
        """The journal of one attempt at `endpoint`, which may ask for marks in its `headers`.

        None if no `answers` are to be kept, or if the engine of the endpoint could not continue them.
        """
        if not answers:
            return None
        service, disabled = endpoint.service, self._metrics.handover_disabled

        def give_up(reason: str) -> None:
            disabled.labels(service, reason).inc()

        if endpoint.engine == VLLM:
            if not can_continue(path, content, has_seed=has_seed):
                return None
            return EngineJournal(path, content, service, self._memory, give_up)
        headers[HEADER_TOKEN_IDS] = REPORT
        return Journal(content, answers, service, self._memory, give_up)

    def _is_on(self, service: str) -> bool:
        known = self._fleet.table.services.get(service)
        return bool(self._wait_seconds) and known is not None and known.handover

    def begin(self, journal: Journal, reply: Reply, endpoint: Endpoint) -> None:
        """The stream has begun: from now on its tokens are kept, and a hang of its replica ends it early."""
        journal.identify(reply, endpoint)
        journal.identity = reply.identity
        if reply.is_stream and reply.identity and journal.open():
            reply.watch_for_hang(self._can_move(endpoint))

    def record_break(self, endpoint: Endpoint, journal: Journal | None) -> None:
        """Record that the replica broke its stream off."""
        if journal is not None and journal.hung:
            self._fleet.record_hung(endpoint)
        else:
            self._fleet.record_failure(endpoint)

    async def finish(self, stream: Interrupted, endpoint: Endpoint) -> None:
        """Continue the stream that broke off at `endpoint`, and end it."""
        record = stream.record
        async with self._forwarder.answering(stream.request, record):
            try:
                broken = await self._continue(stream, endpoint)
            except asyncio.CancelledError:
                if not self._forwarder.cutting:
                    raise
                uncancel()
                broken = SHUTTING_DOWN
            await self._forwarder.end_stream(stream.response, record, broken)

    async def _continue(self, stream: Interrupted, endpoint: Endpoint) -> str:
        """Empty once the stream is complete, or why it broke off for good."""
        journal, record, loop = stream.journal, stream.record, asyncio.get_running_loop()
        crashes = 0
        while journal.broken:
            reason = "hung" if journal.hung else "lost" if record.upstream_failed else "drained"
            self._exclude(stream, endpoint, RETRY_SECONDS if reason == "lost" else self._wait_seconds)
            crashes += record.upstream_failed
            if record.upstream_failed:
                record.failed.append((endpoint.revision, AttemptFailure.LOST))
            record.upstream_failed = False
            if crashes > MAX_CRASHES:
                lost = count(crashes, "replica was", "replicas were")
                return self._failed(record, "crashes", f"{journal.broken}, and {lost} lost with it")
            until = min(loop.time() + self._wait_seconds, stream.deadline)
            leg, broken = Leg.NOT_TAKEN, journal.broken
            while leg is Leg.NOT_TAKEN:
                picked = self._pick(stream)
                if picked is None:
                    if loop.time() >= until or not self._may_be_taken(record.service, endpoint):
                        return self._failed(record, "no_replica", f"{broken}, and no other replica could continue it")
                    await asyncio.sleep(LOOK_SECONDS)
                    continue
                endpoint = picked.endpoint
                leg, broken = await self._try(stream, picked, reason, broken)
            if leg is Leg.REFUSED:
                return self._failed(record, "refused", f"{broken}, and another replica refused to continue it")
            if leg is Leg.COMPLETE:
                return ""
            if not journal.broken:
                return broken
        return ""

    async def _try(self, stream: Interrupted, picked: Picked, reason: str, broken: str) -> tuple[Leg, str]:
        """Ask one replica to continue; the second part is why the stream is broken."""
        request, journal, record, endpoint = stream.request, stream.journal, stream.record, picked.endpoint
        now = asyncio.get_running_loop().time()
        wait = FirstByteWait(
            min(now + self._upstream.timeouts.first_byte_seconds, stream.deadline),
            SilentError,
            "timed out: no first byte",
        )
        headers = request_headers(request.headers, record.request_id) | record.internal_headers
        headers |= record.trace.start_attempt(endpoint.name, endpoint.revision, broken)
        if endpoint.engine != VLLM:
            headers[HEADER_TOKEN_IDS] = RESUME if journal.has_begun else REPORT
        headers[HEADER_DEADLINE] = f"{max(stream.deadline - now, 0.001):.3f}"
        until = stream.deadline + DEADLINE_GRACE_SECONDS
        try:
            tokens = stream.routing.prompt_tokens + journal.tokens
            leased = self._fleet.lease(
                endpoint, stream.routing.cost, wait.move, is_stream=True, may_move=True, prompt_tokens=tokens
            )
            with leased as lease:
                path = journal.path(request.path_qs)
                attempt = self._upstream.attempt(endpoint, path, journal.body(), headers, wait, until)
                async with attempt as reply:
                    journal.identify(reply, endpoint)
                    lease.answered(has_begun=reply.status == 200 and reply.is_stream)
                    leg = self._judge(stream, endpoint, reply)
                    if leg is not None:
                        return leg, broken
                    record.note_failure(record.endpoint, broken)
                    record.note_attempt(picked, AttemptKind.HANDOVER, reason)
                    self._began(stream, endpoint, reason)
                    journal.broken = ""
                    reply.watch_for_hang(self._can_move(endpoint))
                    broken = await self._forwarder.forward_events(stream.response, reply, lease, record, journal)
        except UpstreamError as error:
            if isinstance(error, UnreachableError):
                self._fleet.record_unreachable(endpoint)
            else:
                self._fleet.record_failure(endpoint)
            self._exclude(stream, endpoint, RETRY_SECONDS)
            return Leg.NOT_TAKEN, broken
        if record.upstream_failed:
            self.record_break(endpoint, journal)
        return (Leg.BROKEN if broken else Leg.COMPLETE), broken

    def _judge(self, stream: Interrupted, endpoint: Endpoint, reply: Reply) -> Leg | None:
        """None: this is the rest of the stream."""
        if reply.status in (429, 503):  # full, or not ready yet: it may be soon
            self._exclude(stream, endpoint, RETRY_SECONDS)
            return Leg.NOT_TAKEN
        if 400 <= reply.status < 500 and reply.status != 404:  # 404: it has not loaded the adapter
            return Leg.REFUSED
        if reply.status != 200 or not reply.is_stream or reply.identity != stream.journal.identity:
            self._exclude(stream, endpoint, self._wait_seconds)
            return Leg.NOT_TAKEN
        return None

    def _pick(self, stream: Interrupted) -> Picked | None:
        """A replica of the same revision: one that has not failed under this stream, else one that may be back."""
        if not self._is_on(stream.record.service):
            return None
        route = self._route(stream)
        if route is None:
            return None
        request = replace(stream.routing, pin=stream.record.revision)
        now = asyncio.get_running_loop().time()
        still_excluded = {name for name, until in stream.failed.items() if until > now}
        for tried in (stream.failed.keys(), still_excluded):
            picked = self._fleet.pick(route, request, tried=tried, lost=stream.failed.keys())
            if isinstance(picked, Picked):
                return picked
        return None

    def _may_be_taken(self, service: str, lost: Endpoint) -> bool:
        """Whether a replica may be ready to continue a stream of `lost` while the stream waits.

        Our own runtime may be back in time. Another engine starts for longer than a stream waits: if its only replica
        is not ready any more and the service has no other, the client gets the error event immediately.
        """
        known = self._fleet.table.services.get(service)
        if not lost.engine or known is None or known.desired_replicas > 1:
            return True
        return any(other.revision == lost.revision for other in self._fleet.table.route(service).ready)

    def _route(self, stream: Interrupted) -> Route | None:
        """The replicas of the service, or those of them that have loaded the request's adapter."""
        table = self._fleet.table
        if not stream.adapter:
            return table.route(stream.record.service)
        adapter = table.adapter(stream.adapter)
        is_same = adapter is not None and adapter.service == stream.record.service
        return table.adapter_route(stream.adapter) if is_same else None

    def _can_move(self, endpoint: Endpoint) -> Callable[[], bool]:
        """Whether another healthy replica of the same revision could take a stream of this one."""
        return lambda: self._fleet.has_other(endpoint)

    def _exclude(self, stream: Interrupted, endpoint: Endpoint, seconds: float) -> None:
        stream.failed[endpoint.name] = asyncio.get_running_loop().time() + seconds

    def _began(self, stream: Interrupted, endpoint: Endpoint, reason: str) -> None:
        record = stream.record
        self._metrics.handovers.labels(*record.labels, reason).inc()
        log.info(
            "stream handed over",
            request_id=record.request_id,
            service=record.service,
            reason=reason,
            was=record.endpoint,
            now=endpoint.name,
            tokens=stream.journal.tokens,
        )
        record.endpoint = endpoint.name
        record.handovers += 1

    def _failed(self, record: RequestState, reason: str, broken: str) -> str:
        self._metrics.handovers_failed.labels(*record.labels, reason).inc()
        return broken
