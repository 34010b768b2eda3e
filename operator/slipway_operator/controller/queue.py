"""The work queue of the controller: one worker per key, bursts coalesce, urgent keys first, failures back off.

| key is          | add()                            | done()                     |
|-----------------|----------------------------------|----------------------------|
| unknown         | queued                           | impossible                 |
| queued          | moved up if it is more urgent now| impossible                 |
| active          | marked dirty                     | forgotten                  |
| active and dirty| nothing                          | queued again               |
| in backoff      | queued, but not by BACKGROUND    | –                          |

A key carries no payload: the worker that takes it reads the newest state, so nothing is lost by coalescing. A key is
queued once, whatever happens to its object, so within one urgency every object gets its pass in turn: that is the
fairness between services, and a thousand changes of one of them cost the others one pass.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Hashable
from enum import IntEnum
from typing import Generic, TypeVar

from slipway_kube.backoff import Backoff

KeyT = TypeVar("KeyT", bound=Hashable)

PASSED_OVER_AT_MOST = 8  # keys of higher urgency in a row; then one of the lower gets its pass, so nothing starves


class Urgency(IntEnum):
    """Why a key is queued; the smaller, the sooner."""

    URGENT = 0
    """A pod failed or is being removed, a spec changed, an object is being deleted."""
    NORMAL = 1
    """Anything else that changed."""
    BACKGROUND = 2
    """A sample, a resync: these recur, so they never shorten a backoff."""


class QueueClosed(Exception):  # noqa: N818  not an error: the end of the work
    """The queue is closed and empty."""


class WorkQueue(Generic[KeyT]):
    """A queue of keys in which no key is ever worked on twice at the same time.

    `uniform` draws the jitter of retries: at least half of each step is waited.
    """

    def __init__(
        self,
        *,
        backoff_base_seconds: float = 0.5,
        backoff_cap_seconds: float = 60.0,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._base = backoff_base_seconds
        self._cap = backoff_cap_seconds
        self._uniform = uniform
        self._lanes: dict[Urgency, dict[KeyT, None]] = {urgency: {} for urgency in Urgency}  # ordered sets
        self._dirty: dict[KeyT, Urgency] = {}  # queued, or to be queued when done
        self._active: set[KeyT] = set()
        self._backoffs: dict[KeyT, Backoff] = {}
        self._resting: dict[KeyT, float] = {}  # until when, for keys in backoff
        self._timers: dict[KeyT, asyncio.TimerHandle] = {}
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False
        self._passed_over = dict.fromkeys(Urgency, 0)

    def __len__(self) -> int:
        """How many keys wait for a worker, without active and delayed ones."""
        return sum(len(lane) for lane in self._lanes.values())

    @property
    def active(self) -> int:
        """How many keys are being worked on."""
        return len(self._active)

    def add(self, key: KeyT, urgency: Urgency = Urgency.NORMAL) -> None:
        """Reconcile this key as soon as a worker is free."""
        if self._closed or (urgency is Urgency.BACKGROUND and self._is_resting(key)):
            return
        known = self._dirty.get(key)
        if known is not None and known <= urgency:
            return
        self._dirty[key] = urgency
        if key not in self._active:
            if known is not None:
                del self._lanes[known][key]
            self._enqueue(key, urgency)

    def add_after(self, key: KeyT, seconds: float, urgency: Urgency = Urgency.NORMAL) -> None:
        """Reconcile this key in `seconds` at the latest; an earlier time that was set stays."""
        if self._closed or (urgency is Urgency.BACKGROUND and self._is_resting(key)):
            return
        if seconds <= 0:
            self.add(key, urgency)
            return
        loop = asyncio.get_running_loop()
        when = loop.time() + seconds
        timer = self._timers.get(key)
        if timer is not None:
            if timer.when() <= when:
                return
            timer.cancel()
        self._timers[key] = loop.call_at(when, self._wake, key, urgency)

    def retry(self, key: KeyT) -> float:
        """Reconcile this key again after its backoff; returns the backoff in seconds."""
        backoff = self._backoffs.get(key)
        if backoff is None:
            backoff = Backoff(first=self._base, cap=self._cap, least=0.5, uniform=self._uniform)
            self._backoffs[key] = backoff
        delay = backoff.next_delay()
        self._resting[key] = asyncio.get_running_loop().time() + delay
        if self._dirty.get(key) is Urgency.BACKGROUND:
            del self._dirty[key]  # added while the pass that failed ran: it is no reason to retry early either
        self.add_after(key, delay)
        return delay

    def failures(self, key: KeyT) -> int:
        """How many times in a row this key has failed."""
        backoff = self._backoffs.get(key)
        return backoff.failures if backoff is not None else 0

    def forget(self, key: KeyT) -> None:
        """Reset the key's backoff, because its pass succeeded or its object is deleted."""
        self._backoffs.pop(key, None)
        self._resting.pop(key, None)

    async def get(self) -> KeyT:
        """The next key, now active: call `done` when finished. Raises QueueClosed after `close` once it is empty."""
        while not len(self):
            if self._closed:
                raise QueueClosed
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._wake_one()  # this worker was woken but is cancelled: wake another one for the key
                raise
        key = self._pop()
        del self._dirty[key]
        self._active.add(key)
        # The pass that begins now reads the newest state, and returns when the next pass is due.
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        return key

    def done(self, key: KeyT) -> None:
        """The worker has finished the key; if it was added meanwhile, it is queued again."""
        self._active.remove(key)
        if key in self._dirty:
            self._enqueue(key, self._dirty[key])
        elif not len(self) and not self._active:
            self._idle.set()

    def close(self) -> None:
        """Take no new keys and drop the delayed ones; queued and active keys are still processed."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        while self._waiters:
            self._wake_one()

    async def drained(self) -> None:
        """Wait until nothing is queued or active."""
        await self._idle.wait()

    def _pop(self) -> KeyT:
        """The first key of the most urgent lane, unless a lane was passed over too often."""
        filled = [urgency for urgency in Urgency if self._lanes[urgency]]
        starving = (urgency for urgency in filled if self._passed_over[urgency] >= PASSED_OVER_AT_MOST)
        chosen = next(starving, filled[0])
        for urgency in filled:
            self._passed_over[urgency] += 1
        self._passed_over[chosen] = 0
        lane = self._lanes[chosen]
        key = next(iter(lane))
        del lane[key]
        return key

    def _is_resting(self, key: KeyT) -> bool:
        return asyncio.get_running_loop().time() < self._resting.get(key, 0.0)

    def _enqueue(self, key: KeyT, urgency: Urgency) -> None:
        self._lanes[urgency][key] = None
        self._idle.clear()
        self._wake_one()

    def _wake(self, key: KeyT, urgency: Urgency) -> None:
        del self._timers[key]
        self.add(key, urgency)

    def _wake_one(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
