"""Requests that end early, through the client, with the engine in a thread and in a process of its own."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from slipway_runtime.engine.build import build_engine
from slipway_runtime.engine.client import EngineClient, OutputStream
from slipway_runtime.engine.launch import EngineProcess
from slipway_runtime.engine.loop import EngineThread
from slipway_runtime.engine.options import EngineOptions
from slipway_runtime.messages import EngineStats, FinishReason, Grammar, LoadAdapter, Request, SamplingParams
from slipway_runtime.models.adapter_weights import adapter_digest
from tests.runtime.engine.everything import GRAMMAR, Model, a_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

OPTIONS = EngineOptions(
    max_num_seqs=2, max_num_batched_tokens=16, kv_cache_bytes=8 << 20, threads=1, device="cpu", max_adapters=1,
    max_rank=8, overlap=True,
)  # fmt: skip
SLOW = Grammar(kind="json_schema", text=json.dumps({"enum": [f"word number {n}" for n in range(1500)]}))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return a_model(tmp_path_factory.mktemp("endings"))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["thread", "process"])
async def client(request: pytest.FixtureRequest, model: Model) -> AsyncIterator[EngineClient]:
    if request.param == "thread":
        transport: EngineThread | EngineProcess = EngineThread(build_engine(model.path, OPTIONS))
    else:
        transport = await EngineProcess.launch(model.path, OPTIONS)
    client = EngineClient(transport)
    await client.start()
    yield client
    assert client.error == "", "the table were right whenever there was nothing to do"
    await client.stop()


def ask(client: EngineClient, id: str, tokens: int = 4, **fields) -> OutputStream:
    params = SamplingParams(max_tokens=fields.pop("max_tokens", 400), temperature=0.0, ignore_eos=True)
    prompt = tuple((len(id) * 100 + n) % 3000 + 3 for n in range(tokens))
    return client.generate(Request(id=id, prompt_token_ids=prompt, params=params, arrived=0.0, **fields))


async def until(client: EngineClient, condition: Callable[[EngineStats], bool]) -> EngineStats:
    async with asyncio.timeout(60):
        while not condition(stats := client.stats()):  # noqa: ASYNC110  numbers of another thread
            await asyncio.sleep(0.002)
    return stats


async def bring(client: EngineClient, state: str, folder: Path) -> tuple[OutputStream, asyncio.Task | None]:
    """A request in this state, or on its way through it: the engine does not wait for us."""
    match state:
        case "on its way":
            return ask(client, "x"), None
        case "waiting":
            return ask(client, "x"), None
        case "in its prompt":
            stream = ask(client, "x", tokens=480)
            await until(client, lambda stats: stats.running == 1)
            return stream, None
        case "sampled" | "several":
            stream = ask(client, "x", n=3 if state == "several" else 1)
            await anext(stream)
            return stream, None
        case "bound":
            return ask(client, "x", grammar=GRAMMAR), None
        case "compiling":
            return ask(client, "x", grammar=SLOW), None
        case "its adapter is read":
            digest = adapter_digest(folder)
            loading = asyncio.create_task(client.call(LoadAdapter(call=0, digest=digest, path=str(folder))))
            await asyncio.sleep(0)
            return ask(client, "x", adapter=digest), loading
    raise AssertionError(state)


STATES = ["on its way", "waiting", "in its prompt", "sampled", "several", "bound", "compiling", "its adapter is read"]


@pytest.mark.capability("API-7", "PF-10")
@pytest.mark.parametrize("how", ["aborted", "closed", "finished"])
@pytest.mark.parametrize("state", STATES)
async def test_what_ends_early_is_told_once_and_counted_once(client: EngineClient, model: Model, state: str, how: str):
    before = client.stats()
    others = [ask(client, f"other {n}", max_tokens=12) for n in range(2)] if state == "waiting" else []
    stream, loading = await bring(client, state, model.adapters[0])
    answers = 3 if state == "several" else 1
    if how == "aborted":
        client.abort("x", FinishReason.CANCELLED)
        told = [output async for output in stream if output.finish_reason is not None]
        assert [output.finish_reason for output in told] == [FinishReason.CANCELLED] * answers
    elif how == "closed":
        await stream.aclose()
    else:
        stream.finish()
    assert [output async for output in stream] == []

    texts = [[token for output in [o async for o in other] for token in output.token_ids] for other in others]
    assert [len(text) for text in texts] == [12] * len(others)
    if loading is not None:
        assert (await loading).error == ""
    after = await until(client, lambda stats: stats.running == stats.waiting == stats.blocks_live == 0)
    finished, aborted = after.finished - before.finished, after.aborted - before.aborted
    assert after.admitted - before.admitted == finished + aborted == answers + len(others)
    assert aborted == (0 if how == "finished" else answers)
    assert not client._streams
