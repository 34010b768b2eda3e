"""Generates the arrival times of an open loop: the pause before each request, in seconds. Pure, seeded."""

import random
from collections.abc import Iterator


def poisson(rate: float, draw: random.Random) -> Iterator[float]:
    """Independent arrivals, `rate` a second on average."""
    while True:
        yield draw.expovariate(rate)


def bursty(rate: float, draw: random.Random, *, burst: float = 5.0, mean_burst: int = 20) -> Iterator[float]:
    """Bursts of about `mean_burst` arrivals, `burst` times as dense as the average, with silence between them.

    Over a long time there are `rate` arrivals a second: a burst of n takes n / (rate · burst) seconds, and the silence
    after it takes what is missing to n / rate.
    """
    while True:
        size = 1 + int(draw.expovariate(1 / mean_burst))
        yield draw.expovariate(1 / (size / rate * (1 - 1 / burst))) if burst > 1 else draw.expovariate(rate)
        for _ in range(size - 1):
            yield draw.expovariate(rate * burst)
