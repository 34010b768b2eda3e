"""Splits a stream into whole server-sent events, so that a broken one can end with an error event or go on elsewhere.

Whole events pass through untouched and at once. Only the torn half of an event waits for its other half: a client
that had it could not parse the error event after it. In a stream with marks (`stream_marks`) events wait for the mark
that says which tokens they were made of: replica and gateway write both at once, so they mostly arrive together.
"""

import re
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

    @property
    def failure(self) -> str:
        """Why the replica could not finish the stream; empty: it reported no failure."""


class EventSplitter:
    """Cuts a byte stream after its last complete event, and records whether it ended properly."""

    handover = ""
    failure = ""

    def __init__(self) -> None:
        self.events = 0
        self._torn = bytearray()  # at most MAX_PENDING, and searched once
        self._last = b""

    def feed(self, chunk: bytes) -> bytes:
        """The part of the stream that may go out now; mostly `chunk` itself."""
        if self._torn:
            seam = bytes(self._torn[-3:]) + chunk
            if len(self._torn) + len(chunk) <= MAX_PENDING and not any(end in seam for end in EVENT_ENDS):
                self._torn += chunk
                return b""
            chunk = bytes(self._torn) + chunk
            self._torn = bytearray()
        if not chunk.endswith(EVENT_ENDS):
            cut = max(chunk.rfind(end) + len(end) if end in chunk else 0 for end in EVENT_ENDS)
            if len(chunk) - cut <= MAX_PENDING:
                chunk, self._torn = chunk[:cut], bytearray(chunk[cut:])
        if chunk:
            self.events += sum(chunk.count(end) for end in EVENT_ENDS)
            self._last = chunk
        return chunk

    def finish(self) -> bytes:
        """Drops an incomplete trailing event."""
        return b""

    @property
    def is_complete(self) -> bool:
        """Whether the stream said how it ended: with [DONE], or with an error event of the runtime."""
        return not self._torn and says_its_end(self._last)


class MarkedEvents:
    """Lets the events of a stream with marks out, and takes the marks out of it.

    `on_tokens` gets each mark: the answer's index, its new token ids as they were written, whether the answer ended.
    `on_held` gets the number of bytes that wait for a mark; False: there is no room for them. A stream that would hold
    more than MAX_PENDING bytes, or for which there is no room, is forwarded event by event from then on, without a
    handover: the replica may be any engine that a tenant chooses.
    """

    failure = ""

    def __init__(
        self,
        answers: int,
        on_tokens: Callable[[int, bytes, bool], None],
        on_held: Callable[[int], bool] = lambda _: True,
    ) -> None:
        """`answers`: so many have not ended yet."""
        self.events = 0
        self.handover = ""
        self._open_answers = answers
        self._on_tokens = on_tokens
        self._on_held = on_held
        self._held = bytearray()  # not covered by a mark yet
        self._whole = 0  # bytes of it that are whole events: no mark begins in them
        self._last = b""
        self._unmarked: EventSplitter | None = None  # of the rest of a stream that was given up

    def feed(self, chunk: bytes) -> bytes:
        """The events that a mark covers; the usage and whatever else follows the last answer, once it is complete."""
        if self._unmarked is not None:
            return self._pass(chunk)
        if not self._held and (mark := TOKENS_MARK.search(chunk)) is not None and mark.end() == len(chunk):
            self._note(mark)  # the usual case: events, their mark, and nothing else
            out = chunk[: mark.start()]
            self._last = out or self._last
            return out
        held, seam = self._held, max(len(self._held) - 1, 0)
        held += chunk
        out = self._covered() if held.find(b"\n\n", seam) >= 0 else b""
        self._last = out or self._last
        waiting = len(self._held)
        if waiting > MAX_PENDING or not self._on_held(waiting):
            self._unmarked = EventSplitter()
            rest, self._held = bytes(self._held), bytearray()
            return out + self._pass(rest)
        return out

    def _covered(self) -> bytes:
        """Take what may go out from the held bytes. Each byte is searched once, however small the pieces are."""
        held, covered, end = self._held, [], 0
        for mark in TOKENS_MARK.finditer(held, self._whole):
            covered.append(bytes(held[end : mark.start()]))
            end = mark.end()
            self._note(mark)
        whole = max(held.rfind(b"\n\n", end) + 2, end)
        if not self._open_answers and whole > end:
            # All or nothing: what stands behind the last answer would be said again by a replica that continues.
            last = max(held.rfind(b"\n\n", end, whole - 2) + 2, end)
            if says_its_end(bytes(held[last:whole])):
                covered.append(bytes(held[end:whole]))
                end = whole
        self._held = held[end:] if end else held
        self._whole = whole - end
        return b"".join(covered)

    def _note(self, mark: re.Match[bytes]) -> None:
        index, token_ids, ended = mark.groups()
        if token_ids:
            self.events += token_ids.count(b",") + 1
        if ended:
            self._open_answers -= 1
        self._on_tokens(int(index), bytes(token_ids), ended is not None)

    def _pass(self, chunk: bytes) -> bytes:
        """Forward events that no mark needs to cover any longer, without the marks."""
        assert self._unmarked is not None
        before = self._unmarked.events
        out = TOKENS_MARK.sub(b"", self._unmarked.feed(chunk))
        self.events += self._unmarked.events - before
        if (asked := HANDOVER_MARK.search(out)) is not None:
            self.handover = _reason(asked)
            out = out[: asked.start()]
        self._last = out or self._last
        return out

    def finish(self) -> bytes:
        """What no mark covers goes out only if it says how the stream ended; else another replica will say it."""
        held = bytes(self._held)
        if (asked := HANDOVER_MARK.search(held)) is not None:
            self.handover = _reason(asked)
            return b""
        if says_its_end(held):
            self._last, self._held = held, bytearray()
            return self._last
        return b""

    @property
    def is_complete(self) -> bool:
        """Whether the stream said how it ended: with [DONE], or with an error event of the runtime."""
        return says_its_end(self._last)


def _reason(handover: re.Match[bytes]) -> str:
    return handover[1].decode("utf-8", "replace") or "the replica goes away"


def says_its_end(events: bytes) -> bool:
    """Whether the last of these whole events is the last of its stream, or an error."""
    if not events.endswith(EVENT_ENDS):
        return False
    last = events.rstrip().replace(b"\r\n", b"\n").rsplit(b"\n\n", 1)[-1]
    return last.startswith((DONE, ERROR_PREFIX, *TYPED_ENDS))


def reports_failure(events: bytes) -> bool:
    """Whether one of these last events is an internal error of the replica; vLLM sends [DONE] after it."""
    start = events.rfind(ERROR_PREFIX)  # no text of a model can contain it: JSON escapes quotation marks
    if start < 0:
        return False
    try:
        fields = msgspec.json.decode(events[start:].removeprefix(b"data: ").partition(b"\n\n")[0])
        return bool(fields["error"]["code"] == 500)
    except (msgspec.DecodeError, KeyError, TypeError, RecursionError):
        return False


def error_event(message: str, kind: str, code: int) -> bytes:
    """The last event of a stream that could not be finished."""
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
