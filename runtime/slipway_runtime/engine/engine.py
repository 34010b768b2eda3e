"""The engine: schedule, execute, update; plain, or with the next step planned while one is executed.

The plain loop uses no thread and no event loop, and of time only a stopwatch. It is the specification of the overlapped
one below: both give the same outputs.

When a step runs out of memory, its requests end, the log says so, and the engine goes on: the memory may be free again
in the next step. With more than `MAX_OOM_STEPS` such steps in a row the engine fails, for a new process to begin with
all of the memory.

The overlapped engine executes steps on a worker thread:

    step N:    | plan N+1 | wait for N, update N, report N |          on the loop's thread
    worker:  … execute N ………………………| execute N+1 ……………………            on its own

A plan needs no token that is still being sampled: the worker keeps it on the device for the next plan. Where a plan
does depend on the last result, the scheduler says so, and the loop waits as the plain one does.

On a GPU the worker's thread only launches: step N + 1 is queued on the device while step N runs, and the loop's thread
waits for the copy of N's tokens. On a CPU launching is computing.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final

import msgspec
import structlog

from slipway_runtime.engine.adapter_loader import AdapterLoader
from slipway_runtime.engine.matchers import Grammars
from slipway_runtime.engine.sleep import Sleeper
from slipway_runtime.messages import (
    BatchStats,
    EngineFacts,
    EngineStats,
    FinishReason,
    LoadAdapter,
    Message,
    Output,
    Pause,
    Ping,
    Reply,
    Request,
    ResetPrefixCache,
    SchedulerOutput,
    Sleep,
    StepReport,
    StepResult,
    UnloadAdapter,
    WakeUp,
)
from slipway_runtime.models.config_values import ModelRefusedError
from slipway_runtime.scheduling.admission import Refused, refuse_out_of_range
from slipway_runtime.scheduling.block_pool import KvEvent
from slipway_runtime.scheduling.scheduler import Scheduler
from slipway_runtime.worker.out_of_memory import StepOutOfMemoryError

log = structlog.get_logger()

MAX_OOM_STEPS: Final = 3
BLOCKS_CHECKED_WHEN_IDLE: Final = 1024  # some 0.3 ms, after each lone request
Execute = Callable[[SchedulerOutput], StepResult]
Launch = Callable[[SchedulerOutput], Callable[[], StepResult]]  # begins a step; what it returns waits for the result


class Engine:
    """A scheduler and an executor of its plans, stepped by the step loop."""

    def __init__(
        self,
        scheduler: Scheduler,
        execute: Execute,
        facts: EngineFacts,
        *,
        grammars: Grammars | None = None,
        adapters: AdapterLoader | None = None,
        sleeper: Sleeper | None = None,
        publish: Callable[[Sequence[KvEvent]], None] | None = None,
        stopwatch: Callable[[], float] = time.perf_counter,
    ) -> None:
        """execute: blocks until the step is computed. publish: called with the KV events after each step."""
        self._scheduler = scheduler
        self._execute = execute
        self._facts = facts
        self._grammars = grammars
        self._adapters = adapters
        self._sleeper = sleeper
        self._pending_sleep: Sleep | None = None  # a Sleep that waits for the last final outputs
        self._publish = publish
        self._stopwatch = stopwatch
        self._replies: list[Reply] = []
        self._oom_steps = 0  # steps in a row that ran out of memory
        self._batch: BatchStats | None = None  # the last batch that was computed

    @property
    def facts(self) -> EngineFacts:
        """What was loaded, and how long that took."""
        return self._facts

    @property
    def has_work(self) -> bool:
        """Whether a step would compute or report anything. Waiting for an adapter's file or a grammar is no work."""
        if self._replies or self._pending_sleep:
            return True
        if any(part is not None and part.has_results for part in (self._adapters, self._grammars)):
            return True
        return self._scheduler.has_work and not self._scheduler.is_stalled

    def attach(self, wake: Callable[[], None]) -> None:
        """Set the callback with which the engine's own threads wake the step loop."""
        for part in (self._adapters, self._grammars):
            if part is not None:
                part.wake = wake

    def add(self, request: Request, now: float) -> None:
        """Put a request into the queue. The client sends none while the engine sleeps.

        A request that the worker could not start ends with an error here: in a step it would end the engine.
        """
        assert self._pending_sleep is None
        assert self._sleeper is None or not self._sleeper.level
        try:
            refuse_out_of_range(request, self._facts)
        except Refused as refusal:
            self._scheduler.add(request, now, refusal=str(refusal))
            return
        compiled = self._grammars is None or self._grammars.start(request)
        self._scheduler.add(request, now)
        if not compiled:  # a step with it, and all requests in that step, would wait for its masks
            self._scheduler.pause(request.id, on=True, now=now)

    def abort(self, request_id: str, reason: FinishReason, now: float, index: int | None = None) -> None:
        """End a request, or one of its answers, wherever it is; its blocks are free before the next step computes."""
        self._scheduler.abort(request_id, reason, now, index)

    def control(self, message: Message, now: float) -> None:
        """Begin what a control message asks for; the reply comes with the report of a step."""
        match message:
            case LoadAdapter() | UnloadAdapter() if self._adapters is not None:
                self._adapters.control(message, now)
            case LoadAdapter() | UnloadAdapter():
                self._replies.append(Reply(call=message.call, error="adapters are off: --max-adapters is 0"))
            case Pause():
                self._scheduler.pause(message.request_id, message.on, now)
            case ResetPrefixCache():
                self._scheduler.forget_prefixes()
                self._replies.append(Reply(call=message.call))
            case Ping():
                self._replies.append(Reply(call=message.call))
            case Sleep():
                self._request_sleep(message, now)
            case WakeUp():
                self._replies.append(Reply(call=message.call, error=self._wake()))
            case _:
                raise AssertionError(f"{type(message).__name__} is not a control message")

    def step(self, now: float) -> StepReport:
        """Run one step of all running requests. `now`: when it begins."""
        began = self._stopwatch()
        self._resume_compiled(now)
        plan = self._scheduler.schedule(now)
        planned = self._stopwatch()
        try:
            result = self._execute(plan)
        except StepOutOfMemoryError as error:
            return self._report(self._end_batch(error, now, plan.step), now, planning=planned - began)
        executed = self._stopwatch()
        outputs = self._update(plan, result, now, executed - began)
        return self._report(outputs, now, planning=planned - began + self._stopwatch() - executed)

    def idle(self) -> None:
        """With nothing to do, check the request table and a part of the pool: a leaked block is found at once."""
        self._scheduler.check(most_blocks=BLOCKS_CHECKED_WHEN_IDLE)

    def stats(self, now: float) -> EngineStats:
        """The current statistics."""
        return self._scheduler.stats(now)

    def _resume_compiled(self, now: float) -> None:
        """Resume the requests whose grammars have been compiled."""
        if self._grammars is not None:
            for request_id in self._grammars.take_compiled():
                self._scheduler.pause(request_id, on=False, now=now)

    # --- sleep

    def _request_sleep(self, message: Sleep, now: float) -> None:
        stats, level = self._scheduler.stats(now), self._sleeper.level if self._sleeper is not None else 0
        error = ""
        if self._sleeper is None:
            error = "this engine does not sleep"
        elif message.level not in {1, 2}:
            error = f"there is no sleep of level {message.level}"
        elif level and level != message.level:
            error = f"it sleeps at level {level}: wake it up first"
        elif self._pending_sleep is not None:
            error = "it is about to sleep"
        elif stats.running + stats.waiting:
            error = f"{stats.running + stats.waiting} requests are running or waiting"
        if error or level:
            self._replies.append(Reply(call=message.call, error=error))
        else:
            self._pending_sleep = message

    def _begin_sleep(self, message: Sleep) -> None:
        assert self._sleeper is not None
        self._pending_sleep = None
        self._scheduler.forget_prefixes()
        self._sleeper.sleep(message.level)
        self._replies.append(Reply(call=message.call))

    def _wake(self) -> str:
        """Wake up, with an empty KV cache; why that failed, if it did: then the engine sleeps on."""
        if self._sleeper is None or not self._sleeper.level:
            return ""
        try:
            self._sleeper.wake()
        except (ModelRefusedError, OSError) as error:
            return str(error)
        return ""

    # --- the second half of a step

    def _update(
        self, plan: SchedulerOutput, result: StepResult, now: float, seconds: float, *, in_flight: bool = False
    ) -> list[Output]:
        """Apply the result of a plan, so many seconds after `now`. `in_flight`: whether another is being executed."""
        self._oom_steps = 0
        if plan.rows:
            self._batch = BatchStats(rows=len(plan.rows), tokens=sum(plan.num_new), seconds=seconds, at=now)
        outputs = self._scheduler.update(result, now + seconds)
        return self._after_update(outputs, now + seconds, plan.step, in_flight=in_flight)

    def _end_batch(self, error: StepOutOfMemoryError, now: float, step: int) -> list[Output]:
        """End the requests whose step ran out of memory; their final outputs. No plan is being executed.

        step: the last one that was planned.
        """
        self._oom_steps += 1
        if self._oom_steps > MAX_OOM_STEPS:
            raise error
        outputs = self._scheduler.end_in_flight(FinishReason.OUT_OF_MEMORY, "out of memory in a step", now)
        log.error("out of memory in a step", ended=len(outputs), in_a_row=self._oom_steps, reason=str(error))
        return self._after_update(outputs, now, step, in_flight=False)

    def _after_update(self, outputs: list[Output], now: float, step: int, *, in_flight: bool) -> list[Output]:
        """After a step: advance grammars, load and drop adapters, publish KV events; the outputs to report."""
        if self._grammars is not None:
            outputs = [self._followed(output, self._grammars, now) for output in outputs]
            self._grammars.follow(step)
        if self._adapters is not None:
            self._adapters.after_step(now, in_flight=in_flight)
        if self._pending_sleep is not None and not self._scheduler.has_work:  # nothing is in flight any more
            self._begin_sleep(self._pending_sleep)
        if self._publish is not None and (events := self._scheduler.take_kv_events()):
            self._publish(events)
        return outputs

    def _followed(self, output: Output, grammars: Grammars, now: float) -> Output:
        """Advance the grammar of an answer; where that fails, the answer ends: it never goes on unconstrained."""
        error = grammars.accept(output)
        if not error:
            return output
        if output.finish_reason is None:
            self._scheduler.close(output.request_id, output.index, FinishReason.ERROR, now)
        return msgspec.structs.replace(
            output,
            token_ids=(),
            logprobs=(),
            stop_token_id=None,
            finish_reason=FinishReason.ERROR,
            error=error,
            finished_at=now,
        )

    def _report(self, outputs: list[Output], now: float, *, planning: float) -> StepReport:
        replies, self._replies = self._replies, []
        statuses = None
        if self._adapters is not None:
            replies += self._adapters.take_replies()
            statuses = self._adapters.take_statuses()
        return StepReport(
            outputs=tuple(outputs),
            stats=msgspec.structs.replace(
                self._scheduler.stats(now),
                schedule_seconds=planning,
                last_batch=self._batch,
                mask_seconds=0.0 if self._grammars is None else self._grammars.mask_seconds,
            ),
            replies=tuple(replies),
            adapters=statuses,
            text_blocks=self._scheduler.take_text_blocks(),
        )


def launching(execute: Execute) -> Launch:
    """A launch whose step has been executed when it returns."""

    def launch(plan: SchedulerOutput) -> Callable[[], StepResult]:
        result = execute(plan)
        return lambda: result

    return launch


class PendingResult:
    """The result of a plan that was submitted to a worker."""

    def __init__(self, launched: "Future[Callable[[], StepResult]]") -> None:
        self._launched = launched

    def result(self) -> StepResult:
        """Wait until the plan is launched, and then for its result. To be called once."""
        return self._launched.result()()

    def exception(self) -> Exception | None:
        """Wait for the result, and drop it; the error, if there was one."""
        try:
            self.result()
        except Exception as error:  # noqa: BLE001  the caller decides what it means
            return error
        return None


class LaunchThread:
    """Launches plans one after the other on a thread of its own."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._calls: queue.SimpleQueue[tuple[Launch, SchedulerOutput, Future[Callable[[], StepResult]]]] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._run, name="worker", daemon=True).start()

    def submit(self, plan: SchedulerOutput) -> PendingResult:
        """Launch a plan after those before it."""
        return self.call(self._launch, plan)

    def call(self, launch: Launch, plan: SchedulerOutput) -> PendingResult:
        """Launch a plan with another function: the warm-up must run on the thread that later steps run on."""
        launched: Future[Callable[[], StepResult]] = Future()
        self._calls.put((launch, plan, launched))
        return PendingResult(launched)

    def _run(self) -> None:
        while True:
            launch, plan, launched = self._calls.get()
            try:
                launched.set_result(launch(plan))
            except BaseException as error:  # noqa: BLE001  the thread that waits for the result must get it
                launched.set_exception(error)


class OverlappedEngine(Engine):
    """An Engine with up to two plans in flight."""

    def __init__(self, scheduler: Scheduler, worker: LaunchThread, facts: EngineFacts, **parts: Any) -> None:
        super().__init__(scheduler, lambda plan: worker.submit(plan).result(), facts, **parts)
        self._submit = worker.submit
        self._in_flight: tuple[SchedulerOutput, PendingResult] | None = None

    def step(self, now: float) -> StepReport:
        """Plan the step after the one that is being executed, then update and report the latter."""
        began = self._stopwatch()
        self._resume_compiled(now)
        if self._in_flight is None:
            self._in_flight = self._plan_next(now)
        following = self._plan_next(now) if self._scheduler.can_overlap else None
        planned = self._stopwatch()
        (plan, pending), self._in_flight = self._in_flight, following
        try:
            result = pending.result()
        except StepOutOfMemoryError as error:
            return self._report(self._end_both_batches(error, now, plan.step), now, planning=planned - began)
        except BaseException:
            if self._grammars is not None:  # the plan after this one does not wait for its outputs
                self._grammars.follow(plan.step)
            raise
        executed = self._stopwatch()
        outputs = self._update(plan, result, now, executed - began, in_flight=following is not None)
        return self._report(outputs, now, planning=planned - began + self._stopwatch() - executed)

    def _plan_next(self, now: float) -> tuple[SchedulerOutput, PendingResult]:
        plan = self._scheduler.schedule(now)
        return plan, self._submit(plan)

    def _end_both_batches(self, error: StepOutOfMemoryError, now: float, step: int) -> list[Output]:
        """Give up the plan that failed, and the one after it, which builds on its results."""
        if self._grammars is not None:  # the plan after it waits for masks
            self._grammars.follow(step)
        following, self._in_flight = self._in_flight, None
        failure = following[1].exception() if following is not None else None
        if failure is not None and not isinstance(failure, StepOutOfMemoryError):
            raise failure
        return self._end_batch(error, now, step if following is None else following[0].step)
