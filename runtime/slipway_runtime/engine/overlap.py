"""The overlapped engine: while a worker thread executes one step, the next one is planned. See engine.py for the plain
loop, which gives the same outputs.

    step N:    | plan N+1 | wait for N, update N, report N |          on the loop's thread
    worker:  … execute N ………………………| execute N+1 ……………………            on its own

A plan needs no token that is still being sampled: the worker writes it into its row before it executes the next plan.
Where a plan does depend on the last result, the scheduler says so, and the loop waits as the plain one does.
"""

import queue
import threading
from concurrent.futures import Future
from typing import Any

from slipway_runtime.engine.engine import Engine, Execute
from slipway_runtime.messages import EngineFacts, Output, SchedulerOutput, StepReport, StepResult
from slipway_runtime.scheduling.scheduler import Scheduler
from slipway_runtime.worker.out_of_memory import StepOutOfMemoryError


class Worker:
    """Executes plans one after the other on a thread of its own."""

    def __init__(self, execute: Execute) -> None:
        self._execute = execute
        self._calls: queue.SimpleQueue[tuple[Execute, SchedulerOutput, Future[StepResult]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="worker", daemon=True).start()

    def submit(self, plan: SchedulerOutput) -> "Future[StepResult]":
        """Execute a plan after those before it."""
        return self.call(self._execute, plan)

    def call(self, execute: Execute, plan: SchedulerOutput) -> "Future[StepResult]":
        """Execute a plan with another function: the warm-up must run on the thread that later steps run on."""
        result: Future[StepResult] = Future()
        self._calls.put((execute, plan, result))
        return result

    def _run(self) -> None:
        while True:
            execute, plan, result = self._calls.get()
            try:
                result.set_result(execute(plan))
            except BaseException as error:  # noqa: BLE001  the thread that waits for the result must get it
                result.set_exception(error)


class OverlappedEngine(Engine):
    """An Engine with up to two plans in flight."""

    def __init__(self, scheduler: Scheduler, worker: Worker, facts: EngineFacts, **parts: Any) -> None:
        super().__init__(scheduler, lambda plan: worker.submit(plan).result(), facts, **parts)
        self._submit = worker.submit
        self._in_flight: tuple[SchedulerOutput, Future[StepResult]] | None = None

    def step(self, now: float) -> StepReport:
        """Plan the step after the one that is being executed, then update and report the latter."""
        began = self._stopwatch()
        self._let_in(now)
        if self._in_flight is None:
            self._in_flight = self._plan_next(now)
        following = self._plan_next(now) if self._scheduler.can_overlap else None
        planned = self._stopwatch()
        (plan, pending), self._in_flight = self._in_flight, following
        try:
            result = pending.result()
        except StepOutOfMemoryError as error:
            return self._report(self._give_up_both(error, now), now, planning=planned - began)
        executed = self._stopwatch()
        outputs = self._update(plan, result, now, executed - began, in_flight=following is not None)
        return self._report(outputs, now, planning=planned - began + self._stopwatch() - executed)

    def _plan_next(self, now: float) -> "tuple[SchedulerOutput, Future[StepResult]]":
        plan = self._scheduler.schedule(now)
        return plan, self._submit(plan)

    def _give_up_both(self, error: StepOutOfMemoryError, now: float) -> list[Output]:
        """Give up the plan that failed, and the one after it, which builds on its results."""
        following, self._in_flight = self._in_flight, None
        failure = following[1].exception() if following is not None else None
        if failure is not None and not isinstance(failure, StepOutOfMemoryError):
            raise failure
        return self._give_up(error, now)
