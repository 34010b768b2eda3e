"""The gateway in front of the real runtime with the embedded model, both as users start them."""

import asyncio
import json
import signal
from collections.abc import Callable, Iterator

import aiohttp
import openai
import pytest

from bench.servers import MODEL_NAME, Server, a_gateway, a_runtime
from slipway_api.names import HEADER_IGNORED

pytestmark = pytest.mark.timeout(180)

SECRET = "a bear called Quillington"
MESSAGES = [{"role": "user", "content": f"Tell me a story about {SECRET}."}]
GREEDY = {"model": MODEL_NAME, "messages": MESSAGES, "temperature": 0.0, "max_tokens": 24}


@pytest.fixture(scope="module")
def runtime() -> Iterator[Server]:
    with a_runtime("--revision", "r1", "--max-num-seqs", "2", "--max-num-queued-reqs", "1") as server:
        yield server


@pytest.fixture(scope="module")
def gateway(runtime: Server) -> Iterator[Server]:
    with a_gateway((MODEL_NAME, runtime.url)) as server:
        yield server


def a_client(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


async def signals_of(runtime: Server) -> dict:
    async with aiohttp.ClientSession() as session, session.get(f"{runtime.admin_url}/signals") as response:
        return await response.json()


async def signals_until(runtime: Server, holds: Callable[[dict], bool]) -> dict:
    while not holds(signals := await signals_of(runtime)):  # noqa: ASYNC110  the runtime is another process
        await asyncio.sleep(0.02)
    return signals


@pytest.mark.capability("API-1", "API-9")
async def test_chat_through_the_gateway_is_the_runtimes_own_answer(runtime: Server, gateway: Server):
    direct = await a_client(runtime).chat.completions.create(**GREEDY)
    raw = await a_client(gateway).chat.completions.with_raw_response.create(**GREEDY)
    through = raw.parse()

    assert through.choices[0].message.content
    assert through.choices == direct.choices
    assert through.usage is not None
    assert through.usage.completion_tokens == direct.usage.completion_tokens
    assert through.model == raw.headers["x-slipway-model"] == MODEL_NAME
    assert raw.headers["x-slipway-revision"] == "r1"
    tokenizer = raw.headers["x-slipway-tokenizer"]
    assert tokenizer[:12] in through.system_fingerprint
    assert "r1" in through.system_fingerprint


@pytest.mark.capability("API-27")
async def test_the_names_of_ignored_fields_reach_the_client(gateway: Server):
    """review/api-users.md 1: a field without effect is visible to the client of the gateway too."""
    raw = await a_client(gateway).chat.completions.with_raw_response.create(
        **GREEDY, extra_body={"a_field_of_tomorrow": 1}
    )

    assert raw.headers[HEADER_IGNORED] == "a_field_of_tomorrow"


@pytest.mark.capability("API-1")
async def test_completions_and_models_through_the_gateway(gateway: Server):
    client = a_client(gateway)
    completion = await client.completions.create(model=MODEL_NAME, prompt="Once upon a time", max_tokens=8)

    assert completion.choices[0].finish_reason in {"stop", "length"}
    assert [model.id for model in (await client.models.list()).data] == [MODEL_NAME]


@pytest.mark.capability("API-1", "API-2")
async def test_streamed_text_equals_the_whole_answer_and_arrives_in_pieces(gateway: Server):
    client = a_client(gateway)
    whole = await client.chat.completions.create(**GREEDY)
    stream = await client.chat.completions.create(**GREEDY, stream=True)
    pieces = [part.choices[0].delta.content or "" async for part in stream if part.choices]

    assert "".join(pieces) == whole.choices[0].message.content
    assert len([piece for piece in pieces if piece]) > 10


@pytest.mark.capability("API-2")
async def test_the_first_text_arrives_while_the_runtime_is_still_generating(runtime: Server, gateway: Server):
    stream = await a_client(gateway).chat.completions.create(
        **GREEDY | {"max_tokens": 200}, stream=True, extra_body={"ignore_eos": True}
    )
    async for part in stream:
        if part.choices and part.choices[0].delta.content:
            break

    signals = await signals_of(runtime)
    assert signals["running"] == 1, "the answer is not finished when its first text is here"
    await stream.close()
    await signals_until(runtime, lambda signals: signals["running"] == 0)


@pytest.mark.capability("API-7", "PF-10")
async def test_a_client_that_leaves_frees_its_blocks_in_the_runtime(runtime: Server, gateway: Server):
    before = await signals_until(runtime, lambda signals: signals["running"] == 0)
    stream = await a_client(gateway).chat.completions.create(
        **GREEDY | {"max_tokens": 200}, stream=True, extra_body={"ignore_eos": True}
    )
    async for _ in stream:
        break
    during = await signals_until(runtime, lambda signals: signals["running"] == 1)
    assert during["kvUsage"] > before["kvUsage"]
    await stream.close()

    after = await signals_until(runtime, lambda signals: signals["running"] == 0)
    assert after["kvUsage"] == before["kvUsage"]
    assert after["aborted"] == before["aborted"] + 1


@pytest.mark.capability("BS-4")
async def test_a_full_runtimes_429_reaches_the_client_with_its_time_to_come_back(runtime: Server, gateway: Server):
    client = a_client(gateway)
    long = GREEDY | {"max_tokens": 200, "stream": True, "extra_body": {"ignore_eos": True}}
    outcomes = await asyncio.gather(*(client.chat.completions.create(**long) for _ in range(6)), return_exceptions=True)
    refusals = [outcome for outcome in outcomes if isinstance(outcome, openai.RateLimitError)]
    streams = [outcome for outcome in outcomes if isinstance(outcome, openai.AsyncStream)]

    assert refusals
    assert len(refusals) + len(streams) == len(outcomes)
    for refusal in refusals:
        assert int(refusal.response.headers["retry-after"]) >= 1
        assert int(refusal.response.headers["retry-after-ms"]) > 0
    for stream in streams:
        await stream.close()
    await signals_until(runtime, lambda signals: signals["running"] == signals["waiting"] == 0)


async def test_the_runtimes_refusals_pass_in_its_own_words(runtime: Server, gateway: Server):
    for server in (runtime, gateway):
        with pytest.raises(openai.BadRequestError) as refused:
            await a_client(server).chat.completions.create(**GREEDY | {"temperature": 9.0})
        assert refused.value.param == "temperature" or "temperature" in str(refused.value)


async def logged(server: Server, request_id: str) -> dict:
    """The line about this request; it is written after the answer's last byte, so it may take a moment."""
    while True:
        lines = [json.loads(line) for line in server.log.read_text().splitlines() if line.endswith("}")]
        found = [line for line in lines if line.get("request_id") == request_id and line["message"] == "request"]
        if found:
            return found[0]
        await asyncio.sleep(0.05)


@pytest.mark.capability("OB-7")
async def test_gateway_and_runtime_log_one_request_under_one_id_and_without_its_text(runtime: Server, gateway: Server):
    answer = await a_client(gateway).chat.completions.create(**GREEDY, extra_headers={"X-Request-Id": "story-7"})
    ours, theirs = [await logged(server, "story-7") for server in (gateway, runtime)]
    for server in (runtime, gateway):
        text = server.log.read_text()
        assert "Quillington" not in text
        assert (answer.choices[0].message.content or "")[:40] not in text
    assert ours["model"] == MODEL_NAME
    assert ours["prompt_tokens"] == theirs["prompt_tokens"]
    assert ours["output_tokens"] == theirs["completion_tokens"]
    assert ours["finish"] == theirs["finish_reason"]


async def test_on_sigterm_the_gateway_finishes_its_streams_and_exits_with_0(runtime: Server):
    with a_gateway((MODEL_NAME, runtime.url)) as gateway:
        stream = await a_client(gateway).chat.completions.create(
            **GREEDY | {"max_tokens": 100}, stream=True, extra_body={"ignore_eos": True}
        )
        parts = [await anext(stream)]
        gateway.process.send_signal(signal.SIGTERM)
        parts += [part async for part in stream]

        assert parts[-1].choices[0].finish_reason == "length"
        assert await asyncio.to_thread(gateway.process.wait, 30) == 0
