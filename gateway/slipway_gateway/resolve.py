"""The routing table: services, adapters and endpoints by name, and the route of each.

Which object answers the `model` of a request is decided by `slipway_api.model_names`, as in the operator. Only what the
caller may use counts, so `chat` is each team's own `chat`, and the oldest one for a caller that may use several.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from slipway_api.model_names import AdapterNames, Answer, MayUse, ModelNames, ServiceNames, may_use_all
from slipway_gateway.picker.endpoints import Adapter, Endpoint, Route, Service
from slipway_gateway.picker.split import choose_by_hash

__all__ = ["MayUse", "RoutingTable", "may_use_all"]

MAX_LISTS: Final = 1024  # of names, one for each caller


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
        self._names = ModelNames()
        self._renamed: set[str] = set()  # services whose former names may have changed since the last lookup
        self._routes: dict[str, Route] = {}  # of services: built, and still right
        self._adapter_routes: dict[str, Route] = {}
        self._lists: OrderedDict[MayUse, tuple[int, _NameLists]] = OrderedDict()

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
        if service is None:
            del self._services[key]
            self._names.set_service(key, None)
        else:
            self._services[key] = service
            self._names.set_service(key, ServiceNames(service.served_name, service.created))
            self._renamed.add(key)
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
            self._drop_routes(old.service)
        if endpoint is not None:
            self._endpoints[name] = endpoint
            self._of_service.setdefault(endpoint.service, {})[name] = endpoint
            self._drop_routes(endpoint.service)
            self.know_namespaces([endpoint.service.partition("/")[0]])
        self._renamed |= {one.service for one in (old, endpoint) if one is not None}
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
        names = None
        if adapter is not None:
            self._adapters[key] = adapter
            self._adapters_of.setdefault(adapter.service, set()).add(key)
            names = AdapterNames(adapter.name, adapter.service, adapter.alias, adapter.created)
        self._names.set_adapter(key, names)
        return True

    def know_namespaces(self, namespaces: Iterable[str]) -> None:
        """Names that begin with one of these namespaces are answered by that namespace only, from now on."""
        self._names.know_namespaces(namespaces)

    @property
    def namespaces(self) -> frozenset[str]:
        """Every namespace that is known: names that begin with it are its own."""
        return self._names.namespaces

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
        self._update_former_names()
        answer = self._names.resolve(model, may_use)
        return self._route_of(answer, key) if answer is not None else None

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

        The full name if an older object that the caller may use has the served name, or if only that name is allowed.
        """
        return [(name, self.route(key)) for name, key in self._name_lists(may_use).services]

    def served_adapters(self, may_use: MayUse = may_use_all) -> list[tuple[str, Route]]:
        """One name for each adapter that the caller may use, in order: its name, or else its full name."""
        return [(name, self.adapter_route(key)) for name, key in self._name_lists(may_use).adapters]

    def _name_lists(self, may_use: MayUse) -> "_NameLists":
        """The names that the caller would use; kept until a name changes."""
        self._update_former_names()
        changes, lists = self._lists.get(may_use, (-1, None))
        if lists is None or changes != self._names.changes:
            services = [
                (name, key)
                for key, service in self._services.items()
                if (name := self._shortest((service.served_name, key), Answer(key), may_use))
            ]
            adapters = [
                (name, key)
                for key, one in self._adapters.items()
                if one.service in self._services
                and (name := self._shortest(one.names, Answer(one.service, (key,)), may_use))
            ]
            lists = _NameLists(sorted(services), sorted(adapters))
            self._lists[may_use] = (self._names.changes, lists)
            if len(self._lists) > MAX_LISTS:
                self._lists.popitem(last=False)
        return lists

    def _shortest(self, names: Iterable[str], answer: Answer, may_use: MayUse) -> str:
        """The first of these names that leads this caller to the object; empty: none does."""
        return next((name for name in names if self._names.resolve(name, may_use) == answer), "")

    def _route_of(self, answer: Answer, key: str) -> Route:
        """The route of an answer; of several adapters with one alias, `key` and the weights choose."""
        if not answer.adapters:
            return self.route(answer.service)
        routes = {one: self.adapter_route(one) for one in answer.adapters}
        if len(routes) == 1:
            return routes[answer.adapters[0]]
        weights = {one: self._adapters[one].alias_weight for one in routes}
        loaded = {one: weight for one, weight in weights.items() if routes[one].endpoints}
        return routes[choose_by_hash(loaded, key) or choose_by_hash(weights, key) or answer.adapters[0]]

    def _update_former_names(self) -> None:
        """Claim the names that ready replicas still answer to, for services that have another served name now.

        Only the service's own replicas count: a pod of another owner must not claim names for it.
        """
        while self._renamed:
            key = self._renamed.pop()
            service = self._services.get(key)
            if service is None:
                continue
            other = {"", service.served_name}
            has_former = any(one.served_name not in other for one in self._of_service.get(key, {}).values())
            former = {one.served_name for one in self.route(key).endpoints} - other if has_former else set()
            self._names.set_service(key, ServiceNames(service.served_name, service.created, frozenset(former)))

    def _drop_routes(self, service: str) -> None:
        self._routes.pop(service, None)
        for key in self._adapters_of.get(service, ()):
            self._adapter_routes.pop(key, None)


@dataclass(frozen=True, slots=True)
class _NameLists:
    """The names under which a caller reaches services and adapters, each with the object's key."""

    services: list[tuple[str, str]]
    adapters: list[tuple[str, str]]


def _is_reserved(service: Service, endpoint: Endpoint) -> bool:
    """Whether no user may depend on the endpoint's revision: it gets only copies of requests, or is withheld."""
    is_mirror = service.mirrors.get(endpoint.revision, 0) > 0 and not service.weights.get(endpoint.revision, 0)
    return is_mirror or endpoint.revision in service.withheld
