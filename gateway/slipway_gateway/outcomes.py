"""Outcomes of requests by revision, counted since the gateway's start: requests, errors, TTFT, ITL, output tokens.

The operator compares revisions by these numbers: a replica that died cannot report its own errors, its gateway can.

| the request                                              | counts for                                             |
|----------------------------------------------------------|--------------------------------------------------------|
| was answered below 500                                   | its revision: a request                                |
| was answered with 5xx, or its answer broke off           | its revision: a request and an error                   |
| failed at one revision, was answered by another          | each of them: a request; the failed one: an error too  |
| was left by its client, or cut by the gateway's shutdown | none                                                   |
| was refused or moved by a replica that drains or is full | none, unless nothing else answered                     |
"""

import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Final

from slipway_api.gateway_api import OUTCOME_BUCKETS, OutcomesReport, RevisionOutcomes
from slipway_gateway.health import AttemptFailure

BUCKETS: Final = len(OUTCOME_BUCKETS) + 1
# The replica's own fault. One that drains, is full, or left the table has only passed the request on.
FAULTS: Final = frozenset(
    {AttemptFailure.UNREACHABLE, AttemptFailure.LOST, AttemptFailure.SILENT, AttemptFailure.ENGINE_DEAD}
)


class Tally:
    """The counters of one revision."""

    __slots__ = ("errors", "itl", "output_tokens", "requests", "ttft")

    def __init__(self) -> None:
        self.requests = 0
        self.errors = 0
        self.output_tokens = 0
        self.ttft = array("Q", bytes(8 * BUCKETS))
        self.itl = array("Q", bytes(8 * BUCKETS))


class Pace:
    """Measures the time between tokens of one stream, and counts it for the stream's revision."""

    __slots__ = ("_at", "_clock", "_itl")

    def __init__(self, tally: Tally, first_at: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._itl = tally.itl
        self._at = first_at
        self._clock = clock

    def add(self, events: int) -> None:
        """`events` of the stream arrived together: each counts with its share of the time since the last ones.

        A slow client delays our reading, and then many events come at once: their shares are still right.
        """
        if events > 0:
            now = self._clock()
            self._itl[bisect_left(OUTCOME_BUCKETS, (now - self._at) / events)] += events
            self._at = now


class Outcomes:
    """The counters of all revisions."""

    def __init__(self, boot_id: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._boot_id = boot_id
        self._clock = clock
        self._started = clock()
        self._tallies: dict[tuple[str, str], Tally] = {}

    def tally(self, service: str, revision: str) -> Tally:
        """The counters of one revision."""
        tally = self._tallies.get((service, revision))
        if tally is None:
            tally = self._tallies[service, revision] = Tally()
        return tally

    def pace(self, service: str, revision: str, first_at: float) -> Pace:
        """Measures a stream whose first token arrived at `first_at`."""
        return Pace(self.tally(service, revision), first_at, self._clock)

    def record(
        self,
        service: str,
        revision: str,
        *,
        is_error: bool,
        failed: Iterable[tuple[str, AttemptFailure]] = (),
        ttft_seconds: float | None = None,
        output_tokens: int = 0,
    ) -> None:
        """Count a request that `revision` answered last; `failed` are its earlier attempts, by revision."""
        tally = self.tally(service, revision)
        tally.requests += 1
        tally.errors += is_error
        tally.output_tokens += output_tokens
        if ttft_seconds is not None:
            tally.ttft[bisect_left(OUTCOME_BUCKETS, ttft_seconds)] += 1
        for other in {one for one, failure in failed if failure in FAULTS and one != revision}:
            tally = self.tally(service, other)
            tally.requests += 1
            tally.errors += 1

    def report(self, is_known: Callable[[str, str], bool] = lambda _service, _revision: True) -> OutcomesReport:
        """All counters. Revisions that are not known any more are forgotten, so that their number stays bounded."""
        for key in [key for key in self._tallies if not is_known(*key)]:
            del self._tallies[key]
        return OutcomesReport(
            boot_id=self._boot_id,
            uptime_seconds=self._clock() - self._started,
            revisions=tuple(_outcomes(*key, tally) for key, tally in self._tallies.items()),
        )


def _outcomes(service: str, revision: str, tally: Tally) -> RevisionOutcomes:
    return RevisionOutcomes(
        service=service,
        revision=revision,
        requests=tally.requests,
        errors=tally.errors,
        ttft=_without_zeros(tally.ttft),
        itl=_without_zeros(tally.itl),
        output_tokens=tally.output_tokens,
    )


def _without_zeros(counts: "array[int]") -> tuple[int, ...]:
    """The counts up to the last one above zero."""
    end = len(counts)
    while end and not counts[end - 1]:
        end -= 1
    return tuple(counts[:end])
