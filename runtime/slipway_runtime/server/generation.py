"""Turns the engine's outputs of a request into text deltas: detokenization, stop strings, and the request's record.

The engine knows tokens only. When a stop string is complete, the engine is asked to finish the answer; tokens that it
has computed beyond are neither sent nor counted.
"""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Protocol

from slipway_runtime.engine.detokenizer import Detokenizer, StopStrings
from slipway_runtime.messages import FinishReason, Output, TokenLogprobs


class Outputs(Protocol):
    """The output stream of one engine request."""

    def __aiter__(self) -> AsyncIterator[Output]: ...

    def finish(self, index: int | None = None) -> None:
        """Finish the answer `index`, whose text is complete; None: all answers."""

    async def aclose(self) -> None:
        """Cancel the request: its reader has gone."""


@dataclass(frozen=True)
class Delta:
    """Text and tokens that one step added to one answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or token of the client that ended the answer
    error: str = ""
    index: int = 0  # index of the answer in the response
    logprobs: tuple[TokenLogprobs, ...] = ()  # parallel to token_ids, when asked for
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # in the first delta, when asked for
    text_ends: tuple[int, ...] = ()  # for each token but the last: the length of the text with it


@dataclass(frozen=True, kw_only=True)
class Record:
    """Numbers of one finished request, for metrics and the access log. Never its text."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    draft_tokens: int = 0  # verified for its answers
    accepted_tokens: int = 0  # of these
    preemptions: int = 0  # of all its answers
    max_tokens: int
    finish_reason: FinishReason
    arrived: float
    queued_at: float | None  # None, as the next ones, where the request ended before
    scheduled_at: float | None
    first_token_at: float | None
    last_token_at: float | None
    finished_at: float
    n: int = 1
    longest_answer: int = 0  # tokens of the longest of its answers
    tenant: str = ""
    adapter: str = ""  # name of the adapter


def describe_record(record: Record, **names: str) -> dict[str, Any]:
    """The account of a request in this replica, with these names: what took how long, in seconds."""
    began = record.scheduled_at or record.finished_at
    started = time.time() - (record.finished_at - record.arrived)
    return {
        **names,
        "startedAt": datetime.fromtimestamp(started, UTC).isoformat(),
        "tenant": record.tenant,
        "adapter": record.adapter,
        "promptTokens": record.prompt_tokens,
        "cachedTokens": record.cached_tokens,
        "outputTokens": record.completion_tokens,
        "draftTokens": record.draft_tokens,
        "acceptedTokens": record.accepted_tokens,
        "preemptions": record.preemptions,
        "finish": str(record.finish_reason),
        "prepareSeconds": between(record.arrived, record.queued_at),
        "queueSeconds": between(record.queued_at, began),
        "prefillSeconds": between(record.scheduled_at, record.first_token_at),
        "decodeSeconds": between(record.first_token_at, record.last_token_at),
        "totalSeconds": between(record.arrived, record.finished_at),
    }


def between(start: float | None, end: float | None) -> float | None:
    """Seconds between two times, rounded to 0.1 ms; None if one is missing."""
    return round(end - start, 4) if start is not None and end is not None else None


class Choice:
    """One answer: turns its tokens into text, and finds stop strings."""

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        stops: StopStrings,
        *,
        min_tokens: int = 0,
        include_stop: bool = False,
        eos_token_ids: frozenset[int] = frozenset(),
        only_scores: bool = False,
    ) -> None:
        self.index = index
        self.completion_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._detokenizer = detokenizer
        self._stops = stops
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._eos = eos_token_ids
        self._only_scores = only_scores  # the one token that the engine samples is not part of the answer

    def take(self, output: Output) -> Delta:
        """The delta of one output of the engine."""
        ends: list[int] = []
        if self._only_scores:
            ended = output.finish_reason
            sampled = FinishReason.LENGTH if ended in {FinishReason.STOP, FinishReason.LENGTH} else ended
            delta = Delta("", (), sampled, error=output.error)
        else:
            delta = self._read(output, ends)
        self.finish_reason = delta.finish_reason
        return replace(
            delta,
            index=self.index,
            logprobs=output.logprobs[: len(delta.token_ids)],
            prompt_logprobs=output.prompt_logprobs,
            text_ends=tuple(ends),
        )

    def _read(self, output: Output, ends: list[int]) -> Delta:
        text, taken = "", 0
        for token_id in output.token_ids:
            if taken:
                ends.append(len(text))
            taken += 1
            self.completion_tokens += 1
            # The token that ended the answer (end-of-sequence or stop token) is counted, but is not text.
            if taken == len(output.token_ids) and token_id == output.stop_token_id:
                break
            piece = self._detokenizer.push(token_id)
            if self.completion_tokens <= self._min_tokens:
                text += piece  # before min_tokens: this text cannot be part of a stop string
                continue
            released = self._stops.push(piece)
            text += released.text
            if released.stop is not None:
                text += released.stop if self._include_stop else ""
                return Delta(text, output.token_ids[:taken], FinishReason.STOP, released.stop)
        if output.finish_reason is None:
            return Delta(text, output.token_ids)
        return self._end(output, text)

    def _end(self, output: Output, text: str) -> Delta:
        assert output.finish_reason is not None
        released = self._stops.push(self._detokenizer.flush())
        text += released.text
        if released.stop is not None:
            text += released.stop if self._include_stop else ""
            return Delta(text, output.token_ids, FinishReason.STOP, released.stop)
        named = output.stop_token_id if output.stop_token_id not in self._eos else None
        return Delta(text + self._stops.flush(), output.token_ids, output.finish_reason, named, error=output.error)


class Generation:
    """Turns the outputs of one request into deltas; `record()` then returns its numbers."""

    def __init__(
        self,
        outputs: Outputs,
        choices: Sequence[Choice],
        *,
        prompt_tokens: int,
        max_tokens: int,
        arrived: float,
        clock: Callable[[], float],
        on_output: Callable[[float], None],
        known: Delta | None = None,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        self.draft_tokens = self.accepted_tokens = 0
        self.choices = choices  # in the order of the engine's indices
        self._outputs = outputs
        self._max_tokens = max_tokens
        self._arrived = arrived
        self._clock = clock
        self._on_output = on_output  # seconds between two outputs of an answer
        self._known = known  # the last delta of an answer that is complete without the engine
        self._queued_at: float | None = None
        self._scheduled_at: float | None = None
        self._first_token_at: float | None = None
        self._last_token_at: dict[int, float] = {}
        self._preemptions: dict[int, int] = {}  # of the answers that were preempted

    @property
    def completion_tokens(self) -> int:
        """Tokens of all answers so far."""
        return sum(choice.completion_tokens for choice in self.choices)

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Yield a Delta for each output of an answer; the last one of an answer has its finish reason."""
        try:
            if self._known is not None:
                yield self._known
                return
            async for output in self._outputs:
                choice = self.choices[output.index]
                if choice.finish_reason is not None:
                    continue  # the answer has finished; the engine had sent this before
                self._note_times(output)
                delta = choice.take(output)
                is_over = all(choice.finish_reason is not None for choice in self.choices)
                if delta.finish_reason is not None and output.finish_reason is None:
                    self._outputs.finish(None if is_over else output.index)
                yield delta
                if is_over:
                    return
        finally:
            # Reached also when the client disconnects: only this frees the KV blocks.
            await self._outputs.aclose()

    async def aclose(self) -> None:
        """Cancel the request, also where its deltas were never read."""
        await self._outputs.aclose()

    def record(self) -> Record:
        """The record of the request, after its end."""
        reasons = [choice.finish_reason or FinishReason.CANCELLED for choice in self.choices]
        broken = [reason for reason in reasons if reason not in {FinishReason.STOP, FinishReason.LENGTH}]
        return Record(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
            draft_tokens=self.draft_tokens,
            accepted_tokens=self.accepted_tokens,
            preemptions=sum(self._preemptions.values()),
            max_tokens=self._max_tokens,
            finish_reason=(broken or reasons)[-1],
            arrived=self._arrived,
            queued_at=self._queued_at,
            scheduled_at=self._scheduled_at,
            first_token_at=self._first_token_at,
            last_token_at=max(self._last_token_at.values(), default=None),
            finished_at=self._clock(),
            n=len(self.choices),
            longest_answer=max(choice.completion_tokens for choice in self.choices),
        )

    def _note_times(self, output: Output) -> None:
        now = self._clock()
        if self._queued_at is None:
            self._queued_at = output.queued_at
        if self._scheduled_at is None and output.scheduled_at is not None:
            self._scheduled_at = output.scheduled_at
            self.cached_tokens = output.cached_tokens
        self.draft_tokens += output.draft_tokens
        self.accepted_tokens += output.accepted_tokens
        if output.preemptions:
            self._preemptions[output.index] = output.preemptions
        if not output.token_ids:
            return
        if self._first_token_at is None:
            self._first_token_at = now  # when the first token can be sent to the client
        if (before := self._last_token_at.get(output.index)) is not None:
            self._on_output(now - before)
        self._last_token_at[output.index] = now
