"""What callers may rely on, with the engine in a thread and in a process of its own: the same tests for both."""

import asyncio
import gc
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
import zmq
from zmq.utils.monitor import parse_monitor_message

from slipway_runtime.engine.build import build_engine
from slipway_runtime.engine.client import Draining, EngineClient, EngineDead, OutputStream, Refused
from slipway_runtime.engine.launch import EngineNotLoadedError, EngineProcess
from slipway_runtime.engine.loop import EngineThread
from slipway_runtime.engine.options import EngineOptions
from slipway_runtime.engine.process import PULSE_SECONDS
from slipway_runtime.messages import (
    AdapterState,
    EngineStats,
    FinishReason,
    LoadAdapter,
    Request,
    ResetPrefixCache,
    SamplingParams,
    Sleep,
    UnloadAdapter,
    WakeUp,
    WarmingUp,
)
from slipway_runtime.models.adapter_files import adapter_digest

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODELS = Path(__file__).parents[3] / "models"
TINY = MODELS / "tiny"
SAILOR = MODELS / "adapters" / "sailor"
OPTIONS = EngineOptions(
    max_num_seqs=4, max_num_batched_tokens=64, kv_cache_bytes=16 << 20, threads=1, device="cpu", max_adapters=1,
    overlap=True,
)  # fmt: skip
PROMPT = (1, 1146, 1134, 264, 467)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["thread", "process"])
async def client(request: pytest.FixtureRequest) -> AsyncIterator[EngineClient]:
    if request.param == "thread":
        transport: EngineThread | EngineProcess = EngineThread(build_engine(TINY, OPTIONS))
    else:
        news: list[object] = []
        transport = await EngineProcess.launch(TINY, OPTIONS, on_progress=news.append)
        assert isinstance(news[-1], WarmingUp)
    client = EngineClient(transport)
    await client.start()
    yield client
    assert client.error == ""
    await client.stop()
    with pytest.raises(EngineDead):
        await client.call(ResetPrefixCache(call=0))


def ask(client: EngineClient, id: str, max_tokens: int = 20, prompt: tuple[int, ...] = PROMPT, **more) -> OutputStream:
    fields = {name: more.pop(name) for name in list(more) if name in Request.__struct_fields__}
    params = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, "ignore_eos": True, **more})
    return client.generate(Request(id=id, prompt_token_ids=prompt, params=params, arrived=0.0, **fields))


async def text(stream: OutputStream, index: int = 0) -> list[int]:
    return [token for output in [o async for o in stream] if output.index == index for token in output.token_ids]


async def until(client: EngineClient, condition: Callable[[EngineStats], bool]) -> EngineStats:
    async with asyncio.timeout(60):
        while not condition(stats := client.stats()):  # noqa: ASYNC110  numbers of another thread
            await asyncio.sleep(0.005)
    return stats


async def idle(client: EngineClient) -> EngineStats:
    return await until(client, lambda s: s.running == s.waiting == s.blocks_live == 0)


@pytest.mark.capability("KN-4")
async def test_the_first_request_of_a_process_waits_for_no_second_try_to_connect(monkeypatch: pytest.MonkeyPatch):
    """Of a socket that is not bound yet, another try comes 100 ms later."""
    monitors: list[zmq.Socket[bytes]] = []
    real = zmq.Socket.connect

    def connect(self: "zmq.Socket[bytes]", address: str) -> object:
        if address.startswith("ipc:"):  # a monitor is connected too
            monitors.append(self.get_monitor_socket())
        return real(self, address)

    monkeypatch.setattr(zmq.Socket, "connect", connect)
    client = EngineClient(await EngineProcess.launch(TINY, OPTIONS))
    await client.start()
    assert len(await text(ask(client, "first", 2))) == 2
    [monitor] = monitors
    happened = []
    while monitor.poll(0):
        happened.append(parse_monitor_message(monitor.recv_multipart())["event"])
    monitor.close()
    await client.stop()

    assert zmq.EVENT_CONNECTED in happened
    assert zmq.EVENT_CONNECT_RETRIED not in happened


@pytest.mark.capability("RD-9")
async def test_a_process_sends_pulses_while_it_runs_and_none_while_it_is_stopped():
    engine = await EngineProcess.launch(TINY, OPTIONS)
    client = EngineClient(engine)
    await client.start()
    pulses = 0

    def count() -> None:
        nonlocal pulses
        pulses += 1

    engine.on_pulse = count
    await until(client, lambda _: pulses > 1)
    os.kill(engine.pid, signal.SIGSTOP)
    await asyncio.sleep(0.1)  # one may be on its way
    before = pulses
    await asyncio.sleep(2 * PULSE_SECONDS)
    assert pulses == before
    os.kill(engine.pid, signal.SIGCONT)
    await until(client, lambda _: pulses > before)
    await client.stop()


async def test_the_same_text_whatever_else_runs(client):
    alone = await text(ask(client, "alone"))
    assert len(alone) == 20
    together = await asyncio.gather(*(text(ask(client, f"t{n}")) for n in range(6)))
    assert together == [alone] * 6
    stats = await idle(client)
    assert stats.schedule_seconds > 0
    assert stats.admitted == stats.finished + stats.aborted


@pytest.mark.capability("API-7", "PF-10")
async def test_closing_a_stream_ends_its_request(client):
    before = (await idle(client)).aborted
    async with ask(client, "goes", 1000) as stream:
        await anext(stream)
    stats = await until(client, lambda s: s.aborted == before + 1)
    assert (await idle(client)).blocks_live == 0
    assert stats.admitted == stats.finished + stats.aborted + stats.running + stats.waiting


async def test_a_stop_string_ends_one_answer_of_several_and_counts_as_finished(client):
    before = await idle(client)
    stream = ask(client, "several", 40, n=2, temperature=1.0)
    seen: dict[int, int] = {0: 0, 1: 0}
    ends = []
    async for output in stream:
        assert not (output.index == 0 and seen[0] >= 5), "nothing comes for an answer that was finished"
        seen[output.index] += len(output.token_ids)
        if output.index == 0 and seen[0] >= 5:
            stream.finish(0)
        if output.finish_reason is not None:
            ends.append((output.index, output.finish_reason))
    assert ends == [(1, FinishReason.LENGTH)]
    assert seen[1] == 40
    after = await idle(client)
    assert (after.aborted, after.admitted - before.admitted) == (before.aborted, after.finished - before.finished)


async def test_an_abort_and_a_deadline_end_streams_with_their_reason(client):
    stream = ask(client, "aborted", 1000)
    await anext(stream)
    client.abort("aborted", FinishReason.TIMEOUT)
    assert [o async for o in stream][-1].finish_reason is FinishReason.TIMEOUT
    late = ask(client, "late", deadline=0.0)
    assert [o.finish_reason async for o in late] == [FinishReason.TIMEOUT]
    await idle(client)


async def test_what_can_never_run_is_refused_at_once(client):
    with pytest.raises(Refused):
        ask(client, "long", prompt=(1,) * client.facts.max_model_len)


async def test_forgotten_prefixes_are_computed_again(client):
    prompt = tuple(range(100, 164))
    await text(ask(client, "first", 1, prompt))
    (again,) = [o async for o in ask(client, "again", 1, prompt)]
    assert again.cached_tokens >= 48
    await idle(client)
    assert (await client.call(ResetPrefixCache(call=0))).error == ""
    (anew,) = [o async for o in ask(client, "anew", 1, prompt)]
    assert anew.cached_tokens == 0


@pytest.mark.capability("ML-1", "ML-4", "ML-5")
async def test_adapters_load_answer_and_leave(client, tmp_path):
    digest = adapter_digest(SAILOR)
    (tmp_path / "adapter_config.json").write_text("{}")
    broken = await client.call(LoadAdapter(call=0, digest="sha256:0", path=str(tmp_path)))
    assert broken.error
    calls = (client.call(LoadAdapter(call=0, digest=digest, path=str(SAILOR))) for _ in range(2))
    assert [reply.error for reply in await asyncio.gather(*calls)] == ["", ""]
    assert {s.digest: s.state for s in client.adapters}[digest] in {AdapterState.HOST, AdapterState.SLOT}

    base, sailor = await asyncio.gather(text(ask(client, "base")), text(ask(client, "sailor", adapter=digest)))
    assert base == await text(ask(client, "base again"))
    assert sailor != base

    stream = ask(client, "long sailor", 200, adapter=digest)
    await anext(stream)
    unloading = asyncio.create_task(client.call(UnloadAdapter(call=0, digest=digest)))
    await asyncio.sleep(0)  # it is on its way, and order is kept
    refused = [o async for o in ask(client, "too late", adapter=digest)]
    assert refused[-1].finish_reason is FinishReason.ERROR
    rest = await text(stream)
    assert len(rest) == 199, "who runs with it finishes"
    assert (await asyncio.wait_for(unloading, 60)).error == ""
    assert digest not in {s.digest for s in client.adapters}
    assert (await client.call(UnloadAdapter(call=0, digest=digest))).error
    stats = await idle(client)
    assert stats.invalid_kv_blocks == 0


@pytest.mark.capability("ST-7", "PF-25")
@pytest.mark.parametrize("level", [1, 2])
async def test_after_a_sleep_it_says_the_same_and_finds_no_prefix(client, level):
    digest, prompt = adapter_digest(SAILOR), tuple(range(100, 164))
    assert (await client.call(LoadAdapter(call=0, digest=digest, path=str(SAILOR)))).error == ""
    before = [await text(ask(client, f"before-{adapter}", 8, prompt, adapter=adapter)) for adapter in ("", digest)]
    stream = ask(client, "runs", 1000)
    await anext(stream)
    assert "running" in (await client.call(Sleep(call=0))).error
    counted = client.stats()
    await stream.aclose()
    assert (await client.call(Sleep(call=0, level=level))).error == "", "who has just left is no reason to stay up"

    with pytest.raises(Draining, match="sleeps"):
        ask(client, "too early")
    assert (await client.call(WakeUp(call=0))).error == ""
    (anew,) = [o async for o in ask(client, "anew", 1, prompt)]
    assert anew.cached_tokens == 0
    after = [await text(ask(client, f"after-{adapter}", 8, prompt, adapter=adapter)) for adapter in ("", digest)]
    assert after == before
    stats = await idle(client)
    assert stats.finished == counted.finished + 3
    assert stats.admitted == stats.finished + stats.aborted
    assert (await client.call(UnloadAdapter(call=0, digest=digest))).error == ""


async def test_nothing_is_left_of_many_requests(client):
    async def some(first: int, count: int) -> int:
        for start in range(first, first + count, 20):
            streams = [ask(client, f"m{n}", 2, prompt=(n % 50 + 1, 7)) for n in range(start, start + 20)]
            for number, stream in enumerate(streams):
                if number % 5 == 0:
                    await stream.aclose()
                else:
                    await text(stream)
        await idle(client)
        gc.collect()
        return len(gc.get_objects())

    await some(0, 60)
    before = await some(60, 20)
    after = await some(80, 300)
    assert after - before < 300, "less than one object a request stays"
    assert not client._streams
    assert not client._sent
    assert not client._calls


async def test_a_model_that_cannot_be_loaded_is_told_in_a_sentence(tmp_path):
    with pytest.raises(EngineNotLoadedError, match=r"config\.json") as refused:
        await EngineProcess.launch(tmp_path, OPTIONS, run_directory=tmp_path)
    assert refused.value.trace == ""
    assert list(tmp_path.iterdir()) == [], "its sockets are gone"


@pytest.mark.capability("API-10")
async def test_a_stream_that_nobody_reads_is_paused_over_there_too(client, monkeypatch):
    whole = await text(ask(client, "read", max_tokens=90))
    monkeypatch.setattr("slipway_runtime.engine.stream.PAUSE_UNREAD", 10)
    slow = ask(client, "slow", max_tokens=90)
    await until(client, lambda stats: stats.paused == 1)
    await text(ask(client, "quick"))
    unread = slow.unread
    await text(ask(client, "another"))

    assert slow.unread == unread < 90
    assert client.stats().running == 1
    assert await text(slow) == whole
    await idle(client)
