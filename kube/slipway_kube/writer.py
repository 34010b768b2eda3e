"""Sends all writes to the API server: checks the lease, limits the rate, records expectations, supports dry run.

A write is, in this order: skipped when nothing would change, rate-limited, fenced, recorded as expected, sent.
The fence comes last before sending, because waiting for the rate limit takes time in which leadership may be lost.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Any, Final

from slipway_kube.client import DEFAULT_TIMEOUT, Client
from slipway_kube.errors import (
    AlreadyExists,
    Conflict,
    KubeError,
    NotFound,
    NotLeader,
    StatusError,
    TooManyRequests,
    Unreachable,
)
from slipway_kube.expectations import Expectations, Pending
from slipway_kube.lease import Fence
from slipway_kube.resources import Resource
from slipway_kube.token_bucket import TokenBucket

WRITES_PER_SECOND: Final = 50.0
BURST: Final = 100
LONGEST_BREAK: Final = 10.0  # the longest Retry-After of a 429 that is followed
SHORTEST_TIMEOUT: Final = 1.0  # three seconds lie between the end of our leadership and the next leader's start


@dataclass(frozen=True, slots=True)
class Write:
    """One write, as passed to hooks and metrics."""

    verb: str  # create | delete | apply | json_patch | merge_patch
    resource: Resource
    namespace: str
    name: str
    subresource: str = ""

    @property
    def path(self) -> str:
        """Path of the object, also where the request goes to its collection."""
        return self.resource.path(self.namespace, self.name, self.subresource)


Send = Callable[[], Awaitable[bytes]]
Transport = Callable[[Write, Send], Awaitable[bytes]]
"""Stands between the writer and the server: may fail before sending, after it, or lose the reply."""
OnWrite = Callable[[Write, str], None]
"""Called after each write with its outcome: ok, skipped, or the error's class name (NotLeader when fenced)."""


async def _send_it(_: Write, send: Send) -> bytes:
    return await send()


class Writer:
    """Sends writes while this process holds the lease, else raises `NotLeader`."""

    def __init__(
        self,
        client: Client,
        fence: Fence,
        *,
        rate: float = WRITES_PER_SECOND,
        burst: int = BURST,
        dry_run: bool = False,
        on_write: OnWrite | None = None,
        transport: Transport = _send_it,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.expectations = Expectations()
        """Connect it to each informer: `pods.on_change(writer.expectations.saw)`."""
        self._client = client
        self._fence = fence
        self._bucket = TokenBucket(rate=rate, burst=burst)
        self._dry_run = dry_run
        self._on_write = on_write
        self._transport = transport
        self._clock = clock
        self._sleep = sleep

    def pending(self, owner: Hashable) -> Pending:
        """The owner's writes that the caches do not show yet; falsy when there are none."""
        return self.expectations.pending(owner, now=self._clock())

    async def create(
        self, resource: Resource, namespace: str, body: dict[str, Any], *, owner: Hashable | None = None
    ) -> bytes:
        """POST. `AlreadyExists` means that an earlier try or another leader has created it.

        With `owner`, the object is pending until an informer shows it.
        """
        write = Write("create", resource, namespace, body["metadata"]["name"])
        expected = None if self._dry_run else owner

        async def send() -> bytes:
            if expected is not None:
                self.expectations.expect_create(expected, namespace, write.name, now=self._clock())
            return await self._client.create(
                resource.path(namespace), body, dry_run=self._dry_run, timeout=self._timeout()
            )

        try:
            return await self._write(write, send)
        except KubeError as error:
            if expected is not None:
                self._unexpect_create(expected, namespace, write.name, error)
            raise

    async def delete(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        *,
        uid: str = "",
        resource_version: str = "",
        grace_seconds: int | None = None,
        owner: Hashable | None = None,
    ) -> bool:
        """Delete the object of that uid. False when it did not exist any more, which is no error.

        With `resource_version`, an object that has changed since is left alone, and the answer is False too.
        With `owner` and `uid`, the object is pending until an informer shows it as terminating or gone.
        """
        write = Write("delete", resource, namespace, name)
        expected = owner if uid and not self._dry_run else None

        async def send() -> bytes:
            if expected is not None:
                self.expectations.expect_delete(expected, uid, now=self._clock())
            return await self._client.delete(
                write.path,
                uid=uid,
                resource_version=resource_version,
                grace_seconds=grace_seconds,
                dry_run=self._dry_run,
                timeout=self._timeout(),
            )

        try:
            await self._write(write, send)
        except NotFound:
            self.expectations.retract_delete(uid)
            return False
        except Conflict:
            if not uid:
                raise
            self.expectations.retract_delete(uid)  # the name belongs to another object by now
            return False
        except StatusError:
            self.expectations.retract_delete(uid)
            raise
        except Unreachable:
            if expected is not None:
                self.expectations.expect_delete(expected, uid, now=self._clock(), unsure=True)
            raise
        return True

    async def apply(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        body: dict[str, Any],
        *,
        field_manager: str,
        last: dict[str, Any] | None = None,
        force: bool = True,
        subresource: str = "",
    ) -> bytes | None:
        """Server-side apply. Skipped (None) when `body` equals `last`, the body of this manager's last apply."""
        write = Write("apply", resource, namespace, name, subresource)
        if body == last:
            self._notify(write, "skipped")
            return None
        identified = body | {
            "apiVersion": resource.api_version,
            "kind": resource.kind,
            "metadata": {"name": name} | body.get("metadata", {}),
        }
        return await self._write(
            write,
            lambda: self._client.apply(
                write.path,
                identified,
                field_manager=field_manager,
                force=force,
                dry_run=self._dry_run,
                timeout=self._timeout(),
            ),
        )

    async def label(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        body: dict[str, Any],
        *,
        label: str,
        field_manager: str,
        owner: Hashable | None,
    ) -> None:
        """Server-side apply of metadata with `label`; with `owner`, pending until an informer shows the new value.

        `body` carries the object's uid, so that a deleted object is never created anew.
        """
        uid, value = body["metadata"]["uid"], body["metadata"]["labels"][label]
        expected = None if self._dry_run else owner
        if expected is not None:
            self.expectations.expect_label(expected, uid, label, value, now=self._clock())
        try:
            await self.apply(resource, namespace, name, body, field_manager=field_manager)
        except Unreachable:
            if expected is not None:
                self.expectations.expect_label(expected, uid, label, value, now=self._clock(), unsure=True)
            raise
        except KubeError:
            self.expectations.retract_label(uid)
            raise

    async def json_patch(
        self, resource: Resource, namespace: str, name: str, operations: list[dict[str, Any]], *, subresource: str = ""
    ) -> bytes:
        """RFC 6902. A failed `test` is `Invalid`."""
        write = Write("json_patch", resource, namespace, name, subresource)
        return await self._write(
            write,
            lambda: self._client.json_patch(write.path, operations, dry_run=self._dry_run, timeout=self._timeout()),
        )

    def expect_label(self, owner: Hashable, uid: str, label: str, value: str | None) -> None:
        """Let the object of this uid be pending for the owner until an informer shows the label; None: removed."""
        if not self._dry_run:
            self.expectations.expect_label(owner, uid, label, value, now=self._clock())

    async def merge_patch(
        self, resource: Resource, namespace: str, name: str, body: dict[str, Any], *, subresource: str = ""
    ) -> bytes:
        """RFC 7386."""
        write = Write("merge_patch", resource, namespace, name, subresource)
        return await self._write(
            write,
            lambda: self._client.merge_patch(write.path, body, dry_run=self._dry_run, timeout=self._timeout()),
        )

    async def _write(self, write: Write, send: Send) -> bytes:
        try:
            wait = self._bucket.reserve(self._clock())
            if wait > 0.0:
                await self._sleep(wait)
            if not self._fence.is_leader():
                raise NotLeader(f"{write.verb} {write.path}: not the leader")
            reply = await self._transport(write, send)
        except TooManyRequests as error:
            # All writes slow down, not only the refused one; a disruption budget's 429 has no Retry-After.
            if error.retry_after is not None:
                self._bucket.close_for(min(error.retry_after, LONGEST_BREAK), self._clock())
            self._notify(write, type(error).__name__)
            raise
        except KubeError as error:
            self._notify(write, type(error).__name__)
            raise
        self._notify(write, "ok")
        return reply

    def _timeout(self) -> float:
        """A timeout within our leadership: the write should not arrive under the next leader."""
        return max(SHORTEST_TIMEOUT, min(DEFAULT_TIMEOUT, self._fence.seconds_left()))

    def _unexpect_create(self, owner: Hashable, namespace: str, name: str, error: KubeError) -> None:
        if isinstance(error, Unreachable | AlreadyExists):
            # It may exist although no event showed it. That event may have come before we began to
            # expect it, so do not insist.
            self.expectations.expect_create(owner, namespace, name, now=self._clock(), unsure=True)
        elif isinstance(error, StatusError):
            self.expectations.retract_create(namespace, name)

    def _notify(self, write: Write, outcome: str) -> None:
        if self._on_write is not None:
            self._on_write(write, outcome)
