"""Holds requests for which no replica is ready, while the service may still get one; bounded, first in, first out.

| service without a ready replica                      | a request                                           |
|------------------------------------------------------|-----------------------------------------------------|
| suspended                                            | is refused immediately                              |
| no replica can start until a person acts (Stalled)   | is refused immediately, with reason and remedy      |
| scaled to zero, with `scaleToZero` in mode Active    | waits, within `scaleToZero.activation`              |
| replicas are desired: they load, restart or moved    | waits, within the gateway's own limits (10 s)       |
| none is desired                                      | is refused immediately                              |
| has replicas, none with the adapter (mode OnDemand)  | waits, within the same limits, until one loads it   |

When replicas appear, as many requests are released as they run at once (`maxNumSeqs` each), and one more whenever one
of these ends: a thousand held requests must not fall on the first replica. New requests queue behind the held ones. A
request whose time is over is refused; if there is a replica by then, it is sent there, whose own queue may refuse it.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, Generic, TypeVar

from slipway_gateway.demand import Demand, Held
from slipway_gateway.errors import Refusal, cannot_start, not_ready, suspended, waiting_room_full
from slipway_gateway.picker.endpoints import Route, Service, WaitLimits
from slipway_gateway.resolve import RoutingTable

T = TypeVar("T")

LOADING_REQUESTS: Final = 1000
LOADING_BYTES: Final = 256 << 20
FULL_RETRY_AFTER: Final = 10
MOST: Final = 1 << 30


def wait_limits(service: Service, loading_seconds: float, *, has_base: bool = False) -> WaitLimits | None:
    """Within which limits requests may wait for a ready replica, or for an adapter on one (`has_base`); None: not."""
    if service.is_suspended:
        return None
    if service.activation is not None:
        return service.activation
    if (service.desired_replicas > 0 or has_base) and loading_seconds > 0:
        return WaitLimits(LOADING_REQUESTS, LOADING_BYTES, loading_seconds)
    return None


def refusal_of_stalled(route: Route) -> Refusal | None:
    """The refusal of a request that would wait for a person; None: a replica may come, or load the adapter."""
    if route.service.stalled:
        return cannot_start(route.service.served_name, route.service.stalled)
    if route.adapter is not None and route.adapter.stalled:
        return cannot_start(route.adapter.name, route.adapter.stalled, is_adapter=True)
    return None


class HeldRequests(Generic[T]):
    """A bounded queue of held requests, first in, first out, of which any may leave before its turn. Pure."""

    def __init__(self) -> None:
        self.bytes = 0
        self._sizes: OrderedDict[T, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, request: T, size: int, limits: WaitLimits) -> str:
        """Hold a request; otherwise the limit that it exceeds: "requests" or "bytes"."""
        if len(self._sizes) >= limits.requests:
            return "requests"
        if self.bytes + size > limits.bytes:
            return "bytes"
        self._sizes[request] = size
        self.bytes += size
        return ""

    def remove(self, request: T) -> bool:
        """The request does not wait any more. False: it did not."""
        size = self._sizes.pop(request, None)
        self.bytes -= size or 0
        return size is not None

    def release(self, most: int) -> list[T]:
        """Take out the `most` that have waited longest."""
        released: list[T] = []
        while self._sizes and len(released) < most:
            request, size = self._sizes.popitem(last=False)
            self.bytes -= size
            released.append(request)
        return released


class _Service:
    """The held requests of one service: of the base, and of each adapter; and how many released ones still run."""

    def __init__(self) -> None:
        self.queues: dict[str, HeldRequests[asyncio.Future[None]]] = {}  # by the adapter's key; "": the base
        self.running = 0


class WaitingRoom:
    """The held requests of all services."""

    def __init__(self, table: RoutingTable, demand: Demand, *, loading_seconds: float) -> None:
        """`loading_seconds`: how long a request waits for a replica that the operator wants anyway."""
        self._table = table
        self._demand = demand
        self._loading_seconds = loading_seconds
        self._services: dict[str, _Service] = {}

    @asynccontextmanager
    async def admit(self, route: Route, size: int, pin: str = "") -> AsyncIterator[None]:
        """Return when a request of `size` bytes may be sent, and count it until it has ended. Raises a Refusal.

        A request that pins a revision with a reserved replica waits for nothing: what the others wait for is another.
        """
        service = route.service.key
        has_reserved = any(one.revision == pin for one in route.reserved)
        if has_reserved or not self._must_wait(route) or not await self._wait(route, size):
            yield
            return
        try:
            yield
        finally:
            self._services[service].running -= 1
            self.changed(service)  # its place is free for the next one

    def changed(self, service: str) -> None:
        """The endpoints of a service have changed, or the service itself: release what may go."""
        held = self._services.get(service)
        if held is None:
            return
        for name, queue in list(held.queues.items()):
            self._release(held, queue, self._places(service, name, held.running))
            if not queue:
                del held.queues[name]
        if not held.running and not held.queues:
            del self._services[service]

    def _places(self, service: str, adapter: str, running: int) -> int:
        """How many more held requests may be sent. All, if it is gone, suspended or stalled: they are refused."""
        facts = self._table.services.get(service)
        if facts is None or facts.is_suspended or facts.stalled or (adapter and self._table.adapter(adapter) is None):
            return MOST
        route = self._table.adapter_route(adapter) if adapter else self._table.route(service)
        return len(route.endpoints) * facts.max_num_seqs - running

    def _must_wait(self, route: Route) -> bool:
        """Whether no replica can answer, or others wait before it. Adapters are waited for in mode OnDemand only."""
        held = self._services.get(route.service.key)
        if held is not None and _queue_of(route) in held.queues:
            return True
        is_loaded_by_request = route.adapter is not None and route.adapter.on_demand
        return not route.endpoints and (not route.has_base or is_loaded_by_request)

    async def _wait(self, route: Route, size: int) -> bool:
        """Hold the request until it is released: True, or until its time is over and a replica is ready: False."""
        service, name = route.service, _queue_of(route)
        if service.is_suspended:
            raise suspended(service.served_name)
        if (refusal := refusal_of_stalled(route)) is not None:
            raise refusal
        limits = wait_limits(service, self._loading_seconds, has_base=route.has_base)
        if limits is None:
            raise not_ready(f"{route.name} has no ready replica")
        held = self._services.setdefault(service.key, _Service())
        queue = held.queues.setdefault(name, HeldRequests())
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if exceeded := queue.add(waiter, size, limits):
            self.changed(service.key)
            if not route.has_base:
                self._demand.refuse(service.key)
            raise waiting_room_full(route.name, exceeded, FULL_RETRY_AFTER)
        # A request that only an adapter is missing for needs no further replica of the service.
        held_for = Held(
            service.key,
            size,
            adapter=route.adapter.name if route.adapter is not None and route.adapter.on_demand else "",
            needs_replica=not route.has_base,
        )
        since = self._demand.start_waiting(held_for)
        try:
            async with asyncio.timeout(limits.seconds):
                await waiter
        except TimeoutError:
            if _is_released(waiter):
                return True
            if not self._has_endpoints(service.key, name):
                raise not_ready(f"{route.name} had no ready replica within {limits.seconds:g} s") from None
            return False
        except asyncio.CancelledError:
            if _is_released(waiter):  # and cancelled at once: its place is the next one's
                held.running -= 1
            raise
        finally:
            queue.remove(waiter)
            self._demand.stop_waiting(held_for, since)
            self.changed(service.key)
        return True

    def _has_endpoints(self, service: str, adapter: str) -> bool:
        return self._places(service, adapter, running=0) > 0

    @staticmethod
    def _release(held: _Service, queue: HeldRequests[asyncio.Future[None]], places: int) -> None:
        while places > 0 and (released := queue.release(1)):
            [waiter] = released
            if not waiter.done():  # else its client has just left, or its time is over
                waiter.set_result(None)
                held.running += 1
                places -= 1


def _queue_of(route: Route) -> str:
    return route.adapter.key if route.adapter is not None else ""


def _is_released(waiter: asyncio.Future[None]) -> bool:
    return waiter.done() and not waiter.cancelled()
