"""An engine whose model is shared by two processes says what one process says, and the two live and die together."""

import asyncio
import contextlib
import os
import queue
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from transformers import PreTrainedModel

from slipway_runtime.engine import decide as decide_module
from slipway_runtime.engine import rank as rank_module
from slipway_runtime.engine.build import build_engine
from slipway_runtime.engine.client import EngineClient, EngineDead
from slipway_runtime.engine.decide import EnginePlan, decide
from slipway_runtime.engine.engine import Engine
from slipway_runtime.engine.launch import EngineProcess
from slipway_runtime.engine.options import EngineOptions
from slipway_runtime.engine.ranks import RankDiedError, Ranks, RankStart
from slipway_runtime.messages import (
    EngineFailed,
    Grammar,
    Request,
    SamplingParams,
    SchedulerOutput,
    Sleep,
    StepResult,
    WakeUp,
)
from slipway_runtime.models.checkpoint import Checkpoint
from slipway_runtime.models.config import ModelRefusedError
from slipway_runtime.models.sharding import Shard
from slipway_runtime.worker.collective import Collective
from slipway_runtime.worker.runner import Runner
from tests.runtime.checkpoints import a_checkpoint, greedy
from tests.runtime.engine.test_engine import BYTES_PER_BLOCK, PROMPTS, an_engine, ask, run
from tests.runtime.processes import children

TINY = Path(__file__).parents[3] / "models" / "tiny"
OPTIONS = EngineOptions(
    max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64, kv_cache_bytes=4 << 20, threads=1, device="cpu",
    tensor_parallel_size=2,
)  # fmt: skip
SHARED = {
    "tensor_parallel_size": 2, "speculation": "promptLookup", "overlap": True,
    "kv_cache_host_bytes": 40 * BYTES_PER_BLOCK,
}  # fmt: skip


def is_gone(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def ranks_of(engine: int) -> list[int]:
    """Among its children: torch starts others while it is imported."""
    found = []
    for child in children(engine):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if b"engine.rank" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return found


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  of other processes
            await asyncio.sleep(0.02)


def assert_speaks_as(engine: Engine, model: PreTrainedModel) -> None:
    """For an engine with too few blocks and with drafts."""
    for length in (40, 4):  # the second time it finds prefixes
        for index, prompt in enumerate(PROMPTS):
            ask(engine, f"r{index}", prompt, max_tokens=length)
        assert run(engine) == {f"r{index}": greedy(model, prompt, length) for index, prompt in enumerate(PROMPTS)}
    stats = engine.stats(0.0)
    assert min(stats.preemptions, stats.prefix_hits, stats.accepted_tokens, stats.demotions, stats.promotions) > 0


@pytest.mark.capability("DD-3")
def test_greedy_text_is_that_of_one_process_with_chunks_drafts_preemptions_and_prefix_hits(tmp_path):
    model = a_checkpoint(tmp_path)
    engine = an_engine(tmp_path, blocks=14, seqs=6, budget=32, **SHARED, device="cpu")
    (rank,) = ranks_of(os.getpid())
    whole = an_engine(tmp_path, blocks=14, seqs=6, budget=32)
    assert engine.facts.num_blocks == whole.facts.num_blocks == 14
    assert engine.facts.bytes_per_token == whole.facts.bytes_per_token
    # No rank has what another one has; each pads its own panels, by as much as the processor's kernels need.
    assert whole.facts.weight_bytes <= engine.facts.weight_bytes < 1.1 * whole.facts.weight_bytes

    assert_speaks_as(engine, model)
    os.kill(rank, signal.SIGSTOP)
    threading.Timer(0.2, os.kill, (rank, signal.SIGKILL)).start()  # in the middle of a sum
    ask(engine, "too late", PROMPTS[0])
    with pytest.raises(RankDiedError, match="rank 1 of 2 was killed"):
        run(engine)


@pytest.mark.capability("DD-3", "SD-4")
def test_a_draft_model_drafts_on_rank_0_and_all_ranks_verify(tmp_path):
    model = a_checkpoint(tmp_path)
    drafting = {"speculation": "draft", "draft_model": str(tmp_path)}
    engine = an_engine(tmp_path, blocks=60, seqs=6, budget=32, tensor_parallel_size=2, device="cpu", **drafting)
    for index, prompt in enumerate(PROMPTS):
        ask(engine, f"r{index}", prompt)
    assert run(engine) == {f"r{index}": greedy(model, prompt, 24) for index, prompt in enumerate(PROMPTS)}
    assert engine.stats(0.0).draft_model.accepted_tokens > 20
    os.kill(*ranks_of(os.getpid()), signal.SIGKILL)


@pytest.mark.capability("DD-3")
def test_a_rank_has_a_gpu_by_its_number_in_every_thread_that_loads_weights(tmp_path, monkeypatch):
    """Finding A2: `cuda` without a number is number 0 in each new thread, and layers of rank 1 landed there."""
    a_checkpoint(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(decide_module, "default_budget_bytes", lambda device, share: 1 << 30)
    options = msgspec.structs.replace(OPTIONS, device="auto", threads=2)
    assert [decide(tmp_path, options, rank).device for rank in (0, 1)] == [
        torch.device("cuda", 0), torch.device("cuda", 1)
    ]  # fmt: skip

    used: dict[int, torch.device] = {}
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: used.update({threading.get_ident(): device}))
    checkpoint = Checkpoint(tmp_path, torch.float32, torch.device("cuda", 1))
    threads = set(checkpoint.in_parallel(lambda index: threading.get_ident(), 20))
    assert threads <= set(used)
    assert set(used.values()) == {torch.device("cuda", 1)}


@pytest.mark.capability("DD-3")
@pytest.mark.parametrize("rank", [1, 3])
def test_the_process_of_a_rank_takes_the_gpu_of_its_number_before_it_touches_one(rank, tmp_path, monkeypatch):
    """`cuda` without a number would be number 0, where rank 0 has its weights."""
    a_checkpoint(tmp_path, num_attention_heads=8, num_key_value_heads=4, head_dim=8)
    options = msgspec.structs.replace(OPTIONS, device="auto", tensor_parallel_size=4)
    events: list[object] = []
    for name, does in {
        "is_available": lambda: True,
        "device_count": lambda: 4,
        "get_device_capability": lambda device: events.append(("asked", device)) or (9, 0),
        "set_device": lambda device: events.append(("set", device)),
    }.items():
        monkeypatch.setattr(torch.cuda, name, does)
    monkeypatch.setattr(decide_module, "default_budget_bytes", lambda device, share: 1 << 30)

    class EnoughError(Exception): ...

    def load(plan: EnginePlan, kernels: object, share: Shard) -> None:
        events.extend([("load", plan.device), ("share", share.rank, share.size)])
        raise EnoughError

    monkeypatch.setattr(rank_module, "load_weights", load)
    monkeypatch.setattr(rank_module, "Collective", lambda *of: events.append(("meet", *of)) or Collective(*of))
    leader = SimpleNamespace(start=RankStart(rank=rank, model_path=str(tmp_path), options=options, store=""))
    with pytest.raises(EnoughError):
        rank_module.run_rank(leader)  # type: ignore[arg-type]
    own = torch.device("cuda", rank)
    assert events == [
        ("set", rank), ("asked", own), ("meet", rank, 4, own), ("load", own), ("share", rank, 4)
    ]  # fmt: skip


@pytest.mark.capability("DD-3", "ST-7")
@pytest.mark.parametrize("level", [1, 2])
def test_two_ranks_sleep_and_wake_as_one(tmp_path, level):
    model = a_checkpoint(tmp_path)
    engine = an_engine(tmp_path, blocks=14, seqs=6, budget=32, **SHARED, device="cpu")
    (rank,) = ranks_of(os.getpid())
    assert_speaks_as(engine, model)

    assert order(engine, Sleep(call=1, level=level)) == ""
    files = [*tmp_path.glob("*.safetensors")]
    for file in files:
        file.rename(file.with_suffix(".away"))
    if level == 2:
        assert ".safetensors" in order(engine, WakeUp(call=2)), "it says what is missing, and sleeps on"
    for file in files:
        file.with_suffix(".away").rename(file)
    assert order(engine, WakeUp(call=3)) == ""
    for index, prompt in enumerate(PROMPTS):
        ask(engine, f"again{index}", prompt, max_tokens=40)
    assert run(engine) == {f"again{index}": greedy(model, prompt, 40) for index, prompt in enumerate(PROMPTS)}

    assert order(engine, Sleep(call=4, level=level)) == ""
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(RankDiedError, match="rank 1 of 2 was killed"):
        order(engine, WakeUp(call=5))


def order(engine: Engine, message: Sleep | WakeUp) -> str:
    """What the engine answers: an error, or nothing."""
    engine.control(message, 0.0)
    (reply,) = engine.step(0.0).replies
    return reply.error


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_say_what_one_process_says(tmp_path):
    model = a_checkpoint(tmp_path)
    assert_speaks_as(an_engine(tmp_path, blocks=14, seqs=6, budget=32, **SHARED, device="cuda", dtype="fp32"), model)


@pytest.mark.capability("DD-3")
def test_a_rank_that_dies_while_it_loads_is_told_in_a_sentence(tmp_path):
    a_checkpoint(tmp_path)
    deaths: queue.SimpleQueue[EngineFailed] = queue.SimpleQueue()
    ranks = Ranks(decide(tmp_path, OPTIONS), on_death=deaths.put)
    (rank,) = ranks_of(os.getpid())
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(ModelRefusedError, match="rank 1 of 2 was killed"):
        ranks.wait_for_weights()
    assert "rank 1 of 2 was killed" in deaths.get(timeout=60).error


def test_after_a_step_that_failed_on_one_rank_none_is_tried(tmp_path):
    """The others wait within it for a sum; one of the next step would look the same to them."""

    class OutOfMemory(Runner):
        def __init__(self) -> None: ...

        def execute(self, plan: SchedulerOutput, masks: object = None) -> StepResult:
            raise MemoryError

    a_checkpoint(tmp_path)
    ranks = Ranks(decide(tmp_path, OPTIONS), on_death=lambda _: None)
    with pytest.raises(MemoryError):
        ranks.execute(OutOfMemory(), SchedulerOutput(step=1))
    with pytest.raises(RankDiedError, match="has failed on rank 0"):
        ranks.execute(OutOfMemory(), SchedulerOutput(step=2))


def test_ranks_end_when_nothing_refers_to_them(tmp_path):
    a_checkpoint(tmp_path)
    (meeting := tmp_path / "meeting").mkdir()
    ranks = Ranks(decide(tmp_path, OPTIONS), directory=meeting, on_death=lambda _: None)
    (rank,) = ranks_of(os.getpid())
    del ranks
    assert is_gone(rank)
    assert list(meeting.iterdir()) == []


@pytest.mark.capability("DD-3")
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size is 3: a rank needs the same number of the 4 query heads"),
        ({"tensor_parallel_size": 0}, "at least 1 rank"),
        ({"tensor_parallel_size": 4, "deterministic": True}, "not possible with 4 ranks"),
    ],
    ids=str,
)
def test_what_cannot_be_shared_is_refused_before_anything_is_started(settings, sentence, tmp_path):
    a_checkpoint(tmp_path)
    before = children(os.getpid())
    with pytest.raises(ModelRefusedError, match=sentence):
        build_engine(tmp_path, **settings)
    assert children(os.getpid()) == before


def a_request(id: str, **more: Any) -> Request:
    params = SamplingParams(max_tokens=24, temperature=0.0)
    return Request(id=id, prompt_token_ids=(1, 1146, 1134, 264, 467), params=params, arrived=0.0, **more)


async def answer(client: EngineClient, id: str, **more: Any) -> list[int]:
    return [token async for output in client.generate(a_request(id, **more)) for token in output.token_ids]


async def stopped_after_its_answers(directory: Path) -> None:
    transport = await EngineProcess.launch(TINY, OPTIONS, run_directory=directory)
    (rank,) = ranks_of(transport.pid)
    client, whole = EngineClient(transport), build_engine(TINY, OPTIONS, tensor_parallel_size=1)
    await client.start()
    choice = Grammar(kind="choice", text='["yes", "no"]')
    text, same, bound = await asyncio.gather(
        answer(client, "a"), answer(client, "b"), answer(client, "c", grammar=choice)
    )
    whole.add(a_request("alone"), 0.0)
    assert text == same == run(whole)["alone"]
    assert 0 < len(bound) < len(text)
    await client.stop()  # a kill -9, and nothing else
    await until(lambda: is_gone(rank))


async def ended_by_its_rank(directory: Path) -> None:
    transport = await EngineProcess.launch(TINY, OPTIONS, run_directory=directory)
    (rank,) = ranks_of(transport.pid)
    client = EngineClient(transport)
    await client.start()
    os.kill(rank, signal.SIGKILL)  # while nobody asks for anything
    async with asyncio.timeout(60):
        await client.wait_dead()
    assert client.error == "rank 1 of 2 was killed (signal 9): out of memory, if nobody did it on purpose"
    with pytest.raises(EngineDead):
        await answer(client, "after")
    await until(lambda: is_gone(transport.pid))
    await client.stop()


@pytest.mark.capability("DD-3")
async def test_two_processes_answer_as_one_and_neither_outlives_the_other(tmp_path):
    await asyncio.gather(stopped_after_its_answers(tmp_path), ended_by_its_rank(tmp_path))
    assert list(tmp_path.iterdir()) == [], "their sockets and files are gone"
