"""What exists, kept current: list, then watch, and list again whenever in doubt, for ever.

The cache converges to the server whatever the network does: a relist is compared with what is cached, so an object
that vanished while nobody watched is reported as deleted.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Generic, TypeVar

from slipway_kube.client import Client
from slipway_kube.objects import Key, Object
from slipway_kube.resources import Resource

T = TypeVar("T", bound=Object)


class Change(StrEnum):
    """What happened to an object, as far as the cache can tell."""

    ADDED = "Added"
    MODIFIED = "Modified"
    DELETED = "Deleted"


OnChange = Callable[[Change, T | None, T | None], None]


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
    ) -> None:
        self.synced = asyncio.Event()
        """Set once every namespace has been listed for the first time; never cleared."""
        self.relists = 0
        self.undecodable = 0

    @property
    def cache(self) -> Mapping[Key, T]:
        """Everything known, as a live read-only view."""
        raise NotImplementedError

    def get(self, namespace: str, name: str) -> T | None:
        """One object, or None."""
        raise NotImplementedError

    def on_change(self, callback: "OnChange[T]") -> None:
        """Call back on every change from now on."""
        raise NotImplementedError

    def age(self) -> float:
        """Seconds since the server last gave a sign of life (event, bookmark or list), by the worst namespace.

        A healthy stream gets a bookmark about every minute; infinity before the first list.
        """
        raise NotImplementedError

    async def run(self) -> None:
        """List and watch until cancelled. No failure of the server or of a callback ends it."""
        raise NotImplementedError

    async def refresh(self) -> None:
        """Return after a fresh consistent list, begun after this call: what a new leader wants before it writes."""
        raise NotImplementedError

    async def drift(self) -> int:
        """How many objects differ between the cache and a fresh list and have not come right by themselves."""
        raise NotImplementedError
