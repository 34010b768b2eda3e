"""Output stream of one request: it ends after the final outputs, and aborts the request when it is closed early.

While its outputs are not read, the request is paused; the few outputs that were on their way then still come in.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Final

from slipway_runtime.messages import FinishReason, Output

PAUSE_UNREAD: Final = 256  # outputs of each answer that wait to be read; with so many, the request is paused
RESUME_UNREAD: Final = 64  # and goes on when no more are left
TOO_SLOW: Final = "the reader of this stream is too slow"


class OutputStream(AsyncIterator[Output]):
    """Yields the outputs of one request.

    Each of the request's `n` answers ends with one Output that has a finish reason; after the last of these the
    stream ends. Closing it early aborts the answers that still run.
    """

    def __init__(
        self,
        request_id: str,
        n: int,
        abort: Callable[[FinishReason, int | None], None],
        pause: Callable[[bool], None],
    ) -> None:
        self.request_id = request_id
        self.paused = False
        self._n = n
        self._pause = pause
        self.open = set(range(n))  # answers that the engine still works on
        self._unread_ends = n  # answers whose last Output was not read yet
        self._abort = abort
        self._outputs: deque[Output] = deque()
        self._wake = asyncio.Event()

    @property
    def unread(self) -> int:
        """How many outputs wait to be read: what a slow reader costs."""
        return len(self._outputs)

    def put(self, output: Output) -> None:
        """Queue the next output; called by the client. Outputs of an answer that has ended are dropped."""
        if output.index not in self.open:
            return
        if output.finish_reason is not None:
            self.open.discard(output.index)
        self._outputs.append(output)
        self._wake.set()
        if self.open and not self.paused and len(self._outputs) >= PAUSE_UNREAD * self._n:
            self.paused = True
            self._pause(True)

    def end_unread(self, reason: FinishReason) -> None:
        """End a request that was not read for too long: its outputs are dropped, and a late reader gets an error."""
        if not self.open:
            return
        index = min(self.open)
        self._outputs.clear()
        self._outputs.append(Output(request_id=self.request_id, index=index, finish_reason=reason, error=TOO_SLOW))
        self._unread_ends = 1
        self.open.clear()
        self._wake.set()
        self._abort(reason, None)

    def _go_on_if_read(self) -> None:
        if self.paused and len(self._outputs) <= RESUME_UNREAD * self._n:
            self.paused = False
            if self.open:
                self._pause(False)

    def put_end(self, reason: FinishReason, error: str, now: float, index: int | None = None) -> None:
        """End one answer, or all that are open, with a final output made here."""
        for each in sorted(self.open) if index is None else [index]:
            self.put(Output(request_id=self.request_id, index=each, finish_reason=reason, error=error, finished_at=now))

    async def __anext__(self) -> Output:
        while not self._outputs:
            if not self._unread_ends:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        output = self._outputs.popleft()
        if output.finish_reason is not None:
            self._unread_ends -= 1
        self._go_on_if_read()
        return output

    def finish(self, index: int | None = None) -> None:
        """End an answer, or all, because its text is complete (a stop string): counted as finished, not as aborted.

        Nothing more of that answer is yielded, not even its end: the caller knows it.
        """
        if index is None:
            self._close(FinishReason.STOP)
            return
        unread = [output for output in self._outputs if output.index == index]
        self._outputs = deque(output for output in self._outputs if output.index != index)
        if index in self.open or any(output.finish_reason is not None for output in unread):
            self._unread_ends -= 1
            self._wake.set()
        if index in self.open:
            self.open.discard(index)
            self._abort(FinishReason.STOP, index)
        self._go_on_if_read()

    async def aclose(self) -> None:
        """End the request if it still runs: its reader went away."""
        self._close(FinishReason.CANCELLED)

    def _close(self, reason: FinishReason) -> None:
        self._outputs.clear()
        self._unread_ends = 0
        self._wake.set()
        if self.open:
            self.open.clear()
            self._abort(reason, None)

    async def __aenter__(self) -> "OutputStream":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
