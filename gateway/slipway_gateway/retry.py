"""Whether a request may be tried on another replica. Pure, and only ever asked before the first byte went out."""

from dataclasses import dataclass
from enum import Enum


class Setback(Enum):
    """Why an attempt gave nothing that the client should see yet."""

    UNREACHABLE = "unreachable"  # no connection: the request never arrived
    LOST = "lost"  # the connection broke after the request was sent
    SHED = "shed"  # 429: that replica is full
    UNAVAILABLE = "unavailable"  # 503: that replica is draining, loading or dead


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often one request may be tried in all."""

    tries: int = 3
    # A request may itself be what killed the replica: it gets one more chance, not the whole fleet.
    lost: int = 1

    def allows(self, setbacks: list[Setback]) -> bool:
        """Whether a request with these setbacks so far may be tried once more."""
        return len(setbacks) < self.tries and setbacks.count(Setback.LOST) <= self.lost


class RetryBudget:
    """Retries as a share of requests, so that a struggling fleet is not also hit by its own retries.

    A token bucket filled by requests instead of time: every request brings `ratio` of a retry, at most
    `burst` are saved. With 0.2, a hundred requests pay for twenty retries.
    """

    def __init__(self, *, ratio: float = 0.2, burst: float = 20.0) -> None:
        self._ratio = ratio
        self._burst = burst
        self._saved = burst

    def request(self) -> None:
        """A request came in."""
        self._saved = min(self._burst, self._saved + self._ratio)

    def spend(self) -> bool:
        """Take one retry out of the budget, if there is one."""
        if self._saved < 1.0:
            return False
        self._saved -= 1.0
        return True
