"""A stream whose replica is lost, drained or hung continues on another one: real runtimes, cut at any byte."""

import asyncio
import random
from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio

from tests.gateway.doubles import MODEL
from tests.gateway.handovers import MESSAGES, Pair, Read, a_pair

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"size": {"enum": ["S", "M"]}, "count": {"enum": [1, 22, 333]}},
            "required": ["size", "count"],
            "additionalProperties": False,
        },
    },
}
FORECAST = {
    "type": "function",
    "function": {
        "name": "forecast",
        "parameters": {
            "type": "object",
            "properties": {"town": {"enum": ["Köln", "東京"]}},
            "required": ["town"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {"type": "object", "properties": {"name": {"enum": ["Größe 😀", "東京都"]}}, "required": ["name"]}
USAGE = {"stream_options": {"include_usage": True}}
BASE = {"messages": MESSAGES, "max_tokens": 16, "seed": 3, "temperature": 0.8} | USAGE
REQUESTS = {
    "greedy": (CHAT, BASE | {"temperature": 0, "ignore_eos": True, "return_token_ids": True}),
    "no usage asked": (CHAT, {"messages": MESSAGES, "max_tokens": 12, "temperature": 0}),
    "several answers with logprobs": (CHAT, BASE | {"n": 3, "logprobs": True, "top_logprobs": 2, "max_tokens": 9}),
    "characters of several bytes": (CHAT, BASE | {"structured_outputs": {"choice": ["a 😀 é 東京都 über ñ"]}}),
    "a schema": (
        CHAT,
        BASE | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    ),
    "tools": (CHAT, BASE | {"tools": [WEATHER, FORECAST], "tool_choice": "required", "max_tokens": 60}),
    "a named tool": (
        CHAT,
        BASE
        | {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}, "max_tokens": 60},
    ),
    "several prompts": (
        COMPLETIONS,
        {"prompt": ["Once upon a time", "A fox"], "n": 2, "max_tokens": 7, "seed": 5, "temperature": 0.9} | USAGE,
    ),
    "echo with logprobs": (
        COMPLETIONS,
        {"prompt": "Once upon", "echo": True, "logprobs": 2, "max_tokens": 8, "temperature": 0} | USAGE,
    ),
    "usage with every event": (
        CHAT,
        BASE | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "ignore_eos": True},
    ),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[Pair]:
    async with a_pair(handover_seconds=20.0) as pair:
        yield pair


async def a_request_with_a_stop(pair: Pair) -> dict:
    """A stop string out of the middle of the undisturbed text, so that it spans several tokens."""
    body = BASE | {"temperature": 0, "ignore_eos": True, "max_tokens": 24}
    whole = await pair.ask(CHAT, body)
    return body | {"stop": [whole.texts[0][24:38]]}


def comparable(name: str, read: Read) -> Read:
    """Usage that rides on each event counts up as events come; where they are cut differs. Elsewhere it comes once."""
    if name == "usage with every event":
        read.usage = read.usage[-1:]
    return read


@pytest.mark.capability("RD-4", "API-19", "API-15")
@pytest.mark.parametrize("name", [*REQUESTS, "a stop string"])
async def test_wherever_a_stream_is_cut_the_client_reads_what_it_would_have_read(pair: Pair, name: str):
    """Chaos C10: streams of a killed replica ended with an error event."""
    path, body = REQUESTS[name] if name in REQUESTS else (CHAT, await a_request_with_a_stop(pair))
    whole = comparable(name, await pair.ask(path, body))
    [size] = pair.cuts.sizes
    assert whole.ends == whole.identities == 1
    assert not whole.errors
    assert all(len(reasons) == 1 for reasons in whole.finish_reasons.values())

    draw = random.Random(name)
    positions = sorted({1, 7, size - 1, size - 14, *(draw.randrange(1, size) for _ in range(16))})
    for cut in positions:
        read = comparable(name, await pair.ask(path, body, cut))
        assert read == whole, f"cut after byte {cut} of {size}"
        assert len(pair.cuts.bodies) == 2
        assert read.call_ids == whole.call_ids

    for _ in range(3):  # and the replica that continues is lost as well
        cuts = draw.randrange(1, size), draw.randrange(1, size // 2)
        assert comparable(name, await pair.ask(path, body, *cuts)) == whole, f"cut after bytes {cuts}"


@pytest.mark.capability("RD-4")
async def test_a_stream_without_a_seed_gets_one_and_keeps_it(pair: Pair):
    # The text is drawn at random, and its events are the shorter for it: 12 of them have at least 2,400 bytes.
    await pair.ask(CHAT, {"messages": MESSAGES, "max_tokens": 12, "temperature": 1.0, "ignore_eos": True}, 1200)

    first, second = pair.cuts.bodies
    assert first["seed"] == second["seed"]
    assert "slipway_resume" not in first
    assert second["slipway_resume"]["answers"][0]["output_token_ids"]
    await pair.ask(CHAT, {"messages": MESSAGES, "max_tokens": 2, "seed": None, "temperature": 1.0})
    assert isinstance(pair.cuts.bodies[0]["seed"], int)


@pytest.mark.capability("RD-4", "API-1")
async def test_the_stock_client_sees_one_stream(pair: Pair):
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{pair.gateway.port}/v1", api_key="none", max_retries=0)
    body = {
        "model": MODEL,
        "messages": MESSAGES,
        "max_tokens": 20,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    pair.cuts.at[:] = []
    whole = await client.chat.completions.create(**body)
    pair.cuts.at[:] = [2000, 1500]
    parts = [part async for part in await client.chat.completions.create(**body, stream=True)]

    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
    assert len({part.id for part in parts}) == 1
    assert parts[-1].choices[0].finish_reason == "length"
    assert not pair.cuts.at


@pytest.mark.capability("RD-4")
async def test_an_answer_in_one_piece_that_breaks_off_is_made_again(pair: Pair):
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{pair.gateway.port}/v1", api_key="none", max_retries=0)
    pair.cuts.at[:] = [100]
    answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8)

    assert answer.choices[0].finish_reason
    assert not pair.cuts.at


@pytest.mark.capability("RD-4")
async def test_a_request_that_loses_every_replica_ends_with_an_error_event(pair: Pair):
    body = {"messages": MESSAGES, "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    read = await pair.ask(CHAT, body, *[1500] * 10)

    assert len(pair.cuts.at) == 6, "the first one, and three that continued it"
    assert "replicas were lost" in read.errors[0]["message"]
    assert not read.ends
    pair.cuts.at.clear()


@pytest.mark.capability("RD-1", "RD-2", "RD-4")
async def test_a_drain_past_its_deadline_hands_its_streams_over_and_the_ledger_says_so(pair: Pair):
    body = {"messages": MESSAGES, "max_tokens": 60, "temperature": 0, "ignore_eos": True} | USAGE
    whole = await pair.ask(CHAT, body)
    for replica in pair.replicas:
        replica.steps.hold()
        replica.steps.allow(5)
    running = asyncio.create_task(pair.ask(CHAT, body))
    leaving, staying = pair.replicas
    while not (busy := [r for r in pair.replicas if r.client.stats().running]):  # noqa: ASYNC110  engine threads
        await asyncio.sleep(0.005)
    if busy[0] is staying:
        leaving, staying = staying, leaving
    before = leaving.client.stats()
    while leaving.client.stats().generated_tokens < before.generated_tokens + 3:
        await asyncio.sleep(0.005)
        leaving.steps.allow(1)

    leaving.replica.drain(timeout_seconds=0)
    leaving.steps.resume_steps()
    staying.steps.resume_steps()
    read = await running
    after = await leaving.until(lambda stats: not stats.running)

    assert read == whole
    assert after.handed_over == before.handed_over + 1
    assert after.admitted == after.finished + after.aborted + after.handed_over
    assert "slipway_resume" in pair.cuts.bodies[-1]
    leaving.replica.undrain()


@pytest.mark.capability("API-7", "RD-4")
async def test_a_client_that_leaves_in_the_second_leg_frees_the_replica(pair: Pair):
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 2000, "ignore_eos": True, "stream": True}
    pair.cuts.at[:] = [1500]
    url = f"http://127.0.0.1:{pair.gateway.port}{CHAT}"
    async with pair.http.post(url, json=body) as response:
        while len(pair.cuts.bodies) < 2 or not any(r.client.stats().running for r in pair.replicas):
            await response.content.readany()
        before = sum(replica.client.stats().aborted for replica in pair.replicas)
        response.close()
    for replica in pair.replicas:
        await replica.until(lambda stats: not stats.running)

    assert sum(replica.client.stats().aborted for replica in pair.replicas) == before + 1
