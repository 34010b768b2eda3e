"""Dialects translate chat completions and chunks to the events and bodies of another API (Messages, Responses).

All requests are answered as chat chunks and chat completions; OpenAI's are sent unchanged. The dialect holds all state
of a stream that is specific to its API, so one generation path serves all APIs.
"""

from typing import Any, Protocol

from slipway_runtime.server.errors import ApiError
from slipway_runtime.server.sse import DONE, event


class Dialect(Protocol):
    """Translates one response; each request has its own dialect object."""

    repeats: bool  # whether the last events depend on earlier ones, so that a resumed stream must replay all of them

    def whole(self, completion: dict[str, Any]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""

    def chunk(self, chunk: dict[str, Any]) -> bytes:
        """The events of one chat chunk."""

    def replay(self, chunks: list[dict[str, Any]], tokens: int) -> None:
        """Restore the state of a stream of another replica: `chunks` hold the `tokens` that the client has."""

    def failure(self, error: ApiError) -> bytes:
        """The events of a stream that failed after its first event."""

    def end(self) -> bytes:
        """The events after the last chunk, also after a failure."""


class OpenAIChunks:
    """OpenAI's format for chat completions and completions: no translation."""

    repeats = False

    def whole(self, completion: dict[str, Any]) -> dict[str, Any]:
        """The body as it is."""
        return completion

    def chunk(self, chunk: dict[str, Any]) -> bytes:
        """One event with the chunk."""
        return event(chunk)

    def replay(self, chunks: list[dict[str, Any]], tokens: int) -> None:
        """Does nothing: no event depends on an earlier one."""

    def failure(self, error: ApiError) -> bytes:
        """One event with the error."""
        return event(error.body())

    def end(self) -> bytes:
        """The event `[DONE]`."""
        return DONE
