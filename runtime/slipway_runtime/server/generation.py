"""One request from its prompt to its last character: text as it becomes certain, and the record of what happened.

The engine speaks in tokens; stop strings, characters and the wire's reasons are this side's. When a stop string
completes, the engine is told to finish; tokens that it computed beyond are neither sent nor counted.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from slipway_runtime.engine.detokenizer import Detokenizer, StopStrings
from slipway_runtime.messages import FinishReason, Output


class Outputs(Protocol):
    """The engine's side of one request."""

    def __aiter__(self) -> AsyncIterator[Output]: ...

    def finish(self) -> None:
        """The text is complete."""

    async def aclose(self) -> None:
        """The reader went away."""


@dataclass(frozen=True)
class Delta:
    """What one step added to an answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or token that ended it, when the client named it
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One finished request in numbers: for metrics and for the access log. Never its text."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    max_tokens: int
    finish_reason: FinishReason
    arrived: float
    queued_at: float | None  # these three stay empty when it ended before reaching them
    scheduled_at: float | None
    first_token_at: float | None
    last_token_at: float | None
    finished_at: float


class Generation:
    """Turns the outputs of one request into deltas; afterwards `record()` says what happened."""

    def __init__(
        self,
        outputs: Outputs,
        detokenizer: Detokenizer,
        stops: StopStrings,
        *,
        prompt_tokens: int,
        max_tokens: int,
        min_tokens: int,
        include_stop: bool,
        eos_token_ids: frozenset[int],
        arrived: float,
        clock: Callable[[], float],
        on_output: Callable[[float], None],
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._outputs = outputs
        self._detokenizer = detokenizer
        self._stops = stops
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens
        self._include_stop = include_stop
        self._eos = eos_token_ids
        self._arrived = arrived
        self._clock = clock
        self._on_output = on_output  # seconds between two outputs
        self._queued_at: float | None = None
        self._scheduled_at: float | None = None
        self._first_token_at: float | None = None
        self._last_token_at: float | None = None

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Yield one Delta for each step that brought something; the last one has the finish reason."""
        try:
            async for output in self._outputs:
                delta = self._take(output)
                if delta.finish_reason is not None:
                    self.finish_reason = delta.finish_reason
                    if output.finish_reason is None:
                        self._outputs.finish()
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            # Reached also when the client goes away in the middle: only this frees the KV blocks.
            await self._outputs.aclose()

    def interrupt(self, reason: FinishReason) -> None:
        """It ends here, for a reason that is not the engine's."""
        self.finish_reason = reason

    def record(self) -> Record:
        """What happened, once it has ended."""
        return Record(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
            max_tokens=self._max_tokens,
            finish_reason=self.finish_reason or FinishReason.CANCELLED,
            arrived=self._arrived,
            queued_at=self._queued_at,
            scheduled_at=self._scheduled_at,
            first_token_at=self._first_token_at,
            last_token_at=self._last_token_at,
            finished_at=self._clock(),
        )

    def _take(self, output: Output) -> Delta:
        self._note_times(output)
        text, taken = "", 0
        for token_id in output.token_ids:
            taken += 1
            self.completion_tokens += 1
            # The token that ended it is counted, but it is not text: neither end-of-sequence nor a stop token.
            if taken == len(output.token_ids) and token_id == output.stop_token_id:
                break
            piece = self._detokenizer.push(token_id)
            if self.completion_tokens <= self._min_tokens:
                text += piece  # too early to stop: what was said by then cannot be part of a stop string
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

    def _note_times(self, output: Output) -> None:
        now = self._clock()
        if self._queued_at is None:
            self._queued_at = output.queued_at
        if self._scheduled_at is None and output.scheduled_at is not None:
            self._scheduled_at = output.scheduled_at
            self.cached_tokens = output.cached_tokens
        if not output.token_ids:
            return
        if self._first_token_at is None:
            self._first_token_at = now  # when it can be sent, which is what a client waits for
        else:
            assert self._last_token_at is not None
            self._on_output(now - self._last_token_at)
        self._last_token_at = now
