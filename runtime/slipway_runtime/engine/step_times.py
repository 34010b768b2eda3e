"""Step times of an engine, as its client measures them: from when the engine has work until the report arrives.

A step that takes longer than any other so far may be a long prompt on a slow machine, or an engine that hangs. So what
counts as too long follows the longest step of the last minutes, beginning with the widest one of the warm-up.
"""

from collections.abc import Callable
from typing import Final

WINDOW_SECONDS: Final = 300.0  # a step is remembered for one to two of these


class StepTimes:
    """The time of the last report and the longest step of the last minutes."""

    def __init__(self, widest: float, clock: Callable[[], float]) -> None:
        """`widest`: seconds of the widest step of the warm-up, which is never forgotten."""
        self._clock = clock
        self._widest = widest
        self._recent = self._earlier = 0.0  # the longest of this window, and of the one before
        self._window_ends = clock() + WINDOW_SECONDS
        self._work_since = clock()
        self.reported_at = clock()
        """When the engine last reported a step."""

    @property
    def longest(self) -> float:
        """Seconds of the longest step that is remembered."""
        return max(self._widest, self._recent, self._earlier)

    @property
    def waiting_since(self) -> float:
        """When the wait for the present step began, where there is work."""
        return max(self.reported_at, self._work_since)

    def work_came(self) -> None:
        """Note that the engine has work, after it had none."""
        self._work_since = self._clock()

    def reported(self) -> None:
        """Note that the engine reported a step."""
        now = self._clock()
        if now >= self._window_ends:
            self._earlier, self._recent = self._recent, 0.0
            self._window_ends = now + WINDOW_SECONDS
        self._recent = max(self._recent, now - self.waiting_since)
        self.reported_at = now
