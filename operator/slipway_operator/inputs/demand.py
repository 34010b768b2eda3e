"""Adds up the demand reports of all gateways, and tells which services a new report concerns. No I/O; time is given.

A gateway is *required* while its container runs: nothing counts as idle before each required one has reported.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from slipway_api.gateway_api import DemandReport, ServiceDemand
from slipway_api.types import ServiceKey
from slipway_operator.core.observed import Demand

FRESH: Final = timedelta(seconds=15)  # gateways are asked to answer every 5 s
FORGOTTEN: Final = timedelta(seconds=60)  # a gateway that is silent for so long has lost the requests it held
REMEMBERED: Final = timedelta(days=2)  # the moment of a service's last request; idleSeconds is at most a day
JITTER: Final = timedelta(seconds=1.5)  # between two computations of the same moment


@dataclass(frozen=True, slots=True)
class Received:
    """One gateway's last report."""

    at: datetime
    services: dict[ServiceKey, ServiceDemand]


@dataclass(frozen=True, slots=True)
class Changed:
    """A service whose demand has changed so that it needs a pass."""

    service: ServiceKey
    has_grown: bool  # requests came: its replicas' samples are older than they are
    adapters: frozenset[str] = frozenset()  # requests for them have begun to wait, or wait no more


class DemandTable:
    """The last report of each gateway, and when each service last had a request."""

    def __init__(self) -> None:
        self._reports: dict[str, Received] = {}
        self._last_request: dict[ServiceKey, datetime] = {}

    def receive(self, gateway: str, report: DemandReport, now: datetime) -> list[Changed]:
        """Store a report; returns the services that need a pass because of it."""
        before = self._reports.get(gateway)
        services = {key: one for one in report.services if (key := service_key(one.service)) is not None}
        self._reports[gateway] = Received(now, services)
        for key, one in services.items():
            if one.idle_seconds is not None:
                self._saw_request(key, now - timedelta(seconds=one.idle_seconds))
        if len(self._last_request) > 1000 + 2 * len(services):
            self._last_request = {key: at for key, at in self._last_request.items() if now - at < REMEMBERED}
        earlier = before.services if before is not None else {}
        changes = (compare(key, earlier.get(key), services.get(key)) for key in earlier.keys() | services.keys())
        return [change for change in changes if change is not None]

    def forget(self, gateway: str) -> list[Changed]:
        """Drop a gateway that is gone; returns the services whose waiting requests went with it."""
        gone = self._reports.pop(gateway, None)
        waiting = gone.services.items() if gone is not None else ()
        return [change for key, one in waiting if (change := compare(key, one, None)) is not None]

    def of(self, service: ServiceKey, now: datetime, *, required: Collection[str]) -> Demand | None:
        """The demand for one service at all gateways; None: no gateway has reported."""
        received = [one for one in self._reports.values() if now - one.at < FORGOTTEN]
        if not received:
            return None
        reports = [report for one in received if (report := one.services.get(service)) is not None]
        fresh = {name for name, one in self._reports.items() if now - one.at < FRESH}
        return Demand(
            at=min(one.at for one in received),
            waiting_requests=sum(report.waiting_requests for report in reports),
            waiting_bytes=sum(report.waiting_bytes for report in reports),
            longest_wait=timedelta(seconds=max((report.longest_wait_seconds for report in reports), default=0.0)),
            refused_requests=sum(report.refused_requests for report in reports),
            open_requests=sum(report.open_requests for report in reports),
            idle_since=self._last_request.get(service),
            complete=bool(fresh) and all(name in fresh for name in required),
        )

    def answering(self, now: datetime) -> int:
        """How many gateways have reported within the last seconds."""
        return sum(now - one.at < FRESH for one in self._reports.values())

    def adapters_of(self, service: ServiceKey, now: datetime) -> dict[str, int]:
        """By adapter of the service: the requests that wait at all gateways until a replica has loaded it."""
        waiting: Counter[str] = Counter()
        for received in self._reports.values():
            report = received.services.get(service) if now - received.at < FRESH else None
            for one in report.adapters if report is not None else ():
                waiting[one.adapter] += one.waiting_requests
        return dict(waiting)

    def _saw_request(self, service: ServiceKey, at: datetime) -> None:
        before = self._last_request.get(service)
        if before is None or at > before + JITTER:
            self._last_request[service] = at


def compare(service: ServiceKey, before: ServiceDemand | None, after: ServiceDemand | None) -> Changed | None:
    """Whether the service needs a pass: it got its first waiting or open request, twice as many, lost the last,
    or had more requests refused."""
    was = before or NOTHING
    now = after or NOTHING
    adapters = frozenset({one.adapter for one in was.adapters} ^ {one.adapter for one in now.adapters})
    if bool(was.waiting_requests) != bool(now.waiting_requests):
        return Changed(service, now.waiting_requests > 0, adapters)
    if now.open_requests > was.open_requests and now.open_requests >= 2 * was.open_requests:
        return Changed(service, has_grown=True, adapters=adapters)
    is_refused_more = now.refused_requests > was.refused_requests
    return Changed(service, has_grown=False, adapters=adapters) if adapters or is_refused_more else None


def service_key(name: str) -> ServiceKey | None:
    """The key of `<namespace>/<name>`; None for anything else."""
    namespace, slash, service = name.partition("/")
    return ServiceKey(namespace, service) if slash and namespace and service else None


NOTHING: Final = ServiceDemand(service="")
