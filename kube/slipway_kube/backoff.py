"""How long to wait before trying again: exponential, capped, jittered, never giving up. The only such arithmetic."""

import random
from collections.abc import Callable, Iterator


def exponential(failures: int, *, first: float, cap: float) -> float:
    """The ceiling of the wait after so many failures before this one: first, twice that, four times … cap.

    The exponent is bounded, or it overflows after an outage of hours: 0.5 s × 2**30 is beyond every cap.
    """
    return min(cap, first * 2.0 ** min(failures, 30))


class Backoff:
    """Grows with each `next_delay()` until `reset()`. Jitter keeps a fleet from coming back in step.

    `least` is the share of each step that is always waited: 0.0 is full jitter. Iterating gives delays without end,
    from the first step each time, which is what kopf wants to be given.
    """

    def __init__(
        self,
        *,
        first: float,
        cap: float,
        least: float = 0.0,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._first = first
        self._cap = cap
        self._least = least
        self._uniform = uniform
        self.failures = 0

    def next_delay(self, at_least: float | None = None) -> float:
        """Seconds to wait now; `at_least` is what the server asked for (Retry-After), itself capped."""
        # 0.5 s first: 0…0.5, 0…1, 0…2, … 0…cap.
        ceiling = exponential(self.failures, first=self._first, cap=self._cap)
        self.failures += 1
        return max(self._uniform(self._least * ceiling, ceiling), min(at_least or 0.0, self._cap))

    def reset(self) -> None:
        """Something worked."""
        self.failures = 0

    def __iter__(self) -> Iterator[float]:
        steps = Backoff(first=self._first, cap=self._cap, least=self._least, uniform=self._uniform)
        while True:
            yield steps.next_delay()
