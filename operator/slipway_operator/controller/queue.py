"""Which service to look at next: one worker per key, bursts coalesce, the latest wish wins, failures back off.

| key is          | add()                        | done()                     |
|-----------------|------------------------------|----------------------------|
| unknown         | queued                       | impossible                 |
| queued          | nothing: it will be read new | impossible                 |
| active          | marked dirty                 | forgotten                  |
| active and dirty| nothing                      | queued again               |

A key carries no payload: whoever takes it reads the newest state, so nothing is lost by coalescing.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)


class QueueClosed(Exception):  # noqa: N818  not an error: the end of the work
    """The queue is shutting down and has nothing more to give."""


class WorkQueue(Generic[KeyT]):
    """A queue of keys in which no key is ever worked on twice at the same time.

    `jitter` returns a number in [0, 1): full jitter spreads the retries of a mass failure.
    """

    def __init__(
        self,
        *,
        backoff_base_seconds: float = 0.5,
        backoff_cap_seconds: float = 60.0,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._base = backoff_base_seconds
        self._cap = backoff_cap_seconds
        self._jitter = jitter
        self._queue: deque[KeyT] = deque()
        self._dirty: set[KeyT] = set()
        self._active: set[KeyT] = set()
        self._failures: dict[KeyT, int] = {}
        self._timers: dict[KeyT, asyncio.TimerHandle] = {}
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False

    def __len__(self) -> int:
        """How many keys wait for a worker; those being worked on and those asleep do not count."""
        return len(self._queue)

    @property
    def active(self) -> int:
        """How many keys are being worked on."""
        return len(self._active)

    def add(self, key: KeyT) -> None:
        """Look at this key as soon as a worker is free."""
        if self._closed or key in self._dirty:
            return
        self._dirty.add(key)
        if key not in self._active:
            self._enqueue(key)

    def add_after(self, key: KeyT, seconds: float) -> None:
        """Look at this key in `seconds` at the latest; an earlier wish stands."""
        if self._closed:
            return
        if seconds <= 0:
            self.add(key)
            return
        loop = asyncio.get_running_loop()
        when = loop.time() + seconds
        timer = self._timers.get(key)
        if timer is not None:
            if timer.when() <= when:
                return
            timer.cancel()
        self._timers[key] = loop.call_at(when, self._wake, key)

    def retry(self, key: KeyT) -> float:
        """Look at this key again after its backoff, and say after how many seconds that is."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        # 0.5, 1, 2 … 60 s, of which at least half is waited: 2**7 × 0.5 > 60, so larger exponents change nothing
        ceiling = min(self._cap, self._base * 2.0 ** min(failures, 30))
        delay = ceiling * (0.5 + 0.5 * self._jitter())
        self.add_after(key, delay)
        return delay

    def failures(self, key: KeyT) -> int:
        """How many times in a row this key has failed."""
        return self._failures.get(key, 0)

    def forget(self, key: KeyT) -> None:
        """The key succeeded, or is gone: its next failure starts the backoff anew."""
        self._failures.pop(key, None)

    async def get(self) -> KeyT:
        """The next key, now active: call `done` when finished. Raises QueueClosed after `close` once it is empty."""
        while not self._queue:
            if self._closed:
                raise QueueClosed
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._wake_one()  # this worker dies with a wake-up in its hand: pass it on
                raise
        key = self._queue.popleft()
        self._dirty.discard(key)
        self._active.add(key)
        # The pass that begins now reads everything new, and says itself when it wants to be woken next.
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        return key

    def done(self, key: KeyT) -> None:
        """The worker is finished with the key; if it was added meanwhile, it queues again."""
        self._active.remove(key)
        if key in self._dirty:
            self._enqueue(key)
        elif not self._queue and not self._active:
            self._idle.set()

    def close(self) -> None:
        """Take no new keys and drop the sleeping ones; what is queued or active is still worked off."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        while self._waiters:
            self._wake_one()

    async def drained(self) -> None:
        """Wait until nothing is queued or active."""
        await self._idle.wait()

    def _enqueue(self, key: KeyT) -> None:
        self._queue.append(key)
        self._idle.clear()
        self._wake_one()

    def _wake(self, key: KeyT) -> None:
        del self._timers[key]
        self.add(key)

    def _wake_one(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
