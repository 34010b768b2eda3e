"""Small words for the stories of the Kubernetes layer."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from slipway_kube.cache import Change
from slipway_kube.informer import Informer
from slipway_kube.objects import Key, Object
from slipway_kube.resources import PODS
from tests.fakes import FakeApiServer


def a_pod(
    name: str, namespace: str = "team", *, labels: dict[str, str] | None = None, node: str = ""
) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": namespace, "labels": labels or {}},
        "spec": {"containers": [{"name": "server", "image": "runtime"}]} | ({"nodeName": node} if node else {}),
    }


def versions(server: FakeApiServer, wanted: Callable[[dict[str, Any]], bool] = lambda _: True) -> dict[Key, str]:
    """What is there: uid and version by key."""
    return {
        (one["metadata"]["namespace"], one["metadata"]["name"]): _version(
            one["metadata"]["uid"], one["metadata"]["resourceVersion"]
        )
        for one in server.objects(PODS)
        if wanted(one)
    }


def cached_versions(informer: Informer[Any]) -> dict[Key, str]:
    return {key: _version(one.uid, one.metadata.resource_version) for key, one in informer.cache.items()}


class Listener:
    """Follows an informer's changes, and objects when they do not add up."""

    def __init__(self, informer: Informer[Any]) -> None:
        self.objects: dict[Key, Object] = {}
        self.changes: list[tuple[str, str]] = []
        informer.on_change(self.hear)

    def hear(self, change: Change, old: Object | None, new: Object | None) -> None:
        one = new or old
        assert one is not None
        self.changes.append((change.value, one.name))
        assert self.objects.get(one.key) is old, f"{change} {one.key}: the old one is not what we were told before"
        assert (old is None) == (change is Change.ADDED)
        assert (new is None) == (change is Change.DELETED)
        assert old is None or new is None or old.uid == new.uid
        if new is None:
            del self.objects[one.key]
        else:
            self.objects[one.key] = new


@asynccontextmanager
async def running(*informers: Informer[Any]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(informer.run()) for informer in informers]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _version(uid: str, resource_version: str) -> str:
    return f"{uid}@{resource_version}"
