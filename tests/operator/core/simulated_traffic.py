"""Requests of clients in a simulated cluster, split by the weights in status, and what gateways count of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from slipway_api.gateway_api import OUTCOME_BUCKETS
from slipway_api.inference_service import InferenceService
from slipway_operator.core.observed import Outcomes, ServiceOutcomes
from tests.builders import T0

# A request in twenty takes twice as long as the others, and none is like another.
SPREAD = (*(0.5 + 0.05 * step for step in range(19)), 2.0)
NO_REVISION = ""  # requests that found no replica
NONE = (0,) * (len(OUTCOME_BUCKETS) + 1)


@dataclass(frozen=True)
class Behaviour:
    """How the replicas of a revision answer."""

    errors: float = 0.0
    ttft: float = 0.2
    itl: float = 0.02


class SimulatedTraffic:
    """So many requests a second for ever, each answered by the revision that the weights choose."""

    def __init__(self, rate: float, behaviours: Mapping[str, Behaviour] | None = None) -> None:
        self.rate = rate
        self.behaviours = dict(behaviours or {})
        self.known_from: datetime | None = None  # a new leader knows only what came after it began to lead
        self._answered: list[tuple[datetime, str, Outcomes]] = []
        self._owed: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._failures: dict[str, float] = {}
        self._total: tuple[datetime | None, int, Outcomes] = (None, 0, Outcomes())  # since when, of how many answers

    def tick(self, service: InferenceService, now: datetime, seconds: int) -> None:
        if not any(revision.weight and revision.ready for revision in service.status.revisions):
            self._owed[NO_REVISION] = self._owed.get(NO_REVISION, 0.0) + self.rate * seconds
            refused = int(self._owed[NO_REVISION])
            self._owed[NO_REVISION] -= refused
            if refused:
                self._answered.append(
                    (now, NO_REVISION, Outcomes(requests=refused, errors=refused, ttft=NONE, itl=NONE))
                )
        for revision in service.status.revisions:
            if not revision.weight or not revision.ready:
                continue
            self._owed[revision.hash] = self._owed.get(revision.hash, 0.0) + self.rate * seconds * revision.weight / 100
            requests = int(self._owed[revision.hash])
            self._owed[revision.hash] -= requests
            if requests:
                self._answered.append((now, revision.hash, self._answer(revision.hash, requests)))

    def _answer(self, revision: str, requests: int) -> Outcomes:
        how = self.behaviours.get(revision, Behaviour())
        first = self._counts.get(revision, 0)
        self._counts[revision] = first + requests
        self._failures[revision] = self._failures.get(revision, 0.0) + how.errors * requests
        errors = int(self._failures[revision])
        self._failures[revision] -= errors
        ttft, itl = [0] * (len(OUTCOME_BUCKETS) + 1), [0] * (len(OUTCOME_BUCKETS) + 1)
        for number in range(first, first + requests - errors):
            spread = SPREAD[number % len(SPREAD)]
            ttft[bucket(how.ttft * spread)] += 1
            itl[bucket(how.itl * spread)] += 10
        good, tokens = requests - errors, 11 * requests
        return Outcomes(
            requests=requests, errors=errors, ttft=tuple(ttft), itl=tuple(itl), output_tokens=tokens, good=good
        )

    def since(self, moment: datetime) -> dict[str, Outcomes]:
        """As `Observed.outcomes_since`."""
        begin = max(moment, self.known_from) if self.known_from else moment
        total: dict[str, Outcomes] = {}
        for at, revision, one in reversed(self._answered):
            if at <= begin:
                break
            if revision:
                total[revision] = add(total[revision], one) if revision in total else one
        return total

    def _service_since(self, moment: datetime) -> Outcomes:
        begin, total = max(moment, self.known_from) if self.known_from else moment, Outcomes(ttft=NONE, itl=NONE)
        for at, _revision, one in reversed(self._answered):
            if at <= begin:
                break
            total = add(total, one)
        return total

    def of_service(self) -> ServiceOutcomes:
        """As `Observed.service_outcomes`."""
        since, number, counted = self._total
        if since != self.known_from:  # another leader
            number, counted = 0, Outcomes()
        for at, _revision, one in self._answered[number:]:
            if self.known_from is None or at > self.known_from:
                counted = add(counted, one) if counted.ttft else one
        self._total = (self.known_from, len(self._answered), counted)
        return ServiceOutcomes(began=self.known_from or T0, total=counted, since=self._service_since)


def bucket(seconds: float) -> int:
    return next((index for index, edge in enumerate(OUTCOME_BUCKETS) if seconds <= edge), len(OUTCOME_BUCKETS))


def add(one: Outcomes, other: Outcomes) -> Outcomes:
    return Outcomes(
        requests=one.requests + other.requests,
        errors=one.errors + other.errors,
        ttft=tuple(a + b for a, b in zip(one.ttft, other.ttft, strict=True)),
        itl=tuple(a + b for a, b in zip(one.itl, other.itl, strict=True)),
        output_tokens=one.output_tokens + other.output_tokens,
        good=one.good + other.good,
    )
