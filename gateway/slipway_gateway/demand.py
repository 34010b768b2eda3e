"""Demand for services at this gateway: waiting and open requests, counted, with a version that the operator polls.

The operator asks with the version it has seen and gets the answer when the version is another one (`DemandReport`). The
version must change soon after idle services get work, and rarely otherwise:

| change of a service                                            | new version          |
|----------------------------------------------------------------|----------------------|
| the first waiting request                                      | always               |
| the last waiting request is gone                               | always               |
| the first open request                                         | after 5 idle seconds |
| open requests have doubled, and doubled again, since it was idle | always             |
| the first or last waiting request of an adapter in mode OnDemand | always             |
| the waiting room is full: the 1st, 2nd, 4th … refused request  | always               |
| anything else                                                  | no                   |
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Final

from slipway_api.gateway_api import AdapterDemand, DemandReport, ServiceDemand

# A service with a request every second is busy all the time: its requests are no news.
QUIET_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Held:
    """A request that is held, and what for."""

    service: str
    size: int
    adapter: str = ""  # in mode OnDemand: its model name
    needs_replica: bool = True  # the service has none that is ready


@dataclass(slots=True)
class _Counts:
    """The requests of one service."""

    open: int = 0
    announced: int = 0  # the most open requests since it was idle, of those that changed the version
    last_request: float = 0.0  # when the last one arrived or ended
    waiting_bytes: int = 0
    waiting_since: deque[float] = field(default_factory=deque)  # of each waiting request, the oldest first
    adapters: Counter[str] = field(default_factory=Counter)  # by adapter: requests that wait until a replica has it
    refused: int = 0  # because the waiting room was full, since it was last empty


class Demand:
    """Counts requests from their arrival to their end. Not thread-safe: everything happens on the event loop."""

    def __init__(self, boot_id: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.version = 1
        self._boot_id = boot_id
        self._clock = clock
        self._started = clock()
        self._services: dict[str, _Counts] = {}
        self._changed = asyncio.Event()

    def start_waiting(self, held: Held) -> float:
        """Count a request that is held; returns the moment, which `stop_waiting` needs."""
        counts = self._counts(held.service)
        now = counts.last_request = self._clock()
        is_first = False
        if held.needs_replica:
            counts.waiting_since.append(now)
            counts.waiting_bytes += held.size
            is_first = len(counts.waiting_since) == 1
        if held.adapter:
            counts.adapters[held.adapter] += 1
            is_first = is_first or counts.adapters[held.adapter] == 1
        if is_first:
            self._change()
        return now

    def stop_waiting(self, held: Held, since: float) -> None:
        """A held request was released, refused, or left."""
        counts = self._counts(held.service)
        counts.last_request = self._clock()
        was_last = False
        if held.needs_replica:
            counts.waiting_since.remove(since)  # mostly the first one
            counts.waiting_bytes -= held.size
            was_last = not counts.waiting_since
            if was_last:
                counts.refused = 0
        if held.adapter:
            counts.adapters[held.adapter] -= 1
            if not counts.adapters[held.adapter]:
                del counts.adapters[held.adapter]
                was_last = True
        if was_last:
            self._change()

    def refuse(self, service: str) -> None:
        """Count a request that was refused because the waiting room of its service is full."""
        counts = self._counts(service)
        counts.last_request = self._clock()
        counts.refused += 1
        if counts.refused.bit_count() == 1:  # 1, 2, 4, 8 …
            self._change()

    def start_request(self, service: str) -> None:
        """Count a request that is sent to a replica."""
        counts = self._counts(service)
        now = self._clock()
        was_quiet = not counts.open and now - counts.last_request >= QUIET_SECONDS
        counts.open += 1
        counts.last_request = now
        # While it stays busy the highest number stands: one that swings between 0 and 8 is announced once.
        if was_quiet or counts.open >= 2 * max(1, counts.announced):
            counts.announced = counts.open
            self._change()

    def end_request(self, service: str) -> None:
        """That request has ended."""
        counts = self._counts(service)
        counts.open -= 1
        counts.last_request = self._clock()

    def waiting(self, service: str) -> int:
        """How many requests of this service are held."""
        counts = self._services.get(service)
        return len(counts.waiting_since) if counts is not None else 0

    def waiting_by_service(self) -> dict[str, int]:
        """How many requests are held, of each service that has any."""
        return {name: len(counts.waiting_since) for name, counts in self._services.items() if counts.waiting_since}

    def report(self, known: Container[str]) -> DemandReport:
        """The present demand. Services that are not `known` any more are forgotten once they have no requests."""
        now = self._clock()
        for name in [one for one, counts in self._services.items() if one not in known and not _is_busy(counts)]:
            del self._services[name]
        return DemandReport(
            boot_id=self._boot_id,
            version=self.version,
            uptime_seconds=now - self._started,
            services=tuple(_service_demand(name, counts, now) for name, counts in self._services.items()),
        )

    async def wait(self, after: int | None, seconds: float) -> None:
        """Return when the version is not `after`, or after `seconds`."""
        deadline = asyncio.get_running_loop().time() + seconds
        try:
            async with asyncio.timeout_at(deadline):
                while self.version == after:
                    await self._changed.wait()
        except TimeoutError:
            pass

    def _counts(self, service: str) -> _Counts:
        counts = self._services.get(service)
        if counts is None:
            counts = self._services[service] = _Counts(last_request=self._clock() - QUIET_SECONDS)
        return counts

    def _change(self) -> None:
        self.version += 1
        self._changed.set()  # wakes all that wait now
        self._changed = asyncio.Event()


def _is_busy(counts: _Counts) -> bool:
    return bool(counts.open or counts.waiting_since or counts.adapters)


def _service_demand(name: str, counts: _Counts, now: float) -> ServiceDemand:
    return ServiceDemand(
        service=name,
        waiting_requests=len(counts.waiting_since),
        waiting_bytes=counts.waiting_bytes,
        longest_wait_seconds=now - counts.waiting_since[0] if counts.waiting_since else 0.0,
        refused_requests=counts.refused,
        open_requests=counts.open,
        idle_seconds=0.0 if _is_busy(counts) else max(0.0, now - counts.last_request),
        adapters=tuple(AdapterDemand(adapter=one, waiting_requests=count) for one, count in counts.adapters.items()),
    )
