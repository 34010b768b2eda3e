"""Copies a share of the requests to a revision that gets no user's requests, and drops the answers, counted.

A copy leaves only after the user's own answer has begun, so it can neither delay nor change it: it has a budget of its
own of concurrency and memory, shared fairly between services, is never retried, and is not made while the memory of
bodies is short. Its outcome counts for the mirrored revision (`outcomes`). Where temperature is 0 both answers are kept
until they end, up to 64 KiB each, and compared: `slipway_gateway_mirrored_total` counts the same and the different.
"""

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from slipway_api.names import HEADER_REQUEST_ID
from slipway_gateway.fleet import Fleet
from slipway_gateway.outcomes import Outcomes
from slipway_gateway.picker.endpoints import Endpoint, Route
from slipway_gateway.shares import SharedCapacity
from slipway_gateway.upstream import FirstByteWait, SilentError, Upstream, UpstreamError, answers_for_other

MAX_COPIES: Final = 64  # at once, over all services
MAX_BYTES: Final = 64 << 20  # of their requests and of the answers that are compared
COMPARED_BYTES: Final = 64 * 1024  # of an answer; longer ones are not compared
COPY_SECONDS: Final = 300.0  # for a whole copy; and for the user's answer to end after it

ANSWERED, SAME, DIFFERENT, FAILED, SKIPPED = "answered", "same", "different", "failed", "skipped"


class Capture:
    """The beginning of a user's answer, kept for the comparison with the copy's."""

    __slots__ = ("_pieces", "_size", "ended")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0
        self.ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()  # whether it ended properly

    def add(self, piece: bytes) -> None:
        """Keep a piece, within the limit."""
        self._size += len(piece)
        if self._size <= COMPARED_BYTES:
            self._pieces.append(piece)

    def end(self, *, is_whole: bool) -> None:
        """No more pieces come."""
        if not self.ended.done():
            self.ended.set_result(is_whole and self._size <= COMPARED_BYTES)

    def content(self) -> bytes:
        """All that was kept."""
        return b"".join(self._pieces)


class Mirror:
    """Makes copies of requests and counts their outcomes."""

    def __init__(
        self,
        fleet: Fleet,
        upstream: Upstream,
        outcomes: Outcomes,
        *,
        count: Callable[[str, str, str], None],
        has_room: Callable[[], bool],
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`count` is called with service, revision and what became of a copy; `has_room`: memory is not short."""
        self._fleet = fleet
        self._upstream = upstream
        self._outcomes = outcomes
        self._count = count
        self._has_room = has_room
        self._draw = draw
        self._copies = SharedCapacity(MAX_COPIES)
        self._bytes = SharedCapacity(MAX_BYTES)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> int:
        """Copies that have not ended."""
        return len(self._tasks)

    def copy(
        self,
        route: Route,
        revision: str,
        path: str,
        body: Callable[[Endpoint], bytes],
        headers: Mapping[str, str],
        *,
        is_stream: bool,
        is_comparable: bool,
    ) -> Capture | None:
        """Copy a request that `revision` has begun to answer, if its share says so; the capture of that answer, if any.

        `body` makes the content for an endpoint, which may call the model by another name.
        """
        for mirrored, percent in route.service.mirrors.items():
            if mirrored != revision and self._draw() * 100 < percent:
                return self._start(route, mirrored, path, body, headers, is_stream, is_comparable)
        return None

    async def close(self) -> None:
        """End all copies."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(
        self,
        route: Route,
        revision: str,
        path: str,
        body: Callable[[Endpoint], bytes],
        headers: Mapping[str, str],
        is_stream: bool,
        is_comparable: bool,
    ) -> Capture | None:
        service = route.service.key
        endpoint = self._least_loaded(route, revision)
        content = body(endpoint) if endpoint is not None else b""
        size = len(content) + 2 * COMPARED_BYTES
        if endpoint is None or not self._has_room() or not self._copies.take(service, 1):
            self._count(service, revision, SKIPPED)
            return None
        if not self._bytes.take(service, size):
            self._copies.give_back(service, 1)
            self._count(service, revision, SKIPPED)
            return None
        capture = Capture() if is_comparable else None
        task = asyncio.create_task(
            self._send(endpoint, path, content, copied_headers(headers), capture, is_stream=is_stream)
        )
        self._tasks.add(task)

        def ended(_task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self._copies.give_back(service, 1)
            self._bytes.give_back(service, size)

        task.add_done_callback(ended)
        return capture

    def _least_loaded(self, route: Route, revision: str) -> Endpoint | None:
        endpoints = [one for one in route.ready if one.revision == revision]
        return min(endpoints, key=lambda one: self._fleet.load(one).tokens, default=None)

    async def _send(
        self,
        endpoint: Endpoint,
        path: str,
        content: bytes,
        headers: Mapping[str, str],
        capture: Capture | None,
        *,
        is_stream: bool,
    ) -> None:
        """Send the copy, read its answer to the end, and count what became of it."""
        try:
            async with asyncio.timeout(COPY_SECONDS):
                answer = await self._read_answer(endpoint, path, content, headers, is_stream=is_stream)
                what = ANSWERED
                if answer is None:
                    what = FAILED
                elif capture is not None and await capture.ended and len(answer) <= COMPARED_BYTES:
                    what = SAME if text_of(answer) == text_of(capture.content()) else DIFFERENT
        except TimeoutError:
            what = FAILED
        self._count(endpoint.service, endpoint.revision, what)

    async def _read_answer(
        self, endpoint: Endpoint, path: str, content: bytes, headers: Mapping[str, str], *, is_stream: bool
    ) -> bytes | None:
        """The beginning of the answer, a little more than is compared; None: it failed."""
        deadline = asyncio.get_running_loop().time() + COPY_SECONDS
        wait = FirstByteWait(deadline, SilentError, "timed out: no first byte")
        sent = time.monotonic()
        kept = b""
        ttft, events, status = None, 0, 0
        try:
            with self._fleet.lease(endpoint, len(content), wait.move) as lease:
                async with self._upstream.attempt(endpoint, path, content, headers, wait) as reply:
                    lease.answered()
                    status, kept = reply.status, reply.first
                    if answers_for_other(endpoint, reply):
                        return None
                    if status == 429 or (status == 503 and "Retry-After" in reply.headers):
                        return None  # it is full or drains: that is no fault, and says nothing of its answers
                    pace = None
                    if is_stream and status == 200:
                        ttft = reply.first_at - sent
                        pace = self._outcomes.pace(endpoint.service, endpoint.revision, reply.first_at)
                    while piece := await reply.read_more():
                        count = piece.count(b"\n\n")
                        events += count
                        if pace is not None:
                            pace.add(count)
                        if len(kept) <= COMPARED_BYTES:
                            kept += piece
            is_error = status >= 500
        except UpstreamError:
            is_error = True
        self._outcomes.record(
            endpoint.service, endpoint.revision, is_error=is_error, ttft_seconds=ttft, output_tokens=events
        )
        return kept if status == 200 and not is_error else None


class _Part(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Part | None = None
    message: _Part | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] | None = None  # None: of another API


_decode = msgspec.json.Decoder(_Answer).decode


def text_of(answer: bytes) -> dict[int, str] | None:
    """The text of each choice of an answer, streamed or whole; None: it cannot be read, or is of another API."""
    bodies = [answer]
    if answer.lstrip().startswith(b"data:"):
        lines = (line for line in answer.splitlines() if line.startswith(b"data:"))
        bodies = [data for line in lines if (data := line[5:].strip()) != b"[DONE]"]
    texts: dict[int, str] = {}
    try:
        for body in bodies:
            choices = _decode(body).choices
            if choices is None:
                return None
            for choice in choices:
                part = choice.delta or choice.message
                texts[choice.index] = texts.get(choice.index, "") + (choice.text or (part and part.content) or "")
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return texts


def copied_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of the request, under an id that tells the copy from it in all logs."""
    return {**headers, HEADER_REQUEST_ID: f"{headers.get(HEADER_REQUEST_ID, '')}-copy"}
