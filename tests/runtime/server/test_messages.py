"""The stock `anthropic` client works against a replica: text, tools, streams, token counts, and errors in its shape."""

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic, BadRequestError, NotFoundError

from slipway_api.names import HEADER_TOKEN_IDS
from slipway_api.stream_marks import REPORT, RESUME, TOKENS_MARK
from tests.runtime.server.serving import Running, a_replica
from tests.runtime.server.test_responses import SCHEMA
from tests.runtime.server.test_tool_template import FILES

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.capability("API-18")]

ASK: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "What is a pod?"}],
    "max_tokens": 60,
    "extra_body": {"temperature": 0},  # the client has no argument for it any more; the API has the field
}
RAW = {name: value for name, value in ASK.items() if name != "extra_body"} | {"temperature": 0}
WEATHER = {"name": "weather", "input_schema": SCHEMA, "strict": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica() -> AsyncIterator[Running]:
    """A replica whose chat template shows tools and calls."""
    async with a_replica(tokenizer=FILES, deterministic=True) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(replica: Running) -> AsyncIterator[AsyncAnthropic]:
    http = anthropic.DefaultAsyncHttpxClient(verify=False)
    async with AsyncAnthropic(base_url=replica.url, api_key="none", max_retries=0, http_client=http) as client:
        yield client


async def chat_text(replica: Running, messages: list[Any], max_tokens: int) -> str:
    answer = await replica.openai.chat.completions.create(
        model="tiny", messages=messages, temperature=0, max_tokens=max_tokens
    )
    return answer.choices[0].message.content or ""


async def test_a_message_is_answered_as_chat_answers_it(replica: Running, client: AsyncAnthropic):
    system = {"role": "system", "content": "Be brief."}
    said = await chat_text(replica, [system, {"role": "user", "content": "What is a pod?"}], 60)

    answer = await client.messages.create(**ASK, system=[{"type": "text", "text": "Be brief."}])

    assert answer.type == "message"
    assert answer.role == "assistant"
    assert [block.type for block in answer.content] == ["text"]
    assert answer.content[0].text == said
    assert answer.id.startswith("msg_")


async def test_each_end_has_its_stop_reason(client: AsyncAnthropic):
    whole = await client.messages.create(**ASK | {"max_tokens": 200})
    word = whole.content[0].text.split()[3]

    ended = await client.messages.create(**ASK | {"max_tokens": 200})
    cut = await client.messages.create(**ASK | {"max_tokens": 2})
    stopped = await client.messages.create(**ASK, stop_sequences=[word, "a", "b", "c", "d", "e"][:1])

    assert ended.stop_reason == "end_turn"
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    assert word not in stopped.content[0].text


async def test_a_stream_tells_the_same_message(client: AsyncAnthropic):
    whole = await client.messages.create(**ASK)

    async with client.messages.stream(**ASK) as stream:
        pieces = [text async for text in stream.text_stream]
        final = await stream.get_final_message()
    raw = [event async for event in await client.messages.create(**ASK, stream=True)]

    assert "".join(pieces) == whole.content[0].text == final.content[0].text
    assert len(pieces) > 3
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    kinds = [event.type for event in raw]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert raw[0].message.usage.input_tokens + (raw[0].message.usage.cache_read_input_tokens or 0) > 0


async def test_tokens_are_counted_as_the_answer_counts_them(client: AsyncAnthropic):
    prompt = {name: ASK[name] for name in ("model", "messages")}

    counted = await client.messages.count_tokens(**prompt, system="Be kind.", tools=[WEATHER])
    answer = await client.messages.create(**ASK | {"max_tokens": 1}, system="Be kind.", tools=[WEATHER])
    again = await client.messages.create(**ASK | {"max_tokens": 1}, system="Be kind.", tools=[WEATHER])

    assert counted.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    assert counted.input_tokens == again.usage.input_tokens + again.usage.cache_read_input_tokens
    assert again.usage.cache_read_input_tokens > 0, "tokens from the cache are not counted as input_tokens"


@pytest.mark.parametrize(
    "choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}]
)
async def test_a_tool_is_used(client: AsyncAnthropic, choice: Any):
    ask = ASK | {"tools": [WEATHER], "tool_choice": choice, "max_tokens": 120}

    answer = await client.messages.create(**ask)
    async with client.messages.stream(**ask) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_message()

    [use] = answer.content
    assert answer.stop_reason == "tool_use"
    assert use.name == "weather"
    assert use.input.keys() == {"size", "days"}
    assert final.content[0].input == use.input
    assert final.stop_reason == "tool_use"
    assert "input_json" in kinds


async def test_a_tool_use_and_its_result_go_back_in(replica: Running, client: AsyncAnthropic):
    call = {"id": "toolu_1", "type": "function", "function": {"name": "weather", "arguments": '{"size": "S"}'}}
    said = await chat_text(
        replica,
        [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "toolu_1", "content": "Sunny."},
            {"role": "user", "content": "So?"},
        ],
        8,
    )

    answer = await client.messages.create(
        model="tiny",
        messages=[
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "Let me see.", "cache_control": {"type": "ephemeral"}},
                    {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"size": "S"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "Sunny."}]},
                    {"type": "text", "text": "So?"},
                ],
            },
        ],
        max_tokens=8,
        extra_body={"temperature": 0},
    )

    assert answer.content[0].text == said


async def test_an_answer_goes_on_where_the_last_message_ends(client: AsyncAnthropic):
    whole = (await client.messages.create(**ASK)).content[0].text
    begun = whole[: len(whole) // 2].rstrip()
    messages = [*ASK["messages"], {"role": "assistant", "content": begun}]

    rest = await client.messages.create(**ASK | {"messages": messages})

    assert rest.content
    assert not rest.content[0].text.startswith(begun)


async def test_a_schema_binds_the_text(client: AsyncAnthropic):
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}

    answer = await client.messages.create(**ASK, output_config=config)

    assert json.loads(answer.content[0].text).keys() == {"size", "days"}


REFUSED = {
    "tools": ([{"name": "n" * 129, "input_schema": {}}], r"tools\.0\.name"),
    "messages": ([{"role": "user", "content": [{"type": "image", "source": {}}]}], "content.0: only text"),
    "output_config": ({"effort": 5}, "output_config.effort"),
    "extra_body": ({"top_k": -3}, "top_k"),
}


@pytest.mark.parametrize("field", REFUSED)
async def test_what_is_not_honoured_is_refused_in_this_apis_shape(client: AsyncAnthropic, field: str):
    value, sentence = REFUSED[field]

    with pytest.raises(BadRequestError, match=sentence) as refusal:
        await client.messages.create(**ASK | {field: value})

    assert refusal.value.body["type"] == "error"
    assert refusal.value.body["error"]["type"] == "invalid_request_error"


async def test_an_unknown_model_and_a_method_are_errors_of_this_api(replica: Running, client: AsyncAnthropic):
    with pytest.raises(NotFoundError) as refusal:
        await client.messages.create(**ASK | {"model": "other"})
    wrong_method = await replica.http.get(f"{replica.url}/v1/messages")

    assert refusal.value.body["error"]["type"] == "not_found_error"
    assert wrong_method.status_code == 405
    assert wrong_method.json()["type"] == "error"


def without_usage(events: bytes) -> list[dict[str, Any]]:
    lines = TOKENS_MARK.sub(b"", events).split(b"\n")
    bodies = [json.loads(line[6:]) for line in lines if line.startswith(b"data:")]
    return [{name: value for name, value in body.items() if name != "usage"} for body in bodies]


@pytest.mark.parametrize("uses_tool", [False, True])
async def test_another_replica_continues_a_stream_event_by_event(replica: Running, uses_tool: bool):
    tools = {"tools": [WEATHER], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    body = RAW | {"seed": 7, "stream": True} | (tools if uses_tool else {})
    undisturbed = (await replica.post("/v1/messages", body, headers={HEADER_TOKEN_IDS: REPORT})).content
    id = without_usage(undisturbed)[0]["message"]["id"]
    marks = list(TOKENS_MARK.finditer(undisturbed))

    for cut in {1, len(marks) // 2, len(marks) - 1}:
        ids = [int(i) for mark in marks[:cut] for i in mark[2].split(b",") if i]
        resume = {"slipway_resume": {"answers": [{"output_token_ids": ids}], "id": id}}
        rest = (await replica.post("/v1/messages", body | resume, headers={HEADER_TOKEN_IDS: RESUME})).content

        begun = undisturbed[: marks[cut - 1].end()]
        assert without_usage(begun + rest) == without_usage(undisturbed)


@pytest.mark.parametrize(
    ("path", "field", "stops"),
    [
        ("/v1/messages", "stop_sequences", ["a" * 1025]),
        ("/v1/messages", "stop_sequences", ["a"] * 17),
        ("/v1/responses", "stop", "a" * 1025),
        ("/v1/responses", "stop", ["a"] * 17),
    ],
)
async def test_too_many_or_too_long_stop_strings_are_a_400(replica: Running, path: str, field: str, stops: Any):
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]} if "messages" in path else {"input": "Hi"}
    refused = await replica.post(path, body | {field: stops})

    assert refused.status_code == 400
    assert field in refused.json()["error"]["message"]
