"""When to ask which replica for its signals, and which answers are worth a new look at their service.

What a replica holds does not change while it runs, so it is asked for that once, when it has told that it is up.

Busy and draining replicas are asked every 2 s, idle ones every 15 s, each at its own moment within the interval so
that a fleet's calls spread out. A replica that does not answer leaves no trace: its last sample grows old, and what
that means is for the core to say. One silent replica costs its own timeout and nobody else's.
"""

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Generic, TypeVar

import structlog

from slipway_api.runtime_api import Signals, State
from slipway_operator.core.observed import Capacity, Sample

log = structlog.get_logger()

BUSY_SECONDS = 2.0
IDLE_SECONDS = 15.0
TICK_SECONDS = 0.25

AddressT = TypeVar("AddressT")
KeyT = TypeVar("KeyT")


@dataclass(frozen=True, slots=True)
class Target(Generic[AddressT, KeyT]):
    """One replica that should answer."""

    uid: str
    address: AddressT
    service: KeyT
    is_draining: bool = False
    is_starting: bool = False  # the model is loading, and the port may not be open yet: silence means nothing


def matters(before: Sample | None, after: Sample) -> bool:
    """Whether a service deserves a new look because of this sample.

    Silence broken, load, the end of load, a step of its start, a drain's progress and a restarted engine do; a replica
    that was idle and still is changes nothing.
    """
    if before is None or before.boot_id != after.boot_id or before.draining != after.draining:
        return True
    if before.starting != after.starting or before.capacity != after.capacity:
        return True
    if (after.at - before.at).total_seconds() > 2 * IDLE_SECONDS:
        return True
    return after.draining or after.requests > 0 or before.requests > 0


class Scraper(Generic[AddressT, KeyT]):
    """The newest sample of every replica.

    `targets` names those that should answer now; `ask` and `describe` raise on silence; `on_news` is told the service
    of a sample that matters; `on_error` is told of each silence.
    """

    def __init__(
        self,
        targets: Callable[[], Iterable[Target[AddressT, KeyT]]],
        ask: Callable[[AddressT], Awaitable[Signals]],
        describe: Callable[[AddressT], Awaitable[State]],
        *,
        on_news: Callable[[KeyT], None],
        on_error: Callable[[Exception], None] = lambda _error: None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._targets = targets
        self._ask = ask
        self._describe = describe
        self._on_news = on_news
        self._on_error = on_error
        self._now = now
        self._samples: dict[str, Sample] = {}
        self._due: dict[str, float] = {}
        self._in_flight: dict[str, asyncio.Task[None]] = {}
        self._asking_since: datetime | None = None

    @property
    def asking_since(self) -> datetime:
        """When `run` began: a replica without a sample is silent only if there was time to ask it."""
        return self._asking_since or self._now()

    def sample(self, uid: str) -> Sample | None:
        """The newest sample of one replica, however old."""
        return self._samples.get(uid)

    async def run(self) -> None:
        """Ask for ever; cancel to stop."""
        self._asking_since = self._now()
        try:
            while True:
                self._tick(asyncio.get_running_loop().time())
                await asyncio.sleep(TICK_SECONDS)
        finally:
            for task in self._in_flight.values():
                task.cancel()

    def _tick(self, time: float) -> None:
        """Start the calls that are due, and forget replicas that are gone."""
        present = set()
        for target in self._targets():
            present.add(target.uid)
            due = self._due.setdefault(target.uid, time + _phase(target.uid) * BUSY_SECONDS)
            if target.is_draining:
                due = min(due, time + BUSY_SECONDS)  # an idle replica that begins to drain is no longer left in peace
                self._due[target.uid] = due
            if due <= time and target.uid not in self._in_flight:
                task = asyncio.create_task(self._visit(target))
                self._in_flight[target.uid] = task
                task.add_done_callback(partial(self._landed, target.uid))
        for uid in self._due.keys() - present:
            del self._due[uid]
            self._samples.pop(uid, None)

    def _landed(self, uid: str, _task: asyncio.Task[None]) -> None:
        self._in_flight.pop(uid, None)

    async def _visit(self, target: Target[AddressT, KeyT]) -> None:
        time = asyncio.get_running_loop().time
        before = self._samples.get(target.uid)
        try:
            signals = await self._ask(target.address)
            capacity = await self._capacity(target, signals, before)
        except Exception as exc:  # noqa: BLE001  one broken replica must never end the asking of the others
            if not target.is_starting:
                self._on_error(exc)
            log.debug("no signals", replica=str(target.address), error=str(exc))
            # Was it idle when it fell silent? Ask at the idle pace: a dead address must not cost a call every 2 s.
            self._due[target.uid] = time() + self._interval(target, before)
            return
        if target.uid not in self._due:
            return  # the pod went away while it answered
        after = Sample.of(signals, self._now(), capacity)
        self._samples[target.uid] = after
        self._due[target.uid] = time() + self._interval(target, after)
        if matters(before, after):
            self._on_news(target.service)

    async def _capacity(
        self, target: Target[AddressT, KeyT], signals: Signals, before: Sample | None
    ) -> Capacity | None:
        if signals.starting or target.is_starting:
            return None
        if before is not None and before.boot_id == signals.boot_id and before.capacity is not None:
            return before.capacity
        try:
            return Capacity.of(await self._describe(target.address))
        except Exception as exc:  # noqa: BLE001  its load is known and counts; the next visit asks again
            log.debug("no state", replica=str(target.address), error=str(exc))
            return None

    def _interval(self, target: Target[AddressT, KeyT], sample: Sample | None) -> float:
        is_moving = target.is_draining or target.is_starting
        is_busy = is_moving or sample is None or sample.draining or sample.requests > 0
        return BUSY_SECONDS if is_busy else IDLE_SECONDS


def _phase(uid: str) -> float:
    """Where in an interval this replica's moment lies, in [0, 1): the same in every process."""
    return (zlib.crc32(uid.encode()) % 1000) / 1000
