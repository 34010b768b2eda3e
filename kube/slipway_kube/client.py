"""An HTTP client of the Kubernetes API: get, list, watch, create, apply, patch and delete, on raw JSON.

Bodies go in as anything msgspec encodes (or as bytes that are JSON already) and come back as bytes: the caller
knows which slim struct to decode them into. Every call is bounded by a timeout; every failure is a `KubeError`.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import aiohttp
import msgspec
from yarl import URL

from slipway_kube.auth import Connection
from slipway_kube.errors import Unreachable, from_response
from slipway_kube.objects import Page
from slipway_kube.resources import PODS

DEFAULT_TIMEOUT: Final = 10.0
CONNECT_TIMEOUT: Final = 5.0
PAGE_SIZE: Final = 500
MOST_BYTES: Final = 256 * 2**20  # of an answer of the API server; a page of objects is far smaller
MOST_POD_BYTES: Final = 4 * 2**20  # of the answer of a pod, which its owner writes
MOST_LINE_BYTES: Final = 16 * 2**20  # of a watch; etcd stores no object above 1.5 MiB

JSON: Final = "application/json"
APPLY_PATCH: Final = "application/apply-patch+yaml"  # JSON is YAML
JSON_PATCH: Final = "application/json-patch+json"
MERGE_PATCH: Final = "application/merge-patch+json"


class ProxyReply(NamedTuple):
    """A pod's answer through the API server's proxy."""

    status: int
    body: bytes


class Client:
    """One API server. Use as `async with Client(connection) as client`.

    At most `pool` calls run at once; each watch has a connection of its own beside them.
    The elector gets a client of its own, so that a burst of slow calls cannot delay a lease renewal.
    """

    def __init__(
        self, connection: Connection, *, user_agent: str = "slipway", pool: int = 16, timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        self._connection = connection
        self._user_agent = user_agent
        self._timeout = timeout
        self._calls = asyncio.Semaphore(pool)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            # The semaphore bounds the calls; a limit here would let watches starve them.
            connector=aiohttp.TCPConnector(limit=0, ssl=self._connection.tls or True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT),
            # Uncompressed: gzip would cost both sides more CPU than the network inside a cluster.
            headers={"User-Agent": self._user_agent, "Accept": JSON, "Accept-Encoding": "identity"},
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, path: str, params: Mapping[str, str] | None = None, *, timeout: float | None = None) -> bytes:
        """One object, a list, or any raw path (`/version`)."""
        return await self._call("GET", path, params=params, timeout=timeout)

    async def list_pages(
        self, path: str, *, label_selector: str = "", field_selector: str = "", limit: int = PAGE_SIZE
    ) -> AsyncGenerator[Page, None]:
        """A consistent list in pages. `Gone` when the snapshot was compacted before its last page: start over."""
        params = {"limit": str(limit)} | _selectors(label_selector, field_selector)
        while True:
            page = msgspec.json.decode(await self.get(path, params), type=Page)
            yield page
            if not page.metadata.continue_:
                return
            params["continue"] = page.metadata.continue_

    async def watch(
        self,
        path: str,
        *,
        resource_version: str,
        label_selector: str = "",
        field_selector: str = "",
        timeout_seconds: int = 300,
    ) -> AsyncGenerator[bytes, None]:
        """Lines of a watch with bookmarks, until the server ends it. It has no read timeout: the caller sets one.

        Close it (`contextlib.aclosing`) to release the connection.
        """
        params = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(timeout_seconds)}
        params |= {"resourceVersion": resource_version} | _selectors(label_selector, field_selector)
        where = f"WATCH {path}"
        try:
            async with asyncio.timeout(self._timeout):
                response = await self._send("GET", path, params=params)
            async with response:
                if response.status == 401:
                    self._connection.credentials.forget()
                if response.status >= 300:
                    refusal = await _read(response, MOST_POD_BYTES)
                    raise from_response(response.status, refusal, response.headers.get("Retry-After"))
                async with aclosing(_lines(response.content)) as lines:
                    async for line in lines:
                        yield line
        except (aiohttp.ClientError, OSError) as exc:
            raise Unreachable(f"{where}: {exc or type(exc).__name__}") from exc

    async def create(self, path: str, body: Any, *, dry_run: bool = False, timeout: float | None = None) -> bytes:
        """POST to a collection (or to a subresource such as `eviction`)."""
        return await self._call("POST", path, params=_dry(dry_run), body=body, timeout=timeout)

    async def replace(self, path: str, body: Any, *, dry_run: bool = False, timeout: float | None = None) -> bytes:
        """PUT; with a resourceVersion in the body it is an optimistic lock (409 when the object has changed since)."""
        return await self._call("PUT", path, params=_dry(dry_run), body=body, timeout=timeout)

    async def delete(
        self,
        path: str,
        *,
        uid: str = "",
        resource_version: str = "",
        grace_seconds: int | None = None,
        propagation: str = "",
        dry_run: bool = False,
        timeout: float | None = None,
    ) -> bytes:
        """DELETE; with `uid` only the object of that uid (409 when the name belongs to another object by now).

        With `resource_version` only that version of it (409 when it has changed).
        """
        options: dict[str, Any] = {"kind": "DeleteOptions", "apiVersion": "v1"}
        preconditions = {"uid": uid} if uid else {}
        if resource_version:
            preconditions["resourceVersion"] = resource_version
        if preconditions:
            options["preconditions"] = preconditions
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        if propagation:
            options["propagationPolicy"] = propagation
        if dry_run:
            options["dryRun"] = ["All"]  # beside a body the server ignores the query, and would really delete
        return await self._call("DELETE", path, body=options, timeout=timeout)

    async def apply(
        self,
        path: str,
        body: Any,
        *,
        field_manager: str,
        force: bool = True,
        dry_run: bool = False,
        timeout: float | None = None,
    ) -> bytes:
        """Server-side apply. The path may be a subresource (`…/status`)."""
        params = {"fieldManager": field_manager, "force": str(force).lower()} | _dry(dry_run)
        return await self._call("PATCH", path, params=params, body=body, content_type=APPLY_PATCH, timeout=timeout)

    async def json_patch(
        self, path: str, operations: list[dict[str, Any]], *, dry_run: bool = False, timeout: float | None = None
    ) -> bytes:
        """RFC 6902. A failed `test` is `Invalid` (422), not `Conflict`."""
        params = _dry(dry_run)
        return await self._call("PATCH", path, params=params, body=operations, content_type=JSON_PATCH, timeout=timeout)

    async def merge_patch(self, path: str, body: Any, *, dry_run: bool = False, timeout: float | None = None) -> bytes:
        """RFC 7386: lists are replaced whole, null removes."""
        params = _dry(dry_run)
        return await self._call("PATCH", path, params=params, body=body, content_type=MERGE_PATCH, timeout=timeout)

    async def proxy_to_pod(
        self,
        namespace: str,
        name: str,
        port: int,
        path: str,
        *,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        body: Any = None,
        timeout: float | None = None,
        over_tls: bool = False,
    ) -> ProxyReply:
        """Send a request to a pod through `pods/proxy`, for an operator that runs outside the cluster.

        An error status of the pod itself is returned as the reply. An error of the API server is raised as a
        `StatusError` (503 `ServerError` when the pod refuses the connection). The proxy strips Authorization, so tokens
        travel in other headers. With `over_tls` the API server calls the pod by https, and does not verify it.
        """
        target = f"{'https:' if over_tls else ''}{name}:{port}"
        route = f"{PODS.path(namespace, target)}/proxy{path}"
        status, reply, _ = await self._exchange(
            method, route, headers=headers, body=body, timeout=timeout, most=MOST_POD_BYTES
        )
        if status >= 300 and b'"kind":"Status"' in reply[:100].replace(b" ", b""):
            raise from_response(status, reply)
        return ProxyReply(status, reply)

    async def _call(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = JSON,
        timeout: float | None = None,
    ) -> bytes:
        call = {"params": params, "body": body, "content_type": content_type, "timeout": timeout}
        status, reply, retry_after = await self._exchange(method, path, **call)
        if status == 401:
            # The token was rotated: read it again, and retry once.
            self._connection.credentials.forget()
            status, reply, retry_after = await self._exchange(method, path, **call)
        if status >= 300:
            raise from_response(status, reply, retry_after)
        return reply

    async def _exchange(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = JSON,
        timeout: float | None = None,
        most: int = MOST_BYTES,
    ) -> tuple[int, bytes, str | None]:
        """One request and its whole answer of at most `most` bytes; the timeout includes waiting for the semaphore."""
        seconds = self._timeout if timeout is None else timeout
        try:
            async with asyncio.timeout(seconds), self._calls:
                response = await self._send(
                    method, path, params=params, headers=headers, body=body, content_type=content_type
                )
                async with response:
                    return response.status, await _read(response, most), response.headers.get("Retry-After")
        except TimeoutError as exc:
            raise Unreachable(f"{method} {path}: no answer within {seconds:g} s") from exc
        except (aiohttp.ClientError, OSError) as exc:
            raise Unreachable(f"{method} {path}: {exc or type(exc).__name__}") from exc

    async def _send(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = JSON,
    ) -> aiohttp.ClientResponse:
        assert self._session is not None, "use `async with Client(...)`"
        sent = dict(await self._connection.credentials.headers()) | dict(headers or {})
        if body is not None:
            sent["Content-Type"] = content_type
        return await self._session.request(
            method,
            URL(self._connection.server + path, encoded=True).update_query(params or {}),
            headers=sent,
            data=body if body is None or isinstance(body, bytes) else msgspec.json.encode(body),
            allow_redirects=False,
            proxy=self._connection.proxy,
            server_hostname=self._connection.tls_server_name,
        )


async def _read(response: aiohttp.ClientResponse, most: int) -> bytes:
    """The whole body; raises Unreachable beyond `most` bytes, before more of it fills the memory."""
    pieces, size = [], 0
    async for piece in response.content.iter_any():
        size += len(piece)
        if size > most:
            raise Unreachable(f"the answer is longer than {most} bytes")
        pieces.append(piece)
    return b"".join(pieces)


async def _lines(stream: aiohttp.StreamReader) -> AsyncGenerator[bytes, None]:
    """Split by newlines ourselves: aiohttp's `readline` fails on objects larger than its buffer."""
    rest = b""
    async for chunk in stream.iter_any():
        if len(rest) > MOST_LINE_BYTES:
            raise Unreachable(f"a line of a watch is longer than {MOST_LINE_BYTES >> 20} MiB")
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line:
                yield line


def _selectors(label_selector: str, field_selector: str) -> dict[str, str]:
    selectors = {"labelSelector": label_selector, "fieldSelector": field_selector}
    return {name: value for name, value in selectors.items() if value}


def _dry(dry_run: bool) -> dict[str, str]:
    return {"dryRun": "All"} if dry_run else {}
