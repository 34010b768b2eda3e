"""Opens the attempts of a request: sends it to a replica, and to a second one where the first is late (`hedging`)."""

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from aiohttp import web

from slipway_api.names import HEADER_DEADLINE
from slipway_gateway.apis import GENERATING_PATHS
from slipway_gateway.attempts import Opened
from slipway_gateway.fleet import Fleet
from slipway_gateway.handover import DEADLINE_GRACE_SECONDS, Handover
from slipway_gateway.health import AttemptFailure
from slipway_gateway.hedging import HedgeOutcome, Opening, first_answer
from slipway_gateway.kv_feeds import KvFeeds
from slipway_gateway.metrics import Metrics
from slipway_gateway.picker.endpoints import Endpoint, Route
from slipway_gateway.picker.pick import Picked
from slipway_gateway.request_body import Body, InferenceRequest
from slipway_gateway.request_state import AttemptKind, RequestState
from slipway_gateway.upstream import (
    DEADLINE,
    BudgetError,
    DeadlineError,
    FirstByteWait,
    SilentError,
    UnreachableError,
    Upstream,
    UpstreamError,
    request_headers,
)


@dataclass(frozen=True, slots=True)
class Sending:
    """A request that is being sent, with the limits of its time; both of the event loop's clock."""

    request: web.Request
    inference: InferenceRequest
    body: Body
    answers: int  # that a handover would have to continue; 0: it is not handed over
    deadline: float
    until: float | None  # then another service is to answer; None: there is none
    record: RequestState


class Opener:
    """Sends requests to replicas, up to the first byte of their answers."""

    def __init__(
        self, fleet: Fleet, upstream: Upstream, handover: Handover, kv_feeds: KvFeeds, metrics: Metrics
    ) -> None:
        self._fleet = fleet
        self._upstream = upstream
        self._handover = handover
        self._kv_feeds = kv_feeds
        self._metrics = metrics

    async def open(self, sending: Sending, route: Route, endpoint: Endpoint, matched_tokens: int) -> Opened:
        """The attempt whose first byte came first; raises UpstreamError. The caller closes it."""
        record = sending.record
        record.sent = time.monotonic()
        headers = record.trace.start_attempt(endpoint.name, endpoint.revision, record.error)
        opening = self._open_one(sending, endpoint, matched_tokens, headers)
        if not self._may_hedge(sending, route):
            return await opening
        times = self._fleet.destination(record.service).first_token_times
        delay = times.delay()
        if delay is None:
            opened = await opening
        else:
            opened = await self._open_hedged(sending, route, endpoint, opening, delay, headers)
        if opened.is_stream:
            times.record(opened.reply.first_at - record.sent)
        return opened

    async def _open_hedged(
        self, sending: Sending, route: Route, endpoint: Endpoint, opening: Opening, delay: float, trace: dict[str, str]
    ) -> Opened:
        """The first answer of this replica, or of another one that is asked after `delay`."""
        record, other = sending.record, endpoint

        def start_second() -> Opening | None:
            nonlocal other
            same_revision = replace(sending.inference.routing, pin=endpoint.revision)
            picked = self._fleet.pick(route, same_revision, tried=[endpoint.name], lost=[endpoint.name])
            if not isinstance(picked, Picked):
                return None
            if not self._fleet.destination(record.service).retry_budget.spend():
                self._count(record, HedgeOutcome.DENIED)
                return None
            other = picked.endpoint
            record.note_attempt(picked, AttemptKind.HEDGE)
            return self._open_one(sending, other, picked.matched_tokens, trace)

        opened, outcome, error = await first_answer(opening, delay, start_second)
        if outcome is not None:
            self._count(record, outcome)
        if outcome is HedgeOutcome.WON:
            # How slow the first one is, at least: hedging must not hide it from the comparison with its peers.
            late = time.monotonic() - record.sent
            self._fleet.record_latency(endpoint, ttft=late)
            self._fleet.record_late(endpoint, late)
            record.trace.start_attempt(other.name, other.revision, "hedged")
        if error is not None:
            self._record_error(endpoint if outcome is HedgeOutcome.WON else other, error)
        return opened

    async def _open_one(
        self, sending: Sending, endpoint: Endpoint, matched_tokens: int, trace: dict[str, str]
    ) -> Opened:
        """Send the request to one replica; returns with the first byte of its answer."""
        inference, record = sending.inference, sending.record
        served_name = record.adapter or endpoint.served_name or record.model
        content = sending.body.with_model(inference.routing.model, served_name)
        headers = request_headers(sending.request.headers, record.request_id) | record.internal_headers | trace
        headers |= self._kv_feeds.headers(endpoint, inference.routing)
        headers[HEADER_DEADLINE] = f"{max(sending.deadline - asyncio.get_running_loop().time(), 0.001):.3f}"
        path, answers = sending.request.path, sending.answers
        journal = self._handover.journal(endpoint, path, content, answers, headers, has_seed=inference.has_seed)
        content = journal.body() if journal is not None else content
        wait = self._first_byte_wait(inference, sending.deadline, sending.until)
        latest = sending.deadline + DEADLINE_GRACE_SECONDS
        async with AsyncExitStack() as stack:
            lease = self._fleet.lease(
                endpoint, inference.routing.cost - matched_tokens, wait.move,
                is_stream=inference.stream,
                # Once only: what is slow everywhere must not go round, and two moves are all that a request has.
                may_move=AttemptFailure.MOVED not in record.failures,
                prompt_tokens=inference.routing.prompt_tokens - matched_tokens,
            )  # fmt: skip
            stack.enter_context(lease)
            sent = time.monotonic()
            attempt = self._upstream.attempt(endpoint, sending.request.path_qs, content, headers, wait, latest)
            reply = await stack.enter_async_context(attempt)
            lease.answered(has_begun=reply.status == 200 and reply.is_stream)
            lease.progress(inference.routing.prompt_tokens - matched_tokens)
            return Opened(endpoint, reply, lease, journal, headers, served_name, matched_tokens, sent, stack.pop_all())

    def _may_hedge(self, sending: Sending, route: Route) -> bool:
        """Whether this is a first attempt at a short streamed request, and there is a second replica."""
        most = route.service.hedged_prompt_tokens
        return (
            0 < sending.inference.routing.prompt_tokens <= most
            and sending.inference.stream
            and sending.request.path in GENERATING_PATHS
            and not sending.record.failures
            and len(route.endpoints) > 1
        )

    def _first_byte_wait(self, inference: InferenceRequest, deadline: float, budget: float | None) -> FirstByteWait:
        until = asyncio.get_running_loop().time() + self._upstream.timeouts.first_byte_seconds
        if inference.stream and budget is not None and budget < min(deadline, until):
            return FirstByteWait(budget, BudgetError, "another service is to answer")
        if not inference.stream or deadline <= until:
            return FirstByteWait(deadline, DeadlineError, DEADLINE)
        return FirstByteWait(until, SilentError, "timed out: no first byte")

    def _record_error(self, endpoint: Endpoint, error: UpstreamError) -> None:
        if isinstance(error, UnreachableError):
            self._fleet.record_unreachable(endpoint)
        elif not isinstance(error, (DeadlineError, BudgetError)):
            self._fleet.record_failure(endpoint)

    def _count(self, record: RequestState, outcome: HedgeOutcome) -> None:
        self._metrics.hedges.labels(record.service, outcome.value).inc()
