"""The gateway's in-memory state: the routing table, and per service the load, health and retry budget.

Facts come from `watch` (or from the command line); every fact takes effect before the next request is picked.
"""

import math
import random
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import structlog

from slipway_gateway.demand import Demand
from slipway_gateway.first_token_times import FirstTokenTimes
from slipway_gateway.hangs import LATE_SECONDS, FirstByte, Waiting, find_hung
from slipway_gateway.health import (
    TRUSTED,
    BreakerPolicy,
    Health,
    RetryBudget,
    after_failure,
    after_probe,
    after_unavailable,
    after_unreachable,
)
from slipway_gateway.load_reports import LoadReports
from slipway_gateway.outliers import LatencyOutliers
from slipway_gateway.picker.endpoints import STATIC_REVISION, Adapter, Endpoint, Route, Service
from slipway_gateway.picker.pick import IDLE, Load, Pick, Picked, pick
from slipway_gateway.picker.prefix import PrefixIndex
from slipway_gateway.picker.scorers import RoutingRequest
from slipway_gateway.resolve import RoutingTable

log = structlog.get_logger()

STATIC_NAMESPACE: Final = "static"
HANG_CHECK_SECONDS: Final = 0.5  # between two comparisons of replicas


@dataclass(frozen=True, slots=True)
class View:
    """How current the routing table is."""

    synced: bool  # everything has been listed once
    age_seconds: float  # since the last event, bookmark or list of the API server
    from_snapshot: bool = False  # the table is that of the last process: the API server has not answered this one yet
    refused: tuple[tuple[str, str], ...] = ()  # resource and namespace of the lists that the API server refuses
    refusal: str = ""  # the same as a clause


class Destination:
    """The gateway's load, health and retry state for one service; nothing in it is shared with another service."""

    __slots__ = (
        "first_bytes", "first_token_times", "health", "last_signs", "leases", "loads", "picks", "reports",
        "retry_budget", "slowness",
    )  # fmt: skip

    def __init__(self) -> None:
        self.loads: dict[str, Load] = {}  # only endpoints with something outstanding
        self.health: dict[str, Health] = {}  # only endpoints that are not simply trusted
        self.leases: dict[str, set[Lease]] = {}  # attempts that have no first byte yet
        self.first_bytes: deque[FirstByte] = deque(maxlen=64)  # of streams, the last ones
        self.last_signs: dict[str, float] = {}  # when each endpoint last sent anything
        self.retry_budget = RetryBudget()
        self.reports = LoadReports()
        self.slowness = LatencyOutliers()
        self.first_token_times = FirstTokenTimes()
        self.picks = 0


class Fleet:
    """One process's view. Not thread-safe: everything happens on the event loop."""

    def __init__(
        self,
        *,
        policy: BreakerPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.table = RoutingTable()
        self.changes = 0  # of the table
        self.boot_id = uuid.uuid4().hex
        self.demand = Demand(self.boot_id, clock=clock)
        self.on_change: Callable[[str], None] = lambda _service: None  # replaced by the waiting room
        self.view: Callable[[], View] = lambda: View(synced=True, age_seconds=0.0)  # replaced by the watch
        self._policy = policy or BreakerPolicy()
        self._clock = clock
        self._draw = draw
        self.prefixes = PrefixIndex()
        self.on_endpoint: Callable[[str, Endpoint | None], None] = lambda _name, _endpoint: None  # see `kv_feeds`
        self._destinations: dict[str, Destination] = {}
        self._checked_at = -math.inf  # of `check_hangs`
        self._awake_since = -math.inf

    def set_service(self, key: str, service: Service | None) -> None:
        """Add, replace or remove a service."""
        is_changed = self.table.set_service(key, service)
        if service is None:
            self._destinations.pop(key, None)
        if is_changed:
            self.changes += 1
            self.on_change(key)

    def set_adapter(self, key: str, adapter: Adapter | None) -> None:
        """Add, replace or remove an adapter."""
        old = self.table.adapter(key)
        if self.table.set_adapter(key, adapter):
            self.changes += 1
            for service in {one.service for one in (old, adapter) if one is not None}:
                self.on_change(service)

    def set_endpoint(self, name: str, endpoint: Endpoint | None, *, finishes_requests: bool = False) -> None:
        """Set the endpoint at which a replica gets requests, or None to remove the replica.

        Requests at a replica that leaves and has not answered yet are moved to another one, unless the replica
        `finishes_requests`: one that drains answers what it has accepted.
        """
        old = self.table.endpoint(name)
        is_changed = self.table.set_endpoint(name, endpoint)
        self.changes += is_changed
        if is_changed and endpoint is not None:
            self.on_change(endpoint.service)
        if is_changed:
            self.on_endpoint(name, endpoint)
        if not is_changed or old is None:
            return
        if endpoint is None:
            self.prefixes.remove(name)
        destination = self._destinations.get(old.service)
        if destination is None:
            return
        destination.health.pop(name, None)  # a pod that becomes ready again starts without failures
        destination.reports.remove(name)
        destination.slowness.remove(name)
        destination.last_signs.pop(name, None)
        if endpoint is None and not finishes_requests and self._has_endpoints(old.service):
            for lease in tuple(destination.leases.get(name, ())):
                lease.on_endpoint_left()

    def pick(
        self, route: Route, request: RoutingRequest, *, tried: Collection[str] = (), lost: Collection[str] = ()
    ) -> Pick:
        """The endpoint for the next attempt of `request`, which is sent there immediately.

        `lost` are endpoints whose connections this request lost or could not make: replicas on their nodes come last.
        """
        destination = self.destination(route.service.key)
        now = self._clock()
        route = route.for_pin(request.pin)  # nobody is sent to a reserved replica by chance, but a client may insist
        picked = pick(
            route,
            request,
            loads=destination.loads,
            reports=destination.reports.fresh(now),
            prefixes=self.prefixes,
            ejected={
                *(name for name, health in destination.health.items() if health.is_ejected(now)),
                *destination.slowness.ejected(now),
            },
            tried=tried,
            avoid_nodes={one.node for one in route.endpoints if one.name in lost and one.node} if lost else (),
            draw=self._draw(),
            tie_break=self._draw(),
            turn=destination.picks,
        )
        if isinstance(picked, Picked):
            name = picked.endpoint.name
            destination.picks += 1
            destination.slowness.record_pick(name, now)
            self.prefixes.add(name, request.blocks)
            if (health := destination.health.get(name)) is not None:
                destination.health[name] = after_probe(health, now, self._policy)
        return picked

    def lease(
        self,
        endpoint: Endpoint,
        tokens: int,
        on_endpoint_left: Callable[[], None],
        *,
        is_stream: bool = False,
        may_move: bool = False,
        prompt_tokens: int = 0,
    ) -> "Lease":
        """Count a request of about `tokens` against `endpoint` while the lease is held.

        is_stream: its first byte comes with its first token. may_move: it moves if the replica is found to hang.
        """
        waiting = Waiting(self._clock(), prompt_tokens) if is_stream else None
        destination = self.destination(endpoint.service)
        return Lease(destination, endpoint, tokens, on_endpoint_left, self.demand, self._clock, waiting, may_move)

    def check_hangs(self, seconds: float) -> None:
        """Eject replicas that are silent while their peers answer, and move the streams that wait at them.

        Called every `HANG_CHECK_SECONDS`; a late call shows that this process read nothing for a while.
        """
        now = self._clock()
        if now - self._checked_at > HANG_CHECK_SECONDS + LATE_SECONDS:
            self._awake_since = now
        self._checked_at = now
        for destination in list(self._destinations.values()):
            if destination.leases:
                self._check_hangs_of(destination, now, seconds)

    def _check_hangs_of(self, destination: Destination, now: float, seconds: float) -> None:
        by_revision: dict[str, dict[str, list[Lease]]] = {}
        for name, leases in destination.leases.items():
            endpoint = self.table.endpoint(name)
            movable = [lease for lease in leases if lease.may_move and lease.waiting is not None]
            if endpoint is not None and movable:
                by_revision.setdefault(endpoint.revision, {})[name] = movable
        for revision, movable_at in by_revision.items():
            peers = [one for one in destination.first_bytes if self._revision_of(one.endpoint) == revision]
            waiting = {name: [one.waiting for one in leases if one.waiting] for name, leases in movable_at.items()}
            for name in find_hung(
                now, waiting, destination.last_signs, peers, seconds=seconds, awake_since=self._awake_since
            ):
                endpoint = self.table.endpoint(name)
                if endpoint is None or not self.has_other(endpoint):
                    continue
                log.warning("hung replica ejected: its peers answer", endpoint=name, requests=len(movable_at[name]))
                self.record_unreachable(endpoint)
                for lease in movable_at[name]:
                    lease.on_endpoint_left()

    def _revision_of(self, name: str) -> str | None:
        endpoint = self.table.endpoint(name)
        return endpoint.revision if endpoint is not None else None

    def record_success(self, endpoint: Endpoint) -> None:
        """Record an answer: the replica is trusted at once, since a wrong choice is retried before the first byte."""
        self.destination(endpoint.service).health.pop(endpoint.name, None)

    def record_failure(self, endpoint: Endpoint) -> None:
        """Record that the replica broke the connection, sent nothing or answered with an error of its own."""
        self._set_health(endpoint, after_failure(self._health(endpoint), self._clock(), self._policy))

    def record_unreachable(self, endpoint: Endpoint) -> None:
        """Record that no connection to the replica could be made."""
        self._set_health(endpoint, after_unreachable(self._health(endpoint), self._clock(), self._policy))

    def record_hung(self, endpoint: Endpoint) -> None:
        """Record that all streams of the replica have stopped; requests that it has not answered yet are moved."""
        self.record_unreachable(endpoint)
        if self.has_other(endpoint):
            for lease in tuple(self.destination(endpoint.service).leases.get(endpoint.name, ())):
                lease.on_endpoint_left()

    def has_other(self, endpoint: Endpoint) -> bool:
        """Whether another replica of the same revision is there, and is not ejected."""
        if endpoint.service not in self.table.services:
            return False
        return any(
            other.name != endpoint.name and other.revision == endpoint.revision and not self.is_ejected(other)
            for other in self.table.route(endpoint.service).ready
        )

    def record_unavailable(self, endpoint: Endpoint, seconds: float) -> None:
        """Record that the replica refused requests for a while."""
        self._set_health(endpoint, after_unavailable(self._health(endpoint), self._clock(), seconds))

    def record_late(self, endpoint: Endpoint, seconds: float) -> None:
        """Record that another replica answered a request that this one was silent about for so long.

        It gets no more requests for as long again, unless it answers one: its cancelled request is no load any more, so
        that it would look idle. It is no failure.
        """
        self._set_health(endpoint, after_unavailable(self._health(endpoint), self._clock(), seconds))

    def record_load(self, endpoint: Endpoint, report: str) -> None:
        """Record what the replica reported of its load beside an answer; text that is no report changes nothing."""
        destination = self.destination(endpoint.service)
        own = len(destination.leases.get(endpoint.name, ()))
        destination.reports.record(endpoint.name, report, own_waiting=own, now=self._clock())

    def record_latency(self, endpoint: Endpoint, *, ttft: float | None = None, itl: float | None = None) -> None:
        """Record the latency of a stream: its time to first token, or the mean time between its tokens."""
        if self.table.endpoint(endpoint.name) is None:
            return
        slowness = self.destination(endpoint.service).slowness
        if reason := slowness.record(endpoint.name, self._clock(), ttft=ttft, itl=itl):
            log.warning("slow replica ejected", endpoint=endpoint.name, reason=reason)

    def destination(self, service: str) -> Destination:
        """The state of one service's replicas."""
        destination = self._destinations.get(service)
        if destination is None:
            destination = Destination()
            if service in self.table.services:  # a request may outlive its service; the service's state must not
                self._destinations[service] = destination
        return destination

    def foreign_waiting(self, service: str) -> int:
        """How many requests that are not of this gateway wait at the service's replicas, as these reported."""
        destination = self._destinations.get(service)
        reports = destination.reports.fresh(self._clock()) if destination is not None else {}
        return sum(report.foreign_waiting for report in reports.values())

    def waiting(self, service: str) -> list[int]:
        """How many requests wait at each ready replica: those of this gateway, and those that it reported of others."""
        destination = self._destinations.get(service)
        if destination is None or service not in self.table.services:
            return []
        reports = destination.reports.fresh(self._clock())
        return [
            len(destination.leases.get(one.name, ()))
            + (reports[one.name].foreign_waiting if one.name in reports else 0)
            for one in self.table.route(service).endpoints
        ]

    def load(self, endpoint: Endpoint) -> Load:
        """What this gateway has outstanding there."""
        destination = self._destinations.get(endpoint.service)
        return destination.loads.get(endpoint.name, IDLE) if destination is not None else IDLE

    def kv_usage(self, endpoint: Endpoint) -> float | None:
        """The used share of its KV cache, as it reported lately; None: it did not."""
        destination = self._destinations.get(endpoint.service)
        report = destination.reports.fresh(self._clock()).get(endpoint.name) if destination is not None else None
        return report.kv_usage if report is not None else None

    def is_ejected(self, endpoint: Endpoint) -> bool:
        """Whether it is left out while others can serve."""
        return self._health(endpoint).is_ejected(self._clock()) or self.is_slow(endpoint)

    def is_slow(self, endpoint: Endpoint) -> bool:
        """Whether it is left out because it is much slower than its peers."""
        destination = self._destinations.get(endpoint.service)
        return destination is not None and endpoint.name in destination.slowness.ejected(self._clock())

    def _has_endpoints(self, service: str) -> bool:
        return service in self.table.services and bool(self.table.route(service).ready)

    def _health(self, endpoint: Endpoint) -> Health:
        destination = self._destinations.get(endpoint.service)
        return destination.health.get(endpoint.name, TRUSTED) if destination is not None else TRUSTED

    def _set_health(self, endpoint: Endpoint, health: Health) -> None:
        if self.table.endpoint(endpoint.name) is not None:  # nothing is remembered of one that left the table
            self.destination(endpoint.service).health[endpoint.name] = health


class Lease:
    """A request's share of an endpoint's load; shrinks as tokens arrive, 0 when released."""

    __slots__ = (
        "_clock", "_demand", "_destination", "_left", "_name", "_service", "may_move", "on_endpoint_left", "waiting",
    )  # fmt: skip

    def __init__(
        self,
        destination: Destination,
        endpoint: Endpoint,
        tokens: int,
        on_endpoint_left: Callable[[], None],
        demand: Demand,
        clock: Callable[[], float],
        waiting: Waiting | None,
        may_move: bool,
    ) -> None:
        self._destination = destination
        self._clock = clock
        self.waiting = waiting  # of a stream
        self.may_move = may_move
        self._demand = demand
        self._name = endpoint.name
        self._service = endpoint.service
        self._left = max(1, tokens)
        self.on_endpoint_left = on_endpoint_left

    def __enter__(self) -> Self:
        loads = self._destination.loads
        load = loads.get(self._name, IDLE)
        loads[self._name] = Load(load.tokens + self._left, load.requests + 1)
        self._destination.leases.setdefault(self._name, set()).add(self)
        self._demand.start_request(self._service)
        return self

    def answered(self, *, has_begun: bool = False) -> None:
        """The first byte is here: from now on the answer stays with this replica. `has_begun`: it is a stream's."""
        self._note_sign()
        if has_begun and self.waiting is not None:
            self._destination.first_bytes.append(FirstByte(self._name, self.waiting.since))
        self._stop_waiting()

    def _note_sign(self) -> None:
        self._destination.last_signs[self._name] = self._clock()

    def _stop_waiting(self) -> None:
        leases = self._destination.leases.get(self._name)
        if leases is not None:
            leases.discard(self)
            if not leases:
                del self._destination.leases[self._name]

    def progress(self, tokens: int) -> None:
        """`tokens` of the answer arrived. The last one stays counted until the end: estimates run short."""
        self._note_sign()
        done = tokens if tokens < self._left else self._left - 1
        if done > 0:
            self._left -= done
            load = self._destination.loads[self._name]
            self._destination.loads[self._name] = Load(load.tokens - done, load.requests)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_waiting()
        loads = self._destination.loads
        load = loads.pop(self._name)
        if load.requests > 1:
            loads[self._name] = Load(load.tokens - self._left, load.requests - 1)
        self._demand.end_request(self._service)


def static_fleet(models: Iterable[tuple[str, str]]) -> Fleet:
    """A fleet without Kubernetes: pairs of model and base URL; a model given twice has two replicas."""
    fleet = Fleet()
    for number, (model, url) in enumerate(models):
        key = f"{STATIC_NAMESPACE}/{model}"
        fleet.set_service(key, Service(key=key, served_name=model))
        name = f"{STATIC_NAMESPACE}/{model}-{number}"
        fleet.set_endpoint(name, Endpoint(name=name, service=key, revision=STATIC_REVISION, url=url.rstrip("/")))
    return fleet
