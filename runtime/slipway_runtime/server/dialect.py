"""How an API writes the answers of a chat on the wire: OpenAI's chat as they are, other APIs translated from them.

The engine's side of a request makes chat chunks and chat completions; a dialect turns each into the events and bodies
of its own API. It is the only state of a stream that belongs to the API, so one generation path serves all of them.
"""

from typing import Any, Protocol

from slipway_runtime.server.errors import ApiError
from slipway_runtime.server.sse import DONE, event


class Dialect(Protocol):
    """Writes one response; a new one is made for each request."""

    repeats: bool  # whether the last events depend on earlier ones, so that a resumed stream needs all of them

    def whole(self, completion: dict[str, Any]) -> dict[str, Any]:
        """The body of an answer in one piece."""

    def chunk(self, chunk: dict[str, Any]) -> bytes:
        """The events of one chat chunk."""

    def replay(self, chunks: list[dict[str, Any]], tokens: int) -> None:
        """Take over a stream that another replica began: `chunks` hold the `tokens` that the client has."""

    def failure(self, error: ApiError) -> bytes:
        """The events of a stream that failed after its first event."""

    def end(self) -> bytes:
        """The events behind the last chunk, also behind a failure."""


class OpenAIChunks:
    """Chat completions and completions as OpenAI writes them."""

    repeats = False

    def whole(self, completion: dict[str, Any]) -> dict[str, Any]:
        """The body as it is."""
        return completion

    def chunk(self, chunk: dict[str, Any]) -> bytes:
        """One event with the chunk."""
        return event(chunk)

    def replay(self, chunks: list[dict[str, Any]], tokens: int) -> None:
        """No event depends on an earlier one."""

    def failure(self, error: ApiError) -> bytes:
        """One event with the error."""
        return event(error.body())

    def end(self) -> bytes:
        """`[DONE]`."""
        return DONE
