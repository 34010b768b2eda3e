"""Objects of an API server as a watch shows them, with the times at which their versions came, for benchmarks."""

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import Any, Final

import msgspec

from slipway_api import names
from slipway_kube.client import Client
from slipway_kube.errors import KubeError
from slipway_kube.resources import Resource

PATIENCE_SECONDS: Final = 120.0

Object = dict[str, Any]


class Changes:
    """The objects of one kind as a watch shows them, each version with the time at which it arrived."""

    def __init__(self, client: Client, resource: Resource) -> None:
        self._client = client
        self._path = resource.path()
        self.now: dict[tuple[str, str], Object] = {}  # by namespace and name
        self.on_change: list[Callable[[str, Object], None]] = []
        self._seen: list[tuple[float, str, Object]] = []
        self._news = asyncio.Event()

    async def run(self) -> None:
        """List and watch, for ever; a watch that ends begins anew with a list."""
        while True:
            with suppress(KubeError):
                version = await self._list()
                async with aclosing(self._client.watch(self._path, resource_version=version)) as lines:
                    async for line in lines:
                        event = msgspec.json.decode(line)
                        self._saw(event["type"], event["object"])
            await asyncio.sleep(0.1)

    async def _list(self) -> str:
        """Take over what is there now; returns the version of the list."""
        version, left = "", dict(self.now)
        async for page in self._client.list_pages(self._path):
            version = page.metadata.resource_version
            for raw in page.items or ():
                one = msgspec.json.decode(raw)
                before = left.pop(_where(one), None)
                if before is None or before["metadata"]["resourceVersion"] != one["metadata"]["resourceVersion"]:
                    self._saw("ADDED", one)
        for gone in left.values():
            self._saw("DELETED", gone)
        return version

    async def first(
        self, matches: Callable[[Object], bool], *, since: float = 0.0, patience: float = PATIENCE_SECONDS
    ) -> float:
        """When the first version came for which `matches` is true, among those that came at `since` or later."""
        index = 0
        async with asyncio.timeout(patience):
            while True:
                news = self._news
                for at, kind, one in self._seen[index:]:
                    if at >= since and kind != "DELETED" and matches(one):
                        return at
                index = len(self._seen)
                await news.wait()

    async def until(self, condition: Callable[[], bool], *, patience: float = PATIENCE_SECONDS) -> None:
        """Return when the condition holds; it is asked after each change."""
        async with asyncio.timeout(patience):
            while True:
                news = self._news
                if condition():
                    return
                await news.wait()

    def _saw(self, kind: str, one: Object) -> None:
        if kind not in ("ADDED", "MODIFIED", "DELETED"):
            return
        self.now.pop(_where(one), None)
        if kind != "DELETED":
            self.now[_where(one)] = one
        self._seen.append((time.monotonic(), kind, one))
        for tell in self.on_change:
            tell(kind, one)
        news, self._news = self._news, asyncio.Event()
        news.set()


def _where(one: Object) -> tuple[str, str]:
    return one["metadata"].get("namespace", ""), one["metadata"]["name"]


def service_of(pod: Object) -> str:
    """The service of a pod, by its label."""
    return str(pod["metadata"].get("labels", {}).get(names.LABEL_SERVICE, ""))
