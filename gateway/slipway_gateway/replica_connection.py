"""One HTTP/1.1 connection to a replica: a protocol of ours on the event loop's transport, with llhttp as the parser.

A connection carries one request at a time. Pieces of the answer wait in a bounded buffer, or go to a function as soon
as they are read (`deliver`), without a task switch between.

| the replica sends                                      | the answer is                                              |
|--------------------------------------------------------|------------------------------------------------------------|
| a body by Content-Length, in chunks, or until it closes | complete, and broken if it ends early                      |
| 1xx before the answer                                  | not affected: interim answers are dropped; 101 is broken   |
| Content-Length with chunks, or another transfer coding | broken: two readers could see two ends of it               |
| more than MAX_OVERHEAD bytes of headers or trailers    | broken                                                     |
| something that is not HTTP                             | broken; what was parsed before it is still read            |
| bytes after the end, or between requests               | complete, and the connection is not used again             |
"""

import asyncio
from collections.abc import Callable
from typing import Final, cast

import httptools
from multidict import CIMultiDict

MAX_BUFFERED: Final = 64 * 1024  # bytes of an answer that wait for their reader; then nothing more is read
MAX_OVERHEAD: Final = 64 * 1024  # bytes that are no body: of the headers, of trailers, between two pieces
INTERIM_BYTES: Final = 64  # counted for the status line of an interim answer


class _RefusedError(Exception):
    """The answer is valid for the parser, and not for us."""


class ReplicaConnection(asyncio.Protocol):
    """A connection of the pool (`replica_pool`); `send`, then `next_piece` or `deliver` until `is_over`."""

    __slots__ = (
        "_head_size", "_is_closed", "_is_delimited", "_is_interim", "_is_paused", "_loop", "_on_close", "_overhead",
        "_parser", "_pieces", "_size", "_take", "_transport", "_waiter", "content_length", "has_answered", "has_head",
        "headers", "is_broken", "is_complete", "is_reusable", "status",
    )  # fmt: skip

    def __init__(self, on_close: Callable[["ReplicaConnection"], None]) -> None:
        """`on_close` is called once, whoever closes the connection."""
        self._loop = asyncio.get_running_loop()
        self._on_close = on_close
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._take: Callable[[bytes], bool] | None = None  # where pieces go; None: into the buffer
        self._pieces: list[bytes] = []
        self._size = 0
        self._is_paused = False
        self._is_closed = False
        self.is_complete = True  # the answer is here to its end; between two requests, too
        self._reset()

    def _reset(self) -> None:
        self._overhead = 0  # bytes read since the last piece of a body
        self._head_size = 0
        self._is_interim = False
        self._is_delimited = False  # the answer says where it ends; False: it ends with the connection
        self.has_answered = False  # anything of the answer was read
        self.has_head = False
        self.is_broken = False
        self.is_reusable = False
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self.content_length: int | None = None

    @property
    def is_closed(self) -> bool:
        """Whether no request can be sent on it any more."""
        return self._is_closed or self._transport is None or self._transport.is_closing()

    @property
    def is_over(self) -> bool:
        """Whether everything of the answer was read, and the connection can be used again."""
        if not self.is_complete or not self.is_reusable or self._pieces or self.is_closed:
            return False
        assert self._transport is not None
        return self._transport.get_write_buffer_size() == 0  # else it answered before it had read the request

    async def send(self, head: bytes, body: bytes) -> bytes | None:
        """Send a request, the last one being over; the first piece of the answer, as `next_piece`."""
        assert self._transport is not None
        assert self.is_complete
        self._reset()
        self.is_complete = False
        if len(body) < MAX_BUFFERED:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)
        del body
        return await self.next_piece()

    async def next_piece(self) -> bytes | None:
        """Everything that has been read, as soon as there is something; b"" at the end, None if it broke off."""
        while not self._pieces:
            if self.is_complete:
                return b""
            if self.is_broken:
                return None
            await self._wait()
        return self._take_pieces()

    async def deliver(self, take: Callable[[bytes], bool]) -> None:
        """Pass each piece to `take` when it is read, until it returns False, or no more come; `next_piece` tells.

        `take` must be quick. A piece that it does not take stays in the buffer. Raises what `take` raises.
        """
        while self._pieces:
            if not take(self._pieces[0]):
                return
            self._size -= len(self._pieces.pop(0))
        self._resume()
        if self.is_complete or self.is_broken:
            return
        self._take = take
        try:
            await self._wait()
        finally:
            self._take = None

    def close(self) -> None:
        """Close it now, whatever it is in the middle of; an answer that is not complete is broken."""
        self.is_broken = not self.is_complete
        self._is_closed = True
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    # The transport calls these.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        # Not asserted: uvloop's transports have the methods of an asyncio.Transport, and another base.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Parse what was read, and pass on what it has of the body."""
        if self.is_complete or self.is_broken or self._parser is None:
            self.close()  # nothing was asked for, or nobody wants the rest
            return
        self.has_answered = True
        self._overhead += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._spoil()
        if self._overhead > MAX_OVERHEAD:
            self._spoil()
        pieces, take = self._pieces, self._take
        if not pieces:
            pass
        elif take is None:
            self._bound()
        else:
            if len(pieces) > 1:
                pieces[:] = [b"".join(pieces)]
            try:
                is_taken = take(pieces[0])
            except Exception as error:  # noqa: BLE001  the task that called `deliver` raises it
                is_taken = False
                if self._waiter is not None and not self._waiter.done():
                    self._waiter.set_exception(error)
            if is_taken:
                pieces.clear()
                self._size = 0
            else:
                self._take = None
        if self._take is None or self.is_complete or self.is_broken:
            self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        """The end of an answer that ends with its connection; else whatever was awaited is lost."""
        self._is_closed = True
        self._parser = None  # it refers to this object
        if not self.is_complete and not self.is_broken:
            is_end = self.has_head and not self._is_delimited and error is None
            self.is_complete, self.is_broken = is_end, not is_end
        self._wake()
        self._on_close(self)

    # The parser calls these.

    def on_message_begin(self) -> None:
        """Refuse a second answer to one request."""
        if self.is_complete:
            raise _RefusedError

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; trailers are dropped."""
        if self.has_head:
            return
        self._head_size += len(name) + len(value)
        if self._head_size > MAX_OVERHEAD:
            raise _RefusedError
        self.headers.add(name.decode("latin-1"), value.decode("utf-8", "replace"))

    def on_headers_complete(self) -> None:
        """Learn how the body is delimited."""
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status < 200:
            if status < 100 or status == 101:
                raise _RefusedError
            self._head_size += INTERIM_BYTES
            self._is_interim = True
            self.headers = CIMultiDict()
            return
        self.status = status
        lengths, codings = self.headers.getall("content-length", ()), self.headers.getall("transfer-encoding", ())
        if codings and (lengths or len(codings) > 1 or codings[0].strip().lower() != "chunked"):
            raise _RefusedError
        if lengths:
            self.content_length = int(lengths[0])  # the parser has refused what is not one number
        self._is_delimited = bool(codings or lengths) or status in (204, 304)
        self.has_head = True

    def on_body(self, piece: bytes) -> None:
        """Keep a piece of the body until all that was read is parsed."""
        self._overhead = 0
        self._pieces.append(piece)
        self._size += len(piece)

    def on_message_complete(self) -> None:
        """The answer is complete, unless it was an interim one."""
        if self._is_interim:
            self._is_interim = False
            return
        assert self._parser is not None
        self.is_complete = True
        self.is_reusable = self._parser.should_keep_alive()

    # Own parts.

    def _bound(self) -> None:
        """Read no more while too much waits for its reader."""
        if self._size > MAX_BUFFERED and not self._is_paused and not self.is_closed:
            assert self._transport is not None
            self._transport.pause_reading()
            self._is_paused = True

    def _spoil(self) -> None:
        """Read no more: what follows is not an answer that could be believed."""
        if self.is_complete:
            self.is_reusable = False
        self.close()

    def _take_pieces(self) -> bytes:
        pieces = self._pieces
        whole = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._pieces, self._size = [], 0
        self._resume()
        return whole

    def _resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            if not self.is_closed:
                assert self._transport is not None
                self._transport.resume_reading()

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
