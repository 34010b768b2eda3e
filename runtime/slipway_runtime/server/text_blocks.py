"""The feed of text blocks: which beginnings of prompts this replica has in its KV cache, for gateways.

`GET /internal/text-blocks` streams what `slipway_api.text_blocks` describes. The log keeps the last changes, so that a
gateway that comes back goes on where it was; one that is new, too late, or comes from another process gets all that is
cached now. A gateway that reads slowly costs no memory: it gets all anew when the log has moved on.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import StreamingResponse

from slipway_api import names
from slipway_api.text_blocks import HASHES_OF_LINE, HEARTBEAT_SECONDS, TextBlockUpdate
from slipway_runtime.messages import TextBlockChanges
from slipway_runtime.server.errors import ApiError

router = APIRouter()

MAX_FEEDS: Final = 64  # gateways that listen at once
MAX_KEPT_HASHES: Final = 65_536  # of changes, for gateways that come back
_NEW: Final = -1


class TextBlockLog:
    """The text blocks that are cached now, and the last changes, numbered."""

    def __init__(self, boot_id: str, *, most_hashes: int = MAX_KEPT_HASHES) -> None:
        self.feeds = 0
        self._boot_id = boot_id
        self._most_hashes = most_hashes
        self._cached: dict[int, None] = {}
        self._changes: deque[TextBlockChanges] = deque()
        self._num_hashes = 0
        self._number = 0  # of changes so far
        self._changed = asyncio.Event()
        self._is_closed = False

    def apply(self, changes: TextBlockChanges) -> None:
        """Add the changes of one engine step."""
        for one in changes.removed:
            self._cached.pop(one, None)
        self._cached |= dict.fromkeys(changes.stored)
        for start in range(0, max(len(changes.stored), len(changes.removed)), HASHES_OF_LINE):
            part = slice(start, start + HASHES_OF_LINE)
            self._changes.append(TextBlockChanges(stored=changes.stored[part], removed=changes.removed[part]))
            self._number += 1
        self._num_hashes += len(changes.stored) + len(changes.removed)
        while self._num_hashes > self._most_hashes:
            oldest = self._changes.popleft()
            self._num_hashes -= len(oldest.stored) + len(oldest.removed)
        self._wake()

    def close(self) -> None:
        """End all feeds: the process ends."""
        self._is_closed = True
        self._wake()

    def since(self, number: int) -> Iterator[TextBlockUpdate]:
        """What has changed since that number of changes; everything, where the log does not reach back so far."""
        if not self._number - len(self._changes) <= number <= self._number:
            yield from self._all()
            return
        for at in range(number + 1, self._number + 1):
            changes = self._changes[at - self._number - 1]
            yield TextBlockUpdate(self._cursor(at), changes.stored, changes.removed)

    async def follow(self, after: str) -> AsyncIterator[bytes]:
        """The lines of the feed after this cursor, until the process ends."""
        number = self._number_of(after)
        self.feeds += 1
        try:
            while not self._is_closed:
                changed = self._changed
                lines = [update.line() for update in self.since(number)]
                number = self._number
                yield b"".join(lines) or TextBlockUpdate(self._cursor(number)).line()
                try:
                    async with asyncio.timeout(HEARTBEAT_SECONDS):
                        await changed.wait()
                except TimeoutError:
                    continue
        finally:
            self.feeds -= 1

    def _all(self) -> Iterator[TextBlockUpdate]:
        cached, cursor = iter(self._cached), self._cursor(self._number)
        yield TextBlockUpdate(cursor, tuple(islice(cached, HASHES_OF_LINE)), is_reset=True)
        while hashes := tuple(islice(cached, HASHES_OF_LINE)):
            yield TextBlockUpdate(cursor, hashes)

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _cursor(self, number: int) -> str:
        return f"{self._boot_id}.{number}"

    def _number_of(self, cursor: str) -> int:
        boot_id, _, number = cursor.partition(".")
        return int(number) if boot_id == self._boot_id and number.isdecimal() and len(number) < 20 else _NEW


@router.get(names.PATH_TEXT_BLOCKS)
async def follow_text_blocks(http: Request, after: str = "") -> StreamingResponse:
    """Stream the changes of the text blocks that are cached."""
    log: TextBlockLog = http.app.state.replica.text_blocks
    if log.feeds >= MAX_FEEDS:
        raise ApiError(429, f"{log.feeds} gateways follow the text blocks already", headers={"Retry-After": "60"})
    return StreamingResponse(log.follow(after[:64]), media_type="application/x-ndjson")
