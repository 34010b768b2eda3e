"""From the start of a gateway to its first routing table: from the API server, or from the last process's snapshot.

Requests wait until there is a table, or `wait_seconds` have passed:

| the API server lists in that time | snapshot             | then                                         |
|-----------------------------------|----------------------|----------------------------------------------|
| yes                               | any                  | requests are routed as listed                |
| no                                | not too old          | routed as the snapshot says, until it lists  |
| no                                | too old, bad or none | answered with 503 and Retry-After            |

From the first list on, every change of the table is written to the snapshot.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog

from slipway_gateway.fleet import Fleet, View
from slipway_gateway.snapshot import Snapshot, SnapshotError, SnapshotFile
from slipway_gateway.watch import Watch
from slipway_kube.informer import Informer

log = structlog.get_logger()

WRITE_SECONDS: Final = 1.0  # between two looks at whether the table has changed
WRITE_FACTOR: Final = 50.0  # writing takes at most a fiftieth of the time
CONFIRM_SECONDS: Final = 10.0  # between two notes that an unchanged table is current


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupLimits:
    """How long to wait for the API server, and how old a snapshot may be."""

    wait_seconds: float = 2.0
    max_age_seconds: float = 21_600.0


class RouteStartup:
    """Restores the routing table from a snapshot where it must, and keeps the snapshot current."""

    def __init__(
        self,
        fleet: Fleet,
        watch: Watch,
        known: asyncio.Event,
        directory: Path | None,
        limits: StartupLimits,
        *,
        count: Callable[[str], None] = lambda _outcome: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`known` is set when there is a table, or none is to be expected soon. No `directory`: no snapshot.

        `count` gets the outcome of each write, written or failed; `clock` is the wall clock: it outlives the process.
        """
        self._fleet = fleet
        self._watch = watch
        self._file = SnapshotFile(directory) if directory is not None else None
        self._limits = limits
        self._clock = clock
        self._confirmed_at: float | None = None  # of the snapshot in use
        self._known = known
        self._count = count
        fleet.view = self.view

    def view(self) -> View:
        """The watch's view; before everything was listed, the age of the snapshot in use."""
        view = self._watch.view()
        if view.synced or self._confirmed_at is None:
            return view
        return View(synced=True, age_seconds=max(0.0, self._clock() - self._confirmed_at), from_snapshot=True)

    async def run(self) -> None:
        """Wait for the API server, use the snapshot if it does not answer in time, then keep the snapshot current."""
        self._remember_namespaces()
        try:
            async with asyncio.timeout(self._limits.wait_seconds):
                await self._listed()
        except TimeoutError:
            restored = self._restore()
            self._known.set()
            await self._replace(restored)
        self._known.set()
        await self._listed()
        if self._file is not None:
            await self._keep(self._file)

    async def _listed(self) -> None:
        """Return once the watch has listed everything that it waits for."""
        await asyncio.gather(self._watch.pods.synced.wait(), self._watch.services.synced.wait())
        while not self._watch.view().synced:  # noqa: ASYNC110  the kind LoRAAdapter may never be listed
            await asyncio.sleep(0.05)

    def _remember_namespaces(self) -> None:
        """Names of namespaces that the last process knew stay theirs, also if no object of them is there just now."""
        with contextlib.suppress(SnapshotError):  # `_restore` reports it, if the snapshot is needed
            if self._file is not None and (found := self._file.read()) is not None:
                self._fleet.table.know_namespaces(found[0].namespaces)

    def _restore(self) -> Snapshot | None:
        """Fill the table from the snapshot, if there is a good one."""
        if self._file is None:
            return None
        try:
            found = self._file.read()
        except SnapshotError as error:
            log.warning("the snapshot of the routing table is not used", reason=str(error))
            return None
        if found is None:
            return None
        snapshot, confirmed_at = found
        age = self._clock() - confirmed_at
        if age > self._limits.max_age_seconds:
            log.warning("the snapshot of the routing table is too old", age_seconds=round(age))
            return None
        # What has been listed meanwhile is newer.
        for service in snapshot.services:
            if self._is_unknown(self._watch.services, service.key):
                self._fleet.set_service(service.key, service)
        for endpoint in snapshot.endpoints:
            if self._is_unknown(self._watch.pods, endpoint.name):
                self._fleet.set_endpoint(endpoint.name, endpoint)
        for adapter in snapshot.adapters:
            if self._is_unknown(self._watch.adapters, adapter.key):
                self._fleet.set_adapter(adapter.key, adapter)
        self._confirmed_at = confirmed_at
        log.warning(
            "the API server does not answer: requests are routed as the snapshot says",
            age_seconds=round(age, 1), services=len(snapshot.services), endpoints=len(snapshot.endpoints),
        )  # fmt: skip
        return snapshot

    async def _replace(self, snapshot: Snapshot | None) -> None:
        """Remove what came from the snapshot and is in no list; what is listed has replaced it already."""
        if snapshot is None:
            return
        watch, fleet = self._watch, self._fleet
        services = [one.key for one in snapshot.services]
        endpoints = [one.name for one in snapshot.endpoints]
        adapters = [one.key for one in snapshot.adapters]
        async with asyncio.TaskGroup() as lists:
            for listed, informer, keys, remove in (
                (watch.services.synced.wait(), watch.services, services, fleet.set_service),
                (watch.pods.synced.wait(), watch.pods, endpoints, fleet.set_endpoint),
                (self._listed(), watch.adapters, adapters, fleet.set_adapter),
            ):
                lists.create_task(_remove_unlisted(listed, informer, keys, remove))
        log.info("the API server answers: the snapshot is replaced")

    @staticmethod
    def _is_unknown(informer: Informer[Any], key: str) -> bool:
        return not informer.synced.is_set() and not _is_listed(informer, key)

    async def _keep(self, file: SnapshotFile) -> None:
        """Write the table after each change, and note now and then that an unchanged one is current."""
        written, confirmed, has_failed = -1, 0.0, False
        while True:
            view, now = self._watch.view(), self._clock()
            current_at = now - view.age_seconds
            started = time.monotonic()
            try:
                if written != self._fleet.changes:
                    changes = self._fleet.changes
                    await file.write(Snapshot.of(self._fleet.table), current_at)
                    written, confirmed = changes, now
                    self._count("written")
                elif now - confirmed >= CONFIRM_SECONDS:
                    file.confirm(current_at)
                    confirmed = now
            except SnapshotError as error:
                if not has_failed:  # it is tried every second
                    log.warning("the snapshot of the routing table cannot be written", reason=str(error))
                self._count("failed")
                has_failed, written = True, -1
            await asyncio.sleep(max(WRITE_SECONDS, WRITE_FACTOR * (time.monotonic() - started)))


def _is_listed(informer: Informer[Any], key: str) -> bool:
    namespace, _, name = key.partition("/")
    return informer.get(namespace, name) is not None


async def _remove_unlisted(
    listed: Awaitable[object], informer: Informer[Any], keys: Sequence[str], remove: Callable[[str, None], None]
) -> None:
    await listed
    for key in keys:
        if not _is_listed(informer, key):
            remove(key, None)
