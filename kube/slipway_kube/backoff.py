"""Computes how long to wait before a retry: exponential, capped, jittered, without a last attempt.

Every retry delay of the operator and the gateway is computed here."""

import random
from collections.abc import Callable, Iterator


def exponential(failures: int, *, first: float, cap: float) -> float:
    """The longest wait before the next retry, after `failures` earlier failures: first, 2 × first, 4 × first … cap.

    The exponent is bounded, or it overflows after an outage of hours: 0.5 s × 2**30 is beyond every cap.
    """
    return min(cap, first * 2.0 ** min(failures, 30))


class Backoff:
    """Retry delays that grow with each `next_delay()` until `reset()`. Jitter keeps clients from retrying in step.

    `least` is the share of each delay that is not random: 0.0 is full jitter. Each iteration yields an endless series
    of delays from the first step on, the form in which kopf takes its delays.
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
        """Seconds to wait now; `at_least` is the server's Retry-After, which is capped too."""
        # 0.5 s first: 0…0.5, 0…1, 0…2, … 0…cap.
        ceiling = exponential(self.failures, first=self._first, cap=self._cap)
        self.failures += 1
        return max(self._uniform(self._least * ceiling, ceiling), min(at_least or 0.0, self._cap))

    def reset(self) -> None:
        """Start again from the first step, because an attempt succeeded."""
        self.failures = 0

    def __iter__(self) -> Iterator[float]:
        steps = Backoff(first=self._first, cap=self._cap, least=self._least, uniform=self._uniform)
        while True:
            yield steps.next_delay()
