"""One request from the door to its last byte.

1. Read the body once, bounded; learn the model and the pinned revision.
2. Find the route; pick a replica; try it.
3. Until the first byte went out, another replica may be tried: when one is gone, draining (503) or full (429).
4. Pass the answer on as it comes. From here on nothing can be taken back: a stream that breaks ends with an error
   event, any other answer with a broken connection, and neither ever with silence.
"""

import asyncio
import time
from dataclasses import dataclass

import structlog
from aiohttp import web
from multidict import CIMultiDict

from slipway_gateway.ask import Ask, BodyBudget, parse, request_id
from slipway_gateway.errors import Refusal, bad_gateway, internal, not_ready, unknown_model, unknown_revision
from slipway_gateway.fleet import Fleet
from slipway_gateway.journal import Journal, Record
from slipway_gateway.metrics import Metrics
from slipway_gateway.picker.endpoints import Endpoint, Route
from slipway_gateway.picker.pick import NoneReady, Picked, UnknownRevision
from slipway_gateway.relay import Relay, uncancel
from slipway_gateway.retry import RetryBudget, RetryPolicy, Setback
from slipway_gateway.upstream import LostError, Reply, UnreachableError, Upstream, request_headers

log = structlog.get_logger()

MOST_REFUSAL_BYTES = 64 * 1024  # of a 429 or 503 that we keep, to pass it on when nobody else can answer
STAY_AWAY_SECONDS = 2.0  # from a replica that said 503: by then the pod's readiness has reached us


@dataclass(frozen=True, slots=True)
class _No:
    """A replica's 429 or 503, kept whole."""

    setback: Setback
    status: int
    headers: CIMultiDict[str]
    body: bytes


class Requests:
    """Handles what clients send to the serving paths."""

    def __init__(
        self,
        fleet: Fleet,
        upstream: Upstream,
        metrics: Metrics,
        *,
        bodies: BodyBudget,
        policy: RetryPolicy | None = None,
        budget: RetryBudget | None = None,
    ) -> None:
        self._fleet = fleet
        self._upstream = upstream
        self._metrics = metrics
        self._journal = Journal(metrics)
        self._bodies = bodies
        self._policy = policy or RetryPolicy()
        self._budget = budget or RetryBudget()
        self._relay = Relay(metrics)
        self._open: set[asyncio.Task[object]] = set()
        self.idle = asyncio.Event()  # set while no request is inside
        self.idle.set()

    @property
    def open(self) -> int:
        """How many requests are inside."""
        return len(self._open)

    def leave(self) -> None:
        """This gateway is about to go: from now on, answers ask their clients to connect anew."""
        self._relay.leaving = True

    def cut(self) -> None:
        """End what is still running, with an error event where the answer has begun."""
        self._relay.cutting = True
        for task in self._open:
            task.cancel()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """The answer to one request."""
        task = asyncio.current_task()
        assert task is not None
        record = Record(request_id=request_id(request), path=request.path)
        self._open.add(task)
        self.idle.clear()
        self._metrics.open_requests.inc()
        try:
            return await self._read_and_answer(request, record)
        except Refusal as refusal:
            return self._refuse(refusal, record)
        except asyncio.CancelledError:
            if self._relay.cutting:
                uncancel()
                return self._refuse(not_ready("the gateway is shutting down", retry_after=1), record)
            record.cancelled()
            raise
        except Exception:  # the door stays open for others, whatever this request did
            log.exception("request failed", request_id=record.request_id)
            return self._refuse(internal(), record)
        finally:
            self._open.discard(task)
            if not self._open:
                self.idle.set()
            self._metrics.open_requests.dec()
            self._journal.close(record)

    async def _read_and_answer(self, request: web.Request, record: Record) -> web.StreamResponse:
        body = await self._bodies.read(request)
        try:
            record.arrived = time.monotonic()
            record.request_bytes = len(body)
            return await self._answer(request, parse(body, request), record)
        finally:
            self._bodies.release(body)

    async def _answer(self, request: web.Request, ask: Ask, record: Record) -> web.StreamResponse:
        """Try replicas until one answers or none is left to try."""
        record.stream, record.max_tokens = ask.stream, ask.max_tokens
        headers = request_headers(request.headers, record.request_id)
        self._budget.request()
        tried: dict[str, Setback] = {}
        no: _No | None = None
        while True:
            route = self._route(ask, record)
            endpoint = self._pick(route, ask, tried)
            if isinstance(endpoint, Endpoint) and record.setbacks and not self._may_retry(record):
                endpoint = NoneReady(f"{record.error} at the last of {len(record.setbacks)} tries")
            if isinstance(endpoint, NoneReady):
                return self._give_up(endpoint, no, record)
            record.endpoint, record.revision = endpoint.name, endpoint.revision
            with self._fleet.lease(endpoint, ask.work) as lease:
                try:
                    record.sent = time.monotonic()
                    body = ask.body_for(route.service.served_name)
                    async with self._upstream.attempt(endpoint, request.path_qs, body, headers) as reply:
                        no = await self._no(endpoint, reply)
                        if no is None:
                            if reply.is_stream and not reply.first:
                                raise LostError("an empty stream")
                            self._fleet.succeeded(endpoint)
                            record.error = ""
                            return await self._relay.pass_on(request, reply, lease, record, route.service.served_name)
                        setback, error = no.setback, str(no.status)
                except UnreachableError as failure:
                    setback, error, no = Setback.UNREACHABLE, str(failure), None
                    self._fleet.failed(endpoint)
                except LostError as failure:
                    setback, error, no = Setback.LOST, str(failure), None
                    self._fleet.failed(endpoint)
            record.setbacks.append(setback)
            record.error = error
            tried[endpoint.name] = setback
            self._metrics.upstream_errors.labels(record.model, setback.value).inc()

    def _route(self, ask: Ask, record: Record) -> Route:
        """Looked up before every attempt: the table may have changed while the last one failed."""
        route = self._fleet.table.resolve(ask.model)
        if route is None:
            raise unknown_model(ask.model)
        record.model, record.service = route.service.served_name, route.service.key
        return route

    def _pick(self, route: Route, ask: Ask, tried: dict[str, Setback]) -> Endpoint | NoneReady:
        picked = self._fleet.pick(route, tried=tried.keys(), pin=ask.pin)
        if isinstance(picked, NoneReady):
            # A lost connection may only have been an idle one that the replica closed: the same replica will do.
            saying_no = {name for name, setback in tried.items() if setback is not Setback.LOST}
            picked = self._fleet.pick(route, tried=saying_no, pin=ask.pin)
        match picked:
            case Picked(endpoint):
                return endpoint
            case UnknownRevision(revision):
                raise unknown_revision(ask.model, revision)
            case NoneReady():
                return picked

    async def _no(self, endpoint: Endpoint, reply: Reply) -> _No | None:
        """The replica's no, when its answer is one that another replica may better; None: this is the answer."""
        if reply.status == 429:
            setback = Setback.SHED
        elif reply.status == 503:
            setback = Setback.UNAVAILABLE
            self._fleet.stay_away(endpoint, STAY_AWAY_SECONDS)
        else:
            return None
        body = reply.first
        while len(body) <= MOST_REFUSAL_BYTES and (piece := await reply.more()):
            body += piece
        reply.headers.popall("Content-Length", None)  # of the body as it was sent, not as we kept it
        return _No(setback, reply.status, reply.headers, body)

    def _may_retry(self, record: Record) -> bool:
        if not self._policy.allows(record.setbacks):
            return False
        if not self._budget.spend():
            self._metrics.retries_denied.inc()
            return False
        self._metrics.retries.labels(record.setbacks[-1].value).inc()
        return True

    def _give_up(self, reason: NoneReady, no: _No | None, record: Record) -> web.Response:
        """Nobody answers: pass on what the last replica said, or say it ourselves. Always with a time to come back."""
        if no is not None:
            record.status, record.finish = no.status, "refused"
            response = web.Response(status=no.status, body=no.body, headers=no.headers)
            response.headers.setdefault("Retry-After", "1")
            return self._relay.sign(response, record)
        if Setback.LOST in record.setbacks:
            raise bad_gateway(record.error)
        raise not_ready(reason.reason)

    def _refuse(self, refusal: Refusal, record: Record) -> web.Response:
        record.status = refusal.status
        record.finish = record.finish or "refused"
        record.error = record.error or refusal.kind
        return self._relay.sign(refusal.response(), record)
