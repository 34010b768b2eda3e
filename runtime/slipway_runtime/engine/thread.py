"""The step loop in a thread of the API process: takes messages between steps, reports each step with one call."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

from slipway_runtime.messages import EngineFacts, EngineStats, FinishReason, Request, StepReport

_T = TypeVar("_T")
Message = Request | tuple[str, FinishReason]


class Engine(Protocol):
    """What the step loop needs of an engine. Only the step loop's thread calls these."""

    @property
    def facts(self) -> EngineFacts:
        """What was loaded."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""

    def add(self, request: Request, now: float) -> None:
        """Put a request into the queue."""

    def abort(self, request_id: str, reason: FinishReason, now: float) -> None:
        """End a request wherever it is; its blocks are free before the next step computes."""

    def step(self, now: float) -> StepReport:
        """Schedule, compute, update."""

    def idle(self) -> None:
        """Called once whenever the work runs out."""

    def stats(self, now: float) -> EngineStats:
        """The numbers as they are now."""


class StepThread:
    """Runs an engine's steps, and sleeps when there is no work."""

    def __init__(self, engine: Engine, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._clock = clock
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(
        self,
        loop: asyncio.AbstractEventLoop,
        on_report: Callable[[StepReport], None],
        on_death: Callable[[str], None],
    ) -> None:
        """Start stepping; both functions are called on the event loop."""
        self._thread = threading.Thread(target=self._run, args=(loop, on_report, on_death), name="engine", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Hand over a request, or the end of one, before the next step."""
        self._inbox.put(message)

    def stop(self) -> None:
        """End after the step that runs."""
        self._inbox.put(None)

    def join(self) -> None:
        """Wait for the end."""
        if self._thread is not None:
            self._thread.join()

    def _run(
        self,
        loop: asyncio.AbstractEventLoop,
        on_report: Callable[[StepReport], None],
        on_death: Callable[[str], None],
    ) -> None:
        try:
            while self._take_messages():
                report = self._engine.step(self._clock())
                _call(loop, on_report, report)
                if not self._engine.has_work:
                    self._engine.idle()
        except Exception as error:  # noqa: BLE001  whatever ended the loop, the streams must hear of it
            _call(loop, on_death, f"{type(error).__name__}: {error}")

    def _take_messages(self) -> bool:
        """Pass on what came in, waiting for it when there is nothing to do; False when it is time to stop."""
        wait = not self._engine.has_work
        while True:
            try:
                message = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            if message is None:
                return False
            if isinstance(message, Request):
                self._engine.add(message, self._clock())
            else:
                self._engine.abort(*message, self._clock())


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[_T], None], value: _T) -> None:
    with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody listens any more
        loop.call_soon_threadsafe(function, value)
