"""The overlapped loop beside the plain one: the same outputs, with the next plan made while a step is computed."""

import random
import threading
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipway_runtime.engine.engine import Engine, LaunchThread, OverlappedEngine, launching
from slipway_runtime.messages import FinishReason, Request, SamplingParams, SchedulerOutput, StepResult
from slipway_runtime.scheduling.block_pool import BlockPool
from slipway_runtime.scheduling.scheduler import Scheduler
from tests.runtime.engine.test_client import FACTS
from tests.runtime.paper_worker import PaperWorker, continuation


def a_scheduler(blocks: int = 24) -> Scheduler:
    return Scheduler(BlockPool(blocks, 4), max_num_seqs=4, max_num_batched_tokens=8, max_model_len=60)


def play(engine: Engine, seed: int, requests: int = 8) -> dict[str, list[int]]:
    """Requests that come and go by chance; the chances do not depend on the engine."""
    chance = random.Random(seed)
    texts: dict[str, list[int]] = {}
    ended: dict[str, FinishReason | None] = {}
    coming = [
        (f"r{n}", tuple(chance.randrange(1, 50) for _ in range(chance.randrange(1, 20))), chance.randrange(1, 12))
        for n in range(requests)
    ]
    for step in range(2000):
        while coming and (step % 3 == 0 or not engine.has_work):
            name, prompt, tokens = coming.pop()
            engine.add(
                Request(id=name, prompt_token_ids=prompt, params=SamplingParams(max_tokens=tokens), arrived=0.0), 0.0
            )
            break
        if not engine.has_work:
            engine.idle()
            assert all(reason is FinishReason.LENGTH for reason in ended.values())
            return texts
        for output in engine.step(float(step)).outputs:
            assert output.request_id not in ended, "nothing comes after the end"
            texts.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                ended[output.request_id] = output.finish_reason
    raise AssertionError("still at work")


@pytest.mark.capability("BS-7", "BS-1")
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), blocks=st.integers(16, 40))
def test_both_loops_tell_the_same(seed: int, blocks: int):
    plain = Engine(a_scheduler(blocks), PaperWorker(4).execute, FACTS)
    overlapped = OverlappedEngine(a_scheduler(blocks), LaunchThread(launching(PaperWorker(4).execute)), FACTS)
    assert play(plain, seed) == play(overlapped, seed)


@pytest.mark.capability("BS-7")
def test_the_next_plan_is_made_while_a_step_is_computed():
    scheduler, worker = a_scheduler(), PaperWorker(4)
    planned: list[int] = []
    computed: list[int] = []
    two_ahead = threading.Event()
    schedule = scheduler.schedule

    def watched(now: float) -> SchedulerOutput:
        plan = schedule(now)
        planned.append(plan.step)
        if len(planned) == 2:
            two_ahead.set()
        return plan

    def execute(plan: SchedulerOutput) -> StepResult:
        assert two_ahead.wait(20), "the first step is not computed before the second one is planned"
        computed.append(plan.step)
        return worker.execute(plan)

    scheduler.schedule = watched  # type: ignore[method-assign]
    engine = OverlappedEngine(scheduler, LaunchThread(launching(execute)), FACTS)
    engine.add(Request(id="a", prompt_token_ids=(1, 2), params=SamplingParams(max_tokens=6), arrived=0.0), 0.0)
    text: list[int] = []
    while engine.has_work:
        for output in engine.step(0.0).outputs:
            text += output.token_ids
    engine.idle()
    assert text == continuation((1, 2), 6)
    assert planned == computed == sorted(planned)


@pytest.mark.capability("BS-7")
def test_a_step_is_launched_before_the_result_of_the_last_one_is_there():
    """Finding C15: on a GPU the worker's thread waited for a step's tokens before it launched the next step."""
    worker, launched, second = PaperWorker(4), [], threading.Event()

    def launch(plan: SchedulerOutput) -> Callable[[], StepResult]:
        result = worker.execute(plan)
        launched.append(plan.step)
        if len(launched) == 2:
            second.set()

        def read() -> StepResult:
            assert second.wait(20), "the first result is waited for before the second step is launched"
            return result

        return read

    engine = OverlappedEngine(a_scheduler(), LaunchThread(launch), FACTS)
    engine.add(Request(id="a", prompt_token_ids=(1, 2), params=SamplingParams(max_tokens=6), arrived=0.0), 0.0)
    text: list[int] = []
    while engine.has_work:
        for output in engine.step(0.0).outputs:
            text += output.token_ids
    assert text == continuation((1, 2), 6)


def test_what_the_worker_raises_ends_the_loop():
    def broken(plan: SchedulerOutput) -> StepResult:
        raise RuntimeError("no more memory")

    engine = OverlappedEngine(a_scheduler(), LaunchThread(launching(broken)), FACTS)
    engine.add(Request(id="a", prompt_token_ids=(1,), params=SamplingParams(max_tokens=2), arrived=0.0), 0.0)
    with pytest.raises(RuntimeError, match="no more memory"):
        engine.step(0.0)


@pytest.mark.capability("BS-7")
@pytest.mark.parametrize("kind", ["plain", "overlapped"])
def test_the_cost_of_the_scheduler_is_measured_apart_from_the_computation(kind: str):
    """A stopwatch that only the worker moves by 100, and each reading by 1: planning costs single digits."""
    time = [0.0]

    def stopwatch() -> float:
        time[0] += 1
        return time[0]

    def execute(worker: PaperWorker, plan: SchedulerOutput) -> StepResult:
        time[0] += 100
        return worker.execute(plan)

    compute = partial(execute, PaperWorker(4))
    engine = (
        Engine(a_scheduler(), compute, FACTS, stopwatch=stopwatch)
        if kind == "plain"
        else OverlappedEngine(a_scheduler(), Inline(compute), FACTS, stopwatch=stopwatch)
    )
    engine.add(Request(id="a", prompt_token_ids=(1,), params=SamplingParams(max_tokens=1), arrived=0.0), 0.0)
    assert 0 < engine.step(0.0).stats.schedule_seconds < 10


class Inline(LaunchThread):
    """A worker whose result is computed when it is waited for."""

    def __init__(self, execute) -> None:
        self._execute = execute

    def submit(self, plan: SchedulerOutput):
        execute = self._execute

        class Result:
            def result(self) -> StepResult:
                return execute(plan)

        return Result()
