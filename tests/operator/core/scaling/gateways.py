"""What gateways would report of a service in a simulated cluster: requests come, wait for a replica, run and end."""

from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from slipway_operator.core.observed import Demand

if TYPE_CHECKING:
    from tests.operator.core.simulated_cluster import SimulatedCluster


class Gateways:
    """All gateways of an installation, as one: requests wait while no replica is ready, and run once one is."""

    def __init__(self, *, patience: float = 600, most: int = 1000) -> None:
        self.most = most  # requests that may wait
        self.refused = 0  # since none waited
        self.patience = timedelta(seconds=patience)
        self.waiting: list[datetime] = []  # since when each waits
        self.open = 0
        self.idle_since: datetime | None = None
        self.is_silent = False  # none reports at all
        self.is_partial = False  # one of them does not
        self.given_up = 0

    def attach(self, world: "SimulatedCluster") -> "Gateways":
        world.demand = self.report
        world.load = self.step
        return self

    def send(self, world: "SimulatedCluster", requests: int = 1) -> None:
        """Clients send requests that run until `finish`."""
        admitted = min(requests, self.most - len(self.waiting)) if not world.ready else requests
        self.waiting += [world.now] * admitted
        self.refused += requests - admitted
        self.step(world)

    def finish(self, world: "SimulatedCluster") -> None:
        """Every running request ends."""
        self.open, self.idle_since = 0, world.now
        self.step(world)

    def step(self, world: "SimulatedCluster") -> None:
        if world.ready:
            self.open, self.waiting = self.open + len(self.waiting), []
        late = [since for since in self.waiting if world.now - since > self.patience]
        if late:
            self.given_up += len(late)
            self.waiting, self.idle_since = [one for one in self.waiting if one not in late], world.now
        if not self.waiting:
            self.refused = 0
        for position, pod in enumerate(world.ready):
            pod.running = self.open // len(world.ready) + (position < self.open % len(world.ready))

    def report(self, world: "SimulatedCluster") -> Demand | None:
        if self.is_silent:
            return None
        return Demand(
            at=world.now,
            waiting_requests=len(self.waiting),
            longest_wait=world.now - min(self.waiting, default=world.now),
            refused_requests=self.refused,
            open_requests=self.open,
            idle_since=None if self.waiting or self.open else self.idle_since,
            complete=not self.is_partial,
        )
