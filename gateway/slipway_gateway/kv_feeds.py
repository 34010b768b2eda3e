"""Follows what replicas have in their KV cache, and keeps the prefix index by it: one connection for each replica.

    request to a replica that has a feed → its text blocks go along (`x-slipway-text-blocks`)
    feed of that replica                 → stored: add to its index; removed: take out; reset: begin with an empty one

The feed also tells what other gateways sent there, so that all gateways know the same. Without it (another engine, an
older runtime, a connection that broke) the index stays the guess that it is without feeds: what this gateway sent. A
feed that broke continues at its cursor; a runtime that cannot continue there, or was restarted, sends all that it has.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping
from types import TracebackType
from typing import Any, Final, Self

import aiohttp
import structlog

from slipway_api.names import HEADER_TEXT_BLOCKS, PATH_TEXT_BLOCKS
from slipway_api.text_blocks import HEARTBEAT_SECONDS, TextBlocks, TextBlockUpdate
from slipway_api.trust import Trust
from slipway_gateway.fleet import Fleet
from slipway_gateway.picker.endpoints import Endpoint
from slipway_gateway.picker.prefix import BLOCK_BYTES
from slipway_gateway.picker.scorers import RoutingRequest

log = structlog.get_logger()

MAX_FEEDS: Final = 1024  # of one gateway; the index of further replicas is a guess
SILENT_SECONDS: Final = 3 * HEARTBEAT_SECONDS
FIRST_RETRY_SECONDS: Final = 0.5
LAST_RETRY_SECONDS: Final = 10.0
UNSUPPORTED_SECONDS: Final = 300.0  # until a replica without a feed is asked again


class KvFeeds:
    """The feeds of all replicas; `async with KvFeeds(fleet)` follows them."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        serving_headers: Callable[[Endpoint], Mapping[str, str]] = lambda _: {},
        count: Callable[[str, int], None] = lambda _event, _number: None,
        most: int = MAX_FEEDS,
        trust: Trust | None = None,
    ) -> None:
        """`serving_headers` prove that a gateway asks. `count` counts the blocks stored and removed, and the resets."""
        self.live: set[str] = set()  # replicas whose feed is connected
        self._fleet = fleet
        self._serving_headers = serving_headers
        self._trust = trust or Trust()
        self._count = count
        self._most = most
        self._having: set[str] = set()  # replicas that have a feed, connected or not
        self._tasks: dict[str, tuple[str, asyncio.Task[None]]] = {}  # by replica: its URL, and what follows it
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=2.0, sock_read=SILENT_SECONDS)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )
        self._fleet.on_endpoint = self._set_endpoint
        for endpoint in self._fleet.table.endpoints.values():
            self._set_endpoint(endpoint.name, endpoint)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._fleet.on_endpoint = lambda _name, _endpoint: None
        tasks = [task for _, task in self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def headers(self, endpoint: Endpoint, request: RoutingRequest) -> dict[str, str]:
        """The text blocks of a request, for a replica that has a feed."""
        if endpoint.name not in self._having or not request.blocks:
            return {}
        return {HEADER_TEXT_BLOCKS: TextBlocks(request.prompt_bytes, BLOCK_BYTES, request.blocks).header()}

    def _set_endpoint(self, name: str, endpoint: Endpoint | None) -> None:
        """Follow a replica that came or has changed, and none that is gone."""
        url, task = self._tasks.get(name, ("", None))
        if endpoint is not None and endpoint.url == url:
            return  # only its adapters have changed, or its name
        if task is not None:
            task.cancel()
            del self._tasks[name]
            self._having.discard(name)
        if endpoint is not None and len(self._tasks) < self._most:
            following = asyncio.create_task(self._follow(endpoint), name=f"KV feed {name}")
            self._tasks[name] = (endpoint.url, following)

    async def _follow(self, endpoint: Endpoint) -> None:
        """Follow one replica until cancelled."""
        cursor, pause = "", FIRST_RETRY_SECONDS
        while True:
            try:
                async for update in self._updates(endpoint, cursor):
                    self._apply(endpoint.name, update)
                    cursor, pause = update.cursor, FIRST_RETRY_SECONDS
                    self.live.add(endpoint.name)
                    self._having.add(endpoint.name)
            except _UnsupportedError:
                pause = UNSUPPORTED_SECONDS
            except (aiohttp.ClientError, OSError, ValueError, RecursionError) as error:
                log.debug("KV feed broke off", endpoint=endpoint.name, error=type(error).__name__)
            finally:
                self.live.discard(endpoint.name)
            await asyncio.sleep(pause * random.uniform(0.75, 1.25))  # noqa: S311  to spread them is enough
            pause = min(2 * pause, LAST_RETRY_SECONDS)

    async def _updates(self, endpoint: Endpoint, cursor: str) -> AsyncIterator[TextBlockUpdate]:
        """The lines of the feed after this cursor, as they come."""
        assert self._session is not None, "used outside `async with`"
        headers = dict(self._serving_headers(endpoint))
        url = endpoint.url + PATH_TEXT_BLOCKS
        tls = tls_options(endpoint, self._trust)
        async with self._session.get(url, params={"after": cursor}, headers=headers, **tls) as response:
            if response.status in (404, 405, 501):
                raise _UnsupportedError
            if response.status != 200 or response.content_type != "application/x-ndjson":
                raise ValueError(f"the answer is a {response.status} of {response.content_type}")
            async for line in response.content:
                yield TextBlockUpdate.of_line(line)

    def _apply(self, name: str, update: TextBlockUpdate) -> None:
        index = self._fleet.prefixes
        if update.is_reset:
            index.remove(name)
            self._count("reset", 1)
        if self._fleet.table.endpoint(name) is None:
            return  # it has left meanwhile
        index.discard(name, update.removed)
        index.add(name, update.stored)
        self._count("stored", len(update.stored))
        self._count("removed", len(update.removed))


class _UnsupportedError(Exception):
    """The replica has no feed."""


def tls_options(endpoint: Endpoint, trust: Trust) -> dict[str, Any]:
    """Arguments of a request to a replica that speaks TLS. Raises NoTrustError; plain text is never tried instead."""
    return {"ssl": trust.context, "server_hostname": endpoint.tls_name} if endpoint.tls_name else {}
