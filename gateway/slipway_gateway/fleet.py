"""What the gateway knows of the fleet now: the routing table, what it has outstanding where, and whom it trusts.

Facts come from `watch` (or from the command line); every fact takes effect before the next request is picked.
"""

import random
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from slipway_gateway.breaker import (
    TRUSTED,
    BreakerPolicy,
    Health,
    after_failure,
    asked_to_stay_away,
)
from slipway_gateway.picker.endpoints import Endpoint, Route, RoutingTable, Service
from slipway_gateway.picker.pick import IDLE, Load, Pick, pick

STATIC_NAMESPACE: Final = "static"


@dataclass(frozen=True, slots=True)
class View:
    """How current our picture is."""

    synced: bool  # everything has been listed once
    age_seconds: float  # since the API server last gave a sign of life


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
        self.view: Callable[[], View] = lambda: View(synced=True, age_seconds=0.0)  # replaced by whoever watches
        self._policy = policy or BreakerPolicy()
        self._clock = clock
        self._draw = draw
        self._services: dict[str, Service] = {}
        self._endpoints: dict[str, Endpoint] = {}
        self._by_service: dict[str, dict[str, Endpoint]] = {}
        self._loads: dict[str, Load] = {}  # only endpoints with something outstanding
        self._health: dict[str, Health] = {}  # only endpoints that are not simply trusted

    def set_service(self, key: str, service: Service | None) -> None:
        """A service is like this now, or is gone."""
        if self._services.get(key) == service:
            return  # status changes all the time; what we route by seldom does
        if service is None:
            del self._services[key]
        else:
            self._services[key] = service
        self.table = RoutingTable.of(self._services.values(), self._endpoints.values())

    def set_endpoint(self, name: str, endpoint: Endpoint | None) -> None:
        """A replica may be sent requests at this endpoint from now on, or at none any more."""
        old = self._endpoints.get(name)
        if old == endpoint:
            return
        if old is not None:
            del self._endpoints[name]
            self._by_service[old.service].pop(name)
            # A pod that comes back starts with a clean slate.
            self._health.pop(name, None)
        if endpoint is not None:
            self._endpoints[name] = endpoint
            self._by_service.setdefault(endpoint.service, {})[name] = endpoint
        for key in {changed.service for changed in (old, endpoint) if changed is not None}:
            self.table = self.table.with_endpoints(key, self._by_service[key].values())

    def has_endpoint(self, name: str) -> bool:
        """Whether that replica is in the table."""
        return name in self._endpoints

    def pick(self, route: Route, *, tried: Collection[str] = (), pin: str = "") -> Pick:
        """The endpoint for the next attempt of a request on `route`."""
        return pick(
            route,
            loads=self._loads,
            ejected=self._ejected(),
            tried=tried,
            pin=pin,
            draw=self._draw(),
            tie_break=self._draw(),
        )

    def lease(self, endpoint: Endpoint, tokens: int) -> "Lease":
        """Count a request of about `tokens` against `endpoint` while the lease is held."""
        return Lease(self._loads, endpoint.name, tokens)

    def succeeded(self, endpoint: Endpoint) -> None:
        """It answered."""
        self._health.pop(endpoint.name, None)

    def failed(self, endpoint: Endpoint) -> None:
        """It could not be reached, or broke off."""
        self._note(endpoint, after_failure(self._health.get(endpoint.name, TRUSTED), self._clock(), self._policy))

    def stay_away(self, endpoint: Endpoint, seconds: float) -> None:
        """It asked not to be sent anything for a while."""
        self._note(endpoint, asked_to_stay_away(self._health.get(endpoint.name, TRUSTED), self._clock(), seconds))

    def load(self, endpoint: Endpoint) -> Load:
        """What we have outstanding there."""
        return self._loads.get(endpoint.name, IDLE)

    def is_ejected(self, endpoint: Endpoint) -> bool:
        """Whether it is left out while others can serve."""
        return self._health.get(endpoint.name, TRUSTED).is_ejected(self._clock())

    def _note(self, endpoint: Endpoint, health: Health) -> None:
        if endpoint.name in self._endpoints:  # one that left the table is nobody's concern any more
            self._health[endpoint.name] = health

    def _ejected(self) -> set[str]:
        now = self._clock()
        return {name for name, health in self._health.items() if health.is_ejected(now)}


class Lease:
    """A request's share of an endpoint's load; shrinks as tokens arrive, gone when released."""

    __slots__ = ("_left", "_loads", "_name")

    def __init__(self, loads: dict[str, Load], name: str, tokens: int) -> None:
        self._loads = loads
        self._name = name
        self._left = tokens

    def __enter__(self) -> Self:
        load = self._loads.get(self._name, IDLE)
        self._loads[self._name] = Load(load.tokens + self._left, load.requests + 1)
        return self

    def progress(self, tokens: int) -> None:
        """`tokens` of the answer arrived. The last one stays on the books until the end: estimates run short."""
        done = min(tokens, self._left - 1)
        if done > 0:
            self._left -= done
            load = self._loads[self._name]
            self._loads[self._name] = Load(load.tokens - done, load.requests)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        load = self._loads.pop(self._name)
        if load.requests > 1:
            self._loads[self._name] = Load(load.tokens - self._left, load.requests - 1)


def static_fleet(models: Iterable[tuple[str, str]]) -> Fleet:
    """A fleet without Kubernetes: pairs of model and base URL; a model given twice has two replicas."""
    fleet = Fleet()
    for number, (model, url) in enumerate(models):
        key = f"{STATIC_NAMESPACE}/{model}"
        fleet.set_service(key, Service(key=key, served_name=model))
        name = f"{STATIC_NAMESPACE}/{model}-{number}"
        fleet.set_endpoint(name, Endpoint(name=name, service=key, revision="static", url=url.rstrip("/")))
    return fleet
