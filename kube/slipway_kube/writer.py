"""The one door for writes: fence, rate limit, expectations, dry run, and where tests inject faults.

Every write is, in this order: skipped when nothing would change, paced, fenced, announced to the expectations, sent.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from slipway_kube.client import Client
from slipway_kube.expectations import Pending
from slipway_kube.lease import Fence
from slipway_kube.objects import Key
from slipway_kube.resources import Resource

WRITES_PER_SECOND: Final = 50.0
BURST: Final = 100


@dataclass(frozen=True, slots=True)
class Write:
    """One write on its way, as hooks and metrics see it."""

    verb: str  # create | delete | apply | json_patch | merge_patch
    resource: Resource
    namespace: str
    name: str
    subresource: str = ""


Send = Callable[[], Awaitable[bytes]]
Transport = Callable[[Write, Send], Awaitable[bytes]]
"""Stands between the writer and the server: may fail before sending, after it, or lose the reply."""
OnWrite = Callable[[Write, str], None]
"""Told of each write and its outcome: ok, skipped, fenced, or the error's class name."""


class Writer:
    """Writes for the leader, and refuses (`NotLeader`) for anyone else."""

    def __init__(
        self,
        client: Client,
        fence: Fence,
        *,
        rate: float = WRITES_PER_SECOND,
        burst: int = BURST,
        dry_run: bool = False,
        on_write: OnWrite | None = None,
        transport: Transport | None = None,
    ) -> None: ...

    def pending(self, owner: Key) -> Pending:
        """What the caches do not show yet of the owner's creates and deletes; falsy when nothing is outstanding."""
        raise NotImplementedError

    async def create(self, resource: Resource, namespace: str, body: Any, *, owner: Key | None = None) -> bytes:
        """POST. `AlreadyExists` means that an earlier try, or another leader, got there first."""
        raise NotImplementedError

    async def delete(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        *,
        uid: str = "",
        grace_seconds: int | None = None,
        owner: Key | None = None,
    ) -> bool:
        """Delete that very object. False when it is gone already: the goal is reached either way."""
        raise NotImplementedError

    async def apply(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        body: Any,
        *,
        field_manager: str,
        last: Any = None,
        force: bool = True,
        subresource: str = "",
    ) -> bytes | None:
        """Server-side apply. Skipped (None) when `body == last`: pass what was applied before, or its hash's twin."""
        raise NotImplementedError

    async def apply_status(
        self, resource: Resource, namespace: str, name: str, body: Any, *, field_manager: str, last: Any = None
    ) -> bytes | None:
        """Server-side apply to `/status`; skipped when `body == last`."""
        raise NotImplementedError

    async def json_patch(
        self, resource: Resource, namespace: str, name: str, operations: list[dict[str, Any]], *, subresource: str = ""
    ) -> bytes:
        """RFC 6902. A failed `test` is `Invalid`."""
        raise NotImplementedError

    async def merge_patch(
        self, resource: Resource, namespace: str, name: str, body: Any, *, subresource: str = ""
    ) -> bytes:
        """RFC 7386."""
        raise NotImplementedError
