"""The scraper: asks each replica for its signals at an interval, keeps the newest sample, and queues its service.

A replica's capacity does not change while it runs, so it is read once, after the first answer of the replica. If an
adapter failed to load, it is read with each answer until the adapter is there.

Busy and draining replicas are asked every 1.5 s, idle ones every 15 s, each at its own moment within the interval so
that a fleet's calls spread out. What a gateway says of new requests wakes the idle replicas of the service at once: the
first reaction to a burst does not wait for the end of an idle interval. When a replica does not answer, its last sample
stays and grows old; the core decides what that means. Calls are shared fairly between services, and replicas that were
silent last time wait in a queue of their own: a namespace that drops our packets delays the samples of no other.
"""

import asyncio
import contextlib
import heapq
import zlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Generic, TypeVar

import structlog

from slipway_api.runtime_api import ReadyReason, Signals, State
from slipway_operator.controller.isolation import FairSlots
from slipway_operator.core.observed import Capacity, Sample

log = structlog.get_logger()

BUSY_SECONDS = 1.5  # so that from a saturated replica to the pod of the next one it is less than 2 s
IDLE_SECONDS = 15.0
DEMANDED_SECONDS = 10.0  # at the busy pace after a gateway said that there are requests
REPLACES_WITHIN = timedelta(seconds=10)  # load from another source that is as fresh replaces calls at the busy pace
CLOCK_DIFFERENCE = timedelta(seconds=30)  # by which the clock of another source may be ahead
CALLS_PER_SECOND = 3000.0  # as many as one core allows: 10,000 busy replicas every 3.3 s, samples below 5 s
BATCH_SECONDS = 0.01  # calls that are due within so short a time begin together

CALLS, CALLS_OF_A_SERVICE = 256, 32
SILENT_CALLS, SILENT_CALLS_OF_A_SERVICE = 32, 2

_WAITING = (ReadyReason.NO_MODEL, ReadyReason.STANDBY)  # a pod of a WarmPool until it is claimed

AddressT = TypeVar("AddressT")
KeyT = TypeVar("KeyT", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Target(Generic[AddressT, KeyT]):
    """One replica that should answer."""

    uid: str
    address: AddressT
    service: KeyT
    is_draining: bool = False
    is_starting: bool = False  # the model is loading, and the port may not be open yet: silence is no failure


def matters(before: Sample | None, after: Sample) -> bool:
    """Whether the service needs a pass because of this sample.

    It does after a silence, with load, at the end of load, for a step of the start, a drain's progress, a restarted
    engine and a certificate that its engine has not renewed; not while an idle replica stays idle.
    """
    if before is None or before.boot_id != after.boot_id or before.draining != after.draining:
        return True
    if before.starting != after.starting or before.capacity != after.capacity:
        return True
    if before.outdated_certificate_ends != after.outdated_certificate_ends:
        return True
    if (after.at - before.at).total_seconds() > 2 * IDLE_SECONDS:
        return True
    return after.draining or after.requests > 0 or before.requests > 0


def is_load_only(before: Sample | None, after: Sample) -> bool:
    """Whether a sample that matters contains only a change of load, so that the pass may be delayed and coalesced."""
    if before is None or before.boot_id != after.boot_id or before.capacity != after.capacity:
        return False
    is_moving = before.draining or after.draining or before.starting != after.starting
    return not is_moving and (after.at - before.at).total_seconds() <= 2 * IDLE_SECONDS


class Scraper(Generic[AddressT, KeyT]):
    """The newest sample of every replica.

    `watch` and `forget` add and remove replicas; `ask` and `describe` raise when a replica does not answer; `on_news`
    is called with the service of a sample that matters, and whether it is of load only; `on_error` for each silence.
    """

    def __init__(
        self,
        ask: Callable[[AddressT], Awaitable[Signals]],
        describe: Callable[[AddressT], Awaitable[State]],
        *,
        on_news: Callable[[KeyT, bool], None],
        on_error: Callable[[Exception], None] = lambda _error: None,
        is_ours: Callable[[Target[AddressT, KeyT]], bool] = lambda _target: True,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """`is_ours` tells whether the service controls the pod: to one that only carries its label no token is sent."""
        self._ask = ask
        self._is_ours = is_ours
        self._asking_since: datetime | None = None
        self._describe = describe
        self._on_news = on_news
        self._on_error = on_error
        self._now = now
        self._targets: dict[str, Target[AddressT, KeyT]] = {}
        self._of_service: defaultdict[KeyT, set[str]] = defaultdict(set)
        self._demanded_until: dict[KeyT, float] = {}
        self._samples: dict[str, Sample] = {}
        self._due: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []  # the entries of `_due`, and outdated ones
        self._sooner = asyncio.Event()
        self._learned: dict[str, float] = {}  # when fresh load came last from another source
        self._silent: set[str] = set()
        self._refused: set[str] = set()  # replicas that answered 401 last time
        self._in_flight: dict[str, asyncio.Task[None]] = {}
        self._slots: FairSlots[KeyT] = FairSlots(total=CALLS, per_owner=CALLS_OF_A_SERVICE)
        self._silent_slots: FairSlots[KeyT] = FairSlots(total=SILENT_CALLS, per_owner=SILENT_CALLS_OF_A_SERVICE)

    @property
    def asking_since(self) -> datetime:
        """When `run` began: a replica without a sample is silent only if there was time to ask it."""
        return self._asking_since or self._now()

    def sample(self, uid: str) -> Sample | None:
        """The newest sample of one replica, however old."""
        return self._samples.get(uid)

    def refuses_token(self, uid: str) -> bool:
        """Whether the replica answered 401 when it was last asked: it accepts tokens of another admin master."""
        return uid in self._refused

    def watch(self, target: Target[AddressT, KeyT]) -> None:
        """Scrape this replica from now on, or under its new address or state."""
        is_known = target.uid in self._targets
        self._leave_service(target.uid)
        self._targets[target.uid] = target
        self._of_service[target.service].add(target.uid)
        if not is_known:
            self._plan_visit(target.uid, _loop_time() + _phase(target.uid) * self._busy_seconds())
        elif target.is_draining and target.uid not in self._in_flight:
            # An idle replica that begins to drain is asked at the busy pace from now on.
            self._plan_visit(target.uid, min(self._due[target.uid], _loop_time() + BUSY_SECONDS))

    def forget(self, uid: str) -> None:
        """Stop scraping this replica, because its pod is deleted."""
        self._leave_service(uid)
        for known in (self._targets, self._samples, self._due, self._learned):
            known.pop(uid, None)
        self._silent.discard(uid)
        self._refused.discard(uid)

    def learn(self, uid: str, *, at: datetime, kv_usage: float, running: int, waiting: int) -> None:
        """Take a replica's load from another source. It counts if it is newer than what the replica said itself.

        What the source does not have (whether the replica drains, its boot id) stays as it was.
        """
        target, before = self._targets.get(uid), self._samples.get(uid)
        if target is None or at > self._now() + CLOCK_DIFFERENCE:
            return
        if self._now() - at <= REPLACES_WITHIN:
            self._learned[uid] = _loop_time()
        if before is not None and at <= before.at:
            return
        known = before or Sample(at=at, kv_usage=kv_usage, running=running, waiting=waiting)
        after = replace(known, at=at, kv_usage=kv_usage, running=running, waiting=waiting)
        self._samples[uid] = after
        if matters(before, after):
            self._on_news(target.service, is_load_only(before, after))

    def ask_soon(self, uid: str) -> None:
        """Scrape this replica now, because an action changed its state."""
        if uid in self._targets and uid not in self._in_flight:
            self._plan_visit(uid, _loop_time())

    def ask_service(self, service: KeyT) -> None:
        """Scrape the idle replicas of a service now and for a while at the busy pace: a gateway has requests for it.

        Safe to call with every report of a gateway: a replica that is due within the busy interval is not asked again.
        """
        uids, now = self._of_service.get(service, set()), _loop_time()
        if not uids:
            return
        self._demanded_until[service] = now + DEMANDED_SECONDS
        for uid in uids:
            if uid not in self._in_flight and uid in self._due and self._due[uid] > now + self._busy_seconds():
                self._plan_visit(uid, now)

    async def run(self) -> None:
        """Scrape until cancelled."""
        self._asking_since = self._now()
        for (
            uid
        ) in self._targets:  # visits that were planned while no scraper ran are overdue, and must not all begin at once
            self._plan_visit(uid, _loop_time() + _phase(uid) * self._busy_seconds())
        try:
            while True:
                self._sooner.clear()
                self._begin_visits()
                next_due = max(self._heap[0][0], _loop_time() + BATCH_SECONDS) if self._heap else None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(next_due):
                        await self._sooner.wait()
        finally:
            for task in self._in_flight.values():
                task.cancel()

    def _plan_visit(self, uid: str, due: float) -> None:
        if not self._heap or due < self._heap[0][0]:
            self._sooner.set()
        self._due[uid] = due
        heapq.heappush(self._heap, (due, uid))

    def _begin_visits(self) -> None:
        """Start the calls that are due."""
        time = _loop_time()
        while self._heap and self._heap[0][0] <= time:
            due, uid = heapq.heappop(self._heap)
            if self._due.get(uid) == due and uid not in self._in_flight:
                task = asyncio.create_task(self._visit(self._targets[uid]))
                self._in_flight[uid] = task
                task.add_done_callback(partial(self._visited, uid))

    def _visited(self, uid: str, _task: asyncio.Task[None]) -> None:
        self._in_flight.pop(uid, None)
        target = self._targets.get(uid)
        if target is not None:
            # Was it idle when it fell silent? Ask at the idle pace: a dead address must not cost a call every 1.5 s.
            self._plan_visit(uid, _loop_time() + self._interval(target, self._samples.get(uid)))

    async def _visit(self, target: Target[AddressT, KeyT]) -> None:
        if not self._is_ours(target):
            return
        before = self._samples.get(target.uid)
        slots = self._silent_slots if target.uid in self._silent else self._slots
        try:
            async with slots.hold(target.service):
                signals = await self._ask(target.address)
                capacity = await self._capacity(target, signals, before)
        except Exception as exc:  # noqa: BLE001  one broken replica must never end the asking of the others
            if target.uid in self._targets and getattr(exc, "status", None) == 401 and target.uid not in self._refused:
                self._refused.add(target.uid)
                self._on_news(target.service, False)
            if not target.is_starting:
                self._on_error(exc)
                self._silent.add(target.uid)
            log.debug("no signals", replica=str(target.address), error=str(exc))
            return
        self._silent.discard(target.uid)
        self._refused.discard(target.uid)
        if target.uid not in self._targets:
            return  # the pod was deleted while it answered
        after = Sample.of(signals, self._now(), capacity)
        self._samples[target.uid] = after
        if matters(before, after):
            self._on_news(target.service, is_load_only(before, after))

    async def _capacity(
        self, target: Target[AddressT, KeyT], signals: Signals, before: Sample | None
    ) -> Capacity | None:
        if signals.starting or target.is_starting:
            return None
        is_same = before is not None and before.boot_id == signals.boot_id
        known = before.capacity if is_same and before is not None else None
        if known is not None and not known.failed_adapters:
            return known
        try:
            return Capacity.of(await self._describe(target.address))
        except Exception as exc:  # noqa: BLE001  its load is known and counts; the next visit asks again
            log.debug("no state", replica=str(target.address), error=str(exc))
            return known

    def _leave_service(self, uid: str) -> None:
        known = self._targets.get(uid)
        if known is None:
            return
        self._of_service[known.service].discard(uid)
        if not self._of_service[known.service]:
            del self._of_service[known.service]
            self._demanded_until.pop(known.service, None)

    def _interval(self, target: Target[AddressT, KeyT], sample: Sample | None) -> float:
        starting = sample.starting if sample is not None else ""
        # A container that has returned to its pool starts anew without the kubelet's knowledge: its word counts.
        is_starting = (target.is_starting or bool(starting)) and starting not in _WAITING
        is_moving = target.is_draining or is_starting
        is_demanded = _loop_time() < self._demanded_until.get(target.service, 0.0)
        if not is_moving and not is_demanded and self._is_learned(target.uid):
            return IDLE_SECONDS
        is_busy = is_moving or is_demanded or sample is None or sample.draining or sample.requests > 0
        return self._busy_seconds() if is_busy else IDLE_SECONDS

    def _is_learned(self, uid: str) -> bool:
        learned = self._learned.get(uid)
        return learned is not None and _loop_time() - learned <= REPLACES_WITHIN.total_seconds()

    def _busy_seconds(self) -> float:
        return max(BUSY_SECONDS, len(self._targets) / CALLS_PER_SECOND)


def _loop_time() -> float:
    return asyncio.get_running_loop().time()


def _phase(uid: str) -> float:
    """The time of this replica within an interval, in [0, 1): the same in every process."""
    return (zlib.crc32(uid.encode()) % 1000) / 1000
