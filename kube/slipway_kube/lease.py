"""Leader election on one `coordination.k8s.io` Lease: renewed every 2 s, given up after 7 s, free after 10 s.

The holder fences itself by its own clock: `is_leader()` turns false 7 s after the last successful renewal was
*begun*, three seconds before anyone else may take over, whether or not this process noticed that something is wrong.

         renewal begun   committed   seen by a standby
leader   0 ───────────────────────────────────────────── 7 fenced
standby                              seen ────────────────────────── seen + 10 takes over

No two machines' clocks are compared: a standby waits until the Lease has not changed for 10 s of its own clock.
After kill -9 a standby, which looks every second, leads within 10 + 1 s and two calls; after a clean stop within 1 s
and a call.
A container that is restarted in the same pod finds its predecessor's lease and takes it at once: that process is dead,
or this one would not run. So after all candidates are killed none has to wait for the lease to expire.
RBAC: get, create, update on leases in the release namespace.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, Final, Protocol
from uuid import uuid4

import msgspec
import structlog

from slipway_kube.errors import Conflict, KubeError, LeadershipLost, NotFound
from slipway_kube.resources import LEASES

LEASE_SECONDS: Final = 10
FENCE_SECONDS: Final = 7.0
RETRY_SECONDS: Final = 2.0
LOOK_SECONDS: Final = 1.0  # between two reads by a standby: a clean stop is an outage of the operator for so long
CALL_SECONDS: Final = 2.5  # two tries fit between a renewal and the fence, even when the first one hangs
RELEASE_SECONDS: Final = 2.0
NOT_YET_SECONDS: Final = 0.5  # between two reads of the Lease by a candidate that may not lead yet
SHORTEST_PAUSE: Final = 0.05

log = structlog.get_logger()


class Fence(Protocol):
    """The check that a writer makes before each write: does this process hold the lease?"""

    def is_leader(self) -> bool:
        """May this process write at this very moment?"""
        ...

    def seconds_left(self) -> float:
        """Seconds until `is_leader` turns false, if no renewal succeeds any more."""
        ...


class NoRivals:
    """The fence of a process without leader election: tools, tests."""

    def is_leader(self) -> bool:
        """Always."""
        return True

    def seconds_left(self) -> float:
        """For ever."""
        return float("inf")


class LeaseApi(Protocol):
    """The methods of a `Client` that the elector calls. Give it a client of its own: no call may delay a renewal."""

    async def get(self, path: str, *, timeout: float | None = None) -> bytes:
        """Read one object."""
        ...

    async def create(self, path: str, body: Any, *, timeout: float | None = None) -> bytes:
        """POST."""
        ...

    async def replace(self, path: str, body: Any, *, timeout: float | None = None) -> bytes:
        """PUT with an optimistic lock."""
        ...


def suspend_aware_clock() -> float:
    """Monotonic seconds that also count while the machine is suspended, because the lease expires meanwhile."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Elector:
    """One candidate. `identity` is made unique per process, so that a restarted pod never mistakes itself.

    `incarnation` is the uid of the pod, where there is one: no two processes with the same one ever run at once.
    Until `may_lead` returns true the lease is only read, so that a dead holder's 10 s already run.
    """

    def __init__(
        self,
        client: LeaseApi,
        *,
        namespace: str,
        name: str,
        identity: str,
        incarnation: str = "",
        may_lead: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = suspend_aware_clock,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._own_prefix = f"{identity}_{incarnation}_" if incarnation else ""
        self.identity = f"{self._own_prefix or identity + '_'}{uuid4().hex[:8]}"
        self.leading = asyncio.Event()
        """Set when the lease is won; cleared when it is lost or given back."""
        self._may_lead = may_lead
        self._client = client
        self._collection = LEASES.path(namespace)
        self._path = LEASES.path(namespace, name)
        self._name = name
        self._namespace = namespace
        self._clock = clock
        self._sleep = sleep
        self._lease: dict[str, Any] | None = None  # as last read or written, with its resourceVersion; None: absent
        self._record: dict[str, Any] = {}  # the last spec that we saw …
        self._record_seen = 0.0  # … and when it first looked so
        self._renewed = float("-inf")  # when the last successful renewal was begun
        self._log = log.bind(lease=name, identity=self.identity)

    def is_leader(self) -> bool:
        """True while this process holds the lease by its own clock; checked before every write."""
        return self.seconds_left() > 0.0

    def seconds_left(self) -> float:
        """Seconds until `is_leader()` turns false, if no renewal succeeds any more; 0 for a standby."""
        return max(0.0, self._renewed + FENCE_SECONDS - self._clock())

    async def run(self) -> None:
        """Acquire the lease, then renew it. Raises `LeadershipLost` on loss; releases the lease when cancelled.

        Stop everything that writes before cancelling this: the next leader starts within two seconds.
        """
        try:
            await self._campaign()
            self.leading.set()
            self._log.info("leading")
            await self._hold()
        except asyncio.CancelledError:
            await self._give_back()
            raise
        finally:
            self._renewed = float("-inf")
            self.leading.clear()

    async def _campaign(self) -> None:
        while True:
            try:
                if await self._acquire():
                    return
            except KubeError as error:
                self._log.warning("cannot campaign", error=str(error))
            # Jitter only shortens the wait, which never goes past the expiry of the present holder's lease.
            pause = (LOOK_SECONDS if self._may_lead() else NOT_YET_SECONDS) * random.uniform(0.8, 1.0)  # noqa: S311
            await self._sleep(max(SHORTEST_PAUSE, min(pause, self._free_in() or pause)))

    async def _hold(self) -> None:
        pause = RETRY_SECONDS
        while True:
            await self._sleep(max(SHORTEST_PAUSE, min(pause, self.seconds_left())))
            if not self.is_leader():
                raise LeadershipLost(f"no renewal of {self._name} succeeded for {FENCE_SECONDS:g} s")
            try:
                if not await self._renew():
                    raise LeadershipLost(f"{self._name} is held by {self._holder or 'someone faster'}")
                pause = RETRY_SECONDS
            except LeadershipLost:
                raise
            except KubeError as error:
                pause = RETRY_SECONDS / 4
                self._log.warning("cannot renew", error=str(error), seconds_left=round(self.seconds_left(), 1))

    async def _acquire(self) -> bool:
        """Take the lease if it is free, expired or held by this process. False when another one holds or takes it."""
        try:
            self._see(await self._client.get(self._path, timeout=CALL_SECONDS))
        except NotFound:
            self._lease = None  # deleted by hand, maybe unnoticed by its holder: the last one read still counts
        if self._free_in() > 0.0 or not self._may_lead():
            return False
        try:
            await self._write()
        except Conflict:
            return False
        return True

    async def _renew(self) -> bool:
        """Replace the Lease at its known version; after a conflict read it first. False when another one holds it."""
        try:
            await self._write()
        except (Conflict, NotFound):
            return await self._acquire()
        return True

    async def _write(self) -> None:
        """Create the lease, or replace its known version, with this process as holder."""
        begun = self._clock()
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        old = self._record
        is_renewal = old.get("holderIdentity") == self.identity
        spec = {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": LEASE_SECONDS,
            "acquireTime": old.get("acquireTime", now) if is_renewal else now,
            "renewTime": now,
            "leaseTransitions": old.get("leaseTransitions", 0) + (0 if is_renewal or not old else 1),
        }
        timeout = min(CALL_SECONDS, self.seconds_left() or CALL_SECONDS)
        if self._lease is None:
            metadata = {"name": self._name, "namespace": self._namespace}
            body = {"apiVersion": LEASES.api_version, "kind": LEASES.kind, "metadata": metadata, "spec": spec}
            reply = await self._client.create(self._collection, body, timeout=timeout)
        else:
            reply = await self._client.replace(self._path, self._lease | {"spec": spec}, timeout=timeout)
        self._see(reply)
        self._renewed = begun

    async def _give_back(self) -> None:
        """Release the lease, so that the next leader need not wait. Best effort: an unreleased lease expires."""
        if not self.leading.is_set():
            return
        self._renewed = float("-inf")  # fenced before another process can lead
        try:
            async with asyncio.timeout(RELEASE_SECONDS):
                self._see(await self._client.get(self._path, timeout=RELEASE_SECONDS))
                if self._lease is not None and self._holder == self.identity:
                    spec = self._lease["spec"] | {"holderIdentity": "", "leaseDurationSeconds": 1}
                    await self._client.replace(self._path, self._lease | {"spec": spec}, timeout=RELEASE_SECONDS)
                    self._log.info("gave the lease back")
        except (KubeError, TimeoutError) as error:
            self._log.warning("cannot give the lease back; it runs out by itself", error=str(error))

    def _see(self, lease: bytes) -> None:
        self._lease = msgspec.json.decode(lease, type=dict[str, Any])
        # Only the spec counts: an edit of the labels is no renewal.
        if self._lease.setdefault("spec", {}) != self._record:
            self._record = self._lease["spec"]
            self._record_seen = self._clock()

    def _free_in(self) -> float:
        """Seconds until this process may take the lease, by its own clock; 0 when it is free or its own."""
        is_own_predecessor = bool(self._own_prefix) and self._holder.startswith(self._own_prefix)
        if self._holder in ("", self.identity) or is_own_predecessor:
            return 0.0
        # A holder that was started with a longer lease keeps it for that longer time.
        duration = max(LEASE_SECONDS, self._record.get("leaseDurationSeconds") or 0)
        return max(0.0, self._record_seen + duration - self._clock())

    @property
    def _holder(self) -> str:
        return self._record.get("holderIdentity") or ""
