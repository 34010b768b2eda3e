"""The gateway in front of an unmodified vLLM: bound answers, and streams that are cut at any byte and continue."""

import json
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio

from slipway_gateway.engine_streams import can_continue
from slipway_gateway.fleet import Fleet
from slipway_gateway.gateway import Gateway
from slipway_gateway.picker.endpoints import Endpoint, Service
from slipway_gateway.settings import GatewaySettings
from tests.agent.subjects import VLLM_START_SECONDS, beside_vllm
from tests.gateway.handovers import Cuts, Cutter

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(VLLM_START_SECONDS + 300),
    pytest.mark.capability("OP-11", "RD-4"),
]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "stream_options": {"include_usage": True}}
STORY = LONG | {"prompt": "Once upon a time"}
TALK = LONG | {"messages": [{"role": "user", "content": "Tell me a story about a fox."}]}
CONTINUED = {
    "a completion": (COMPLETIONS, STORY),
    "a completion of tokens without usage": (
        COMPLETIONS,
        {"prompt": [5, 17, 300, 41], "temperature": 0, "ignore_eos": True},
    ),
    "a chat": (CHAT, TALK),
    "a chat without usage": (CHAT, TALK | {"stream_options": None, "max_tokens": None, "max_completion_tokens": 12}),
}
BROKEN = {
    "a stop string": (COMPLETIONS, STORY | {"stop": ["\n"]}),
    "two answers": (COMPLETIONS, STORY | {"n": 2, "temperature": 0.8}),
    "a sample with the client's seed": (COMPLETIONS, STORY | {"temperature": 0.8, "seed": 7}),
    "logprobs": (CHAT, TALK | {"logprobs": True}),
    "a schema": (CHAT, TALK | {"response_format": {"type": "json_object"}}),
}
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "paint", "description": "Paints.", "parameters": SCHEMA}}
MESSAGES: Any = [{"role": "user", "content": "Which colour?"}]


@dataclass
class Read:
    """What a client reads of one stream."""

    text: str
    identities: set[tuple[Any, ...]]
    usage: list[Any]
    finish_reasons: list[str]
    errors: list[Any]
    ends: int

    @classmethod
    def of(cls, raw: bytes) -> "Read":
        read = cls("", set(), [], [], [], 0)
        assert b'token_ids":[' not in raw, "the client has not requested them"
        for event in raw.removesuffix(b"\n\n").split(b"\n\n"):
            assert event.startswith(b"data: ")
            if event == b"data: [DONE]":
                read.ends += 1
                continue
            body = json.loads(event[6:])
            if "error" in body:
                read.errors.append(body["error"])
                continue
            read.identities.add((body["id"], body["created"], body["object"]))
            if body.get("usage"):
                read.usage.append({name: body["usage"][name] for name in ("prompt_tokens", "completion_tokens")})
            for choice in body["choices"]:
                read.text += (choice.get("delta") or {}).get("content") or choice.get("text") or ""
                read.finish_reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
        return read


@dataclass
class Fleeted:
    """A gateway before two addresses of one vLLM, which cut answers."""

    gateway: Gateway
    cuts: Cuts
    http: aiohttp.ClientSession

    async def ask(self, path: str, body: dict[str, Any], *cuts: int) -> Read:
        self.cuts.at[:] = cuts
        self.cuts.sizes.clear()
        self.cuts.bodies.clear()
        url = f"http://127.0.0.1:{self.gateway.port}{path}"
        async with self.http.post(url, json={"model": "chat", "stream": True} | body) as response:
            assert response.status == 200, await response.text()
            return Read.of(await response.read())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def vllm() -> AsyncIterator[Fleeted]:
    async with AsyncExitStack() as stack:
        subject = await stack.enter_async_context(beside_vllm())
        cuts, fleet = Cuts(), Fleet()
        fleet.set_service("ns/chat", Service("ns/chat", "chat"))
        for number in range(2):
            proxy = await stack.enter_async_context(Cutter(subject.url, cuts))
            name = f"ns/chat-{number}"
            fleet.set_endpoint(name, Endpoint(name, "ns/chat", "r1", proxy.url, served_name="tiny", engine="vllm"))
        settings = GatewaySettings(host="127.0.0.1", port=0, admin_port=0, propagation_seconds=0)
        gateway = await stack.enter_async_context(Gateway(settings, fleet))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        yield Fleeted(gateway, cuts, http)


def follows_schema(text: str | None) -> None:
    found = json.loads(text or "")
    assert set(found) == {"colour", "count"}
    assert found["colour"] in ("red", "green")
    assert 0 <= found["count"] <= 9


@pytest.mark.capability("API-1")
async def test_a_schema_and_a_tool_bind_the_answers_to_a_stock_client(vllm: Fleeted):
    form: Any = {"type": "json_schema", "json_schema": {"name": "paint", "schema": SCHEMA, "strict": True}}
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{vllm.gateway.port}/v1", api_key="none", max_retries=0
    ) as client:
        create = client.chat.completions.create
        bound = await create(model="chat", messages=MESSAGES, max_tokens=80, response_format=form)
        follows_schema(bound.choices[0].message.content)

        stream = await create(model="chat", messages=MESSAGES, max_tokens=80, response_format=form, stream=True)
        parts = [part async for part in stream]
        follows_schema("".join(part.choices[0].delta.content or "" for part in parts if part.choices))

        choice: Any = {"type": "function", "function": {"name": "paint"}}
        named = await create(model="chat", messages=MESSAGES, max_tokens=80, tools=[TOOL], tool_choice=choice)
        required = await create(
            model="chat",
            messages=MESSAGES,
            max_tokens=80,
            tools=[TOOL],
            tool_choice="required",
            parallel_tool_calls=False,
        )
        for answer in (named, required):
            (call,) = answer.choices[0].message.tool_calls or []
            assert call.function.name == "paint"
            follows_schema(call.function.arguments)

        free = await create(model="chat", messages=MESSAGES, max_tokens=8, tools=[TOOL], tool_choice="auto")
        assert free.choices[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize("name", CONTINUED)
async def test_a_stream_cut_anywhere_reads_like_an_undisturbed_one(vllm: Fleeted, name: str):
    path, body = CONTINUED[name]
    whole = await vllm.ask(path, body)
    (size,) = vllm.cuts.sizes
    assert whole.text
    assert (whole.errors, whole.ends, len(whole.identities), whole.finish_reasons) == ([], 1, 1, ["length"])

    places = random.Random(name)
    for first in sorted(places.sample(range(1, size), 8)):
        read = await vllm.ask(path, body, first)
        assert (read.text, read.usage) == (whole.text, whole.usage), f"cut after {first} of {size} bytes"
        assert (read.errors, read.ends, read.finish_reasons) == ([], 1, ["length"])
        assert len(read.identities) == 1, "one stream for its client"


async def test_a_stream_is_continued_as_often_as_it_breaks(vllm: Fleeted):
    whole = await vllm.ask(COMPLETIONS, STORY)
    size = vllm.cuts.sizes[0]
    read = await vllm.ask(COMPLETIONS, STORY, size // 3, size // 4, size // 5)
    assert (read.text, read.usage, read.errors, read.ends) == (whole.text, whole.usage, [], 1)
    prompts = [body["prompt"] for body in vllm.cuts.bodies]
    assert prompts[0] == STORY["prompt"]
    assert len(prompts[1]) < len(prompts[2]) < len(prompts[3]), "each replica gets the tokens so far"


async def test_a_sampled_stream_is_continued_if_its_client_has_set_no_seed(vllm: Fleeted):
    body = STORY | {"temperature": 0.8}
    await vllm.ask(COMPLETIONS, body)
    read = await vllm.ask(COMPLETIONS, body, vllm.cuts.sizes[0] // 2)
    assert (read.errors, read.ends) == ([], 1)
    assert read.usage[0]["completion_tokens"] == STORY["max_tokens"]


@pytest.mark.parametrize("name", BROKEN)
async def test_a_stream_that_cannot_be_continued_exactly_ends_with_one_error_event(vllm: Fleeted, name: str):
    path, body = BROKEN[name]
    await vllm.ask(path, body)
    read = await vllm.ask(path, body, vllm.cuts.sizes[0] // 2)
    (error,) = read.errors
    assert "broke off" in error["message"]
    assert (error["code"], read.ends, len(vllm.cuts.bodies)) == (502, 0, 1), "no other replica was asked"


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        (COMPLETIONS, {"prompt": "a", "temperature": 0, "seed": 3}, True),
        (COMPLETIONS, {"prompt": "a", "temperature": 0.5, "seed": 3}, False),
        (COMPLETIONS, {"prompt": [1, 2], "stop": None, "echo": False, "logprobs": None}, True),
        (COMPLETIONS, {"prompt": [[1, 2]]}, False),
        (COMPLETIONS, {"prompt": ["a", "b"]}, False),
        (COMPLETIONS, {"prompt": 5}, False),
        (COMPLETIONS, {"prompt": "a", "max_tokens": "16"}, False),
        (COMPLETIONS, {"prompt": "a", "return_token_ids": True}, False),
        (COMPLETIONS, {"prompt": "a", "a_field_of_the_next_version": 1}, False),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, True),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, False),
        (CHAT, {"messages": "a"}, False),
        ("/v1/responses", {"input": "a"}, False),
    ],
)
async def test_a_request_whose_continuation_is_not_certain_is_not_continued(
    path: str, fields: dict[str, Any], expected: bool
):
    assert can_continue(path, json.dumps(fields).encode(), has_seed="seed" in fields) is expected
