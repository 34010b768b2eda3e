"""The API side of the engine, over a real scheduler and a paper worker in a real thread."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from slipway_runtime.engine.client import (
    WINDOW_SECONDS,
    Draining,
    EngineClient,
    EngineDead,
    Overloaded,
    QueueLimits,
    Refused,
    StepTimes,
)
from slipway_runtime.engine.engine import Engine
from slipway_runtime.engine.loop import EngineThread
from slipway_runtime.messages import (
    EngineFacts,
    FinishReason,
    Output,
    Request,
    SamplingParams,
    SchedulerOutput,
    StepResult,
)
from slipway_runtime.scheduling.block_pool import BlockPool
from slipway_runtime.scheduling.scheduler import Scheduler
from tests.runtime.paper_worker import PaperWorker, continuation

FACTS = EngineFacts(
    vocab_size=50, eos_token_ids=(), max_model_len=200, max_num_seqs=2, max_num_batched_tokens=8, block_size=4,
    num_blocks=100, bytes_per_token=1, weight_bytes=1, dtype="paper", device="paper", load_seconds=0, warmup_seconds=0,
)  # fmt: skip


class Stage:
    """Lets the worker take one step at a time, so that a test decides what happens between steps."""

    def __init__(self, **limits: object) -> None:
        self.worker = PaperWorker(4)
        self.scheduler = Scheduler(BlockPool(100, 4), max_num_seqs=2, max_num_batched_tokens=8, max_model_len=200)
        self.gate: threading.Semaphore | None = None
        self.live_when_computing: list[int] = []
        self.broken = ""
        self.client = EngineClient(
            EngineThread(Engine(self.scheduler, self.execute, FACTS)), limits=QueueLimits(**limits)
        )

    def execute(self, plan: SchedulerOutput) -> StepResult:
        if self.gate is not None:
            self.gate.acquire(timeout=300)
        if self.broken:
            raise RuntimeError(self.broken)
        self.live_when_computing.append(self.scheduler.pool.live)
        return self.worker.execute(plan)

    def close_gate(self) -> Callable[[], None]:
        gate = self.gate = threading.Semaphore(0)
        return gate.release

    async def step_until(self, condition: Callable[[], bool]) -> None:
        """Take single steps until the condition holds, with the gate closed.

        Left alone, the engine could compute a whole answer before this side has run once: machines are busy.
        """
        assert self.gate is not None
        while not condition():
            steps = self.client.stats().steps
            self.gate.release()
            await until(lambda: self.client.stats().steps > steps)  # noqa: B023  awaited at once

    def open_gate(self) -> None:
        gate, self.gate = self.gate, None
        if gate is not None:
            gate.release(1000)

    def generate(self, id: str, prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 5, **fields: object):
        return self.client.generate(
            Request(id=id, prompt_token_ids=prompt, params=SamplingParams(max_tokens=max_tokens), arrived=0.0, **fields)
        )


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    stage = Stage()
    await stage.client.start()
    yield stage
    stage.open_gate()
    await stage.client.stop()


async def text(stream: AsyncIterator[Output]) -> tuple[list[int], FinishReason | None]:
    outputs = [output async for output in stream]
    assert [o.finish_reason is not None for o in outputs] == [False] * (len(outputs) - 1) + [True]
    return [token for output in outputs for token in output.token_ids], outputs[-1].finish_reason


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  the condition changes in another thread
        await asyncio.sleep(0.001)


async def test_streams_what_the_engine_computes(stage):
    results = await asyncio.gather(*(text(stage.generate(f"r{n}", (n + 1, 2), 9)) for n in range(5)))
    assert results == [(continuation((n + 1, 2), 9), FinishReason.LENGTH) for n in range(5)]
    await until(lambda: stage.client.stats().finished == 5)
    assert stage.client.stats().blocks_live == 0


@pytest.mark.capability("API-2")
async def test_the_first_token_arrives_before_the_second_is_computed(stage):
    step = stage.close_gate()
    stream = stage.generate("a")
    step()
    first = await anext(stream)
    assert list(first.token_ids) == continuation((1, 2, 3), 1)
    assert len(stage.live_when_computing) == 1


@pytest.mark.capability("API-7", "PF-10")
async def test_closing_a_stream_frees_its_blocks_before_the_next_step_computes(stage):
    step = stage.close_gate()
    async with stage.generate("goes", tuple(range(1, 9)), 50) as goes, stage.generate("stays", (4,), 50) as stays:
        step()
        await anext(goes)
        step()
        await anext(stays)
        await goes.aclose()
        step()  # was scheduled before the close
        await anext(stays)
        step()
        await anext(stays)
        assert stage.live_when_computing[1] == 4, "three blocks of nine tokens, and one"
        assert stage.live_when_computing[-1] <= 2
        stage.open_gate()
    await until(lambda: stage.client.stats().aborted == 2)
    assert stage.client.stats().blocks_live == 0


@pytest.mark.capability("API-7", "PF-10")
async def test_a_request_dropped_before_its_first_token_leaves_nothing_behind(stage):
    step = stage.close_gate()
    streams = [stage.generate(f"r{n}") for n in range(5)]
    step()
    for stream in streams:
        await stream.aclose()
        assert [output async for output in stream] == []
    stage.open_gate()
    await until(lambda: stage.client.stats().aborted == 5)
    stats = stage.client.stats()
    assert (stats.running, stats.waiting, stats.blocks_live) == (0, 0, 0)


async def test_a_cancelled_reader_aborts_its_request(stage):
    stage.close_gate()

    async def read() -> None:
        async with stage.generate("a", max_tokens=100) as stream:
            await text(stream)

    task = asyncio.create_task(read())
    await until(lambda: stage.client.stats().waiting == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    stage.open_gate()
    await until(lambda: stage.client.stats().aborted == 1)


async def test_a_stop_string_counts_as_finished(stage):
    stream = stage.generate("a", max_tokens=150)
    await anext(stream)
    stream.finish()
    await until(lambda: stage.client.stats().finished == 1)
    assert stage.client.stats().aborted == 0


async def test_an_abort_from_elsewhere_ends_the_stream_with_its_reason(stage):
    stage.close_gate()
    stream = stage.generate("a")
    stage.client.abort("a", FinishReason.TIMEOUT)
    assert (await text(stream)) == ([], FinishReason.TIMEOUT)
    stage.client.abort("a")
    stage.client.abort("nobody")


@pytest.mark.capability("API-4")
async def test_a_deadline_in_the_past_ends_at_once(stage):
    assert await text(stage.generate("a", max_tokens=150, deadline=0.0)) == ([], FinishReason.TIMEOUT)


@pytest.mark.capability("BS-4")
async def test_a_full_queue_refuses_before_anything_is_queued():
    stage = Stage(max_requests=3)
    await stage.client.start()
    stage.close_gate()
    streams = [stage.generate(f"r{n}") for n in range(3)]
    with pytest.raises(Overloaded) as refusal:
        stage.generate("one more")
    assert refusal.value.retry_after_seconds >= 1
    assert stage.client.stats().waiting == 3
    stage.open_gate()
    for stream in streams:
        assert (await text(stream))[1] is FinishReason.LENGTH
    assert (await text(stage.generate("later")))[1] is FinishReason.LENGTH
    await stage.client.stop()


@pytest.mark.capability("KV-6")
async def test_what_can_never_fit_is_refused_at_once(stage):
    with pytest.raises(Refused, match="200 tokens"):
        stage.generate("a", (1,) * 200)
    stage.generate("b")
    with pytest.raises(Refused, match="'b' is running"):
        stage.generate("b")


async def test_the_ledger_balances_at_every_moment(stage):
    step = stage.close_gate()
    streams = [stage.generate(f"r{n}", max_tokens=3) for n in range(6)]

    def balanced() -> bool:
        s = stage.client.stats()
        return s.admitted == s.finished + s.aborted + s.handed_over + s.running + s.waiting

    assert stage.client.stats().admitted == 6
    assert balanced()
    for _ in range(4):
        step()
        await asyncio.sleep(0.002)
        assert balanced()
    await streams[5].aclose()
    assert balanced()
    stage.open_gate()
    await asyncio.gather(*(text(stream) for stream in streams[:5]))
    assert balanced()


async def test_drain_refuses_newcomers_and_waits_for_the_rest(stage):
    stage.close_gate()
    stream = stage.generate("a")
    stage.client.drain()
    stage.client.drain()
    with pytest.raises(Draining):
        stage.generate("b")
    waiting = asyncio.create_task(stage.client.wait_drained())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    stage.open_gate()
    assert (await text(stream))[1] is FinishReason.LENGTH
    await asyncio.wait_for(waiting, 60)
    stage.client.undrain()
    assert (await text(stage.generate("c")))[1] is FinishReason.LENGTH


async def test_a_drain_with_nothing_to_wait_for_is_done(stage):
    stage.client.drain()
    await asyncio.wait_for(stage.client.wait_drained(), 60)


@pytest.mark.capability("API-3")
async def test_when_the_step_loop_dies_everybody_hears_of_it(stage):
    stage.broken = "out of memory"
    running, waiting = stage.generate("a"), [stage.generate(f"w{n}") for n in range(3)]
    for stream in (running, *waiting):
        *_, last = [output async for output in stream]
        assert last.finish_reason is FinishReason.ERROR
        assert last.error == "RuntimeError: out of memory"
    await asyncio.wait_for(stage.client.wait_dead(), 60)
    assert not stage.client.alive
    with pytest.raises(EngineDead, match="out of memory"):
        stage.generate("b")


async def test_stop_ends_what_still_runs():
    stage = Stage()
    await stage.client.start()
    step = stage.close_gate()
    stream = stage.generate("a", max_tokens=190)
    step()
    await anext(stream)
    stopping = asyncio.create_task(stage.client.stop())
    await asyncio.sleep(0)  # the engine is asked to stop, and only then may it take its next step
    stage.open_gate()
    await stopping
    await stage.client.stop()
    assert (await text(stream))[1] is FinishReason.CANCELLED
    with pytest.raises(EngineDead):
        stage.generate("b")


async def test_a_leaked_block_is_found_when_the_engine_is_idle(stage):
    stage.scheduler.pool.allocate(1)
    stream = stage.generate("a", max_tokens=1)
    assert (await text(stream))[1] is FinishReason.LENGTH
    await asyncio.wait_for(stage.client.wait_dead(), 60)
    assert "every live block belongs to a running sequence" in stage.client.error


@pytest.mark.capability("API-10")
async def test_a_stream_that_is_not_read_is_paused_and_goes_on_where_it_was(stage, monkeypatch):
    """Chaos C11: it read a count before the engine had told it."""
    monkeypatch.setattr("slipway_runtime.engine.stream.PAUSE_UNREAD", 10)
    monkeypatch.setattr("slipway_runtime.engine.stream.RESUME_UNREAD", 2)
    stage.close_gate()
    slow = stage.generate("slow", (1, 2, 3), 60)
    await stage.step_until(lambda: slow.paused)
    assert stage.client.stats().paused == 1
    stage.open_gate()
    assert await text(stage.generate("quick", (7,), 30)) == (continuation((7,), 30), FinishReason.LENGTH)
    waited = slow.unread
    computed = stage.client.stats().computed_tokens
    assert await text(stage.generate("other", (8,), 30)) == (continuation((8,), 30), FinishReason.LENGTH)
    assert slow.unread == waited < 60, "nothing more is computed for it"
    assert stage.client.stats().computed_tokens - computed == 30
    assert stage.scheduler.pool.live > 0, "its blocks stay"

    assert await text(slow) == (continuation((1, 2, 3), 60), FinishReason.LENGTH)
    await until(lambda: stage.client.stats().finished == 3)
    assert stage.client.stats().paused == stage.client.stats().blocks_live == 0


@pytest.mark.capability("API-10")
@pytest.mark.parametrize(
    ("deadline", "limit", "reason"), [(None, 0.0, FinishReason.CANCELLED), (0.0, 60.0, FinishReason.TIMEOUT)]
)
async def test_a_stream_that_is_never_read_again_is_ended_though_no_step_runs(monkeypatch, deadline, limit, reason):
    """Chaos C11: it hung on a busy machine."""
    monkeypatch.setattr("slipway_runtime.engine.stream.PAUSE_UNREAD", 5)
    stage = Stage()
    client = stage.client = EngineClient(
        EngineThread(Engine(stage.scheduler, stage.execute, FACTS), clock=lambda: -1.0),
        paused_seconds=limit,
        clock=lambda: 0.0,
    )
    await client.start()
    try:
        stage.close_gate()
        slow = stage.generate("slow", (1, 2, 3), 190, deadline=deadline)
        await stage.step_until(lambda: slow.paused)
        await until(lambda: not slow.open)
        stage.open_gate()
        await until(lambda: client.stats().aborted == 1)
        [last] = [output async for output in slow]
        assert last.finish_reason is reason
        assert "too slow" in last.error
        assert client.stats().blocks_live == client.stats().paused == 0
        assert client.stats().generated_tokens < 190
        assert await text(stage.generate("next")) == (continuation((1, 2, 3), 5), FinishReason.LENGTH)
    finally:
        await client.stop()


@pytest.mark.capability("API-10")
async def test_a_paused_stream_that_is_closed_or_whose_engine_dies_leaves_no_timer(stage, monkeypatch):
    monkeypatch.setattr("slipway_runtime.engine.stream.PAUSE_UNREAD", 5)
    stage.close_gate()
    closed = stage.generate("closed", (1, 2, 3), 190)
    await stage.step_until(lambda: closed.paused)
    await closed.aclose()
    stage.open_gate()
    await until(lambda: stage.client.stats().aborted == 1)
    assert stage.client.stats().paused == 0
    stage.close_gate()
    left = stage.generate("left", (1, 2, 3), 190)
    await stage.step_until(lambda: left.paused)
    stage.open_gate()
    stage.broken = "no luck"
    stage.generate("breaks it")
    await stage.client.wait_dead()
    assert stage.client.stats().paused == 0
    assert [output async for output in left][-1].finish_reason is FinishReason.ERROR


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.capability("RD-9")
def test_a_step_takes_from_when_work_was_there_until_its_report():
    clock = Clock()
    times = StepTimes(0.5, clock)
    clock.now += 1000  # idle
    times.work_came()
    clock.now += 2
    times.reported()
    assert times.longest == 2.0
    clock.now += 3
    times.reported()
    assert times.longest == 3.0
    assert times.waiting_since == clock.now


@pytest.mark.capability("RD-9")
def test_a_long_step_is_forgotten_after_some_minutes_and_the_widest_of_the_warm_up_never():
    clock = Clock()
    times = StepTimes(0.5, clock)
    clock.now += 7
    times.reported()
    assert times.longest == 7.0
    for _ in range(3):
        clock.now += WINDOW_SECONDS
        times.work_came()
        times.reported()
    assert times.longest == 0.5


@pytest.mark.capability("RD-9")
def test_a_hang_that_ended_does_not_raise_the_limit_of_the_next_step():
    """The limit is 6 s and four times the longest step: with a hang of 12 s as the longest it would be 54 s."""
    clock = Clock()
    times = StepTimes(0.5, clock)
    for seconds in (0.1, 12, 0.1, 12, 0.1):  # also the second one: it does not follow the first at once
        clock.now += seconds
        times.reported()
        assert times.longest == 0.5
        assert times.limit == 8.0


@pytest.mark.capability("RD-9")
def test_slow_steps_one_after_the_other_raise_the_limit_though_the_first_exceeded_it():
    """As when a prompt with a long cached prefix comes to a slow machine."""
    clock = Clock()
    times = StepTimes(0.5, clock)
    for seconds, longest in ((10, 0.5), (9, 9.0), (11, 11.0), (0.1, 11.0)):
        clock.now += seconds
        times.reported()
        assert times.longest == longest


@pytest.mark.capability("RD-9")
def test_steps_that_grow_with_the_context_raise_the_limit_with_them():
    clock = Clock()
    times = StepTimes(1.0, clock)
    for seconds in (2, 6, 20, 60):
        assert seconds < times.limit
        clock.now += seconds
        times.reported()
        assert times.longest == seconds
