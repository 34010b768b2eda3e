"""Outcomes of requests by revision, counted since the gateway's start: requests, errors, TTFT, ITL, output tokens.

The operator compares revisions by these numbers: a replica that died cannot report its own errors, its gateway can.

| the request                                              | counts for                                             |
|----------------------------------------------------------|--------------------------------------------------------|
| was answered below 500                                   | its revision: a request                                |
| was answered with 5xx, or its answer broke off           | its revision: a request and an error                   |
| failed at one revision, was answered by another          | each of them: a request; the failed one: an error too  |
| was left by its client, or cut by the gateway's shutdown | none                                                   |
| was refused or moved by a replica that drains or is full | none, unless nothing else answered                     |

Beside them stand the counters of each service as its clients see it (`ServiceOutcomes`): each request once, with the
time that it was held or retried, and an error also where no replica was there to be asked.
"""

import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Final

from slipway_api.gateway_api import OUTCOME_BUCKETS, OutcomesReport, RevisionOutcomes, ServiceOutcomes
from slipway_gateway.health import AttemptFailure

BUCKETS: Final = len(OUTCOME_BUCKETS) + 1
# The replica's own fault. One that drains, is full, or left the table has only passed the request on.
FAULTS: Final = frozenset(
    {AttemptFailure.UNREACHABLE, AttemptFailure.LOST, AttemptFailure.SILENT, AttemptFailure.ENGINE_DEAD}
)


class Tally:
    """The counters of one revision, or of one service."""

    __slots__ = ("errors", "good", "itl", "output_tokens", "requests", "ttft")

    def __init__(self) -> None:
        self.requests = 0
        self.errors = 0
        self.good = 0  # of a service only
        self.output_tokens = 0
        self.ttft = array("Q", bytes(8 * BUCKETS))
        self.itl = array("Q", bytes(8 * BUCKETS))


class Pace:
    """Measures the time between tokens of one stream, and counts it for the stream's revision and service."""

    __slots__ = ("_at", "_clock", "_first_at", "_itl", "_service_itl", "_tokens")

    def __init__(
        self,
        tally: Tally,
        first_at: float,
        clock: Callable[[], float] = time.monotonic,
        service: Tally | None = None,
    ) -> None:
        self._itl = tally.itl
        self._service_itl = service.itl if service is not None else None
        self._at = self._first_at = first_at
        self._tokens = 0
        self._clock = clock

    def add(self, events: int) -> None:
        """`events` of the stream arrived together: each counts with its share of the time since the last ones.

        A slow client delays our reading, and then many events come at once: their shares are still right.
        """
        if events > 0:
            now = self._clock()
            bucket = bisect_left(OUTCOME_BUCKETS, (now - self._at) / events)
            self._itl[bucket] += events
            if self._service_itl is not None:
                self._service_itl[bucket] += events
            self._tokens += events
            self._at = now

    @property
    def mean_seconds(self) -> float | None:
        """The mean time between tokens so far; None: there was only one."""
        return (self._at - self._first_at) / self._tokens if self._tokens else None


class Outcomes:
    """The counters of all revisions."""

    def __init__(self, boot_id: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._boot_id = boot_id
        self._clock = clock
        self._started = clock()
        self._tallies: dict[tuple[str, str], Tally] = {}
        self._services: dict[str, Tally] = {}

    def tally(self, service: str, revision: str) -> Tally:
        """The counters of one revision."""
        tally = self._tallies.get((service, revision))
        if tally is None:
            tally = self._tallies[service, revision] = Tally()
        return tally

    def pace(self, service: str, revision: str, first_at: float) -> Pace:
        """Measures a stream whose first token arrived at `first_at`."""
        return Pace(self.tally(service, revision), first_at, self._clock)

    def client_pace(self, service: str, revision: str, first_at: float, *, is_pinned: bool = False) -> Pace:
        """As `pace`, of a stream that a client reads: it counts for the service too, and if pinned only for it."""
        tally = Tally() if is_pinned else self.tally(service, revision)
        return Pace(tally, first_at, self._clock, self._service_tally(service))

    def record_service(
        self,
        service: str,
        *,
        counts: bool,
        is_error: bool = False,
        is_good: bool = False,
        ttft_seconds: float | None = None,
        output_tokens: int = 0,
    ) -> None:
        """Count a request as its client saw it; where it does not count, only the tokens that it was sent do."""
        tally = self._service_tally(service)
        tally.output_tokens += output_tokens
        if counts:
            tally.requests += 1
            tally.errors += is_error
            tally.good += is_good and not is_error
            if ttft_seconds is not None:
                tally.ttft[bisect_left(OUTCOME_BUCKETS, ttft_seconds)] += 1

    def _service_tally(self, service: str) -> Tally:
        tally = self._services.get(service)
        if tally is None:
            tally = self._services[service] = Tally()
        return tally

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

    def report(
        self,
        is_known: Callable[[str, str], bool] = lambda _service, _revision: True,
        is_service: Callable[[str], bool] = lambda _service: True,
    ) -> OutcomesReport:
        """All counters. Those of revisions and services that are not known any more are forgotten, so they stay few."""
        for key in [key for key in self._tallies if not is_known(*key)]:
            del self._tallies[key]
        for service in [service for service in self._services if not is_service(service)]:
            del self._services[service]
        return OutcomesReport(
            boot_id=self._boot_id,
            uptime_seconds=self._clock() - self._started,
            revisions=tuple(_outcomes(*key, tally) for key, tally in self._tallies.items()),
            services=tuple(_service_outcomes(service, tally) for service, tally in self._services.items()),
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


def _service_outcomes(service: str, tally: Tally) -> ServiceOutcomes:
    return ServiceOutcomes(
        service=service,
        requests=tally.requests,
        errors=tally.errors,
        good=tally.good,
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
