"""Sends a request on to another service when its own cannot answer in time: `spec.routing.fallback`.

| its own service                                   | the request                                                   |
|---------------------------------------------------|---------------------------------------------------------------|
| has had no ready replica for `afterSeconds`       | goes to the fallback                                          |
| refuses it: no replica, full, its replicas failed | goes to the fallback at once                                  |
| has not begun to stream within `afterSeconds`     | is cancelled there, which counts against no replica, and goes |
| is overloaded (the last step of `overload`)       | goes to the fallback at once                                  |

Only to a service with a ready replica that the caller may use; through at most `MAX_HOPS` services, never in a circle.
A request that pins a revision or names an adapter or an alias goes nowhere else: it asks for exactly that.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Final

from aiohttp import web

from slipway_gateway.errors import Refusal
from slipway_gateway.picker.endpoints import Route, Service
from slipway_gateway.resolve import RoutingTable
from slipway_gateway.tenants import Tenant

MAX_HOPS: Final = 3


class NoAnswer(Exception):  # noqa: N818  it becomes an answer, or the reason to ask another service
    """The service cannot answer this request now, and nothing has been sent to the client."""

    def __init__(self, reason: str, answer: web.Response | Refusal) -> None:
        """`reason`: waiting, slow, refused, failed or overloaded. `answer`: for the client, if no service is left."""
        super().__init__(reason)
        self.reason = reason
        self.answer = answer


@dataclass(slots=True)
class Chain:
    """The services that one request has been sent to, in their order."""

    services: list[str] = field(default_factory=list)
    deadline: float | None = None  # of the event loop's clock: then the next service is asked; None: there is none

    def enter(self, table: RoutingTable, tenant: Tenant, route: Route, pin: str) -> None:
        """The request is sent to this service now; its time starts."""
        self.services.append(route.service.key)
        self.deadline = None
        if self.next(table, tenant, route, pin) is not None:
            self.deadline = asyncio.get_running_loop().time() + route.service.fallback_seconds

    def next(self, table: RoutingTable, tenant: Tenant, route: Route, pin: str) -> Service | None:
        """The service that can take the request instead; None: there is none now."""
        if pin or route.adapter is not None or len(self.services) > MAX_HOPS:
            return None
        service = table.services.get(route.service.fallback)
        if service is None or service.key in self.services or not table.route(service.key).endpoints:
            return None
        return service if tenant.may_use(service.served_name, service.key) else None
