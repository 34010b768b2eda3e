"""Splits a stream into whole server-sent events, so that a broken stream can end with an error event of the gateway.

Whole events pass through untouched and at once. Only the torn half of an event waits for its other half: a client
that had it could not parse the error event after it.
"""

from typing import Final

import msgspec

DONE: Final = b"data: [DONE]"
ERROR_PREFIX: Final = b'data: {"error"'
EVENT_ENDS: Final = (b"\n\n", b"\r\n\r\n")
MAX_PENDING: Final = 1 << 20  # an event longer than this is let through in pieces


class EventSplitter:
    """Cuts a byte stream after its last complete event, and records whether it ended properly."""

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

    @property
    def is_complete(self) -> bool:
        """Whether the stream said how it ended: with [DONE], or with an error event of the runtime."""
        if self._torn:
            return False
        last = self._last.rstrip().replace(b"\r\n", b"\n").rsplit(b"\n\n", 1)[-1]
        return last.startswith((DONE, ERROR_PREFIX))


def error_event(message: str, kind: str, code: int) -> bytes:
    """The last event of a stream that could not be finished."""
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
