"""A cache of the objects of one kind, kept up to date by list and watch."""

import http.client
import json
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

PAUSE = 0.2  # seconds before the next attempt when the API server is away


class WatchCache:
    """A cache of objects, filled by a thread of its own; `changed` is called on that thread."""

    def __init__(self, api: str, path: str, tls: ssl.SSLContext, changed: Callable[[], None]) -> None:
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self._server, self._path, self._tls, self._changed = urlsplit(api).netloc, path, tls, changed
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        while True:
            try:
                with self._get(self._path) as answer:
                    listed = json.load(answer)
                self.objects = {_key(item): item for item in listed["items"]}
                self._changed()
                version = listed["metadata"]["resourceVersion"]
                with self._get(f"{self._path}?watch=1&allowWatchBookmarks=true&resourceVersion={version}") as answer:
                    for line in answer:
                        self._apply(json.loads(line))
            except (OSError, http.client.HTTPException, ValueError):
                pass
            time.sleep(PAUSE)

    def _apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "ERROR":
            raise ValueError(event["object"])  # the version is too old: list again
        if event["type"] == "DELETED":
            self.objects.pop(_key(event["object"]), None)
        elif event["type"] != "BOOKMARK":
            self.objects[_key(event["object"])] = event["object"]
        self._changed()

    def _get(self, path: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPSConnection(self._server, context=self._tls, timeout=3600)
        connection.request("GET", path)
        answer = connection.getresponse()
        if answer.status != 200:
            raise ValueError(answer.read())
        return answer


def _key(item: dict[str, Any]) -> tuple[str, str]:
    return item["metadata"]["namespace"], item["metadata"]["name"]
