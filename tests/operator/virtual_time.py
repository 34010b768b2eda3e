"""An event loop whose clock jumps to the next timer: hours run in milliseconds, and always in the same order."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    """Waits for nothing: where a real selector would sleep, the clock moves on instead."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = 0.0

    def select(self, timeout: float | None = None):
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("everything waits and no timer is set: the test would hang for ever")
        if not ready and timeout:
            self.clock += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """asyncio, with a clock of its own. Real sockets do not belong here."""

    def __init__(self) -> None:
        self._virtual = _JumpingSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.clock


def run_in_virtual_time(story: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end; sleeping costs nothing."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(story)
