"""The engine: schedule, execute, update. Knows no thread, no event loop and no clock."""

from collections.abc import Callable

from slipway_runtime.messages import EngineFacts, EngineStats, FinishReason, Request, StepPlan, StepReport, StepResult
from slipway_runtime.scheduling.scheduler import Scheduler


class Engine:
    """A scheduler and something that executes its plans, stepped by whoever owns it."""

    def __init__(self, scheduler: Scheduler, execute: Callable[[StepPlan], StepResult], facts: EngineFacts) -> None:
        self._scheduler = scheduler
        self._execute = execute
        self._facts = facts

    @property
    def facts(self) -> EngineFacts:
        """What was loaded, and how long that took."""
        return self._facts

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self._scheduler.has_work

    def add(self, request: Request, now: float) -> None:
        """Put a request into the queue."""
        self._scheduler.add(request, now)

    def abort(self, request_id: str, reason: FinishReason, now: float) -> None:
        """End a request wherever it is; its blocks are free before the next step computes."""
        self._scheduler.abort(request_id, reason, now)

    def step(self, now: float) -> StepReport:
        """One step for everybody who runs."""
        plan = self._scheduler.schedule(now)
        result = self._execute(plan)
        outputs = self._scheduler.update(result, now)
        return StepReport(outputs=tuple(outputs), stats=self._scheduler.stats(now))

    def idle(self) -> None:
        """With nothing to do, check the books: a leaked block is found on the day it leaks."""
        self._scheduler.check()

    def stats(self, now: float) -> EngineStats:
        """The numbers as they are."""
        return self._scheduler.stats(now)
