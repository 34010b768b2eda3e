"""Isolates services from each other: slots for calls that are granted to owners in turn, and calls in the background.

One object occupies at most one worker, and its writes go one after the other, so it never has more than one write
waiting for the rate limit. The calls to admin ports need bounds of their own, because a silent port blocks for its
whole timeout.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

import structlog

log = structlog.get_logger()

OwnerT = TypeVar("OwnerT", bound=Hashable)


class FairSlots(Generic[OwnerT]):
    """A semaphore of `total` slots, at most `per_owner` for one owner; free slots are granted to owners in turn.

    An owner waits at most for one slot of each other owner that waits, however many calls they have in line.
    """

    def __init__(self, *, total: int, per_owner: int) -> None:
        self._free = total
        self._per_owner = per_owner
        self._held: Counter[OwnerT] = Counter()
        self._waiting: dict[OwnerT, deque[asyncio.Future[None]]] = {}  # in turn: the first gets the next slot

    @asynccontextmanager
    async def hold(self, owner: OwnerT) -> AsyncIterator[None]:
        """Hold one slot for as long as the block lasts."""
        await self._take(owner)
        try:
            yield
        finally:
            self._release(owner)

    def waiting(self, owner: OwnerT) -> int:
        """How many calls of this owner wait for a slot."""
        return len(self._waiting.get(owner, ()))

    async def _take(self, owner: OwnerT) -> None:
        if self._free and self._held[owner] < self._per_owner and owner not in self._waiting:
            self._grant(owner)
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._release(owner)  # granted and cancelled in the same moment
            else:
                self._forget(owner, waiter)
            raise

    def _grant(self, owner: OwnerT) -> None:
        self._free -= 1
        self._held[owner] += 1

    def _release(self, owner: OwnerT) -> None:
        self._free += 1
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]
        self._serve()

    def _serve(self) -> None:
        """Grant the free slots to the owners in turn; an owner at its own bound is skipped and keeps its place."""
        while self._free:
            owner = next((one for one in self._waiting if self._held[one] < self._per_owner), None)
            if owner is None:
                return
            line = self._waiting.pop(owner)
            waiter = line.popleft()
            if line:
                self._waiting[owner] = line  # to the end of the round
            if not waiter.done():
                self._grant(owner)
                waiter.set_result(None)

    def _forget(self, owner: OwnerT, waiter: asyncio.Future[None]) -> None:
        line = self._waiting.get(owner)
        if line is not None and waiter in line:
            line.remove(waiter)
            if not line:
                del self._waiting[owner]


class BackgroundCalls(Generic[OwnerT]):
    """Calls that a pass starts without waiting for them: one at a time for each subject, in fairly shared slots.

    `on_done` is called with the owner and the subject of each call that succeeded.
    """

    def __init__(self, slots: FairSlots[OwnerT], on_done: Callable[[OwnerT, str], None]) -> None:
        self._slots = slots
        self._on_done = on_done
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, owner: OwnerT, subject: str, call: Callable[[], Awaitable[object]]) -> None:
        """Call as soon as there is a slot, unless a call about this subject is under way."""
        if subject not in self._tasks:
            task = asyncio.create_task(self._run(owner, subject, call), name=f"call about {subject}")
            self._tasks[subject] = task
            task.add_done_callback(lambda _: self._tasks.pop(subject, None))

    async def stop(self) -> None:
        """Cancel the calls under way."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, owner: OwnerT, subject: str, call: Callable[[], Awaitable[object]]) -> None:
        try:
            async with self._slots.hold(owner):
                await call()
        except Exception as exc:  # noqa: BLE001  the plan repeats what did not happen
            log.info("a call to a replica failed; the plan repeats it", owner=str(owner), error=str(exc))
        else:
            self._on_done(owner, subject)
