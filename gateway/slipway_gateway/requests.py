"""Handles one request from its headers to the last byte of its answer: read, route, try replicas, forward.

1. Refuse everything until the fleet has been listed once: an unknown name may well exist. Authenticate, and refuse
   what is beyond the tenant's rate or concurrency.
2. Read the body, bounded in time and memory; learn the model and the pinned revision.
3. Find the service or adapter; take a share of its connections and memory; wait while no replica is ready, where one
   may come (`waiting_room`); pick a replica; try it.
4. Until the first byte went out, another replica may be tried: when one is gone, draining (503), full (429), silent,
   dead, or has left the fleet.
5. Forward the answer as it comes (`forwarding`); a stream that breaks off continues on another replica (`handover`).

Who says no, and who turns it into something else:

| what            | who says it                                  | who handles it, and what it becomes                 |
|-----------------|----------------------------------------------|-----------------------------------------------------|
| Refusal         | `front_door`, tenancy, bodies, waiting room  | `handle`, or `app` before it: the error answer      |
| UpstreamError   | `upstream`, while an answer is awaited       | `_answer`: an AttemptFailure; another try           |
| DeadlineError   | `upstream`, at the request's own deadline    | `_answer`: the Refusal 504                          |
| BudgetError     | `upstream`, as a fallback is due             | `_answer`: NoAnswer                                 |
| RejectedAttempt | `attempts`: an answer another may better     | `_answer`: an AttemptFailure; kept as last answer   |
| NoneReady       | `picker`: no replica is left to try          | `_give_up`: the last answer, or a Refusal; NoAnswer |
| UnknownRevision | `picker`: the pinned revision does not exist | `_pick`: the Refusal 404                            |
| NoAnswer        | `_ask_service`: this service has none        | `_ask_services`: the fallback, else its Refusal     |
| UpstreamError   | `upstream`, within a stream                  | `forwarding`: `handover`, or an error event         |
| CancelledError  | the client left, or the shutdown cuts        | `handle`: 499 in the log; a 503 or an error event   |
"""

import asyncio
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import msgspec
import structlog
from aiohttp import web

from slipway_api.names import HEADER_ADAPTER, HEADER_TEXT_BLOCKS, HEADER_TOKEN_IDS
from slipway_api.recent_requests import MOST_FOUND
from slipway_gateway.access_log import AccessLog
from slipway_gateway.accounting import Accounting
from slipway_gateway.apis import GENERATING_PATHS, limit_field, refusal_response
from slipway_gateway.attempts import FAILURES, Attempts, RejectedAttempt, rejected_attempt
from slipway_gateway.errors import (
    Refusal,
    bad_gateway,
    deadline_exceeded,
    internal,
    not_ready,
    not_synced,
    overloaded,
    service_memory_full,
    service_requests_full,
    set_retry_after,
    unknown_model,
    unknown_revision,
)
from slipway_gateway.fallback import Chain, NoAnswer
from slipway_gateway.fleet import Fleet
from slipway_gateway.forwarding import Forwarder, uncancel
from slipway_gateway.handover import Handover, Interrupted
from slipway_gateway.health import AttemptFailure, RetryPolicy
from slipway_gateway.journal import JournalMemory
from slipway_gateway.kv_feeds import KvFeeds
from slipway_gateway.metrics import Metrics
from slipway_gateway.mirror import Mirror
from slipway_gateway.opening import Opener, Sending
from slipway_gateway.outcomes import Outcomes
from slipway_gateway.overload import Ladder, Step
from slipway_gateway.picker.endpoints import Endpoint, Route
from slipway_gateway.picker.pick import NoneReady, Picked, UnknownRevision
from slipway_gateway.request_account import describe_request
from slipway_gateway.request_body import Body, BodyReader, InferenceRequest, parse, request_id
from slipway_gateway.request_state import SHUTTING_DOWN, AttemptKind, RequestState
from slipway_gateway.resolve import may_use_all
from slipway_gateway.shares import SharedCapacity
from slipway_gateway.tenancy import ATTEMPT_FAILURES, Tenancy, internal_headers, set_max_tokens
from slipway_gateway.tenants import Caller
from slipway_gateway.tracing import Tracing
from slipway_gateway.upstream import (
    BudgetError,
    DeadlineError,
    LostError,
    RevisionError,
    Upstream,
    UpstreamError,
    answers_for_other,
)
from slipway_gateway.waiting_room import WaitingRoom, refusal_of_stalled

log = structlog.get_logger()

MAX_WHOLE_BYTES = 1 << 20  # of an answer in one piece that is read whole first: half of it could not be retried


class Requests:
    """Handles what clients send to the serving paths."""

    def __init__(
        self,
        fleet: Fleet,
        upstream: Upstream,
        metrics: Metrics,
        *,
        bodies: BodyReader,
        connections: SharedCapacity,
        journals: JournalMemory,
        handover_seconds: float = 0.0,
        policy: RetryPolicy | None = None,
        loading_seconds: float = 0.0,
        tenancy: Tenancy | None = None,
        tracing: Tracing | None = None,
        ladder: Ladder | None = None,
        kv_feeds: KvFeeds | None = None,
    ) -> None:
        self._fleet = fleet
        self._waiting_room = WaitingRoom(fleet.table, fleet.demand, loading_seconds=loading_seconds)
        fleet.on_change = self._waiting_room.changed
        self._upstream = upstream
        self._metrics = metrics
        self.outcomes = Outcomes(fleet.boot_id)
        self.mirror = Mirror(
            fleet,
            upstream,
            self.outcomes,
            count=lambda service, revision, outcome: metrics.mirrored.labels(service, revision, outcome).inc(),
            has_room=bodies.has_room,
        )
        self.access_log = AccessLog(metrics)
        self._bodies = bodies
        self._connections = connections
        self._policy = policy or RetryPolicy()
        self.tenancy = tenancy or Tenancy(Accounting(metrics.registry))
        self.tracing = tracing or Tracing("")
        self._ladder = ladder or Ladder()
        self._forwarder = Forwarder(metrics)
        self._handover = Handover(
            fleet, upstream, self._forwarder, metrics, memory=journals, wait_seconds=handover_seconds
        )
        self._opener = Opener(fleet, upstream, self._handover, kv_feeds or KvFeeds(fleet), metrics)
        metrics.handover_bytes.set_function(lambda: journals.held)
        self._open: dict[asyncio.Task[object], RequestState] = {}
        self.idle = asyncio.Event()  # set while no request is inside
        self.idle.set()

    @property
    def open(self) -> int:
        """How many requests are inside."""
        return len(self._open)

    def find(self, request_id: str) -> list[dict[str, Any]]:
        """The accounts of the requests with this id: those that have ended, then those that are open."""
        ended = self.access_log.recent.find(request_id)
        still_open = [record for record in self._open.values() if record.request_id == request_id]
        return ended + [describe_request(record, is_open=True) for record in still_open[:MOST_FOUND]]

    def leave(self) -> None:
        """Begin the shutdown: from now on, answers close their connections."""
        self._forwarder.leaving = True

    def cut(self) -> None:
        """End what is still running, with an error event where a stream has begun."""
        self._forwarder.cutting = True
        for task in self._open:
            task.cancel()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """The answer to one request. Once an answer has begun, `forwarding` ends it; here are only whole answers."""
        task = asyncio.current_task()
        assert task is not None
        record = RequestState(request_id=request_id(request), path=request.path, outcomes=self.outcomes)
        record.trace = self.tracing.start(request.headers, request.path)
        self._open[task] = record
        self.idle.clear()
        self._metrics.open_requests.inc()
        try:
            return await self._read_and_answer(request, record)
        except Refusal as refusal:
            return self._refuse(refusal, record)
        except asyncio.CancelledError:
            if self._forwarder.cutting:
                uncancel()
                record.is_cut = True
                return self._refuse(not_ready(SHUTTING_DOWN, retry_after=1), record)
            record.set_cancelled()
            raise
        except Exception:  # the gateway serves others, whatever this request did
            log.exception("request failed", request_id=record.request_id)
            return self._refuse(internal(), record)
        finally:
            self._open.pop(task, None)
            if not self._open:
                self.idle.set()
            self._metrics.open_requests.dec()
            request[ATTEMPT_FAILURES] = tuple(record.failures)
            self.access_log.write(record)
            self.tenancy.account(record)
            record.trace.finish(record)

    async def _read_and_answer(self, request: web.Request, record: RequestState) -> web.StreamResponse:
        if not self._fleet.view().synced:
            raise not_synced()
        caller = self.tenancy.authenticate(request)
        record.tenant, record.key = caller.tenant.label, caller.key
        record.internal_headers, record.may_use = internal_headers(caller), caller.tenant.may_use
        self.tenancy.refuse_excess(caller, request, record)
        body = await self._bodies.read(request, caller.tenant.max_body_bytes)
        try:
            record.arrived = time.monotonic()
            record.request_bytes = len(body.content)
            inference = parse(body.content, request, tenant=record.tenant)
            record.stream, record.max_tokens = inference.stream, inference.max_tokens
            record.is_pinned = bool(inference.routing.pin)
            route = self._resolve(inference, record)
            self.tenancy.check(caller, body, inference, record)
            with self.tenancy.admit(caller, inference, record):
                return await self._ask_services(request, caller, route, inference, body, record)
        finally:
            body.release()

    async def _ask_services(
        self,
        request: web.Request,
        caller: Caller,
        route: Route,
        inference: InferenceRequest,
        body: Body,
        record: RequestState,
    ) -> web.StreamResponse:
        """The answer of the service, or of its fallback where it cannot answer in time."""
        chain, table, asked, pin = Chain(), self._fleet.table, record.model, inference.routing.pin
        step = self._degrade(caller, inference, body, record)
        while True:
            chain.enter(table, caller.tenant, route, pin)
            try:
                if step is Step.FALLBACK and chain.deadline is not None:
                    raise NoAnswer("overloaded", not_ready(f"{record.model} is overloaded"))
                return await self._ask_service(request, route, inference, body, record, chain.deadline)
            except NoAnswer as none:
                answer, reason = none.answer, none.reason
            # Not in the handler: a refusal raised there refers to `none`, and `none` to the refusal (`collector`).
            following = chain.next(table, caller.tenant, route, pin)
            # A request that may have crashed two replicas is not tried on another service's.
            if following is None or sum(one.may_be_the_requests_fault for one in record.failures) > 1:
                if isinstance(answer, Refusal):
                    try:
                        raise answer
                    finally:
                        del answer  # this frame is in its traceback
                return self._forwarder.sign(answer, record)
            self._metrics.fallbacks.labels(route.service.key, following.key, reason).inc()
            if step is Step.FALLBACK:
                self._metrics.degraded.labels(route.service.key, "fallback").inc()
            step = Step.NONE
            record.fallback_from, record.finish, record.error, record.failures = asked, "", "", []
            body.content = body.with_model(inference.routing.model, following.key)
            inference = msgspec.structs.replace(inference, routing=replace(inference.routing, model=following.key))
            record.may_use = may_use_all  # the chain has asked, by the name that the tenant's patterns may name
            route = self._resolve(inference, record)

    def _degrade(self, caller: Caller, inference: InferenceRequest, body: Body, record: RequestState) -> Step:
        """Refuse or shorten a request of an overloaded service; the step that the service is on."""
        step = self._ladder.step(self._fleet.waiting(record.service))
        if self._ladder.sheds(step, caller.tenant.priority):
            self._metrics.degraded.labels(record.service, "shed").inc()
            record.degraded = "shed"
            raise overloaded(record.model)
        limit = self._ladder.capped(step, inference.max_tokens)
        if limit is not None and record.path in GENERATING_PATHS:
            self._metrics.degraded.labels(record.service, "capped").inc()
            record.degraded = f"max_tokens={limit}"
            set_max_tokens(body, limit, limit_field(record.path))
        return step

    async def _ask_service(
        self,
        request: web.Request,
        route: Route,
        inference: InferenceRequest,
        body: Body,
        record: RequestState,
        until: float | None,
    ) -> web.StreamResponse:
        """The answer of one service; NoAnswer where it has none, or `until`, of the event loop's clock, passes."""
        service = route.service.key
        if not body.assign_to(service):
            self._metrics.refused.labels(service, "memory").inc()
            raise NoAnswer("refused", service_memory_full(record.model))
        if not self._connections.take(service, 1):
            self._metrics.refused.labels(service, "connections").inc()
            raise NoAnswer("refused", service_requests_full(record.model))
        try:
            async with AsyncExitStack() as stack:
                try:
                    async with asyncio.timeout_at(until):
                        waiting = self._waiting_room.admit(route, len(body.content), inference.routing.pin)
                        await stack.enter_async_context(waiting)
                except TimeoutError:
                    raise NoAnswer("waiting", not_ready(f"{record.model} has no ready replica")) from None
                except Refusal as refusal:
                    raise NoAnswer("refused", refusal) from None
                record.admitted = time.monotonic()
                return await self._answer(request, inference, body, record, until)
        finally:
            self._connections.give_back(service, 1)

    async def _answer(
        self,
        request: web.Request,
        inference: InferenceRequest,
        body: Body,
        record: RequestState,
        until: float | None,
    ) -> web.StreamResponse:
        """Try replicas until one answers or none is left to try."""
        self._fleet.destination(record.service).retry_budget.add_request()
        seconds = self._seconds_for(record.service)
        deadline = asyncio.get_running_loop().time() + seconds - (time.monotonic() - record.arrived)
        answers = self._handover.seed(request.path, inference, body, record.service)
        sending = Sending(request, inference, body, answers, deadline, until, record)
        attempts = Attempts()
        while True:
            route = self._resolve(inference, record)
            endpoint = self._pick(route, inference, attempts)
            if isinstance(endpoint, Endpoint) and record.failures and not self._may_retry(record):
                endpoint = NoneReady(f"{record.error} at the last of {len(record.failures)} tries")
            if isinstance(endpoint, NoneReady):
                raise NoAnswer(
                    "failed" if record.failures else "refused", self._give_up(endpoint, route, attempts, record)
                )
            record.endpoint, record.revision = endpoint.name, endpoint.revision
            record.matched_tokens = attempts.matched_tokens
            if attempts.picked is not None:
                record.note_attempt(attempts.picked, AttemptKind.RETRY if record.failures else AttemptKind.FIRST)
            try:
                answer = await self._try_endpoint(sending, route, endpoint, attempts.matched_tokens)
            except DeadlineError:
                raise deadline_exceeded(seconds) from None
            except BudgetError as slow:
                raise NoAnswer("slow", not_ready(f"{record.model} did not answer in time")) from slow
            except UpstreamError as error:
                failure, record.error, attempts.last_answer = FAILURES[type(error)], str(error), None
                if failure is AttemptFailure.UNREACHABLE:
                    self._fleet.record_unreachable(endpoint)
                else:
                    self._fleet.record_failure(endpoint)
            else:
                if isinstance(answer, web.StreamResponse):
                    return answer
                failure, record.error, attempts.last_answer = answer.failure, str(answer.status), answer
            record.failures.append(failure)
            record.failed.append((endpoint.revision, failure))
            attempts.failed[endpoint.name] = failure
            record.note_failure(endpoint.name, record.error)
            self._metrics.upstream_errors.labels(*record.labels, failure.value).inc()

    async def _try_endpoint(
        self, sending: Sending, route: Route, endpoint: Endpoint, matched_tokens: int
    ) -> web.StreamResponse | RejectedAttempt:
        """One attempt: the whole answer, forwarded, or an answer that another replica may better."""
        request, record, journal = sending.request, sending.record, None
        routing = sending.inference.routing
        try:
            opened = await self._opener.open(sending, route, endpoint, matched_tokens)
            endpoint, reply, lease, journal = opened.endpoint, opened.reply, opened.lease, opened.journal
            async with opened.stack:
                record.endpoint, record.matched_tokens = endpoint.name, opened.matched_tokens
                record.adapter = reply.headers.get(HEADER_ADAPTER, "") or record.adapter
                if answers_for_other(endpoint, reply):
                    raise RevisionError("the replica answered for another revision")
                self._fleet.record_load(endpoint, reply.load_report)
                if reply.is_stream:
                    self._fleet.record_latency(endpoint, ttft=reply.first_at - opened.sent)
                rejected = await rejected_attempt(self._fleet, endpoint, reply)
                if rejected is not None:
                    return rejected
                if reply.is_stream and not reply.first:
                    raise LostError("an empty stream")
                if not reply.is_stream:
                    await reply.read_whole(MAX_WHOLE_BYTES)
                self._copy(request, sending.inference, sending.body, opened.headers, record)
                sending.body.release()
                if journal is not None:
                    self._handover.begin(journal, reply, endpoint)
                record.error = ""
                response = await self._forwarder.forward(request, reply, lease, record, opened.served_name, journal)
            if record.upstream_failed:
                self._handover.record_break(endpoint, journal)
            elif record.events > 1:
                self._fleet.record_latency(endpoint, itl=reply.waited / (record.events - 1))
            if journal is not None and journal.broken:
                adapter = route.adapter.key if route.adapter is not None else ""
                stream = Interrupted(request, response, journal, routing, record, sending.deadline, adapter)
                await self._handover.finish(stream, endpoint)
            return response
        finally:
            if journal is not None:
                journal.close()

    def _copy(
        self,
        request: web.Request,
        inference: InferenceRequest,
        body: Body,
        headers: Mapping[str, str],
        record: RequestState,
    ) -> None:
        """Send a copy of a request whose answer has begun to a mirrored revision, where its service has one."""
        service = self._fleet.table.services.get(record.service)
        if service is not None and service.mirrors and not record.copied:
            record.copied = True
            record.capture = self.mirror.copy(
                self._resolve(inference, record),
                record.revision,
                request.path_qs,
                lambda one: body.with_model(inference.routing.model, record.adapter or one.served_name or record.model),
                {name: value for name, value in headers.items() if name not in (HEADER_TOKEN_IDS, HEADER_TEXT_BLOCKS)},
                is_stream=inference.stream,
                is_comparable=inference.is_greedy,
            )

    def _seconds_for(self, service: str) -> float:
        """How long a whole request of this service may take."""
        known = self._fleet.table.services.get(service)
        seconds = known.request_seconds if known is not None else None
        return self._upstream.timeouts.request_seconds if seconds is None else seconds

    def _resolve(self, inference: InferenceRequest, record: RequestState) -> Route:
        """Looked up before every attempt: the table may have changed while the last one failed."""
        key = inference.routing.cohort or record.request_key
        route = self._fleet.table.resolve(inference.routing.model, key, record.may_use)
        if route is None:
            raise unknown_model(inference.routing.model)
        record.model, record.service = route.service.served_name, route.service.key
        record.latency_limits = route.service.latency_limits
        record.adapter = route.adapter.name if route.adapter is not None else ""
        return route

    def _pick(self, route: Route, inference: InferenceRequest, attempts: Attempts) -> Endpoint | NoneReady:
        picked = self._fleet.pick(route, inference.routing, tried=attempts.failed.keys(), lost=attempts.lost)
        if isinstance(picked, NoneReady):
            # A lost connection may only have been an idle one that the replica closed: the same replica will do.
            refusing = {name for name, failure in attempts.failed.items() if failure is not AttemptFailure.LOST}
            picked = self._fleet.pick(route, inference.routing, tried=refusing, lost=attempts.lost)
        match picked:
            case Picked(endpoint):
                attempts.picked = picked
                return endpoint
            case UnknownRevision(revision):
                raise unknown_revision(inference.routing.model, revision)
            case NoneReady():
                return picked

    def _may_retry(self, record: RequestState) -> bool:
        if not self._policy.allows(record.failures):
            return False
        last = record.failures[-1]
        # A move costs its service nothing: the replica that left has stopped working on the request, or never will.
        if last is not AttemptFailure.MOVED and not self._fleet.destination(record.service).retry_budget.spend():
            self._metrics.retries_denied.labels(record.service).inc()
            return False
        self._metrics.retries.labels(record.service, last.value).inc()
        return True

    def _give_up(
        self, reason: NoneReady, route: Route, attempts: Attempts, record: RequestState
    ) -> web.Response | Refusal:
        """What the client gets when no replica answers: the last one's answer, or a refusal; with Retry-After."""
        if (answer := attempts.last_answer) is not None:
            record.status, record.finish = answer.status, "refused"
            response = web.Response(status=answer.status, body=answer.body, headers=answer.headers)
            set_retry_after(response.headers)
            return response
        if any(failure.may_be_the_requests_fault for failure in record.failures):
            return bad_gateway(record.error)
        stalled = refusal_of_stalled(route) if not record.failures and not route.ready else None
        return stalled or not_ready(reason.reason)

    def _refuse(self, refusal: Refusal, record: RequestState) -> web.Response:
        record.status = refusal.status
        record.finish = record.finish or "refused"
        record.error = record.error or refusal.kind
        return self._forwarder.sign(refusal_response(refusal, record.path, record.request_id), record)
