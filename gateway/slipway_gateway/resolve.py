"""The routing table: resolves the `model` of a request to a service or an adapter of it, and its endpoints.

| a client says         | answered by                                                                             |
|-----------------------|-----------------------------------------------------------------------------------------|
| `<namespace>/<name>`  | that service, always                                                                    |
| a served name         | the oldest service whose status has it                                                  |
| an adapter's name     | the oldest adapter of that name: the replicas of its base that have loaded it           |
| `<namespace>/<name>`  | the adapter of that name in that namespace                                              |
| a former served name  | the oldest service with a replica that still answers to it, while nothing is called so  |
| an alias, or with     | one of the adapters with that alias, by weight, in the namespace of the oldest; one     |
| `<namespace>/` before | without a loaded replica leaves its share to the others                                 |

Only what the caller may use counts: a service of another tenant neither answers nor takes a name from this one's, as
if it did not exist. So `chat` is each team's own `chat`, and the oldest one for a caller that may use several.
"""

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime

from slipway_api.seniority import older_first
from slipway_gateway.picker.endpoints import Adapter, Endpoint, Route, Service
from slipway_gateway.picker.split import choose_by_hash

MayUse = Callable[[str, str], bool]  # of the name that a client says, and the key of the service that would answer


def may_use_all(model: str, service: str) -> bool:
    """Whether a caller may use the service: every one, where no tenants are configured."""
    return True


class Claims:
    """Names, and the keys of the objects that claim each."""

    def __init__(self) -> None:
        self._keys: dict[str, set[str]] = {}

    def add(self, name: str, key: str) -> None:
        """`key` claims `name`."""
        self._keys.setdefault(name, set()).add(key)

    def remove(self, name: str, key: str) -> None:
        """`key` does not claim `name` any more."""
        keys = self._keys[name]
        keys.discard(key)
        if not keys:
            del self._keys[name]

    def of(self, name: str) -> frozenset[str] | set[str]:
        """The keys that claim `name`."""
        return self._keys.get(name, frozenset())


class RoutingTable:
    """Services, adapters and endpoints by name. A change costs the same whatever the size of the fleet.

    Routes are built when they are first asked for after a change, and `built_routes` counts them: a thousand pods that
    become ready between two requests of a service are one build.
    """

    def __init__(self) -> None:
        self.built_routes = 0
        self._services: dict[str, Service] = {}
        self._endpoints: dict[str, Endpoint] = {}
        self._adapters: dict[str, Adapter] = {}
        self._of_service: dict[str, dict[str, Endpoint]] = {}  # service key -> its endpoints by name
        self._adapters_of: dict[str, set[str]] = {}  # service key -> keys of its adapters
        self._served = Claims()
        self._adapter_names = Claims()
        self._aliases = Claims()
        self._former: dict[str, dict[str, int]] = {}  # name that replicas answer to -> service key -> how many
        self._routes: dict[str, Route] = {}  # of services: built, and still right
        self._adapter_routes: dict[str, Route] = {}

    def __len__(self) -> int:
        return len(self._services)

    @property
    def services(self) -> Mapping[str, Service]:
        """Every service by its key."""
        return self._services

    @property
    def endpoints(self) -> Mapping[str, Endpoint]:
        """Every endpoint by its name."""
        return self._endpoints

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """Every adapter by its key."""
        return self._adapters

    def set_service(self, key: str, service: Service | None) -> bool:
        """Add, replace or remove a service. False: nothing that routing needs has changed."""
        old = self._services.get(key)
        if old == service:
            return False
        self._drop_routes(key)
        if old is not None:
            del self._services[key]
            self._served.remove(old.served_name, key)
        if service is not None:
            self._services[key] = service
            self._served.add(service.served_name, key)
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
            self._drop_routes(old.service)
        if endpoint is not None:
            self._endpoints[name] = endpoint
            self._of_service.setdefault(endpoint.service, {})[name] = endpoint
            self._count_name(endpoint, 1)
            self._drop_routes(endpoint.service)
        return True

    def set_adapter(self, key: str, adapter: Adapter | None) -> bool:
        """Add, replace or remove an adapter. False: nothing that routing needs has changed."""
        old = self._adapters.get(key)
        if old == adapter:
            return False
        self._adapter_routes.pop(key, None)
        if old is not None:
            del self._adapters[key]
            of_service = self._adapters_of[old.service]
            of_service.discard(key)
            if not of_service:
                del self._adapters_of[old.service]
            for claims, name in self._names_of(old):
                claims.remove(name, key)
        if adapter is not None:
            self._adapters[key] = adapter
            self._adapters_of.setdefault(adapter.service, set()).add(key)
            for claims, name in self._names_of(adapter):
                claims.add(name, key)
        return True

    def endpoint(self, name: str) -> Endpoint | None:
        """The endpoint of that pod, while it may be sent requests."""
        return self._endpoints.get(name)

    def adapter(self, key: str) -> Adapter | None:
        """The adapter of that key."""
        return self._adapters.get(key)

    def resolve(self, model: str, key: str = "", may_use: MayUse = may_use_all) -> Route | None:
        """The route that a request for `model` takes, or None when nothing that the caller may use has that name.

        `key` chooses among the adapters of an alias: equal keys choose equally.
        """
        service = self._service_called(model, may_use)
        if service is not None:
            return self.route(service)
        adapter = self._oldest_adapter(self._usable_adapters(self._adapter_names, model, may_use))
        if adapter is not None:
            return self.adapter_route(adapter)
        former = self._former_owner(model, may_use)
        if former is not None:
            return self.route(former)
        return self._resolve_alias(model, key, may_use)

    def has_revision(self, service: str, revision: str) -> bool:
        """Whether the service is there, and its status or a replica names the revision."""
        return service in self._services and revision in self.route(service).revisions

    def route(self, key: str) -> Route:
        """The route of one service. Pods that claim to belong to it and are not controlled by it are left out."""
        route = self._routes.get(key)
        if route is None:
            service = self._services[key]
            endpoints = self._of_service.get(key, {}).values()
            own = sorted((one for one in endpoints if one.owner_uid == service.uid), key=lambda one: one.name)
            route = self._routes[key] = Route(
                service,
                tuple(one for one in own if not _is_reserved(service, one)),
                tuple(one for one in own if _is_reserved(service, one)),
            )
            self.built_routes += 1
        return route

    def adapter_route(self, key: str) -> Route:
        """The route of one adapter: the endpoints of its base that have loaded it."""
        route = self._adapter_routes.get(key)
        if route is None:
            adapter = self._adapters[key]
            base = self.route(adapter.service)
            route = self._adapter_routes[key] = Route(
                base.service,
                tuple(one for one in base.endpoints if adapter.name in one.adapters),
                tuple(one for one in base.reserved if adapter.name in one.adapters),
                adapter,
                bool(base.endpoints),
            )
            self.built_routes += 1
        return route

    def served_models(self, may_use: MayUse = may_use_all) -> list[tuple[str, Route]]:
        """One name for each service that the caller may use, in order: its served name, or else its full name.

        The full name where an older one that the caller may use is called so, or where only that name is allowed.
        """
        names = ((self._shortest(service.served_name, key, may_use), key) for key, service in self._services.items())
        return sorted(((name, self.route(key)) for name, key in names if name), key=lambda model: model[0])

    def served_adapters(self, may_use: MayUse = may_use_all) -> list[tuple[str, Route]]:
        """One name for each adapter that the caller may use, in order: its name, or else its full name."""
        routes = [self.adapter_route(key) for key, one in self._adapters.items() if one.service in self._services]
        names = ((self._name_of_adapter(route, may_use), route) for route in routes)
        return sorted(((name, route) for name, route in names if name), key=lambda model: model[0])

    def _name_of_adapter(self, route: Route, may_use: MayUse) -> str:
        """The shortest name with which this caller reaches the adapter; empty: it may not use it."""
        assert route.adapter is not None
        names = (route.adapter.name, f"{route.adapter.namespace}/{route.adapter.name}")
        return next((name for name in names if self.resolve(name, may_use=may_use) is route), "")

    def _shortest(self, name: str, key: str, may_use: MayUse) -> str:
        """The shortest name with which this caller reaches the service of that key; empty: it may not use it."""
        return next((one for one in (name, key) if self._service_called(one, may_use) == key), "")

    def _service_called(self, name: str, may_use: MayUse) -> str | None:
        """The service that this caller means by `name`: the one of that key, else the oldest one that is called so."""
        if name in self._services:
            return name if may_use(name, name) else None
        return self._oldest_service({key for key in self._served.of(name) if may_use(name, key)})

    def _usable_adapters(self, claims: Claims, name: str, may_use: MayUse) -> set[str]:
        """The adapters with that name, or alias, whose service is there and this caller may use."""
        services = {key: self._adapters[key].service for key in claims.of(name)}
        return {key for key, service in services.items() if service in self._services and may_use(name, service)}

    def _former_owner(self, name: str, may_use: MayUse) -> str | None:
        """The service that was called so, until its new replicas are ready.

        Only the service's own replicas count: a pod of another owner must not claim names for it.
        """
        return self._oldest_service(
            {
                key
                for key in self._former.get(name, ())
                if key in self._services
                and may_use(name, key)
                and any(one.served_name == name for one in self.route(key).endpoints)
            }
        )

    def _resolve_alias(self, name: str, key: str, may_use: MayUse) -> Route | None:
        usable = self._usable_adapters(self._aliases, name, may_use)
        oldest = self._oldest_adapter(usable)
        if oldest is None:
            return None
        namespace = self._adapters[oldest].namespace
        routes = {one: self.adapter_route(one) for one in usable if self._adapters[one].namespace == namespace}
        weights = {one: self._adapters[one].alias_weight for one in routes}
        loaded = {one: weight for one, weight in weights.items() if routes[one].endpoints}
        chosen = choose_by_hash(loaded, key) or choose_by_hash(weights, key) or oldest
        return routes[chosen]

    def _oldest_service(self, keys: set[str]) -> str | None:
        return min(keys, key=self._seniority, default=None)

    def _oldest_adapter(self, keys: set[str]) -> str | None:
        return min(keys, key=self._adapter_seniority, default=None)

    def _seniority(self, key: str) -> tuple[datetime, str, str]:
        namespace, _, name = key.partition("/")
        return older_first(self._services[key].created, namespace, name)

    def _adapter_seniority(self, key: str) -> tuple[datetime, str, str]:
        namespace, _, name = key.partition("/")
        return older_first(self._adapters[key].created, namespace, name)

    def _names_of(self, adapter: Adapter) -> Iterator[tuple[Claims, str]]:
        for claims, name in ((self._adapter_names, adapter.name), (self._aliases, adapter.alias)):
            if name:
                yield claims, name
                yield claims, f"{adapter.namespace}/{name}"

    def _drop_routes(self, service: str) -> None:
        self._routes.pop(service, None)
        for key in self._adapters_of.get(service, ()):
            self._adapter_routes.pop(key, None)

    def _count_name(self, endpoint: Endpoint, change: int) -> None:
        if not endpoint.served_name:
            return
        counts = self._former.setdefault(endpoint.served_name, {})
        counts[endpoint.service] = counts.get(endpoint.service, 0) + change
        if not counts[endpoint.service]:
            del counts[endpoint.service]
        if not counts:
            del self._former[endpoint.served_name]


def _is_reserved(service: Service, endpoint: Endpoint) -> bool:
    """Whether no user may depend on the endpoint's revision: it gets only copies of requests, or is withheld."""
    is_mirror = service.mirrors.get(endpoint.revision, 0) > 0 and not service.weights.get(endpoint.revision, 0)
    return is_mirror or endpoint.revision in service.withheld
