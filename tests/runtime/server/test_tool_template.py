"""A model whose template shows tools may call them, in the form of its template, strict ones only as declared."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from slipway_runtime.server.tokenizer import load_tokenizer
from tests.runtime.server.serving import TINY, Running, a_replica

pytestmark = pytest.mark.asyncio(loop_scope="module")

HERMES = (
    "{{ bos_token }}{% if tools %}<|system|>Call a tool as <tool_call>{...}</tool_call>."
    "{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% for call in message.get('tool_calls') or [] %}"
    "<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    "{{ (message['content'] or '') + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
FILES = load_tokenizer(TINY, chat_template=HERMES)
SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": ["S", "M"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["size", "count"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": " ?"},  # the tiny model would fill the rest with spaces, up to the bound
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}
ASK: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Weather?"}],
    "temperature": 0,
    "seed": 1,
    "max_tokens": 120,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica() -> AsyncIterator[Running]:
    async with a_replica(tokenizer=FILES) as running:
        yield running


async def test_an_answer_without_a_call_is_text(replica: Running):
    answer = await replica.openai.chat.completions.create(**ASK, tools=[WEATHER], tool_choice="auto")

    assert answer.choices[0].finish_reason in {"stop", "length"}
    assert answer.choices[0].message.content
    assert not answer.choices[0].message.tool_calls


@pytest.mark.capability("SO-1")
async def test_a_strict_call_that_begins_can_only_go_on_as_declared(replica: Running):
    """The tiny model calls nothing by itself, so its answer so far is given: it has just begun a call."""
    begun = "Let me see.<tool_call>"
    resume = {"answers": [{"output_token_ids": FILES.tokenizer.encode(begun, add_special_tokens=False).ids}]}
    body = ASK | {"tools": [WEATHER], "tool_choice": "auto", "parallel_tool_calls": False, "slipway_resume": resume}
    headers = {"x-slipway-token-ids": "resume"}
    answer = await replica.post("/v1/chat/completions", body, headers=headers)

    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    [call] = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert call["function"]["name"] == "weather"
    arguments = json.loads(call["function"]["arguments"])
    assert set(arguments) == {"size", "count"}
    assert arguments["size"] in {"S", "M"}

    async with replica.openai.chat.completions.with_streaming_response.create(
        **{name: value for name, value in body.items() if name != "slipway_resume"},
        stream=True,
        extra_body={"slipway_resume": resume},
        extra_headers=headers,
    ) as stream:
        events = [json.loads(line[6:]) async for line in stream.iter_lines() if line.startswith("data: {")]
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls") or []]
    assert pieces[0]["function"]["name"] == "weather"
    assert json.loads("".join(piece["function"].get("arguments") or "" for piece in pieces)) == arguments


@pytest.mark.capability("SO-1")
async def test_a_conversation_with_calls_and_their_results_goes_on(replica: Running):
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"size": "S"}'}}
    answer = await replica.openai.chat.completions.create(
        **ASK
        | {
            "messages": [
                {"role": "user", "content": "Weather?"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."},
            ],
            "max_tokens": 4,
        },
        tools=[WEATHER],
    )

    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}


@pytest.mark.capability("SO-1")
async def test_with_a_response_format_an_answer_that_begins_a_call_is_a_call(replica: Running):
    """review/api-users.md 7."""
    begun = FILES.tokenizer.encode("<tool_call>", add_special_tokens=False).ids
    body = ASK | {"tools": [WEATHER], "response_format": FORMAT}
    resumed = body | {"slipway_resume": {"answers": [{"output_token_ids": begun}]}, "parallel_tool_calls": False}

    free = await replica.post("/v1/chat/completions", body)
    called = await replica.post("/v1/chat/completions", resumed, headers={"x-slipway-token-ids": "resume"})

    [answer] = free.json()["choices"]
    said = answer["message"]
    values = [said["content"]] if said["content"] else [call["function"]["arguments"] for call in said["tool_calls"]]
    assert all(set(json.loads(value)) == {"size", "count"} for value in values)
    [call] = called.json()["choices"][0]["message"]["tool_calls"]
    assert set(json.loads(call["function"]["arguments"])) == {"size", "count"}


async def test_a_format_of_the_responses_api_leaves_functions_callable(replica: Running):
    """review/api-users.md 7."""
    text = {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}
    function = {"type": "function", **WEATHER["function"]}
    asked = {"model": "tiny", "input": "Weather?", "max_output_tokens": 120, "temperature": 0, "tools": [function]}
    both = await replica.post("/v1/responses", asked | {"text": text})
    forced = await replica.post("/v1/responses", asked | {"text": text, "tool_choice": "required"})

    assert both.status_code == 200, both.text
    assert {item["type"] for item in forced.json()["output"]} == {"function_call"}
