"""How long to wait before trying again: exponential, capped, with full jitter, and never giving up."""

import random
from collections.abc import Callable


class Backoff:
    """Grows with each `next_delay()` until `reset()`. Jitter keeps a fleet from coming back in step."""

    def __init__(self, *, first: float, cap: float, uniform: Callable[[float, float], float] = random.uniform) -> None:
        self._first = first
        self._cap = cap
        self._uniform = uniform
        self.failures = 0

    def next_delay(self, at_least: float | None = None) -> float:
        """Seconds to wait now; `at_least` is what the server asked for (Retry-After), itself capped."""
        # 0.5 s first: 0…0.5, 0…1, 0…2, … 0…cap. The exponent is bounded, or it overflows after an outage of hours.
        ceiling = min(self._cap, self._first * 2 ** min(self.failures, 20))
        self.failures += 1
        return max(self._uniform(0.0, ceiling), min(at_least or 0.0, self._cap))

    def reset(self) -> None:
        """Something worked."""
        self.failures = 0
