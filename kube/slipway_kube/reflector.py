"""A reflector: lists and watches one kind of object, in one namespace or in all, and keeps a cache equal to it.

What ends a watch, and what follows:

the server's own timeout      watch on from the last version
silence                       watch on from the last version: the connection was half open
a broken connection, 429, 5xx watch on from the last version, after a pause
410, or any ERROR event       list again, after a pause
three failures in a row       list again: the server may be unable to watch from that version
403 or 404 to a list          list again, after a pause; the cache stays, and `ReadAccess` reports the refusal
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import msgspec
import structlog

from slipway_kube.access import REFUSALS, ReadAccess
from slipway_kube.backoff import Backoff
from slipway_kube.cache import Cache
from slipway_kube.client import PAGE_SIZE, Client
from slipway_kube.errors import KubeError, StatusError, from_status
from slipway_kube.objects import Key, Object, Page, WatchEvent
from slipway_kube.resources import Resource

WATCH_SECONDS: Final = (300, 600)  # the server ends a watch after a random time between these
SHORTEST_WATCH: Final = 1.0
FAILURES_BEFORE_RELIST: Final = 3
REFUSALS_BEFORE_EMPTY: Final = 3  # a RoleBinding that was created a moment ago may not be effective yet

T = TypeVar("T", bound=Object)
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Source:
    """What to list and watch."""

    resource: Resource
    namespace: str = ""
    label_selector: str = ""
    field_selector: str = ""


@dataclass(frozen=True, slots=True)
class Pace:
    """The timeouts and delays of a reflector; tests set shorter ones."""

    page_size: int = PAGE_SIZE
    silence_seconds: tuple[float, float] = (70.0, 90.0)  # bookmarks come every minute
    first_pause: float = 0.5
    longest_pause: float = 30.0


class Reflector(Generic[T]):
    """Keeps one namespace of `cache` (or all) equal to the API server while `follow()` runs."""

    def __init__(
        self,
        client: Client,
        source: Source,
        projection: type[T],
        cache: Cache[T],
        *,
        pace: Pace,
        clock: Callable[[], float],
        on_listed: Callable[[], None],
        on_refused: Callable[[], None] = lambda: None,
        access: ReadAccess | None = None,
    ) -> None:
        self.lists = 0
        self.undecodable = 0
        self._client = client
        self._path = source.resource.path(source.namespace)
        self._namespace = source.namespace
        self._selectors = {"label_selector": source.label_selector, "field_selector": source.field_selector}
        self._object = msgspec.json.Decoder(projection)
        self._event: msgspec.json.Decoder[WatchEvent[Any]] = msgspec.json.Decoder(
            WatchEvent[projection]  # type: ignore[valid-type]
        )
        self._cache = cache
        self._pace = pace
        self._backoff = Backoff(first=pace.first_pause, cap=pace.longest_pause)
        self._clock = clock
        self._on_listed = on_listed
        self._on_refused = on_refused
        self._access = access or ReadAccess()
        self._refusals = 0  # in a row
        self._resource = source.resource.plural
        self._version = ""  # the last resourceVersion; empty: unknown, so list
        self._last_life = float("-inf")
        self._patience: asyncio.Timeout | None = None  # of the watch that is running
        self._asked = 0  # refreshes asked for, and how many of them a list begun afterwards has answered
        self._answered = 0
        self._answer = asyncio.Condition()
        self._wanted = asyncio.Event()  # ends the pause between two attempts
        self._log = log.bind(kind=source.resource.plural, namespace=source.namespace or "*")

    @property
    def is_settled(self) -> bool:
        """Whether this source was listed, or the API server keeps refusing to list it, so that it counts as empty."""
        return self.lists > 0 or self._refusals >= REFUSALS_BEFORE_EMPTY

    def age(self) -> float:
        """Seconds since the last event, bookmark, list or refusal: a server that refuses is not silent."""
        return self._clock() - self._last_life

    async def follow(self) -> None:
        """List when no version is known, else watch; until cancelled."""
        while True:
            try:
                delay = await self._watch() if self._version else await self._list()
            except TimeoutError:  # the watch is silent, or `refresh` was called
                delay = 0.0
            except KubeError as error:
                delay = self._pause_after(error)
                level = "debug" if self._refusals > 1 else "info"  # `ReadAccess` has logged the refusal
                getattr(self._log, level)(
                    "watch interrupted", error=str(error), pause=round(delay, 1), relist=not self._version
                )
            except Exception:  # noqa: BLE001  an informer that dies leaves a process that looks healthy and is blind
                self._version = ""
                delay = self._backoff.next_delay()
                self._log.exception("watch interrupted by a bug", pause=round(delay, 1))
            await self._pause(delay)

    async def _pause(self, seconds: float) -> None:
        """Wait before the next attempt; a `refresh` ends the wait."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wanted.wait()
        self._wanted.clear()

    async def refresh(self) -> None:
        """Return after a list that was begun after this call, also if the API server refused it."""
        self._asked += 1
        mine = self._asked
        self._version = ""
        self._wanted.set()
        if self._patience is not None and not self._patience.expired():
            self._patience.reschedule(asyncio.get_running_loop().time())  # end the watch now
        async with self._answer:
            await self._answer.wait_for(lambda: self._answered >= mine)

    async def differences(self) -> dict[Key, T | None]:
        """The objects in which a fresh list differs from the cache: the cached object (or None) by key."""
        listed: dict[Key, tuple[str, str]] = {}
        async with aclosing(self._pages()) as pages:
            async for page in pages:
                for item in page.items or ():
                    meta = _metadata.decode(item).metadata
                    listed[meta.key] = (meta.uid, meta.resource_version)
        cached = {
            key: (known.uid, known.metadata.resource_version)
            for key, known in self._cache.view.items()
            if not self._namespace or key[0] == self._namespace
        }
        keys = listed.keys() | cached.keys()
        return {key: self._cache.view.get(key) for key in keys if listed.get(key) != cached.get(key)}

    async def _list(self) -> float:
        answering = self._asked
        keys: set[Key] = set()
        version = ""
        try:
            async with aclosing(self._pages()) as pages:
                async for page in pages:
                    version = page.metadata.resource_version
                    keys.update(self._put(item) for item in page.items or ())
                    self._last_life = self._clock()
        except REFUSALS as error:
            self._last_life = self._clock()
            self._refusals += 1
            self._access.refuse(self._resource, self._namespace, error)
            self._on_refused()
            await self._answer_refreshes(answering)
            raise
        self._cache.keep_only(keys, namespace=self._namespace)
        self.lists += 1
        self._refusals = 0
        self._access.allow(self._resource, self._namespace)
        self._on_listed()
        if answering == self._asked:
            self._version = version  # else: asked again meanwhile, and this list began too early for that
        await self._answer_refreshes(answering)
        return 0.0

    async def _answer_refreshes(self, answering: int) -> None:
        async with self._answer:
            self._answered = answering
            self._answer.notify_all()

    async def _watch(self) -> float:
        """Watch until the server ends it. `TimeoutError` when it falls silent or `refresh` needs a list."""
        loop = asyncio.get_running_loop()
        began = self._clock()
        silence = random.uniform(*self._pace.silence_seconds)  # noqa: S311  jitter, not cryptography
        lines = self._client.watch(
            self._path,
            resource_version=self._version,
            timeout_seconds=random.randint(*WATCH_SECONDS),  # noqa: S311
            **self._selectors,
        )
        try:
            async with asyncio.timeout(silence) as self._patience, aclosing(lines):
                async for line in lines:
                    self._last_life = self._clock()
                    self._apply(line)
                    if not self._version:
                        return 0.0
                    self._backoff.reset()
                    self._patience.reschedule(loop.time() + silence)
        finally:
            self._patience = None
        # No tight loop against a server that ends watches as soon as they begin.
        return 0.0 if self._clock() - began >= SHORTEST_WATCH else self._backoff.next_delay()

    def _apply(self, line: bytes) -> None:
        misfit = None
        try:
            event = self._event.decode(line)
        except msgspec.ValidationError as error:
            event, misfit = _slim_event.decode(line), error
        version = event.object.metadata.resource_version
        if event.type == "ERROR":
            self._version = ""
            raise from_status(bytes(_raw_event.decode(line).object))
        if event.type == "BOOKMARK":
            # A bookmark from before our version: the server lost history (etcd restored from a backup).
            self._version = version if _is_after(version, self._version, or_equal=True) else ""
            return
        if not _is_after(version, self._version):
            return  # versions only grow within a watch: this is a repetition
        if event.type == "DELETED":
            self._cache.remove(event.object)
        elif misfit is None:
            self._cache.put(event.object)
        else:
            self._report_misfit(event.object, misfit)
        self._version = version

    def _put(self, item: msgspec.Raw) -> Key:
        try:
            decoded = self._object.decode(item)
        except msgspec.ValidationError as error:
            known = _metadata.decode(item)
            self._report_misfit(known, error)
            return known.key
        self._cache.put(decoded)
        return decoded.key

    def _report_misfit(self, known: Object, error: Exception) -> None:
        """Count and log an object that cannot be decoded; its cached version stays."""
        self.undecodable += 1
        self._log.warning("an object does not fit", object=known.key, error=str(error))

    def _pages(self) -> AsyncGenerator[Page, None]:
        return self._client.list_pages(self._path, limit=self._pace.page_size, **self._selectors)

    def _pause_after(self, error: KubeError) -> float:
        refused = isinstance(error, StatusError) and error.status < 500 and error.status != 429
        if refused or self._backoff.failures + 1 >= FAILURES_BEFORE_RELIST:
            self._version = ""
        return self._backoff.next_delay(error.retry_after if isinstance(error, StatusError) else None)


_raw_event = msgspec.json.Decoder(WatchEvent[msgspec.Raw])
_slim_event: msgspec.json.Decoder[WatchEvent[Any]] = msgspec.json.Decoder(WatchEvent[Object])
_metadata = msgspec.json.Decoder(Object)


def _is_after(version: str, than: str, *, or_equal: bool = False) -> bool:
    """Versions are numbers in every API server; where one is not, it counts as newer."""
    if not (version.isdecimal() and than.isdecimal()):
        return True
    return int(version) > int(than) or (or_equal and int(version) == int(than))
