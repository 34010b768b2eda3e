"""The API server's verbs on raw JSON, over one bounded pool of connections.

Bodies go in as anything msgspec encodes (or as bytes that are JSON already) and come back as bytes: the caller
knows which slim struct to decode them into. Every call is bounded by a timeout; every failure is a `KubeError`.
"""

from collections.abc import AsyncIterator, Mapping
from typing import Any, Final, NamedTuple

from slipway_kube.auth import Connection

DEFAULT_TIMEOUT: Final = 10.0
PAGE_SIZE: Final = 500


class ProxyReply(NamedTuple):
    """What a pod answered through the API server's proxy, or the API server in its place."""

    status: int
    body: bytes


class Client:
    """One API server. Use as `async with Client(connection) as client`.

    At most `pool` calls are on the way at once; watches come on top, one connection each.
    The lease wants a client of its own, so that a burst of slow calls cannot cost the leadership.
    """

    def __init__(
        self, connection: Connection, *, user_agent: str = "slipway", pool: int = 16, timeout: float = DEFAULT_TIMEOUT
    ) -> None: ...

    async def __aenter__(self) -> "Client":
        raise NotImplementedError

    async def __aexit__(self, *exc_info: object) -> None:
        raise NotImplementedError

    async def get(self, path: str, params: Mapping[str, str] | None = None, *, timeout: float | None = None) -> bytes:
        """One object, a list, or any raw path (`/version`)."""
        raise NotImplementedError

    def list_pages(
        self, path: str, *, label_selector: str = "", field_selector: str = "", limit: int = PAGE_SIZE
    ) -> AsyncIterator[bytes]:
        """A consistent list in pages. `Gone` when the snapshot was compacted before its last page: start over."""
        raise NotImplementedError

    def watch(
        self,
        path: str,
        *,
        resource_version: str,
        label_selector: str = "",
        field_selector: str = "",
        timeout_seconds: int = 300,
    ) -> AsyncIterator[bytes]:
        """Lines of a watch with bookmarks, until the server ends it. Silence is the caller's to judge."""
        raise NotImplementedError

    async def create(self, path: str, body: Any, *, dry_run: bool = False, timeout: float | None = None) -> bytes:
        """POST to a collection (or to a subresource such as `eviction`)."""
        raise NotImplementedError

    async def replace(self, path: str, body: Any, *, dry_run: bool = False, timeout: float | None = None) -> bytes:
        """PUT; with a resourceVersion in the body it is an optimistic lock (409 when someone was faster)."""
        raise NotImplementedError

    async def delete(
        self,
        path: str,
        *,
        uid: str = "",
        grace_seconds: int | None = None,
        propagation: str = "",
        dry_run: bool = False,
        timeout: float | None = None,
    ) -> bytes:
        """DELETE; with `uid` only that very object (409 when the name belongs to another by now)."""
        raise NotImplementedError

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
        raise NotImplementedError

    async def json_patch(
        self, path: str, operations: list[dict[str, Any]], *, dry_run: bool = False, timeout: float | None = None
    ) -> bytes:
        """RFC 6902. A failed `test` is `Invalid` (422), not `Conflict`."""
        raise NotImplementedError

    async def merge_patch(self, path: str, body: Any, *, dry_run: bool = False, timeout: float | None = None) -> bytes:
        """RFC 7386: lists are replaced whole, null removes."""
        raise NotImplementedError

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
    ) -> ProxyReply:
        """Ask a pod through `pods/proxy`: how an operator outside the cluster reaches the admin port.

        The pod's own error statuses are answers, not exceptions; `Unreachable` only when the API server is.
        The proxy strips Authorization, so tokens travel in other headers.
        """
        raise NotImplementedError
