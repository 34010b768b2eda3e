"""The step loop: takes messages between steps, reports each step with one call, and sleeps when there is no work.

It runs in the engine process (process.py), or, for tests and tiny machines, in a thread of the API process.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from slipway_runtime.messages import Abort, EngineFacts, EngineStats, FinishReason, Message, Request, StepReport


class Engine(Protocol):
    """What the step loop needs of an engine. Only the thread of the loop calls these."""

    @property
    def facts(self) -> EngineFacts:
        """What was loaded."""

    @property
    def has_work(self) -> bool:
        """Whether a step would compute or report anything."""

    def attach(self, wake: Callable[[], None]) -> None:
        """Set the callback with which the engine's own threads wake the step loop."""

    def add(self, request: Request, now: float) -> None:
        """Put a request into the queue."""

    def abort(self, request_id: str, reason: FinishReason, now: float, index: int | None = None) -> None:
        """End a request, or one of its answers, wherever it is; its blocks are free before the next step computes."""

    def control(self, message: Message, now: float) -> None:
        """Begin what a control message asks for; the reply comes with the report of a step."""

    def step(self, now: float) -> StepReport:
        """Run one step: schedule, compute, update."""

    def idle(self) -> None:
        """Called once whenever the work runs out."""

    def stats(self, now: float) -> EngineStats:
        """The current statistics."""


class StepLoop:
    """Runs an engine's steps on the thread that calls `run`; the other methods may be called from any thread."""

    def __init__(self, engine: Engine, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._clock = clock
        self._inbox: queue.SimpleQueue[Message | _Stop | _Wake] = queue.SimpleQueue()
        engine.attach(lambda: self._inbox.put(_Wake()))

    def send(self, message: Message) -> None:
        """Hand over a message before the next step."""
        self._inbox.put(message)

    def stop(self, error: Exception | None = None) -> None:
        """End after the step that runs; with an error, `run` raises it."""
        self._inbox.put(_Stop(error))

    def run(self, report: Callable[[StepReport], None]) -> None:
        """Step until `stop`; whatever the engine raises ends the loop."""
        while self._take_messages():
            report(self._engine.step(self._clock()))
            if not self._engine.has_work:
                self._engine.idle()

    def _take_messages(self) -> bool:
        """Pass messages to the engine, waiting for one when there is no work; False after `stop`."""
        while True:
            try:
                message = self._inbox.get(block=not self._engine.has_work)
            except queue.Empty:
                return True
            match message:
                case _Stop(error):
                    if error is not None:
                        raise error
                    return False
                case _Wake():
                    pass
                case Request():
                    self._engine.add(message, self._clock())
                case Abort():
                    self._engine.abort(message.request_id, message.reason, self._clock(), message.index)
                case _:
                    self._engine.control(message, self._clock())


@dataclass(frozen=True)
class _Stop:
    """Message: end the loop."""

    error: Exception | None


class _Wake:
    """Message: look whether there is work."""


_T = TypeVar("_T")


class EngineThread:
    """A Transport to an engine in this process."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self.facts: EngineFacts = engine.facts
        self.first_stats: EngineStats = engine.stats(clock())
        self._loop = StepLoop(engine, clock)
        self._thread: threading.Thread | None = None
        self.on_pulse: Callable[[], None] = lambda: None  # never called: a thread cannot stop alone

    def start(self, on_report: Callable[[StepReport], None], on_death: Callable[[str], None]) -> None:
        """Start stepping; both functions are called on the event loop."""
        loop = asyncio.get_running_loop()

        def run() -> None:
            try:
                self._loop.run(lambda report: _call(loop, on_report, report))
            except Exception as error:  # noqa: BLE001  whatever ended the loop, the streams must get the error
                _call(loop, on_death, f"{type(error).__name__}: {error}")

        self._thread = threading.Thread(target=run, name="engine", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Hand over a message before the next step."""
        self._loop.send(message)

    async def stop(self) -> None:
        """End after the step that runs."""
        if self._thread is not None:
            self._loop.stop()
            await asyncio.to_thread(self._thread.join)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[_T], None], value: _T) -> None:
    with contextlib.suppress(RuntimeError):  # the event loop is closed: no stream is read any more
        loop.call_soon_threadsafe(function, value)
