"""Which namespaces the API server refuses to list: deleted, never created, or without a Role for this process.

A refused namespace is logged once, reported and tried again; it never stops the others. Its objects stay as they were
last seen, and one that was never listed counts as empty.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import structlog

from slipway_kube.errors import Forbidden, NotFound, StatusError

log = structlog.get_logger()

REFUSALS: Final = (Forbidden, NotFound)
"""The answers that refuse a list. Any other failure is an outage: the API server may still have the objects."""

OnAccessChange = Callable[[str], None]


class ReadAccess:
    """The refused lists of one process, by resource and namespace; "" is all namespaces."""

    def __init__(self, on_change: OnAccessChange = lambda _namespace: None) -> None:
        """Calls `on_change(namespace)` when a list in it is refused for the first time, and when it succeeds again."""
        self._on_change = on_change
        self._refused: dict[tuple[str, str], str] = {}
        self.refused: Mapping[tuple[str, str], str] = MappingProxyType(self._refused)
        """By resource (plural) and namespace: the API server's answer."""

    def refuse(self, resource: str, namespace: str, error: StatusError) -> None:
        """The API server refused to list this resource in this namespace."""
        is_new = (resource, namespace) not in self._refused
        self._refused[resource, namespace] = str(error)
        if is_new:
            log.warning(
                "cannot read a namespace; the others continue, and it is tried again",
                namespace=namespace or "*",
                resource=resource,
                error=str(error),
            )
            self._on_change(namespace)

    def allow(self, resource: str, namespace: str) -> None:
        """The API server listed this resource in this namespace."""
        if self._refused.pop((resource, namespace), None) is not None:
            log.info("can read a namespace again", namespace=namespace or "*", resource=resource)
            self._on_change(namespace)

    def refused_in(self, namespace: str) -> frozenset[str]:
        """The resources that cannot be listed in this namespace."""
        return frozenset(resource for resource, place in self._refused if place in ("", namespace))

    @property
    def namespaces(self) -> tuple[str, ...]:
        """The namespaces in which a list is refused, sorted."""
        return tuple(sorted({namespace for _resource, namespace in self._refused if namespace}))

    def describe(self) -> str:
        """One clause for a readiness probe; empty while everything can be read."""
        places: dict[str, list[str]] = {}
        for resource, namespace in sorted(self._refused):
            places.setdefault(namespace, []).append(resource)
        return "; ".join(
            f"cannot list {', '.join(resources)} in {f'namespace {namespace}' if namespace else 'the cluster'}"
            for namespace, resources in sorted(places.items())
        )
