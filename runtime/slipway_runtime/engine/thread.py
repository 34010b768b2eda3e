"""The engine in a thread of the API process: for tests and tiny machines, where a second process is not worth it."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from slipway_runtime.engine.loop import Engine, StepLoop
from slipway_runtime.messages import EngineFacts, EngineStats, Message, StepReport

_T = TypeVar("_T")


class EngineThread:
    """A Transport to an engine in this process."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self.facts: EngineFacts = engine.facts
        self.first_stats: EngineStats = engine.stats(clock())
        self._loop = StepLoop(engine, clock)
        self._thread: threading.Thread | None = None

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
