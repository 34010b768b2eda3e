"""An informer: a cache of one kind of object that a list and watch per namespace keeps current.

The cache converges to the server whatever the network does: a relist is compared with what is cached, so an object
that vanished while nobody watched is reported as deleted.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final, Generic, TypeVar

import structlog

from slipway_kube.access import REFUSALS, ReadAccess
from slipway_kube.cache import Cache, Change, OnChange, notify_all
from slipway_kube.client import Client
from slipway_kube.objects import Key, Object
from slipway_kube.reflector import Pace, Reflector, Source
from slipway_kube.resources import Resource

__all__ = ["Change", "Informer", "OnChange", "Pace"]

CATCH_UP_SECONDS: Final = 2.0

T = TypeVar("T", bound=Object)
log = structlog.get_logger()


class Informer(Generic[T]):
    """A cache of one kind of object, projected onto `projection`, keyed by (namespace, name).

    `informer = Informer(client, PODS, Pod, label_selector=MANAGED_SELECTOR); task = create_task(informer.run())`
    Callbacks get (change, old, new), after the cache has changed; they must be quick and must not await.
    """

    def __init__(
        self,
        client: Client,
        resource: Resource,
        projection: type[T],
        *,
        namespaces: Sequence[str] = (),
        label_selector: str = "",
        field_selector: str = "",
        pace: Pace | None = None,
        clock: Callable[[], float] = time.monotonic,
        access: ReadAccess | None = None,
    ) -> None:
        """`access` collects the namespaces that the API server refuses to list."""
        self.synced = asyncio.Event()
        """Set once every namespace has been listed, or is refused while another one was listed; never cleared.

        If all are refused, the cause is this process's rights and not the namespaces, so nothing counts as empty.
        """
        self.access = access or ReadAccess()
        self._callbacks: list[OnChange[T]] = []
        self._relist_callbacks: list[Callable[[], None]] = []
        self._cache = Cache[T](self._notify)
        self._reflectors = [
            Reflector(
                client,
                Source(resource, namespace, label_selector, field_selector),
                projection,
                self._cache,
                pace=pace or Pace(),
                clock=clock,
                on_listed=self._listed,
                on_refused=self._note_settled,
                access=self.access,
            )
            for namespace in (namespaces or [""])
        ]

    @property
    def cache(self) -> Mapping[Key, T]:
        """All cached objects, as a live read-only view."""
        return self._cache.view

    @property
    def relists(self) -> int:
        """How many lists followed the first one: after a watch that could not be resumed, or for a `refresh`."""
        return sum(max(0, reflector.lists - 1) for reflector in self._reflectors)

    @property
    def undecodable(self) -> int:
        """How often an object did not fit the projection; its last cached version stays."""
        return sum(reflector.undecodable for reflector in self._reflectors)

    def get(self, namespace: str, name: str) -> T | None:
        """One object, or None."""
        return self._cache.view.get((namespace, name))

    def on_change(self, callback: OnChange[T]) -> None:
        """Call `callback` on every change from now on."""
        self._callbacks.append(callback)

    def on_relist(self, callback: Callable[[], None]) -> None:
        """Call `callback` after each list but the first: the watch could not be resumed, or `refresh` was called."""
        self._relist_callbacks.append(callback)

    def age(self) -> float:
        """Seconds since the last sign of life of the server, in the namespace with the longest silence.

        A healthy stream gets a bookmark about every minute, and a refusal is an answer; infinity before the first one.
        """
        return max(reflector.age() for reflector in self._reflectors)

    async def run(self) -> None:
        """List and watch until cancelled; a failure of the server or of a callback does not end it."""
        async with asyncio.TaskGroup() as group:
            for reflector in self._reflectors:
                group.create_task(reflector.follow())

    async def refresh(self) -> None:
        """Return after a consistent list that began after this call; a new leader awaits it before its first write.

        A namespace that is refused keeps its last cached objects, and is in `access.refused`.
        """
        await asyncio.gather(*(reflector.refresh() for reflector in self._reflectors))

    async def drift(self) -> int:
        """How many cached objects differ from a fresh list, except those that the watch corrects meanwhile.

        Anything but 0 means that this informer is broken: better to exit than to go on acting on it.
        """
        wrong: dict[Key, T | None] = {}
        for reflector in self._reflectors:
            with suppress(*REFUSALS):  # the reflector reports it, and there is nothing to compare with
                wrong |= await reflector.differences()
        if wrong:
            await asyncio.sleep(CATCH_UP_SECONDS)
        return sum(1 for key, cached in wrong.items() if self._cache.view.get(key) is cached)

    def _notify(self, change: Change, old: T | None, new: T | None) -> None:
        notify_all(self._callbacks, change, old, new)

    def _listed(self) -> None:
        if self.synced.is_set():
            for callback in self._relist_callbacks:
                callback()
        self._note_settled()

    def _note_settled(self) -> None:
        if all(one.is_settled for one in self._reflectors) and any(one.lists for one in self._reflectors):
            self.synced.set()
