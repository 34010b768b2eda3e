"""Decides whether the operator is alive, from the age of its caches, the API server's answers and the event loop's lag.

| watch is        | API server answers | the loop runs | verdict                                    |
|-----------------|--------------------|---------------|--------------------------------------------|
| fresh           | –                  | yes           | alive                                      |
| silent for long | no                 | yes           | alive: a restart would not help            |
| silent for long | yes                | yes           | not alive: the watch is broken             |
| –               | –                  | no            | not alive                                  |
"""

import asyncio
from collections.abc import Awaitable, Callable

from slipway_kube.errors import KubeError
from slipway_operator.probes import Verdict

SILENT_SECONDS = 300.0  # a healthy watch gets a bookmark about every minute
CHECK_SECONDS = 15.0
LAG_SECONDS = 10.0


class Freshness:
    """Checks the age of the watch and the lag of the event loop.

    `age` says for how long the watch has been silent; `ping` makes one cheap call to the API server.
    """

    def __init__(
        self,
        age: Callable[[], float],
        ping: Callable[[], Awaitable[object]],
        *,
        monotonic: Callable[[], float],
        on_lag: Callable[[float], None] = lambda _seconds: None,
    ) -> None:
        self._age = age
        self._ping = ping
        self._monotonic = monotonic
        self._on_lag = on_lag
        self._last_beat = monotonic()
        self._is_zombie = False

    def alive(self) -> Verdict:
        """Whether the process should go on; False when a restart would help."""
        lag = self._monotonic() - self._last_beat
        if lag > CHECK_SECONDS + LAG_SECONDS:
            return False, f"the event loop has not run for {lag:.0f} s"
        if self._is_zombie:
            return False, f"the API server answers, but its watch has been silent for {self._age():.0f} s"
        return True, "ok"

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            started = self._monotonic()
            await asyncio.sleep(CHECK_SECONDS)
            self._last_beat = self._monotonic()
            self._on_lag(max(0.0, self._last_beat - started - CHECK_SECONDS))
            self._is_zombie = self._age() > SILENT_SECONDS and await self._answers() and self._age() > SILENT_SECONDS

    async def _answers(self) -> bool:
        try:
            await self._ping()
        except KubeError:
            return False
        return True
