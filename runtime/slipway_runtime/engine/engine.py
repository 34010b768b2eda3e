"""The engine: schedule, execute, update. Knows no thread, no event loop and no clock but a stopwatch."""

import time
from collections.abc import Callable

import msgspec

from slipway_runtime.messages import (
    EngineFacts,
    EngineStats,
    FinishReason,
    Message,
    Reply,
    Request,
    StepPlan,
    StepReport,
    StepResult,
)
from slipway_runtime.scheduling.scheduler import Scheduler


class Engine:
    """A scheduler and something that executes its plans, stepped by whoever owns it."""

    def __init__(
        self,
        scheduler: Scheduler,
        execute: Callable[[StepPlan], StepResult],
        facts: EngineFacts,
        *,
        stopwatch: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._scheduler = scheduler
        self._execute = execute
        self._facts = facts
        self._stopwatch = stopwatch
        self._replies: list[Reply] = []

    @property
    def facts(self) -> EngineFacts:
        """What was loaded, and how long that took."""
        return self._facts

    @property
    def has_work(self) -> bool:
        """Whether a step would do or tell anything."""
        return bool(self._scheduler.has_work or self._replies)

    def attach(self, wake: Callable[[], None]) -> None:
        """Whom the engine's own threads wake when one of them has something to tell."""

    def add(self, request: Request, now: float) -> None:
        """Put a request into the queue."""
        self._scheduler.add(request, now)

    def abort(self, request_id: str, reason: FinishReason, now: float, index: int | None = None) -> None:
        """End a request, or one of its answers, wherever it is; its blocks are free before the next step computes."""
        if index is None:
            self._scheduler.abort(request_id, reason, now)
        else:
            self._scheduler.abort(request_id, reason, now, index)

    def control(self, message: Message, now: float) -> None:
        """Begin what is asked; the reply comes with the report of a step."""
        assert not isinstance(message, Request)
        self._replies.append(
            Reply(call=getattr(message, "call", 0), error=f"this engine knows no {type(message).__name__}")
        )

    def step(self, now: float) -> StepReport:
        """One step for everybody who runs."""
        began = self._stopwatch()
        plan = self._scheduler.schedule(now)
        planned = self._stopwatch()
        result = self._execute(plan)
        executed = self._stopwatch()
        outputs = self._scheduler.update(result, now)
        cost = planned - began + self._stopwatch() - executed
        stats = msgspec.structs.replace(self._scheduler.stats(now), schedule_seconds=cost)
        replies, self._replies = self._replies, []
        return StepReport(outputs=tuple(outputs), stats=stats, replies=tuple(replies))

    def idle(self) -> None:
        """With nothing to do, check the books: a leaked block is found on the day it leaks."""
        self._scheduler.check()

    def stats(self, now: float) -> EngineStats:
        """The numbers as they are."""
        return self._scheduler.stats(now)
