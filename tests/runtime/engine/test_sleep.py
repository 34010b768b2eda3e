"""A sleeping engine has given its memory back, and remembers nothing when it wakes."""

import shutil
import weakref
from pathlib import Path

import pytest

from slipway_runtime.engine.build import build_engine
from slipway_runtime.engine.engine import Engine
from slipway_runtime.messages import AllBlocksCleared, Message, Output, Reply, Request, SamplingParams, Sleep, WakeUp
from slipway_runtime.scheduling.block_pool import KvEventLog
from tests.runtime.checkpoints import a_checkpoint

PROMPT = tuple(range(3, 60))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    a_checkpoint(path)
    return path


@pytest.fixture
def engine(checkpoint: Path) -> Engine:
    return build_engine(checkpoint, max_num_seqs=2, max_num_batched_tokens=64, kv_cache_bytes=1 << 20, device="cpu")


def ask(engine: Engine, id: str) -> list[Output]:
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    engine.add(Request(id=id, prompt_token_ids=PROMPT, params=params, arrived=0.0), 0.0)
    outputs: list[Output] = []
    while engine.has_work:
        outputs += engine.step(0.0).outputs
    return outputs


def call(engine: Engine, message: Message) -> str:
    engine.control(message, 0.0)
    replies: list[Reply] = []
    while engine.has_work:
        replies += engine.step(0.0).replies
    (reply,) = replies
    return reply.error


def tokens(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@pytest.mark.capability("ST-7", "PF-25")
@pytest.mark.parametrize("level", [1, 2])
def test_memory_is_free_while_it_sleeps_and_afterwards_it_says_the_same(engine: Engine, level: int):
    events: list[object] = []
    engine._scheduler.pool.events, engine._publish = KvEventLog(16), events.extend
    before = ask(engine, "before")
    assert ask(engine, "again")[0].cached_tokens > 0
    counted = engine.stats(0.0)
    runner = engine._sleeper._runner  # type: ignore[union-attr]
    memory = [weakref.ref(runner.caches[0].untyped_storage()), weakref.ref(runner.caches[0])]
    weights = weakref.ref(runner.decoder)

    assert call(engine, Sleep(call=1, level=level)) == ""
    assert [one() for one in memory] == [None, None]
    assert (weights() is None) == (level == 2)
    assert events[-1] == AllBlocksCleared()
    assert call(engine, Sleep(call=2, level=level)) == "", "asking again is harmless"
    assert "wake it up first" in call(engine, Sleep(call=3, level=3 - level))
    assert call(engine, WakeUp(call=4)) == ""
    assert call(engine, WakeUp(call=5)) == ""

    after = ask(engine, "after")
    assert tokens(after) == tokens(before)
    assert after[0].cached_tokens == 0
    assert events.count(AllBlocksCleared()) == 1
    stats = engine.stats(0.0)
    assert stats.finished == counted.finished + 1
    assert stats.generated_tokens == counted.generated_tokens + 6
    assert stats.steps > counted.steps
    engine.idle()


@pytest.mark.capability("ST-7")
def test_weights_that_are_gone_from_disk_let_it_sleep_on_until_they_are_back(checkpoint: Path, tmp_path: Path):
    moved = tmp_path / "model"
    shutil.copytree(checkpoint, moved)
    engine = build_engine(moved, max_num_seqs=1, max_num_batched_tokens=64, kv_cache_bytes=1 << 20, device="cpu")
    before = tokens(ask(engine, "before"))
    assert call(engine, Sleep(call=1, level=2)) == ""
    (moved / "model.safetensors").rename(moved / "elsewhere")
    assert "safetensors" in call(engine, WakeUp(call=2))
    (moved / "elsewhere").rename(moved / "model.safetensors")
    assert call(engine, WakeUp(call=3)) == ""
    assert tokens(ask(engine, "after")) == before


def test_it_sleeps_only_with_nothing_to_do_and_at_levels_that_there_are(engine: Engine):
    assert "level 7" in call(engine, Sleep(call=1, level=7))
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    engine.add(Request(id="runs", prompt_token_ids=PROMPT, params=params, arrived=0.0), 0.0)
    assert call(engine, Sleep(call=2)) == "1 requests are running or waiting"
    assert tokens(ask(engine, "works on"))
