"""Server-sent events: one write for each step, and detection of clients that disconnect or do not read.

Headers forbid proxies to buffer (`X-Accel-Buffering`, `Cache-Control`), and the first event is sent with the first
token. After the status 200, errors are events of the stream. A client that does not read delays no other client: after
the socket's buffer is full, its outputs are counted, and above a limit its request is paused, later cancelled.

All requests are answered as chat chunks and chat completions. A dialect translates them to the events and bodies of
another API (Messages, Responses) and holds all state of a stream that is specific to it, so one generation path serves
all APIs; OpenAI's chunks are sent unchanged.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from slipway_runtime.server.errors import ApiError

_T = TypeVar("_T")

DONE: Final = b"data: [DONE]\n\n"
HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache, no-transform",
    "x-accel-buffering": "no",
}
STALL_SECONDS: Final = 60.0  # a client that reads nothing for so long counts as disconnected
_encode: Final = msgspec.json.Encoder().encode


class ClientGone(Exception):  # noqa: N818  not an error of the server
    """The client has disconnected, or does not read."""


def event(body: Mapping[str, Any]) -> bytes:
    """One event with a JSON body."""
    return b"data: " + _encode(body) + b"\n\n"


class EventStream(Response):
    """Sends events as they are generated; closes their source as soon as the client disconnects."""

    def __init__(self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str] | None = None) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self._events = events
        # Not `init_headers`: it would promise a content length.
        self.raw_headers = [(name.encode(), value.encode()) for name, value in {**HEADERS, **(headers or {})}.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the headers, then each event."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await _while_connected(self._send_all(send), receive)
        except ClientGone:
            return  # closing the events has ended the generation and written its record
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:  # closes the source after a disconnect in `send`
            async for chunk in events:
                try:
                    async with asyncio.timeout(STALL_SECONDS):
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
                except TimeoutError:
                    raise ClientGone from None  # connected, but not reading: close the connection


async def while_connected(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Await the work, but cancel it and raise ClientGone when the client disconnects first."""
    return await _while_connected(work, request.receive)


async def _while_connected(work: Coroutine[Any, Any, _T], receive: Callable[[], Awaitable[Any]]) -> _T:
    """Race the work against the disconnect message.

    The work runs in the request's own task and the watch in another, so that cancelling the request ends the work too.
    """
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if not gone:
            raise
        task.uncancel()
        raise ClientGone from None
    finally:
        watcher.cancel()


async def merged(sources: Sequence[AsyncGenerator[_T, None]]) -> AsyncGenerator[_T, None]:
    """Yield the items of all sources until all have ended; closing this closes them. Bounded read-ahead."""
    ready: asyncio.Queue[_T | None] = asyncio.Queue(maxsize=1)  # None: a source has ended

    failures: list[Exception] = []

    async def read(source: AsyncGenerator[_T, None]) -> None:
        try:
            async with aclosing(source) as items:
                async for item in items:
                    await ready.put(item)
        except Exception as error:  # noqa: BLE001  raised again in the reader
            failures.append(error)
        await ready.put(None)

    readers = [asyncio.create_task(read(source)) for source in sources]
    try:
        left = len(readers)
        while left:
            item = await ready.get()
            if failures:
                raise failures[0]
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


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
