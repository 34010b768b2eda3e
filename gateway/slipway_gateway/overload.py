"""The degrade ladder: what a service that cannot keep up does with a request, step by step. Pure.

| requests that wait at a replica, on average | step                                                                |
|---------------------------------------------|---------------------------------------------------------------------|
| below `waiting`                             | NONE                                                                |
| `waiting`                                   | SHED: tenants with a priority below 0 get 429                       |
| twice as many                               | CAP: besides, answers are limited to `max_tokens`                   |
| four times as many                          | FALLBACK: besides, requests go to the service's fallback at once    |
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


class Step(IntEnum):
    """How far a service is degraded; each step includes the ones below it."""

    NONE = 0
    SHED = 1
    CAP = 2
    FALLBACK = 3


@dataclass(frozen=True, slots=True)
class Ladder:
    """When a step begins, and how long answers may still be."""

    waiting: int = 0  # requests that wait at a replica, on average; 0: never degrade
    max_tokens: int = 256

    def step(self, waiting: Sequence[int]) -> Step:
        """The step for a service whose ready replicas have so many waiting requests each.

        >>> Ladder(waiting=4).step([7, 9])  # 8 on average
        <Step.CAP: 2>
        """
        if not self.waiting or not waiting:
            return Step.NONE
        pressure = sum(waiting) / len(waiting) / self.waiting
        if pressure >= 4:
            return Step.FALLBACK
        if pressure >= 2:
            return Step.CAP
        return Step.SHED if pressure >= 1 else Step.NONE

    def sheds(self, step: Step, priority: int) -> bool:
        """Whether a request of this priority is refused."""
        return step >= Step.SHED and priority < 0

    def capped(self, step: Step, max_tokens: int | None) -> int | None:
        """The limit that the answer gets, where it is below what the request asks for; None: what it asks for."""
        if step < Step.CAP or (max_tokens is not None and max_tokens <= self.max_tokens):
            return None
        return self.max_tokens
