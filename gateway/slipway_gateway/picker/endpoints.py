"""Where requests may go: services, their endpoints, and what the `model` of a request means. Frozen values."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One replica that may be sent requests: its pod is Ready, serving and not being deleted."""

    name: str  # <namespace>/<pod>
    service: str  # <namespace>/<name>
    revision: str
    url: str  # http://10.0.0.7:8000
    token_digests: tuple[str, ...] = ()  # of the serving tokens that it accepts; empty: it wants none


@dataclass(frozen=True, slots=True)
class Service:
    """What the gateway needs to know of an InferenceService."""

    key: str  # <namespace>/<name>
    served_name: str  # what clients say as `model`, and what its replicas answer to
    created: str = ""  # RFC 3339 in UTC, so that older sorts first
    weights: Mapping[str, int] = field(default_factory=dict)  # share of each revision; empty: no split is known


@dataclass(frozen=True, slots=True)
class Route:
    """One service with the endpoints that can answer for it now."""

    service: Service
    endpoints: tuple[Endpoint, ...] = ()


@dataclass(frozen=True, slots=True)
class RoutingTable:
    """Everything the gateway can route to. A new fact makes a new table; readers keep the one they hold.

    A `model` is either `<namespace>/<name>`, which is always valid and wins, or a served name.
    Two services with one served name: the older one serves, the other answers to its full name only.
    """

    routes: Mapping[str, Route] = field(default_factory=dict)  # by service key
    keys_by_name: Mapping[str, str] = field(default_factory=dict)  # served name -> service key

    @classmethod
    def of(cls, services: Iterable[Service], endpoints: Iterable[Endpoint]) -> "RoutingTable":
        """The table of these services and endpoints; an endpoint whose service is unknown is left out."""
        by_service: dict[str, list[Endpoint]] = {}
        for endpoint in endpoints:
            by_service.setdefault(endpoint.service, []).append(endpoint)
        routes = {
            service.key: Route(service, _in_order(by_service.get(service.key, ())))
            for service in sorted(services, key=_seniority)
        }
        return cls(MappingProxyType(routes), MappingProxyType(_names(routes.values())))

    def with_endpoints(self, key: str, endpoints: Iterable[Endpoint]) -> "RoutingTable":
        """The same table with other endpoints for one service: a pod came or went, no name changed."""
        route = self.routes.get(key)
        if route is None:
            return self
        changed = Route(route.service, _in_order(endpoints))
        return RoutingTable(MappingProxyType({**self.routes, key: changed}), self.keys_by_name)

    def resolve(self, model: str) -> Route | None:
        """The route that a request for `model` takes, or None when nobody serves it."""
        return self.routes.get(model) or self.routes.get(self.keys_by_name.get(model, ""))

    def served_models(self) -> list[tuple[str, Service]]:
        """Every name that a client may say and who serves it: served names first come, clashes by full name."""
        models = [
            (route.service.served_name if self._owns_its_name(route.service) else route.service.key, route.service)
            for route in self.routes.values()
        ]
        return sorted(models, key=lambda model: model[0])

    def _owns_its_name(self, service: Service) -> bool:
        return self.resolve(service.served_name) is self.routes[service.key]


def _names(routes_by_seniority: Iterable[Route]) -> dict[str, str]:
    names: dict[str, str] = {}
    for route in routes_by_seniority:
        names.setdefault(route.service.served_name, route.service.key)
    return names


def _seniority(service: Service) -> tuple[str, str]:
    return service.created, service.key


def _in_order(endpoints: Iterable[Endpoint]) -> tuple[Endpoint, ...]:
    return tuple(sorted(endpoints, key=lambda endpoint: endpoint.name))
