"""Replicas on silent nodes: used on while no other replica of their service is ready and they accept connections.

When a node does not answer, the control plane sets its pods to not ready, although no kubelet said so: the fault may
lie between the node and the API server. A service that loses all its replicas in this way keeps those that still
accept a connection, as Envoy does below its panic threshold. It ends when a replica is ready by its kubelet's word,
when the replica stops accepting, and after PANIC_SECONDS in any case.

| the kubelet's word (container) | condition Ready | another replica ready | accepts connections | gets requests |
|--------------------------------|-----------------|-----------------------|---------------------|---------------|
| ready                          | True            | any                   | any                 | yes           |
| ready                          | False           | no                    | yes                 | yes           |
| ready                          | False           | no                    | no                  | no            |
| ready                          | False           | yes                   | any                 | no            |
| not ready: it hangs            | any             | any                   | any                 | no            |
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import structlog

from slipway_api import names
from slipway_gateway.fleet import Fleet
from slipway_gateway.picker.endpoints import Endpoint
from slipway_kube.objects import Pod

log = structlog.get_logger()

PANIC_SECONDS: Final = 300.0  # as long as Kubernetes waits before it evicts the pods of a silent node
PROBE_SECONDS: Final = 2.0  # between two connections to a replica
CONNECT_SECONDS: Final = 1.0

Accepts = Callable[[Endpoint], Awaitable[bool]]


def is_silent(pod: Pod) -> bool:
    """Whether the pod is not ready although its kubelet last said that it is: its node does not answer."""
    server = pod.container(names.SERVER_CONTAINER)
    return not pod.is_ready and server is not None and server.ready


async def accepts_connections(endpoint: Endpoint) -> bool:
    """Whether a TCP connection to the replica can be opened."""
    address = urlsplit(endpoint.url)
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.close()
        return True
    return False


@dataclass(frozen=True, slots=True)
class _Silent:
    endpoint: Endpoint
    until: float


class PanicMode:
    """Stands between the watch and the fleet: every change of an endpoint goes through it."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        accepts: Accepts = accepts_connections,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._accepts = accepts
        self._clock = clock
        self._ready: dict[str, set[str]] = {}  # service -> its replicas that are ready
        self._silent: dict[str, dict[str, _Silent]] = {}  # service -> its replicas on silent nodes
        self._service_of: dict[str, str] = {}
        self._changed = asyncio.Event()

    def set_endpoint(
        self, name: str, endpoint: Endpoint | None, silent: Endpoint | None, *, finishes_requests: bool = False
    ) -> None:
        """Set a replica's endpoint, or None; `silent`: where it would be reached, if only its node is silent."""
        since = self._forget(name)
        if (known := endpoint or silent) is not None:
            self._service_of[name] = known.service
        if endpoint is not None:
            self._ready.setdefault(endpoint.service, set()).add(name)
        elif silent is not None:
            until = since.until if since is not None else self._clock() + PANIC_SECONDS
            self._silent.setdefault(silent.service, {})[name] = _Silent(silent, until)
        in_use = self._fleet.table.endpoint(name) if since is not None and silent is not None else None
        if in_use is None or in_use != silent:
            self._fleet.set_endpoint(name, endpoint, finishes_requests=finishes_requests)
        if endpoint is not None:
            for other in self._silent.get(endpoint.service, {}):
                self._fleet.set_endpoint(other, None)
        self._changed.set()

    async def run(self) -> None:
        """Try the silent replicas of services without a ready one, until cancelled."""
        while True:
            self._changed.clear()
            await self.probe()
            seconds = PROBE_SECONDS if self._silent else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._changed.wait()

    async def probe(self) -> None:
        """Try each of them once."""
        now = self._clock()
        tried = [
            one.endpoint
            for service, silent in self._silent.items()
            if not self._ready.get(service)
            for one in silent.values()
            if now < one.until
        ]
        answers = dict(zip(tried, await asyncio.gather(*map(self._accepts, tried)), strict=True))
        for service, silent in list(self._silent.items()):
            for name, one in list(silent.items()):
                # What has changed meanwhile is settled already.
                use = answers.get(one.endpoint, False) and not self._ready.get(service) and self._clock() < one.until
                is_used = self._fleet.table.endpoint(name) is not None
                if use != is_used:
                    self._fleet.set_endpoint(name, one.endpoint if use else None)
                    change = "added" if use else "removed"
                    log.warning(f"endpoint on a silent node {change}", pod=name)

    def _forget(self, name: str) -> _Silent | None:
        service = self._service_of.pop(name, None)
        if service is None:
            return None
        ready, silent = self._ready.get(service, set()), self._silent.get(service, {})
        ready.discard(name)
        before = silent.pop(name, None)
        if not ready:
            self._ready.pop(service, None)
        if not silent:
            self._silent.pop(service, None)
        return before
