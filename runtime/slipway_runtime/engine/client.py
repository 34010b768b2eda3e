"""Client of the engine, on the API side: sends requests and returns streams of outputs, with one message a step.

    client = EngineClient(transport)
    await client.start()
    async with client.generate(request) as outputs:
        async for output in outputs:
            ...

The step loop runs in a process of its own or in a thread beside the event loop; callers do not see which.
Everything here runs on the event loop.

The client measures the engine's steps, from when the engine has work until the report arrives. A step that takes longer
than any other so far may be a long prompt on a slow machine, or an engine that hangs. So what counts as too long
follows the longest step of the last minutes, beginning with the widest one of the warm-up. A step that was too long by
that measure was a hang, which must not make the next one harder to find; unless the step after it is as slow.
"""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from slipway_runtime.engine.stream import OutputStream
from slipway_runtime.messages import (
    Abort,
    AdapterStatus,
    EngineFacts,
    EngineStats,
    FinishReason,
    LoadAdapter,
    Message,
    Pause,
    Ping,
    Reply,
    Request,
    ResetPrefixCache,
    Sleep,
    StepReport,
    TextBlockChanges,
    UnloadAdapter,
    WakeUp,
)
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


class Transport(Protocol):
    """A loaded engine, wherever it runs. All methods are called on the event loop, and call back on it."""

    on_pulse: Callable[[], None]
    """Called twice a second while the engine's process runs; never for an engine in a thread."""

    @property
    def facts(self) -> EngineFacts:
        """What was loaded."""

    @property
    def first_stats(self) -> EngineStats:
        """The statistics before the first step."""

    def start(self, on_report: Callable[[StepReport], None], on_death: Callable[[str], None]) -> None:
        """Begin to step. `on_death` is called once, with a sentence, when the loop ends without being asked to."""

    def send(self, message: Message) -> None:
        """Hand over a message; the engine takes it before its next step. Never blocks, keeps the order."""

    async def stop(self) -> None:
        """End the step loop, whatever runs. Idempotent."""


WINDOW_SECONDS: Final = 300.0  # a step is remembered for one to two of these
LONGEST_STEPS: Final = 4.0  # limit of a step, in multiples of the longest so far: attention grows with the context
STALL_SECONDS: Final = 6.0


class StepTimes:
    """The time of the last report, the longest step of the last minutes, and the limit for the next step."""

    def __init__(self, widest: float, clock: Callable[[], float], stall_seconds: float = STALL_SECONDS) -> None:
        """`widest`: seconds of the widest step of the warm-up, which is never forgotten.

        stall_seconds: how much longer than a multiple of the longest step the next one may take.
        """
        self._clock = clock
        self._stall_seconds = stall_seconds
        self._widest = widest
        self._too_long = 0.0  # seconds of the last step, if it exceeded the limit
        self._recent = self._earlier = 0.0  # the longest of this window, and of the one before
        self._window_ends = clock() + WINDOW_SECONDS
        self._work_since = clock()
        self.reported_at = clock()
        """When the engine last reported a step."""
        self.pulsed_at: float | None = None
        """When the engine's process last showed that it runs; None: it never did."""

    @property
    def longest(self) -> float:
        """Seconds of the longest step that is remembered."""
        return max(self._widest, self._recent, self._earlier)

    @property
    def limit(self) -> float:
        """Seconds that a step may take before the engine counts as stalled."""
        return self._stall_seconds + LONGEST_STEPS * self.longest

    @property
    def waiting_since(self) -> float:
        """When the wait for the present step began, where there is work."""
        return max(self.reported_at, self._work_since)

    def pulsed(self) -> None:
        """Note that the engine's process runs, whatever its step loop does."""
        self.pulsed_at = self._clock()

    def work_came(self) -> None:
        """Note that the engine has work, after it had none."""
        self._work_since = self._clock()

    def reported(self) -> None:
        """Note that the engine reported a step."""
        now = self._clock()
        if now >= self._window_ends:
            self._earlier, self._recent = self._recent, 0.0
            self._window_ends = now + WINDOW_SECONDS
        step = now - self.waiting_since
        # A hang ends with one late report; the steps of a prompt that is slow to compute follow each other.
        normal = step if step <= self.limit else min(step, self._too_long)
        self._too_long = step if step > self.limit else 0.0
        self._recent = max(self._recent, normal)
        self.reported_at = now


__all__ = [
    "Call",
    "Draining",
    "EngineClient",
    "EngineDead",
    "EngineError",
    "OutputStream",
    "Overloaded",
    "QueueLimits",
    "Refused",
]

PAUSED_SECONDS = 60.0  # that a request may wait for its reader, with its blocks; then it is cancelled
DRAIN_RETRY_SECONDS = 1.0  # another replica can take the request at once
Call = LoadAdapter | UnloadAdapter | ResetPrefixCache | Ping | Sleep | WakeUp


class EngineClient:
    """Sends requests to the engine and its outputs to their callers.

    - `generate` raises before anything is queued: Refused, Overloaded (with the time to retry), Draining,
      EngineDead. Afterwards the stream always ends with one Output that has a finish reason for each answer.
    - Closing a stream early aborts its request: the blocks are free when the next step begins.
    - A stream that is not read is paused: nothing is computed for it, and after `paused_seconds` it is cancelled.
    - `call` sends a control message, such as LoadAdapter, and waits for its reply.
    - When the engine dies, every stream gets an ERROR output, every call raises, `alive` turns false and `error`
      says why.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        limits: QueueLimits | None = None,
        paused_seconds: float = PAUSED_SECONDS,
        stall_seconds: float = STALL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.facts = transport.facts
        self.error: str = ""
        self.adapters: tuple[AdapterStatus, ...] = ()  # all known adapters, as last reported
        self.on_step: Callable[[EngineStats], None] | None = None  # called with the statistics of each step
        self.on_text_blocks: Callable[[TextBlockChanges], None] = lambda _: None
        self._transport = transport
        self._clock = clock
        self._admission = Admission(limits or QueueLimits(), transport.facts.max_num_seqs)
        self._streams: dict[str, OutputStream] = {}
        self._paused_seconds = paused_seconds
        self._paused: dict[str, asyncio.TimerHandle] = {}  # by request: cancels it unless its reader resumes
        self._sent: deque[int] = deque()  # prompt tokens of each request that the engine has not counted yet
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._next_call = itertools.count(1)
        self.times = StepTimes(transport.facts.widest_step_seconds, clock, stall_seconds)
        transport.on_pulse = lambda: self.times.pulsed()
        self._draining = False
        self._asleep = False  # from the moment that Sleep is sent: order is kept, so no request follows it
        self._drained = asyncio.Event()
        self._stats = transport.first_stats
        self._sent_count = self._stats.admitted
        self._started = False
        self._dead = asyncio.Event()

    # --- life

    async def start(self) -> None:
        """Start the step loop."""
        self._transport.start(self._on_report, self._on_death)
        self._started = True

    async def stop(self) -> None:
        """End the step loop; requests that still run are cancelled. Idempotent."""
        if self._started:
            self._started = False
            await self._transport.stop()
        self._end_all(FinishReason.CANCELLED, "")

    @property
    def alive(self) -> bool:
        """Whether the step loop runs."""
        return self._started and not self.error

    async def wait_dead(self) -> None:
        """Return when the step loop has died: `error` says why."""
        await self._dead.wait()

    # --- requests

    def generate(self, request: Request) -> OutputStream:
        """Queue a request; the stream yields its outputs, step by step.

        Raises Refused, Overloaded, Draining or EngineDead at once, here and not at the first output.
        """
        self._raise_if_dead()
        if self._draining:
            raise Draining("this replica is draining", DRAIN_RETRY_SECONDS)
        if self._asleep:
            raise Draining("this replica sleeps", DRAIN_RETRY_SECONDS)
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
        stream = OutputStream(
            request.id,
            request.n,
            lambda reason, index: self._closed_by_reader(request.id, reason, index),
            lambda on: self._pause(request, on),
        )
        if stats.running + stats.waiting <= stats.paused:
            self.times.work_came()
        self._transport.send(request)  # first: a request that cannot be encoded must leave nothing behind
        self._streams[request.id] = stream
        # The engine counts a request once for each of its answers; its prompt is computed once.
        self._sent.extend([len(request.prompt_token_ids), *(0 for _ in range(1, request.n))])
        self._sent_count += request.n
        return stream

    def abort(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request; its stream gets the final outputs at once. Unknown and finished ids are ignored."""
        stream = self._forget(request_id)
        if stream is None:
            return
        stream.put_end(reason, "", self._clock())
        self._transport.send(Abort(request_id, reason))
        self._note_if_drained()

    async def call(self, message: Call) -> Reply:
        """Send a control message and wait for its reply, whose `error` says why it failed, if it did.

        The number of the message is set here. Raises EngineDead.
        """
        self._raise_if_dead()
        if (stats := self.stats()).running + stats.waiting <= stats.paused:
            self.times.work_came()
        number = next(self._next_call)
        self._calls[number] = asyncio.get_running_loop().create_future()
        asleep, self._asleep = self._asleep, self._asleep or isinstance(message, Sleep)
        self._transport.send(msgspec.structs.replace(message, call=number))
        try:
            reply = await self._calls[number]
        finally:
            del self._calls[number]
        if isinstance(message, Sleep) and reply.error:
            self._asleep = asleep
        elif isinstance(message, WakeUp) and not reply.error:
            self._asleep = False
        return reply

    # --- statistics

    def stats(self) -> EngineStats:
        """The statistics after the last step, with the requests that the engine has not counted yet."""
        on_their_way = len(self._sent)
        if not on_their_way and not self._paused:
            return self._stats
        return msgspec.structs.replace(
            self._stats,
            admitted=self._stats.admitted + on_their_way,
            waiting=self._stats.waiting + on_their_way,
            paused=sum(len(self._streams[request_id].open) for request_id in self._paused),
            waiting_tokens=self._stats.waiting_tokens + sum(self._sent),
        )

    # --- drain

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._draining

    def drain(self) -> None:
        """Refuse new requests; earlier ones finish. Idempotent."""
        self._draining = True
        self._note_if_drained()

    def undrain(self) -> None:
        """Accept requests again. Idempotent."""
        self._draining = False
        self._drained.clear()

    async def wait_drained(self) -> None:
        """Return when the engine drains and no request is left."""
        await self._drained.wait()

    # --- from the step loop, on the event loop

    def _on_report(self, report: StepReport) -> None:
        self.times.reported()
        self._stats = report.stats
        for _ in range(len(self._sent) - (self._sent_count - report.stats.admitted)):
            self._sent.popleft()
        self._admission.observe(report.stats, self._clock())
        if report.adapters is not None:
            self.adapters = report.adapters
        if self.on_step is not None:
            self.on_step(report.stats)
        if report.text_blocks is not None:
            self.on_text_blocks(report.text_blocks)
        for output in report.outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue  # closed while the step ran
            stream.put(output)
            if not stream.open:
                self._forget(output.request_id)
        for reply in report.replies:
            waiting = self._calls.get(reply.call)
            if waiting is not None and not waiting.done():
                waiting.set_result(reply)
        self._note_if_drained()

    def _on_death(self, error: str) -> None:
        self.error = error
        self._end_all(FinishReason.ERROR, error)
        self._dead.set()

    def _closed_by_reader(self, request_id: str, reason: FinishReason, index: int | None) -> None:
        stream = self._streams.get(request_id)
        if stream is None:
            return
        if not stream.open:
            self._forget(request_id)
        self._transport.send(Abort(request_id, reason, index))
        self._note_if_drained()

    def _pause(self, request: Request, on: bool) -> None:
        """Pause a request whose reader has fallen behind, or resume it."""
        if request.id not in self._streams:
            return
        self._transport.send(Pause(request.id, on))
        if not on:
            if (stats := self.stats()).running + stats.waiting <= stats.paused:
                self.times.work_came()
            self._paused.pop(request.id).cancel()
            return
        # The engine may not step meanwhile, so the deadline is watched here.
        left = request.deadline - self._clock() if request.deadline is not None else self._paused_seconds
        seconds, reason = min((self._paused_seconds, FinishReason.CANCELLED), (max(left, 0.0), FinishReason.TIMEOUT))
        stream = self._streams[request.id]
        self._paused[request.id] = asyncio.get_running_loop().call_later(seconds, stream.end_unread, reason)

    def _forget(self, request_id: str) -> OutputStream | None:
        timer = self._paused.pop(request_id, None)
        if timer is not None:
            timer.cancel()
        return self._streams.pop(request_id, None)

    def _end_all(self, reason: FinishReason, error: str) -> None:
        streams = [stream for request_id in list(self._streams) if (stream := self._forget(request_id)) is not None]
        for stream in streams:
            stream.put_end(reason, error, self._clock())
        for waiting in self._calls.values():
            if not waiting.done():
                waiting.set_exception(EngineDead(error or "the engine is not running"))
        self._note_if_drained()

    def _raise_if_dead(self) -> None:
        if not self.alive:
            raise EngineDead(self.error or "the engine is not running")

    def _note_if_drained(self) -> None:
        if self._draining and not self._streams:
            self._drained.set()
