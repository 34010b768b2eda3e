"""Writes the answers of a call to the client: as one JSON body, or as a stream of server-sent events.

Errors before the first token are responses with their own status, so a gateway may still try another replica.
Errors after it are events of the stream. Each engine request of a call leaves one record when it ends, also after
an error: metrics and one log line.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import structlog
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from slipway_api import names, stream_marks
from slipway_api.recent_requests import MOST_FOUND
from slipway_runtime.messages import FinishReason, Request
from slipway_runtime.server.accounts import keep_account
from slipway_runtime.server.errors import ApiError, unavailable
from slipway_runtime.server.generation import Delta, Generation, between
from slipway_runtime.server.json_pieces import json_in_pieces
from slipway_runtime.server.openai_types import GenerationRequest
from slipway_runtime.server.prompt import Prompt
from slipway_runtime.server.replica import Replica
from slipway_runtime.server.request_context import Caller, Served
from slipway_runtime.server.sse import ClientGone, Dialect, EventStream, merged, while_connected

log = structlog.get_logger()

# Reasons of the server, not of the answer itself.
_BROKEN: Final = {FinishReason.ERROR, FinishReason.CANCELLED, FinishReason.OUT_OF_MEMORY, FinishReason.HANDED_OVER}
_UNAVAILABLE: Final = 503  # another replica may succeed
MANY_LOGPROBS: Final = 1024  # tokens with logprobs; a body with more is written in a thread


class ChoiceWriter(Protocol):
    """Writes one answer (choice) in the format of one endpoint."""

    @property
    def reasoning_tokens(self) -> int | None:
        """The tokens of the reasoning so far; None where no reasoning is looked for."""

    def opening(self) -> list[dict[str, Any]]:
        """The choices of the stream events before the first text."""

    def piece(self, delta: Delta) -> list[dict[str, Any]]:
        """The choices of the stream events of a delta; none while its text is held back."""

    def whole(self, deltas: list[Delta]) -> dict[str, Any]:
        """The choice of an answer in one piece."""


class ResponseFormat(Protocol):
    """The response format of one endpoint."""

    route: str
    id: str

    def writer(self, index: int, prompt: Prompt) -> ChoiceWriter:
        """A writer for one answer."""

    def envelope(self, choices: list[dict[str, Any]], *, streamed: bool) -> dict[str, Any]:
        """The response body or chunk around the choices."""


@dataclass
class _Part:
    """One engine request of the call, with its answers to a prompt."""

    request: Request
    generation: Generation
    counts_prompt: bool = True  # in the usage: only the first request of each prompt
    ended: bool = False


class ResponseBuilder:
    """The answers of one call on their way to the client."""

    def __init__(
        self,
        http: HttpRequest,
        body: GenerationRequest,
        caller: Caller,
        served: Served,
        format: ResponseFormat,
        replica: Replica,
        dialect: Dialect,
    ) -> None:
        self._http = http
        self._body = body
        self._format = format
        self._dialect = dialect
        self._served = served
        self._replica = replica
        self._metrics = served.model.metrics
        self._parts: list[_Part] = []
        self._accounts = 0  # that were kept of its parts
        self._writers: dict[int, ChoiceWriter] = {}
        self._prompts: list[Prompt] = []
        self._before: dict[int, Delta] = {}  # text and tokens of resumed answers, by index
        self._finished_elsewhere = [0, 0]  # tokens of prompts and answers that only count in the usage
        self._is_resumed = body.slipway_resume is not None
        self._wants_token_ids = bool(body.return_token_ids)
        self._marks_tokens = caller.wants_token_ids and bool(body.stream)
        self._stream_usage = body.stream_options is not None and body.stream_options.include_usage

    def add(self, request: Request, generation: Generation, prompt: Prompt, before: Delta | None) -> None:
        """Add an engine request: a prompt of the call, or a resumed answer with the delta `before`."""
        is_new = all(prompt is not known for known in self._prompts)
        self._parts.append(_Part(request, generation, counts_prompt=is_new))
        if is_new:
            self._prompts.append(prompt)
        for choice in generation.choices:
            self._writers[choice.index] = self._format.writer(choice.index, prompt)
        if before is not None:
            self._before[generation.choices[0].index] = before
        self._replica.opened(request.id, choices=request.n, can_continue_elsewhere=self._marks_tokens)
        self._http.state.admitted = True  # from here on its record reports how the request ended

    def count_finished(self, prompt: Prompt, completion_tokens: int) -> None:
        """Count an answer that another replica has finished: in the usage only, without any output."""
        if all(prompt is not known for known in self._prompts):
            self._prompts.append(prompt)
            self._finished_elsewhere[0] += len(prompt.token_ids)
        self._finished_elsewhere[1] += completion_tokens

    async def abandon(self) -> None:
        """End the requests that still run."""
        for part in self._parts:
            await part.generation.aclose()
            self._end(part)

    async def as_body(self) -> Response:
        """Wait for all answers and return them as one JSON body."""
        collected: dict[int, list[Delta]] = {index: [] for index in self._writers}
        for index, before in self._before.items():
            collected[index].append(before)

        async def collect() -> None:
            async with aclosing(self._all_deltas()) as deltas:
                async for delta in deltas:
                    collected[delta.index].append(delta)
                    if delta.finish_reason is not None and (failure := self._failure(delta)) is not None:
                        raise failure

        try:
            await while_connected(self._http, collect())
        except ClientGone:
            return Response(status_code=499)  # the client has disconnected
        scored = (len(each.logprobs) + len(each.prompt_logprobs or ()) for one in collected.values() for each in one)
        if sum(scored) <= MANY_LOGPROBS:
            return JSONResponse(self._whole(collected))
        written = await asyncio.to_thread(lambda: b"".join(json_in_pieces(self._whole(collected))))
        return Response(written, media_type="application/json")

    def _whole(self, collected: dict[int, list[Delta]]) -> dict[str, Any]:
        """The body with all answers."""
        choices = [
            self._with_ids(writer.whole(deltas), tuple(i for delta in deltas for i in delta.token_ids))
            for writer, deltas in ((self._writers[index], collected[index]) for index in sorted(collected))
        ]
        whole = self._format.envelope(choices, streamed=False) | {"usage": self._usage()}
        return self._dialect.whole(self._with_model_fields(self._with_prompt_ids(whole)))

    async def as_stream(self) -> Response:
        """Wait for the first token, then stream: until then a failure is a response with its own status."""
        # A replica that resumes the stream must have the same model, revision, tokenizer and adapter.
        headers = {names.HEADER_TOKEN_IDS: self._served.fingerprint(self._replica)} if self._marks_tokens else {}
        deltas = self._all_deltas()
        if not self._parts:  # all answers are finished: only the usage and the end are missing
            return EventStream(self._events(None, deltas), headers)
        try:
            first = await while_connected(self._http, anext(deltas))
        except ClientGone:
            return Response(status_code=499)
        if first.finish_reason is not None and (failure := self._failure(first)) is not None:
            await deltas.aclose()
            raise failure
        return EventStream(self._events(first, deltas), headers)

    async def _events(self, first: Delta | None, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[bytes, None]:
        broken = False
        async with aclosing(deltas):
            if first is not None:
                yield self._opening() + self._delta_events(first)
            async for delta in deltas:
                if self._marks_tokens and self._can_continue_elsewhere(delta):
                    yield stream_marks.handover_mark(self._why(delta).message)
                    return
                if chunk := self._delta_events(delta):
                    yield chunk
                if delta.finish_reason in _BROKEN:
                    broken = True
                    break
        if self._stream_usage and not broken:
            last = self._format.envelope([], streamed=True) | {"usage": self._usage()}
            yield self._dialect.chunk(self._with_model_fields(last))
        yield self._dialect.end()

    def _opening(self) -> bytes:
        """The events before the first text; a resumed stream has sent them already, for all answers."""
        chunks = b""
        for index, writer in self._writers.items():
            opening = writer.opening()
            if self._is_resumed:
                self._replay(writer, opening, self._before.get(index))
                continue
            for number, choice in enumerate(opening):
                chunks += self._event(choice, with_prompt=index == number == 0, is_opening=True)
        return chunks

    def _replay(self, writer: ChoiceWriter, opening: list[dict[str, Any]], before: Delta | None) -> None:
        """Restore the state that the writer and the dialect had on the other replica."""
        if before is not None:
            said = [*opening, *writer.piece(before)]
            self._dialect.replay([self._chunk(choice) for choice in said], len(before.token_ids))

    def _delta_events(self, delta: Delta) -> bytes:
        """The events of a delta; nothing while text is held back."""
        if delta.finish_reason in _BROKEN:
            return self._dialect.failure(self._why(delta))
        choices = self._writers[delta.index].piece(delta)
        if self._wants_token_ids and not choices and delta.token_ids:
            choices = [{"index": delta.index, **self._empty_delta(), "finish_reason": None}]
        if self._wants_token_ids and choices:
            choices[0] = self._with_ids(choices[0], delta.token_ids)
        events = b"".join(self._event(choice) for choice in choices)
        if self._marks_tokens and (events or delta.token_ids):
            ended = delta.finish_reason is not None
            events += stream_marks.tokens_mark(delta.index, delta.token_ids, ended=ended)
        return events

    def _empty_delta(self) -> dict[str, Any]:
        return {"text": ""} if self._format.route == "completions" else {"delta": {}}

    def _event(self, choice: dict[str, Any], *, with_prompt: bool = False, is_opening: bool = False) -> bytes:
        return self._dialect.chunk(self._chunk(choice, with_prompt=with_prompt, is_opening=is_opening))

    def _chunk(self, choice: dict[str, Any], *, with_prompt: bool = False, is_opening: bool = False) -> dict[str, Any]:
        chunk = self._format.envelope([choice], streamed=True)
        if with_prompt:
            chunk = self._with_prompt_ids(chunk)
        if self._stream_usage:
            continuous = self._body.stream_options and self._body.stream_options.continuous_usage_stats
            usage = self._usage() if continuous else None
            if usage is not None and is_opening:  # the role is no token
                usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
            chunk["usage"] = usage
        return self._with_model_fields(chunk)

    def _with_ids(self, choice: dict[str, Any], token_ids: tuple[int, ...]) -> dict[str, Any]:
        return choice | {"token_ids": token_ids} if self._wants_token_ids else choice

    def _with_prompt_ids(self, whole: dict[str, Any]) -> dict[str, Any]:
        """Add vLLM's `prompt_token_ids` to a chat where requested; completions have them in each choice."""
        if not self._body.return_token_ids or self._format.route == "completions":
            return whole
        return whole | {"prompt_token_ids": self._prompts[0].token_ids}

    # --- deltas of the engine

    async def _all_deltas(self) -> AsyncGenerator[Delta, None]:
        if len(self._parts) == 1:
            source = self._deltas(self._parts[0])
        else:
            source = merged([self._deltas(part) for part in self._parts])
        try:
            async with aclosing(source) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            await self.abandon()  # requests whose deltas were never read

    async def _deltas(self, part: _Part) -> AsyncGenerator[Delta, None]:
        """The deltas of one engine request; writes its record when they end, also after an error."""
        try:
            async with aclosing(part.generation.deltas()) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self._end(part)

    # --- failures, usage, records

    def _can_continue_elsewhere(self, delta: Delta) -> bool:
        """Whether an answer ended because of this replica, so that another one can continue it."""
        if delta.finish_reason is FinishReason.HANDED_OVER:
            return True
        return delta.finish_reason in _BROKEN and self._why(delta).status == _UNAVAILABLE

    def _why(self, delta: Delta) -> ApiError:
        if delta.finish_reason is FinishReason.OUT_OF_MEMORY:
            return unavailable("this replica ran out of memory; the request may be sent again")
        part = next(p for p in self._parts if any(c.index == delta.index for c in p.generation.choices))
        return self._replica.why_it_failed(part.request.id, delta.error)

    def _failure(self, last: Delta) -> ApiError | None:
        """The error response for an answer that did not end by itself; None for STOP and LENGTH."""
        match last.finish_reason:
            case FinishReason.STOP | FinishReason.LENGTH:
                return None
            case FinishReason.TIMEOUT:
                return ApiError(504, "the deadline of the request has passed")
            case _:
                return self._why(last)

    def _with_model_fields(self, body: dict[str, Any]) -> dict[str, Any]:
        return body | {"model": self._served.name, "system_fingerprint": self._served.fingerprint(self._replica)}

    def _usage(self) -> dict[str, Any]:
        """The token usage; each prompt is counted once, whatever `n` is."""
        prompt, completion = self._finished_elsewhere
        prompt += sum(part.generation.prompt_tokens for part in self._parts if part.counts_prompt)
        completion += sum(part.generation.completion_tokens for part in self._parts)
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(part.generation.cached_tokens for part in self._parts)},
        }
        reasoning = [count for writer in self._writers.values() if (count := writer.reasoning_tokens) is not None]
        return usage | ({"completion_tokens_details": {"reasoning_tokens": sum(reasoning)}} if reasoning else {})

    def _end(self, part: _Part) -> None:
        if part.ended:
            return
        part.ended = True
        self._replica.closed(part.request.id)
        record = replace(
            part.generation.record(),
            tenant=part.request.tenant,
            adapter=self._served.name if self._served.digest else "",
        )
        self._metrics.ended(record)
        began = record.scheduled_at or record.finished_at
        log.info(
            "request",
            request_id=self._http.state.request_id,
            id=part.request.id,
            route=self._format.route,
            model=self._served.name,
            tenant=part.request.tenant,
            stream=bool(self._body.stream),
            n=record.n,
            prompt_tokens=record.prompt_tokens,
            cached_tokens=record.cached_tokens,
            completion_tokens=record.completion_tokens,
            finish_reason=str(record.finish_reason),
            prepare_seconds=between(record.arrived, record.queued_at),
            queue_seconds=between(record.queued_at, began),
            prefill_seconds=between(record.scheduled_at, record.first_token_at),
            decode_seconds=between(record.first_token_at, record.last_token_at),
            total_seconds=between(record.arrived, record.finished_at),
        )
        if self._accounts < MOST_FOUND:  # a request with many prompts must not displace the others' accounts
            self._accounts += 1
            keep_account(
                self._replica,
                self._http,
                record,
                id=part.request.id,
                route=self._format.route,
                model=self._served.name,
                is_streamed=bool(self._body.stream),
            )
