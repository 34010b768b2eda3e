"""Watches the step loop of an engine: for how long a step that is due has not come.

A step is due while the engine has requests. An idle engine gets a ping every few seconds, whose answer is due, so that
a hanging engine is found before the first request. The allowed time of a step grows with the longest step so far
(`StepTimes`): a prompt of 30,000 tokens on a CPU is slow, and does not hang.

The engine's process also sends a pulse twice a second, from a thread that a long step does not hold up. A process that
is stopped sends none, so it is found after `PULSE_LIMIT_SECONDS`, however long its steps may take.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from slipway_runtime.engine.client import EngineClient, EngineDead
from slipway_runtime.messages import Ping

PING_AFTER_SECONDS: Final = 2.0  # without a step, and without work
PULSE_LIMIT_SECONDS: Final = 2.5  # without a pulse: five are missing
PULSE_CONFIRM_SECONDS: Final = 1.0  # this process may have been late itself: pulses that wait are read by then


class StepWatch:
    """The time since the last step of one engine, where a step is due."""

    def __init__(self, engine: EngineClient, clock: Callable[[], float], *, hang_seconds: float) -> None:
        self.hang_seconds = hang_seconds
        self._engine = engine
        self._clock = clock
        self._busy_since = 0.0
        self._ping: asyncio.Task[None] | None = None
        self._pinged_at = 0.0
        self._missed: tuple[float, float] | None = None  # a pulse that was late, and when that was seen first

    @property
    def longest_stall(self) -> float:
        """Seconds that a step may take before the engine counts as stalled; at most `hang_seconds`."""
        return min(self._engine.times.limit, self.hang_seconds)

    @property
    def is_stalled(self) -> bool:
        """Whether a step takes longer than it may, or the engine's process does not run."""
        return self.silent_seconds() > self.longest_stall or self.stopped_seconds() > 0

    def stopped_seconds(self) -> float:
        """Seconds for which the engine's process has not run; 0: it runs, or may run.

        Found by the second of two looks, at least `PULSE_CONFIRM_SECONDS` apart, without a pulse between them.
        """
        pulsed_at, now = self._engine.times.pulsed_at, self._clock()
        if pulsed_at is None or now - pulsed_at <= PULSE_LIMIT_SECONDS:
            self._missed = None
            return 0.0
        if self._missed is None or self._missed[0] != pulsed_at:
            self._missed = pulsed_at, now
        return now - pulsed_at if now - self._missed[1] >= PULSE_CONFIRM_SECONDS else 0.0

    @property
    def hangs(self) -> bool:
        """Whether no step came for so long that none of the engine's requests will finish."""
        return self.silent_seconds() > self.hang_seconds

    def silent_seconds(self) -> float:
        """Seconds without a step although one was due; 0 where none is due."""
        times, now, stats = self._engine.times, self._clock(), self._engine.stats()
        if self._ping is not None and not self._ping.done():
            return max(0.0, now - max(times.reported_at, self._pinged_at))
        if stats.running + stats.waiting > stats.paused:
            return max(0.0, now - max(stats.last_step_at, times.waiting_since, self._busy_since))
        if now - times.reported_at > PING_AFTER_SECONDS:
            self._pinged_at, self._ping = now, asyncio.create_task(self._send_ping())
        return 0.0

    def request_came(self, choices: int) -> None:
        """Note the first request of an engine that was idle: its time begins.

        An engine that hangs makes no step and still counts requests that have left: then a new request must not
        restart the time.
        """
        stats = self._engine.stats()
        if stats.running + stats.waiting <= choices or stats.last_step_at >= self._busy_since:
            self._busy_since = self._clock()

    async def _send_ping(self) -> None:
        """Ping the engine. Readiness probes of the kubelet and the operator, each second, trigger the pings."""
        with contextlib.suppress(EngineDead):
            await self._engine.call(Ping(call=0))
