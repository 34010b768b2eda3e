"""The Engines of the cluster, kept current by a list and watch: what services name in spec.runtime.engine.

Nothing is reconciled for an Engine: it has no status and no children. A change only wakes the services that name it.
"""

import asyncio
import time
from collections.abc import Callable

import msgspec

from slipway_kube.access import ReadAccess
from slipway_kube.client import Client
from slipway_kube.informer import Change, Informer
from slipway_kube.objects import Object
from slipway_kube.resources import ENGINES
from slipway_operator.core.engines import EngineSeen, see_engine


class EngineObject(Object, frozen=True):
    """An Engine, with its spec undecoded."""

    spec: msgspec.Raw = msgspec.Raw(b"{}")


class Engines:
    """The Engines by name. Where the kind is not installed, or may not be read, services that name one are told so."""

    def __init__(self, client: Client, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._refused = asyncio.Event()
        # An access of its own: where Engines cannot be read, services of our own runtime lack nothing.
        self._access = ReadAccess(lambda _namespace: self._access_changed())
        self._informer = Informer(client, ENGINES, EngineObject, clock=monotonic, access=self._access)
        self._informer.on_change(self._saw)
        self._listeners: list[Callable[[str], None]] = []
        self._seen: dict[str, EngineSeen | None] = {}

    async def run(self) -> None:
        """List and watch until cancelled."""
        await self._informer.run()

    async def until_known(self) -> None:
        """Return once the Engines are listed, or the list is refused."""
        waits = [asyncio.create_task(one.wait()) for one in (self._informer.synced, self._refused)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()

    async def refresh(self) -> None:
        """Return after a list that began after this call, also if the API server refused it."""
        await self._informer.refresh()

    def on_change(self, callback: Callable[[str], None]) -> None:
        """Call `callback(name)` after each change of an Engine, and for each one that services may name."""
        self._listeners.append(callback)

    def seen(self, name: str) -> EngineSeen | None:
        """The Engine of that name as it is now; None for our own runtime."""
        if name not in self._seen:
            self._seen[name] = self._look(name)
        return self._seen[name]

    def _look(self, name: str) -> EngineSeen | None:
        cached = self._informer.cache
        specs = {one.name: one.spec for one in cached.values()}
        if name not in specs and self._access.refused:
            (answer,) = set(self._access.refused.values())
            return EngineSeen(fault=f"the API server does not list Engines ({answer}); install the CRD and the RBAC")
        decoded = {one: msgspec.json.decode(raw) if one == name else {} for one, raw in specs.items()}
        return see_engine(name, decoded)

    def _saw(self, change: Change, old: EngineObject | None, new: EngineObject | None) -> None:
        self._seen.clear()
        is_same = old is not None and new is not None and bytes(old.spec) == bytes(new.spec)
        changed = new or old
        if changed is not None and not (is_same and change is not Change.DELETED):
            self._tell(changed.name)

    def _access_changed(self) -> None:
        self._refused.set()
        asked = [name for name, seen in self._seen.items() if seen is not None]
        self._seen.clear()
        for name in asked:
            self._tell(name)

    def _tell(self, name: str) -> None:
        for callback in self._listeners:
            callback(name)
