"""How long requests of one service wait for their first token: when one of them is late. Pure."""

from collections import deque
from typing import Final

PERCENTILE: Final = 0.95
# Where all take about as long, the slowest twentieth is not late, it is only longer: hedging it costs and gains nothing
# (bench/hedging.py: p99 a fifth higher without any stall).
MEDIANS: Final = 2.0
LEAST_SAMPLES: Final = 20  # below that nothing is known of the tail
KEPT_SAMPLES: Final = 200


class FirstTokenTimes:
    """The times of the last requests that could have been hedged (see `hedging`).

    A request that a second replica answered counts with the time from the first attempt on, which is above the
    percentile, as its true time is: so hedging does not lower the percentile by which it hedges.
    """

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=KEPT_SAMPLES)
        self._delay: float | None = None  # None: to be computed

    def record(self, seconds: float) -> None:
        """A request had its first token after so long, from whichever replica."""
        self._seconds.append(seconds)
        self._delay = None

    def delay(self) -> float | None:
        """After how long a request is late: after 95 % of the others and twice the median; None: too few are known."""
        if len(self._seconds) < LEAST_SAMPLES:
            return None
        if self._delay is None:
            ordered = sorted(self._seconds)
            median = ordered[len(ordered) // 2]
            self._delay = max(ordered[int(PERCENTILE * len(ordered))], MEDIANS * median)
        return self._delay
