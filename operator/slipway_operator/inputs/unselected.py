"""Objects of ours that left the selection of their informer, because somebody removed the label that it selects by.

A watch with a selector reports an edited object as deleted. So an object of ours that vanishes without having been
asked to go stays in this cache until a GET says that it is gone. If it is still there, it is read every few seconds
until its label is restored, which the core plans as for any other label: it is never hidden, and never made twice.

Edits while no operator led are found in two ways: at a takeover and at each resync the namespaces of our objects are
listed with the opposite selector, and a create that meets a 409 reports the object that has the name (`adopt`).
"""

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Final, Generic, TypeVar

import msgspec
import structlog

from slipway_api import names
from slipway_kube.cache import Change, notify_all
from slipway_kube.client import Client
from slipway_kube.errors import KubeError, NotFound
from slipway_kube.informer import Informer, OnChange
from slipway_kube.objects import Key, Object
from slipway_kube.resources import Resource
from slipway_operator.inputs.labels import controller_of

LOOK_AGAIN_SECONDS: Final = 5.0
LISTS_AT_ONCE: Final = 8
NOT_SELECTED: Final = f"{names.LABEL_MANAGED_BY}!={names.MANAGED_BY}"

T = TypeVar("T", bound=Object)
log = structlog.get_logger()


class OwnedObjects(Generic[T]):
    """All objects of one kind that our objects control: those that an informer shows, and those that left it."""

    def __init__(self, client: Client, resource: Resource, projection: type[T], informer: Informer[T]) -> None:
        self._client = client
        self._resource = resource
        self._projection = projection
        self._informer = informer
        self._unselected: dict[Key, T] = {}
        self._callbacks: list[OnChange[T]] = []
        self._look = asyncio.Event()
        informer.on_change(self._saw)

    @property
    def unselected(self) -> Mapping[Key, T]:
        """The objects that the informer does not show."""
        return self._unselected

    def get(self, namespace: str, name: str) -> T | None:
        """One object, or None."""
        return self._informer.get(namespace, name) or self._unselected.get((namespace, name))

    def on_change(self, callback: OnChange[T]) -> None:
        """Call `callback(change, old, new)` after each change, as an informer does."""
        self._callbacks.append(callback)

    def adopt(self, raw: bytes) -> None:
        """Take in an object of ours that the API server has, and no cache."""
        found = msgspec.json.decode(raw, type=self._projection)
        if controller_of(found) is not None and self._informer.get(*found.key) is None:
            self._put(found)

    async def run(self) -> None:
        """Read the objects that left the selection, until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_AGAIN_SECONDS if self._unselected else None):
                    await self._look.wait()
            self._look.clear()
            for key in list(self._unselected):
                with suppress(KubeError):  # the next look may get an answer; until then the object counts as there
                    await self._read(key)

    async def sweep(self, namespaces: Iterable[str]) -> None:
        """Find the objects of these namespaces that no informer selects."""
        slots = asyncio.Semaphore(LISTS_AT_ONCE)
        await asyncio.gather(*(self._list(namespace, slots) for namespace in namespaces))

    async def _list(self, namespace: str, slots: asyncio.Semaphore) -> None:
        try:
            async with slots:
                path = self._resource.path(namespace)
                async for page in self._client.list_pages(path, label_selector=NOT_SELECTED):
                    for item in page.items or ():
                        self.adopt(bytes(item))
        except KubeError as error:
            log.warning("cannot look for edited labels", path=path, error=str(error))

    async def _read(self, key: Key) -> None:
        try:
            raw = await self._client.get(self._resource.path(*key))
        except NotFound:
            found = None
        else:
            found = msgspec.json.decode(raw, type=self._projection)
        known = self._unselected.get(key)
        if known is None:
            return  # the informer shows it again
        if found is None or found.uid != known.uid:
            self._remove(key)
        if found is not None and controller_of(found) is not None and self._informer.get(*key) is None:
            self._put(found)

    def _saw(self, change: Change, old: T | None, new: T | None) -> None:
        """A change that the informer shows."""
        if change is Change.DELETED and old is not None:
            if controller_of(old) is not None and not old.is_terminating:
                self._unselected[old.key] = old
                self._look.set()
                return
        elif new is not None and (kept := self._unselected.get(new.key)) is not None:
            if kept.uid == new.uid:
                del self._unselected[new.key]
                change, old = Change.MODIFIED, kept
            else:
                self._remove(new.key)
        self._notify(change, old, new)

    def _put(self, found: T) -> None:
        known = self._unselected.get(found.key)
        if known is not None and known.metadata.resource_version == found.metadata.resource_version:
            return
        if known is None:
            log.warning("an object of ours has lost a label", kind=self._resource.kind, name="/".join(found.key))
        self._unselected[found.key] = found
        self._look.set()
        self._notify(Change.ADDED if known is None else Change.MODIFIED, known, found)

    def _remove(self, key: Key) -> None:
        self._notify(Change.DELETED, self._unselected.pop(key), None)

    def _notify(self, change: Change, old: T | None, new: T | None) -> None:
        notify_all(self._callbacks, change, old, new)
