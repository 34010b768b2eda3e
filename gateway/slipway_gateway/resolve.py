"""The routing table: resolves the `model` of a request to a service and its endpoints.

| a client says         | answered by                                                                             |
|-----------------------|-----------------------------------------------------------------------------------------|
| `<namespace>/<name>`  | that service, always                                                                    |
| a served name         | the oldest service whose status has it                                                  |
| a former served name  | the oldest service with a replica that still answers to it, while no service is called so|
"""

from collections.abc import Iterator, Mapping
from datetime import datetime

from slipway_api.seniority import older_first
from slipway_gateway.picker.endpoints import Endpoint, Route, Service


class RoutingTable:
    """Services and endpoints by name. A change costs the same whatever the size of the fleet.

    Routes are built when they are first asked for after a change, and `built_routes` counts them: a thousand pods that
    become ready between two requests of a service are one build.
    """

    def __init__(self) -> None:
        self.built_routes = 0
        self._services: dict[str, Service] = {}
        self._endpoints: dict[str, Endpoint] = {}
        self._of_service: dict[str, dict[str, Endpoint]] = {}  # service key -> its endpoints by name
        self._served: dict[str, set[str]] = {}  # served name -> keys of the services that claim it
        self._former: dict[str, dict[str, int]] = {}  # name that replicas answer to -> service key -> how many
        self._routes: dict[str, Route] = {}  # built, and still right

    def __len__(self) -> int:
        return len(self._services)

    @property
    def services(self) -> Mapping[str, Service]:
        """Every service by its key."""
        return self._services

    def set_service(self, key: str, service: Service | None) -> bool:
        """Add, replace or remove a service. False: nothing that routing needs has changed."""
        old = self._services.get(key)
        if old == service:
            return False
        self._routes.pop(key, None)
        if old is not None:
            del self._services[key]
            claims = self._served[old.served_name]
            claims.discard(key)
            if not claims:
                del self._served[old.served_name]
        if service is not None:
            self._services[key] = service
            self._served.setdefault(service.served_name, set()).add(key)
        return True

    def set_endpoint(self, name: str, endpoint: Endpoint | None) -> bool:
        """Set or remove the endpoint of a replica. False: nothing has changed."""
        old = self._endpoints.get(name)
        if old == endpoint:
            return False
        if old is not None:
            del self._endpoints[name]
            of_service = self._of_service[old.service]
            del of_service[name]
            if not of_service:
                del self._of_service[old.service]
            self._count_name(old, -1)
            self._routes.pop(old.service, None)
        if endpoint is not None:
            self._endpoints[name] = endpoint
            self._of_service.setdefault(endpoint.service, {})[name] = endpoint
            self._count_name(endpoint, 1)
            self._routes.pop(endpoint.service, None)
        return True

    def endpoint(self, name: str) -> Endpoint | None:
        """The endpoint of that pod, while it may be sent requests."""
        return self._endpoints.get(name)

    def resolve(self, model: str) -> Route | None:
        """The route that a request for `model` takes, or None when no service has that name."""
        key = model if model in self._services else self._owner_of(model)
        return self.route(key) if key is not None else None

    def route(self, key: str) -> Route:
        """The route of one service. Pods that claim to belong to it and are not controlled by it are left out."""
        route = self._routes.get(key)
        if route is None:
            service = self._services[key]
            endpoints = self._of_service.get(key, {}).values()
            own = sorted((one for one in endpoints if one.owner_uid == service.uid), key=lambda one: one.name)
            route = self._routes[key] = Route(service, tuple(own))
            self.built_routes += 1
        return route

    def served_models(self) -> list[tuple[str, Route]]:
        """One name for each service, in order: its served name, or its full name where an older one is called so."""
        return sorted(self._names(), key=lambda model: model[0])

    def _names(self) -> Iterator[tuple[str, Route]]:
        for key, service in self._services.items():
            owns_name = self._owner_of(service.served_name) == key and service.served_name not in self._services
            yield (service.served_name if owns_name else key), self.route(key)

    def _owner_of(self, name: str) -> str | None:
        """The service that is called so, or was until its new replicas are ready."""
        claims = self._served.get(name)
        if claims is None:
            # Only the service's own replicas count: a pod of another owner must not claim names for it.
            claims = {
                key
                for key in self._former.get(name, ())
                if key in self._services and any(one.served_name == name for one in self.route(key).endpoints)
            }
        return min(claims, key=self._seniority, default=None)

    def _seniority(self, key: str) -> tuple[datetime, str, str]:
        namespace, _, name = key.partition("/")
        return older_first(self._services[key].created, namespace, name)

    def _count_name(self, endpoint: Endpoint, change: int) -> None:
        if not endpoint.served_name:
            return
        counts = self._former.setdefault(endpoint.served_name, {})
        counts[endpoint.service] = counts.get(endpoint.service, 0) + change
        if not counts[endpoint.service]:
            del counts[endpoint.service]
        if not counts:
            del self._former[endpoint.served_name]
