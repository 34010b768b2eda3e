"""The objects of one cluster-scoped kind that services name: Engines and ServiceTemplates.

Nothing is reconciled for them: they have no status and no children. A change only wakes the services that name them.
"""

import asyncio
import time
from collections.abc import Callable, Iterator

import msgspec

from slipway_kube.access import ReadAccess
from slipway_kube.client import Client
from slipway_kube.informer import Change, Informer
from slipway_kube.objects import Object
from slipway_kube.resources import Resource


class SpecObject(Object, frozen=True):
    """An object with its spec undecoded."""

    spec: msgspec.Raw = msgspec.Raw(b"{}")


class ClusterObjects:
    """The objects of one kind by name, kept current by a list and watch."""

    def __init__(self, client: Client, resource: Resource, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._is_refused = asyncio.Event()
        # An access of its own: if the kind cannot be read, services that name no object of it lack nothing.
        self._access = ReadAccess(lambda _namespace: self._access_changed())
        self._informer = Informer(client, resource, SpecObject, clock=monotonic, access=self._access)
        self._informer.on_change(self._saw)
        self._listeners: list[Callable[[str | None], None]] = []

    async def run(self) -> None:
        """List and watch until cancelled."""
        await self._informer.run()

    async def until_known(self) -> None:
        """Return once the objects are listed, or the list is refused."""
        waits = [asyncio.create_task(one.wait()) for one in (self._informer.synced, self._is_refused)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()

    async def refresh(self) -> None:
        """Return after a list that began after this call, also if the API server refused it."""
        await self._informer.refresh()

    def on_change(self, callback: Callable[[str | None], None]) -> None:
        """Call `callback(name)` after each change of an object; None: whether the kind can be listed has changed."""
        self._listeners.append(callback)

    @property
    def refused(self) -> str:
        """Why the objects cannot be listed; empty: they can."""
        return next(iter(self._access.refused.values()), "")

    def objects(self) -> Iterator[SpecObject]:
        """The objects that exist."""
        return iter(self._informer.cache.values())

    def _saw(self, change: Change, old: SpecObject | None, new: SpecObject | None) -> None:
        is_same = old is not None and new is not None and bytes(old.spec) == bytes(new.spec)
        changed = new or old
        if changed is not None and not (is_same and change is not Change.DELETED):
            self._tell(changed.name)

    def _access_changed(self) -> None:
        self._is_refused.set()
        self._tell(None)

    def _tell(self, name: str | None) -> None:
        for callback in self._listeners:
            callback(name)
