"""The store of an informer: the objects that lists and watch events have shown. Pure: no network, no clock.

These rules keep deleted objects and duplicates out of it:

cached             received                    result
nothing            object                      Added
version 7          same uid, version 7         nothing (a duplicate)
version 7          same uid, version 9         Modified
uid A              uid B under the same name   Deleted A, then Added B
uid A              deletion of A               Deleted
uid A              deletion of B               nothing (a late event about an earlier object of that name)
uid A              a full list without it      Deleted
"""

from collections.abc import Callable, Iterable, Mapping, Set
from enum import StrEnum
from types import MappingProxyType
from typing import Generic, TypeVar

import structlog

from slipway_kube.objects import Key, Object

log = structlog.get_logger()
T = TypeVar("T", bound=Object)


class Change(StrEnum):
    """The kind of change of a cached object."""

    ADDED = "Added"
    MODIFIED = "Modified"
    DELETED = "Deleted"


OnChange = Callable[[Change, T | None, T | None], None]


def notify_all(callbacks: Iterable[OnChange[T]], change: Change, old: T | None, new: T | None) -> None:
    """Call every callback; an exception in one is logged, and keeps none of the others from being called."""
    for callback in callbacks:
        try:
            callback(change, old, new)
        except Exception:
            log.exception("a listener failed", change=change)


class Cache(Generic[T]):
    """Objects by key; calls `notify(change, old, new)` after every change."""

    def __init__(self, notify: OnChange[T]) -> None:
        self._objects: dict[Key, T] = {}
        self._notify = notify
        self.view: Mapping[Key, T] = MappingProxyType(self._objects)

    def put(self, new: T) -> None:
        """Store an object that a list or an event showed."""
        old = self._objects.get(new.key)
        if old is not None and old.uid != new.uid:
            self.remove(old)
            old = None
        if old is not None and old.metadata.resource_version == new.metadata.resource_version:
            return
        self._objects[new.key] = new
        self._notify(Change.ADDED if old is None else Change.MODIFIED, old, new)

    def remove(self, gone: Object) -> None:
        """Remove an object, if its uid is the cached one. Listeners get the object as it was last cached."""
        old = self._objects.get(gone.key)
        if old is not None and old.uid == gone.uid:
            del self._objects[gone.key]
            self._notify(Change.DELETED, old, None)

    def keep_only(self, keys: Set[Key], *, namespace: str) -> None:
        """Remove the objects of that namespace ("" for all) whose keys a full list did not contain."""
        gone = [
            cached
            for key, cached in self._objects.items()
            if key not in keys and (not namespace or key[0] == namespace)
        ]
        for cached in gone:
            self.remove(cached)
