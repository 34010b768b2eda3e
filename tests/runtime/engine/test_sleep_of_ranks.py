"""An engine of two ranks sleeps and wakes as one: both free their memory, and both have it again or none computes."""

import os
import signal
import time
from pathlib import Path

import pytest

from slipway_runtime.engine import build as build_module
from slipway_runtime.engine.build import build_engine
from slipway_runtime.engine.engine import Engine
from slipway_runtime.engine.ranks import (
    RankCapture,
    RankDiedError,
    RankGraphs,
    RankSleep,
    RankWake,
    SharedSleeper,
)
from slipway_runtime.engine.sleep import Sleeper
from slipway_runtime.messages import Message, Reply, Sleep, WakeUp
from slipway_runtime.models.config import DoesNotFitError
from slipway_runtime.models.decoder import Decoder
from slipway_runtime.worker.runner import Runner
from tests.runtime.checkpoints import a_checkpoint, greedy
from tests.runtime.engine.test_engine import PROMPTS, an_engine, ask, run
from tests.runtime.engine.test_ranks import ranks_of


def call(engine: Engine, message: Message) -> str:
    engine.control(message, 0.0)
    replies: list[Reply] = []
    while engine.has_work:
        replies += engine.step(0.0).replies
    (reply,) = replies
    return reply.error


def sleeper_of(engine: Engine) -> Sleeper:
    assert engine._sleeper is not None
    return engine._sleeper


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


@pytest.mark.capability("ST-7", "DD-3")
def test_the_other_rank_frees_its_weights_and_its_kv_cache_too(tmp_path):
    a_checkpoint(tmp_path, vocab_size=60_000, hidden_size=256)
    engine = build_engine(
        tmp_path, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64, kv_cache_bytes=64 << 20, threads=1,
        device="cpu", tensor_parallel_size=2,
    )  # fmt: skip
    (rank,) = ranks_of(os.getpid())
    awake = resident_bytes(rank)
    cache, vocabulary = 32 << 20, 2 * 30_000 * 256 * 4  # half of each
    assert call(engine, Sleep(call=1, level=1)) == ""
    assert awake - resident_bytes(rank) > 0.9 * cache
    assert call(engine, WakeUp(call=2)) == ""
    assert call(engine, Sleep(call=3, level=2)) == ""
    assert awake - resident_bytes(rank) > 0.9 * (cache + vocabulary)
    assert call(engine, WakeUp(call=4)) == ""
    assert resident_bytes(rank) > 0.9 * awake


@pytest.mark.capability("ST-7", "DD-3")
def test_a_rank_that_cannot_read_its_weights_lets_all_sleep_on_until_it_can(tmp_path):
    model = a_checkpoint(tmp_path)
    engine = an_engine(tmp_path, tensor_parallel_size=2, device="cpu")
    sleeper = sleeper_of(engine)
    assert isinstance(sleeper, SharedSleeper)
    assert call(engine, Sleep(call=1, level=2)) == ""
    weights, elsewhere = tmp_path / "model.safetensors", tmp_path / "elsewhere"
    reload, loads = sleeper._load_weights, []
    other = sleeper._ranks._others[0]

    def reload_after_the_other_rank_failed() -> Decoder:
        deadline = time.monotonic() + 60
        while other._replies.empty():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        elsewhere.rename(weights)
        loads.append(1)
        return reload()

    sleeper._load_weights = reload_after_the_other_rank_failed
    weights.rename(elsewhere)
    error = call(engine, WakeUp(call=2))
    assert error.startswith("rank 1: ")
    assert "safetensors" in error
    assert sleeper.level == 2
    assert call(engine, WakeUp(call=3)) == ""
    assert loads == [1], "rank 0 kept what it had restored"
    ask(engine, "after", PROMPTS[0])
    assert run(engine) == {"after": greedy(model, PROMPTS[0], 24)}


@pytest.mark.capability("ST-7", "DD-3")
@pytest.mark.parametrize("message", [Sleep(call=2, level=1), WakeUp(call=2)], ids=["falling asleep", "waking"])
def test_a_rank_that_dies_ends_the_engine_with_a_sentence(message, tmp_path):
    a_checkpoint(tmp_path)
    engine = an_engine(tmp_path, tensor_parallel_size=2, device="cpu")
    if isinstance(message, WakeUp):
        assert call(engine, Sleep(call=1, level=1)) == ""
    (rank,) = ranks_of(os.getpid())
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(RankDiedError, match="rank 1 of 2 was killed"):
        call(engine, message)


@pytest.mark.capability("ST-7", "KN-5")
def test_graphs_are_captured_again_by_all_ranks_after_all_have_their_memory(tmp_path, monkeypatch):
    """On a CPU there are no graphs: rank 0 is given some, and what it tells the other rank is what is proved."""
    a_checkpoint(tmp_path)
    events: list[object] = []

    def capture(runner: Runner, *_: object) -> str:
        events.append("capture" if runner.caches else "capture without memory")
        return ""

    monkeypatch.setattr(build_module, "capture_steps", capture)
    sleeper = sleeper_of(an_engine(tmp_path, tensor_parallel_size=2, device="cpu"))
    assert isinstance(sleeper, SharedSleeper)
    ranks, runner = sleeper._ranks, sleeper._runner
    send, wait = ranks._send_to_all, ranks._expect_done

    def recorded_send(order: object) -> None:
        events.append(type(order))
        send(order)  # type: ignore[arg-type]

    def recorded_wait() -> list[str]:
        errors = wait()
        events.append("done")
        return errors

    monkeypatch.setattr(ranks, "_send_to_all", recorded_send)
    monkeypatch.setattr(ranks, "_expect_done", recorded_wait)
    events.clear()
    runner.graphs = object()  # type: ignore[assignment]
    sleeper.sleep(1)
    assert runner.graphs is None, "graphs refer to freed memory"
    sleeper.wake()
    assert events == [RankSleep, "done", RankWake, "done", RankCapture, "capture", RankGraphs]
    events.clear()
    sleeper.sleep(1)
    sleeper.wake()
    assert events == [RankSleep, "done", RankWake, "done"], "without graphs before, none are captured"


@pytest.mark.capability("ST-7", "KN-5")
def test_no_memory_for_the_graphs_of_a_rank_that_wakes_ends_the_engine_with_a_sentence(tmp_path, monkeypatch):
    """The other rank waits within the capture: a second try to wake up would find it there."""

    def no_memory(*_: object) -> str:
        if sleeps:
            raise DoesNotFitError("the CUDA graphs do not fit")
        return ""

    sleeps: list[bool] = []
    a_checkpoint(tmp_path)
    monkeypatch.setattr(build_module, "capture_steps", no_memory)
    engine = an_engine(tmp_path, tensor_parallel_size=2, device="cpu")
    assert call(engine, Sleep(call=1, level=1)) == ""
    sleeper_of(engine)._captured = True  # on a CPU there were no graphs
    sleeps.append(True)
    with pytest.raises(RankDiedError, match="the CUDA graphs do not fit"):
        call(engine, WakeUp(call=2))
