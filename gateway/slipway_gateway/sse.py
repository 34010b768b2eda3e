"""Splits a stream into whole server-sent events, so that a broken one can end with an error event or go on elsewhere.

Whole events pass through untouched and at once. Only the torn half of an event waits for its other half: a client
that had it could not parse the error event after it. In a stream with marks (`stream_marks`) events wait for the mark
that says which tokens they were made of: replica and gateway write both at once, so they mostly arrive together.
"""

from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from slipway_api.stream_marks import HANDOVER_MARK, TOKENS_MARK

DONE: Final = b"data: [DONE]"
ERROR_PREFIX: Final = b'data: {"error"'
# The last events of the APIs whose events have types.
TYPED_ENDS: Final = (
    b"event: message_stop", b"event: response.completed", b"event: response.incomplete", b"event: response.failed",
    b"event: error",
)  # fmt: skip
EVENT_ENDS: Final = (b"\n\n", b"\r\n\r\n")
MAX_PENDING: Final = 1 << 20  # an event longer than this is let through in pieces


class Events(Protocol):
    """What a stream of a replica becomes for a client."""

    events: int  # so far; of a stream with marks, tokens

    def feed(self, chunk: bytes) -> bytes:
        """The part of the stream that may go out now."""

    def finish(self) -> bytes:
        """What may go out after the last byte."""

    @property
    def is_complete(self) -> bool:
        """Whether the stream said how it ended."""

    @property
    def handover(self) -> str:
        """Why another replica shall continue the stream; empty: the replica did not ask for it."""


class EventSplitter:
    """Cuts a byte stream after its last complete event, and records whether it ended properly."""

    handover = ""

    def __init__(self) -> None:
        self.events = 0
        self._torn = b""
        self._last = b""

    def feed(self, chunk: bytes) -> bytes:
        """The part of the stream that may go out now; mostly `chunk` itself."""
        if self._torn:
            chunk = self._torn + chunk
            self._torn = b""
        if not chunk.endswith(EVENT_ENDS):
            cut = max(chunk.rfind(end) + len(end) if end in chunk else 0 for end in EVENT_ENDS)
            if len(chunk) - cut <= MAX_PENDING:
                chunk, self._torn = chunk[:cut], chunk[cut:]
        if chunk:
            self.events += sum(chunk.count(end) for end in EVENT_ENDS)
            self._last = chunk
        return chunk

    def finish(self) -> bytes:
        """Half an event is no event."""
        return b""

    @property
    def is_complete(self) -> bool:
        """Whether the stream said how it ended: with [DONE], or with an error event of the runtime."""
        return not self._torn and says_its_end(self._last)


class MarkedEvents:
    """Lets the events of a stream with marks out, and takes the marks out of it.

    `on_tokens` gets each mark: the answer's index, its new token ids as they were written, whether the answer ended.
    """

    def __init__(self, answers: int, on_tokens: Callable[[int, bytes, bool], None]) -> None:
        """`answers`: so many have not ended yet."""
        self.events = 0
        self.handover = ""
        self._open_answers = answers
        self._on_tokens = on_tokens
        self._held = b""  # not covered by a mark yet
        self._last = b""

    def feed(self, chunk: bytes) -> bytes:
        """The events that a mark covers; the usage and whatever else follows the last answer, once it is complete."""
        if self._held:
            chunk = self._held + chunk
        covered, end = [], 0
        for mark in TOKENS_MARK.finditer(chunk):
            covered.append(chunk[end : mark.start()])
            end = mark.end()
            index, token_ids, ended = mark.groups()
            if token_ids:
                self.events += token_ids.count(b",") + 1
            if ended:
                self._open_answers -= 1
            self._on_tokens(int(index), token_ids, ended is not None)
        if not self._open_answers:
            # All or nothing: what stands behind the last answer would be said again by a replica that continues.
            whole = chunk.rfind(b"\n\n", end) + 2
            if whole >= end + 2 and says_its_end(chunk[end:whole]):
                covered.append(chunk[end:whole])
                end = whole
        self._held = chunk[end:]
        out = b"".join(covered)
        self._last = out or self._last
        return out

    def finish(self) -> bytes:
        """What no mark covers goes out only if it says how the stream ended; else another replica will say it."""
        if (asked := HANDOVER_MARK.search(self._held)) is not None:
            self.handover = asked[1].decode("utf-8", "replace") or "the replica goes away"
            return b""
        if says_its_end(self._held):
            self._last, self._held = self._held, b""
            return self._last
        return b""

    @property
    def is_complete(self) -> bool:
        """Whether the stream said how it ended: with [DONE], or with an error event of the runtime."""
        return says_its_end(self._last)


def says_its_end(events: bytes) -> bool:
    """Whether the last of these whole events is the last of its stream, or an error."""
    if not events.endswith(EVENT_ENDS):
        return False
    last = events.rstrip().replace(b"\r\n", b"\n").rsplit(b"\n\n", 1)[-1]
    return last.startswith((DONE, ERROR_PREFIX, *TYPED_ENDS))


def error_event(message: str, kind: str, code: int) -> bytes:
    """The last event of a stream that could not be finished."""
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
