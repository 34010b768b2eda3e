"""One call from the checked body to the last byte: what chat and completions have in common.

    admitted → queued → prefill → decode → streamed → ended; each moment has its time in the record

Errors before the first token are responses with their own status, so a gateway may still try another replica.
Errors after it are events of the stream. However a call ends, it leaves one record: metrics and one log line.
"""

import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, Protocol

import structlog
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from slipway_api import names
from slipway_runtime.engine.client import EngineError
from slipway_runtime.engine.detokenizer import Detokenizer, StopStrings
from slipway_runtime.messages import FinishReason, Request
from slipway_runtime.server import sampling
from slipway_runtime.server.errors import ApiError, of_engine
from slipway_runtime.server.generation import Delta, Generation
from slipway_runtime.server.loaded import LoadedModel
from slipway_runtime.server.metrics import Metrics
from slipway_runtime.server.openai_types import GenerationRequest
from slipway_runtime.server.replica import Replica
from slipway_runtime.server.sse import DONE, ClientGone, EventStream, event, while_connected

log = structlog.get_logger()

_BROKEN: Final = {FinishReason.ERROR, FinishReason.CANCELLED}  # ended by this side, not by the answer


class Shape(Protocol):
    """How one endpoint writes its answers."""

    route: str
    id: str

    def opening(self) -> dict[str, Any] | None:
        """What comes before the first text of a stream."""

    def chunk(self, text: str, finish_reason: str | None, stop_reason: str | int | None) -> dict[str, Any]:
        """One event of a stream."""

    def usage_chunk(self) -> dict[str, Any]:
        """The last event of a stream, which carries only the usage."""

    def whole(self, text: str, finish_reason: str, stop_reason: str | int | None) -> dict[str, Any]:
        """An answer in one piece."""


@dataclass(frozen=True)
class Caller:
    """What the gateway says of who asks, in headers that it removes from what clients send."""

    tenant: str = ""
    priority: int = 0
    seconds: float | None = None  # until nobody wants the answer any more

    @classmethod
    def of(cls, request: HttpRequest) -> "Caller":
        """Read the headers; a senseless one is a 400."""
        headers = request.headers
        try:
            seconds = float(headers[names.HEADER_DEADLINE]) if names.HEADER_DEADLINE in headers else None
            priority = int(headers.get(names.HEADER_PRIORITY) or 0)
        except ValueError:
            raise ApiError(400, f"{names.HEADER_DEADLINE} and {names.HEADER_PRIORITY} are numbers") from None
        return cls(headers.get(names.HEADER_TENANT, "")[:128], priority, seconds)


async def answer(
    http: HttpRequest,
    body: GenerationRequest,
    prompt_token_ids: tuple[int, ...],
    shape: Shape,
    *,
    arrived: float,
    model: LoadedModel,
    prompt_field: str,
    otherwise_max_tokens: int | None,
) -> Response:
    """Generate, and answer in one piece or as a stream."""
    replica: Replica = http.app.state.replica
    metrics = model.metrics
    caller = Caller.of(http)
    if caller.seconds is not None and caller.seconds <= 0:
        raise ApiError(504, "the deadline of the request has passed")
    params = sampling.resolve(
        body,
        model.defaults,
        model.engine.facts,
        prompt_tokens=len(prompt_token_ids),
        max_output_tokens=model.max_output_tokens,
        otherwise_max_tokens=otherwise_max_tokens,
        fresh_seed=secrets.randbits(63),
        prompt_field=prompt_field,
    )
    request = Request(
        id=shape.id,
        prompt_token_ids=prompt_token_ids,
        params=params,
        arrived=arrived,
        deadline=arrived + caller.seconds if caller.seconds is not None else None,
        tenant=caller.tenant,
        priority=caller.priority,
        # Prefixes are shared within a tenant only, and a client may divide its own further.
        cache_salt=f"{caller.tenant}\x1f{body.cache_salt or ''}" if caller.tenant or body.cache_salt else "",
    )
    try:
        outputs = model.engine.generate(request)
    except EngineError as error:
        refusal = of_engine(error)
        metrics.refused(refusal.status)
        raise refusal from None
    replica.opened(request.id)
    generation = Generation(
        outputs,
        Detokenizer(
            model.prompts.files.tokenizer, prompt_token_ids, skip_special_tokens=body.skip_special_tokens is not False
        ),
        StopStrings(body.stops),
        prompt_tokens=len(prompt_token_ids),
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        include_stop=bool(body.include_stop_str_in_output),
        eos_token_ids=frozenset(model.engine.facts.eos_token_ids),
        arrived=arrived,
        clock=replica.clock,
        on_output=metrics.between_outputs,
    )
    call = _Call(http, body, shape, generation, request, replica, metrics)
    return await (call.as_stream() if body.stream else call.in_one_piece())


class _Call:
    """A generation with its request and its reader."""

    def __init__(
        self,
        http: HttpRequest,
        body: GenerationRequest,
        shape: Shape,
        generation: Generation,
        request: Request,
        replica: Replica,
        metrics: Metrics,
    ) -> None:
        self._http = http
        self._body = body
        self._shape = shape
        self._generation = generation
        self._request = request
        self._replica = replica
        self._metrics = metrics

    async def in_one_piece(self) -> Response:
        """Wait for the whole answer."""

        async def collect() -> tuple[str, Delta]:
            text: list[str] = []
            async with aclosing(self._deltas()) as deltas:
                async for delta in deltas:
                    text.append(delta.text)
            return "".join(text), delta

        try:
            text, last = await while_connected(self._http, collect())
        except ClientGone:
            return Response(status_code=499)  # nobody reads it
        if (failure := self._failure(last)) is not None:
            raise failure
        whole = self._shape.whole(text, str(last.finish_reason), last.stop_reason)
        return JSONResponse(self._signed(whole | {"usage": self._usage()}))

    async def as_stream(self) -> Response:
        """Wait for the first token, then stream: until then a failure is a response with its own status."""
        deltas = self._deltas()
        try:
            first = await while_connected(self._http, anext(deltas))
        except ClientGone:
            return Response(status_code=499)
        if first.finish_reason is not None and (failure := self._failure(first)) is not None:
            await deltas.aclose()
            raise failure
        return EventStream(self._events(first, deltas))

    async def _deltas(self) -> AsyncGenerator[Delta, None]:
        """The deltas; when they end, for whatever reason, so does the call."""
        try:
            async with aclosing(self._generation.deltas()) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self._ended()

    async def _events(self, first: Delta, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[bytes, None]:
        opening = self._shape.opening()
        async with aclosing(deltas):
            if opening is not None:
                yield self._event(opening) + self._delta_event(first)
            else:
                yield self._delta_event(first)
            if first.finish_reason is None:
                async for delta in deltas:
                    if chunk := self._delta_event(delta):
                        yield chunk
        if self._wants_usage and self._generation.finish_reason not in _BROKEN:
            yield event(self._signed(self._shape.usage_chunk() | {"usage": self._usage()}))
        yield DONE

    def _delta_event(self, delta: Delta) -> bytes:
        """The event of a delta; nothing while text is held back."""
        if delta.finish_reason in _BROKEN:
            failure = self._replica.why_it_failed(self._request.id, delta.error)
            return event(failure.body())
        if not delta.text and delta.finish_reason is None:
            return b""
        finish = str(delta.finish_reason) if delta.finish_reason is not None else None
        return self._event(self._shape.chunk(delta.text, finish, delta.stop_reason))

    def _event(self, chunk: dict[str, Any]) -> bytes:
        if self._wants_usage:
            continuous = self._body.stream_options and self._body.stream_options.continuous_usage_stats
            chunk |= {"usage": self._usage() if continuous else None}
        return event(self._signed(chunk))

    @property
    def _wants_usage(self) -> bool:
        options = self._body.stream_options
        return options is not None and (options.include_usage or options.continuous_usage_stats)

    def _failure(self, last: Delta) -> ApiError | None:
        """What to answer instead of tokens, when it ended without its own fault."""
        match last.finish_reason:
            case FinishReason.STOP | FinishReason.LENGTH:
                return None
            case FinishReason.TIMEOUT:
                return ApiError(504, "the deadline of the request has passed")
            case _:
                return self._replica.why_it_failed(self._request.id, last.error)

    def _signed(self, body: dict[str, Any]) -> dict[str, Any]:
        return body | {"model": self._replica.identity.model, "system_fingerprint": self._replica.fingerprint}

    def _usage(self) -> dict[str, Any]:
        generation = self._generation
        return {
            "prompt_tokens": generation.prompt_tokens,
            "completion_tokens": generation.completion_tokens,
            "total_tokens": generation.prompt_tokens + generation.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
        }

    def _ended(self) -> None:
        self._replica.closed(self._request.id)
        record = self._generation.record()
        self._metrics.ended(record)
        began = record.scheduled_at or record.finished_at
        log.info(
            "request",
            request_id=self._http.state.request_id,
            id=self._request.id,
            route=self._shape.route,
            model=self._replica.identity.model,
            tenant=self._request.tenant,
            stream=bool(self._body.stream),
            prompt_tokens=record.prompt_tokens,
            cached_tokens=record.cached_tokens,
            completion_tokens=record.completion_tokens,
            finish_reason=str(record.finish_reason),
            prepare_seconds=_between(record.arrived, record.queued_at),
            queue_seconds=_between(record.queued_at, began),
            prefill_seconds=_between(record.scheduled_at, record.first_token_at),
            decode_seconds=_between(record.first_token_at, record.last_token_at),
            total_seconds=_between(record.arrived, record.finished_at),
        )


def _between(start: float | None, end: float | None) -> float | None:
    """Seconds between two moments that both came; milliseconds are exact enough for a log."""
    return round(end - start, 4) if start is not None and end is not None else None
