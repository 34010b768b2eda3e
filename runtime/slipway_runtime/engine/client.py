"""The API side's way to the engine: requests in, streams of outputs out, one message a step between them.

    client = EngineClient(engine)
    await client.start()
    async with client.generate(request) as outputs:
        async for output in outputs:
            ...

Today the step loop runs in a thread beside the event loop; callers see nothing of that, so it may become a process.
Everything here runs on the event loop.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import TracebackType

import msgspec

from slipway_runtime.engine.thread import Engine, StepThread
from slipway_runtime.messages import EngineStats, FinishReason, Output, Request, StepReport
from slipway_runtime.scheduling.admission import (
    Admission,
    Draining,
    EngineDead,
    EngineError,
    Overloaded,
    QueueLimits,
    Refused,
    refuse_impossible,
)

__all__ = [
    "Draining",
    "Engine",
    "EngineClient",
    "EngineDead",
    "EngineError",
    "OutputStream",
    "Overloaded",
    "QueueLimits",
    "Refused",
]

DRAIN_RETRY_SECONDS = 1.0  # another replica can take the request at once


class EngineClient:
    """Hands requests to the engine and its outputs to whoever asked.

    - `generate` raises before anything is queued: Refused, Overloaded (with the time to come back), Draining,
      EngineDead. Afterwards the stream always ends with exactly one Output that has a finish reason.
    - Closing a stream early aborts its request: the blocks are free when the next step begins.
    - When the step loop dies, every stream gets an ERROR output, `alive` turns false and `error` says why.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        limits: QueueLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.facts = engine.facts
        self.error: str = ""
        self._clock = clock
        self._admission = Admission(limits or QueueLimits(), engine.facts.max_num_seqs)
        self._streams: dict[str, OutputStream] = {}
        self._sent: deque[int] = deque()  # prompt tokens of each request that the engine has not counted yet
        self._draining = False
        self._drained = asyncio.Event()
        self._stats = engine.stats(clock())
        self._sent_count = self._stats.admitted
        self._thread = StepThread(engine, clock)
        self._started = False
        self._dead = asyncio.Event()
        self.on_step: Callable[[EngineStats], None] | None = None  # told of each step's numbers, for histograms

    # --- life

    async def start(self) -> None:
        """Start the step loop."""
        self._thread.start(asyncio.get_running_loop(), self._on_report, self._on_death)
        self._started = True

    async def stop(self) -> None:
        """End the step loop; what still runs is cancelled. Idempotent."""
        if self._started:
            self._started = False
            self._thread.stop()
            await asyncio.to_thread(self._thread.join)
        self._end_all(FinishReason.CANCELLED, "")

    @property
    def alive(self) -> bool:
        """Whether the step loop runs."""
        return self._started and not self.error

    async def wait_dead(self) -> None:
        """Return when the step loop has died: `error` says of what."""
        await self._dead.wait()

    # --- requests

    def generate(self, request: Request) -> "OutputStream":
        """Queue a request; the stream yields what each step brought for it.

        Raises Refused, Overloaded, Draining or EngineDead at once, here and not at the first output.
        """
        if not self.alive:
            raise EngineDead(self.error or "the engine is not running")
        if self._draining:
            raise Draining("this replica is draining", DRAIN_RETRY_SECONDS)
        if request.id in self._streams:
            raise Refused(f"a request with the id {request.id!r} is running")
        refuse_impossible(request, self.facts)
        stats = self.stats()
        self._admission.admit(
            waiting=stats.waiting,
            waiting_tokens=stats.waiting_tokens,
            prompt_tokens=len(request.prompt_token_ids),
            now=self._clock(),
        )
        stream = OutputStream(request.id, self)
        self._streams[request.id] = stream
        self._sent.append(len(request.prompt_token_ids))
        self._sent_count += 1
        self._thread.send(request)
        return stream

    def abort(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request; its stream gets its last Output at once. Unknown and finished ids are ignored."""
        stream = self._streams.pop(request_id, None)
        if stream is None:
            return
        stream.put(Output(request_id=request_id, finish_reason=reason, finished_at=self._clock()))
        self._thread.send((request_id, reason))
        self._note_if_drained()

    # --- numbers

    def stats(self) -> EngineStats:
        """The numbers after the last step, with the requests that are still on their way to the engine."""
        on_their_way = len(self._sent)
        if not on_their_way:
            return self._stats
        return msgspec.structs.replace(
            self._stats,
            admitted=self._stats.admitted + on_their_way,
            waiting=self._stats.waiting + on_their_way,
            waiting_tokens=self._stats.waiting_tokens + sum(self._sent),
        )

    # --- drain

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._draining

    def drain(self) -> None:
        """Refuse new requests; those that are in finish. Idempotent."""
        self._draining = True
        self._note_if_drained()

    def undrain(self) -> None:
        """Take requests again. Idempotent."""
        self._draining = False
        self._drained.clear()

    async def wait_drained(self) -> None:
        """Return when a drain has nothing left to wait for."""
        await self._drained.wait()

    # --- from the step loop, on the event loop

    def _on_report(self, report: StepReport) -> None:
        self._stats = report.stats
        for _ in range(len(self._sent) - (self._sent_count - report.stats.admitted)):
            self._sent.popleft()
        self._admission.observe(report.stats, self._clock())
        if self.on_step is not None:
            self.on_step(report.stats)
        for output in report.outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue  # closed while the step ran
            if output.finish_reason is not None:
                del self._streams[output.request_id]
            stream.put(output)
        self._note_if_drained()

    def _on_death(self, error: str) -> None:
        self.error = error
        self._end_all(FinishReason.ERROR, error)
        self._dead.set()

    def _end_all(self, reason: FinishReason, error: str) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.put(
                Output(request_id=stream.request_id, finish_reason=reason, error=error, finished_at=self._clock())
            )
        self._note_if_drained()

    def _note_if_drained(self) -> None:
        if self._draining and not self._streams:
            self._drained.set()


class OutputStream(AsyncIterator[Output]):
    """The outputs of one request. Ends after the Output with a finish reason; close it early to abort."""

    def __init__(self, request_id: str, client: EngineClient) -> None:
        self.request_id = request_id
        self._client = client
        self._outputs: deque[Output] = deque()
        self._wake = asyncio.Event()
        self._ended = False

    def put(self, output: Output) -> None:
        """Hand in the next output; called by the client."""
        self._outputs.append(output)
        self._wake.set()

    async def __anext__(self) -> Output:
        while not self._outputs:
            if self._ended:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        output = self._outputs.popleft()
        if output.finish_reason is not None:
            self._ended = True
        return output

    def finish(self) -> None:
        """End the request because its text is complete (a stop string): counted as finished, not as aborted."""
        self._close(FinishReason.STOP)

    async def aclose(self) -> None:
        """End the request if it still runs: its reader went away."""
        self._close(FinishReason.CANCELLED)

    def _close(self, reason: FinishReason) -> None:
        if not self._ended:
            self._ended = True
            self._client.abort(self.request_id, reason)
            self._outputs.clear()

    async def __aenter__(self) -> "OutputStream":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
