"""Sums of the gateways' outcome counters by revision and by service, with a history that answers "since when".

The history goes back six hours. The counters of a service as a whole are kept like those of a revision, under the name
WHOLE_SERVICE.

A gateway's counters begin anew with each of its starts (`boot_id`), so what is summed are their increases. No I/O; time
is given. The history of a revision has at most 160 points, whatever its traffic: at each report at first, then ever
fewer, so that the distance between two points is at most 8 percent of their age. A revision without traffic has one.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from slipway_api.gateway_api import OUTCOME_BUCKETS, OutcomesReport, RevisionOutcomes, ServiceOutcomes
from slipway_api.types import ServiceKey
from slipway_operator.core import observed as seen
from slipway_operator.core.observed import Outcomes
from slipway_operator.inputs.demand import service_key

BUCKETS: Final = len(OUTCOME_BUCKETS) + 1
KEPT: Final = timedelta(hours=6)
FINEST: Final = timedelta(seconds=5)
SPACING: Final = 0.08  # of a point's age
WHOLE_SERVICE: Final = ""  # in the place of a revision's hash
SWEEP: Final = timedelta(seconds=60)
_HEAD: Final = 4  # requests, errors, output tokens, good requests; the two histograms follow

Counters = array  # of unsigned 64-bit integers


def counters_of(outcomes: RevisionOutcomes | ServiceOutcomes) -> "Counters[int]":
    """The counters of one revision, or of a service, in one row."""
    good = outcomes.good if isinstance(outcomes, ServiceOutcomes) else 0
    row = array("Q", (outcomes.requests, outcomes.errors, outcomes.output_tokens, good))
    for histogram in (outcomes.ttft, outcomes.itl):
        row.extend((*histogram[:BUCKETS], *([0] * (BUCKETS - len(histogram)))))
    return row


def outcomes_of(row: "Counters[int]") -> Outcomes:
    """The row as the core reads it."""
    return Outcomes(
        requests=row[0],
        errors=row[1],
        output_tokens=row[2],
        good=row[3],
        ttft=tuple(row[_HEAD : _HEAD + BUCKETS]),
        itl=tuple(row[_HEAD + BUCKETS :]),
    )


class History:
    """The sums of one revision over time."""

    __slots__ = ("_rows", "_times", "began")

    def __init__(self, since: datetime) -> None:
        self.began = since
        self._times = [since]
        self._rows: list[Counters[int]] = [array("Q", bytes(8 * (_HEAD + 2 * BUCKETS)))]

    def __len__(self) -> int:
        return len(self._times)

    @property
    def changed_at(self) -> datetime:
        """When it last grew."""
        return self._times[-1]

    @property
    def total(self) -> "Counters[int]":
        """The sum since it began; it never falls."""
        return self._rows[-1]

    def add(self, increase: "Counters[int]", unchanged_at: datetime, now: datetime) -> None:
        """Add an increase that happened after `unchanged_at`."""
        total = array("Q", map(int.__add__, self._rows[-1], increase))
        if unchanged_at > self._times[-1]:
            self._times.append(unchanged_at)
            self._rows.append(self._rows[-1])
        self._times.append(max(now, self._times[-1]))
        self._rows.append(total)
        if len(self._times) > 160:
            self._thin(now)

    def since(self, moment: datetime) -> "Counters[int]":
        """The increase since a moment. What was reported with the first point after it may be older: it is left out."""
        first = min(bisect_left(self._times, moment), len(self._times) - 1)
        first = bisect_right(self._times, self._times[first]) - 1  # gateways that reported at once
        return array("Q", map(int.__sub__, self._rows[-1], self._rows[first]))

    def _thin(self, now: datetime) -> None:
        """Keep the newest point, and those whose distance from the next newer one is large enough for their age."""
        kept = [len(self._times) - 1]
        for index in range(len(self._times) - 2, -1, -1):
            age = now - self._times[index]
            if self._times[kept[-1]] - self._times[index] >= max(FINEST, age * SPACING):
                kept.append(index)
            if age > KEPT:
                break
        kept.reverse()
        self._times = [self._times[index] for index in kept]
        self._rows = [self._rows[index] for index in kept]


@dataclass(slots=True)
class _Gateway:
    """The last report of one gateway."""

    boot_id: str
    at: datetime
    rows: dict[tuple[ServiceKey, str], "Counters[int]"] = field(default_factory=dict)


class OutcomeSums:
    """The histories of all revisions."""

    def __init__(self, since: datetime) -> None:
        """`since`: what gateways counted before is not ours to add; of one that starts later, all counts."""
        self._since = since
        self._swept = since
        self._gateways: dict[str, _Gateway] = {}
        self._histories: dict[ServiceKey, dict[str, History]] = {}
        self._has_reports = False

    def receive(self, gateway: str, report: OutcomesReport, now: datetime) -> None:
        """Add what has happened at this gateway since its last report."""
        self._has_reports = True
        rows = {
            (key, one.revision): counters_of(one)
            for one in report.revisions
            if (key := service_key(one.service)) is not None
        }
        rows |= {
            (key, WHOLE_SERVICE): counters_of(whole)
            for whole in report.services
            if (key := service_key(whole.service)) is not None
        }
        last = self._gateways.get(gateway)
        started = now - timedelta(seconds=report.uptime_seconds)
        if last is not None and last.boot_id == report.boot_id:
            before, unchanged_at = last.rows, last.at
        elif last is not None or started >= self._since:
            before, unchanged_at = {}, max(started, self._since)
        else:  # it counted before this operator began: the present numbers are where its sums begin
            before, unchanged_at = rows, now
        for (service, revision), row in rows.items():
            history = self._histories.setdefault(service, {}).get(revision)
            if history is None:
                history = self._histories[service][revision] = History(unchanged_at)
            increase = _increase(row, before.get((service, revision)))
            if any(increase):
                history.add(increase, unchanged_at, now)
        self._gateways[gateway] = _Gateway(report.boot_id, now, rows)
        if now - self._swept >= SWEEP:
            self._sweep(now)

    def forget(self, gateway: str) -> None:
        """Drop a gateway that is gone; what it counted stays in the sums."""
        self._gateways.pop(gateway, None)

    def since(self, service: ServiceKey, moment: datetime) -> Mapping[str, Outcomes] | None:
        """The outcomes of each revision of a service since a moment; None: no gateway has reported."""
        if not self._has_reports:
            return None
        histories = self._histories.get(service, {})
        return {
            revision: outcomes_of(history.since(moment))
            for revision, history in histories.items()
            if revision != WHOLE_SERVICE
        }

    def of_service(self, service: ServiceKey) -> seen.ServiceOutcomes | None:
        """What was counted of a service as its clients saw it; None: no gateway has counted a request of it."""
        history = self._histories.get(service, {}).get(WHOLE_SERVICE)
        if history is None:
            return None
        return seen.ServiceOutcomes(
            began=history.began,
            total=outcomes_of(history.total),
            since=lambda moment: outcomes_of(history.since(moment)),
        )

    @property
    def has_reports(self) -> bool:
        """Whether a gateway has reported since this operator began."""
        return self._has_reports

    def _sweep(self, now: datetime) -> None:
        """Forget revisions that no gateway counts any more and that did not change for six hours."""
        self._swept = now
        counted = {key for gateway in self._gateways.values() for key in gateway.rows}
        for service, histories in list(self._histories.items()):
            for revision, history in list(histories.items()):
                if (service, revision) not in counted and now - history.changed_at > KEPT:
                    del histories[revision]
            if not histories:
                del self._histories[service]


def _increase(row: "Counters[int]", before: "Counters[int] | None") -> "Counters[int]":
    """From one report to the next. A counter that fell was forgotten by the gateway and began anew."""
    if before is None or any(new < old for new, old in zip(row, before, strict=True)):
        return row
    return array("Q", map(int.__sub__, row, before))
