"""The stock `openai` client's responses API works against a replica: text, calls, schemas, streams, and refusals."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from openai import BadRequestError, NotFoundError
from openai.types.responses import Response

from slipway_api.names import HEADER_TOKEN_IDS
from slipway_api.stream_marks import REPORT, RESUME, TOKENS_MARK
from tests.runtime.server.serving import Running, a_replica
from tests.runtime.server.test_tool_template import FILES

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.capability("API-18")]

ASK: dict[str, Any] = {"model": "tiny", "input": "What is a pod?", "temperature": 0, "max_output_tokens": 60}
SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": ["S", "M"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["size", "days"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": " ?"},
}
WEATHER = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica() -> AsyncIterator[Running]:
    async with a_replica(deterministic=True) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def with_tools() -> AsyncIterator[Running]:
    """A replica whose chat template shows tools and calls."""
    async with a_replica(tokenizer=FILES) as running:
        yield running


async def chat_text(replica: Running, messages: list[Any], max_tokens: int) -> str:
    answer = await replica.openai.chat.completions.create(
        model="tiny", messages=messages, temperature=0, max_tokens=max_tokens
    )
    return answer.choices[0].message.content or ""


async def test_an_input_is_answered_as_chat_answers_it(replica: Running):
    said = await chat_text(replica, [{"role": "user", "content": "What is a pod?"}], 60)

    answer = await replica.openai.responses.create(**ASK)

    assert answer.output_text == said
    assert answer.status == "completed"
    assert answer.id.startswith("resp_")
    assert answer.model == "tiny"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


async def test_a_response_has_the_required_fields_of_open_responses(replica: Running):
    """review/peer-suites.md 9"""
    body = (await replica.post("/v1/responses", ASK)).json()

    assert body["created_at"] <= body["completed_at"]
    assert (body["presence_penalty"], body["frequency_penalty"]) == (0.0, 0.0)


async def test_instructions_and_items_are_the_conversation(replica: Running):
    earlier = (await replica.openai.responses.create(**ASK | {"input": "Hello!"})).output
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": earlier[0].content[0].text},
        {"role": "user", "content": "What is a node?"},
    ]
    said = await chat_text(replica, messages, 30)

    answer = await replica.openai.responses.create(
        model="tiny",
        instructions="Be brief.",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "Hello!"}]},
            *[item.model_dump() for item in earlier],  # an output is sent back as it came
            {"role": "user", "content": "What is a node?"},
        ],
        temperature=0,
        max_output_tokens=30,
    )

    assert answer.output_text == said


async def test_an_answer_that_is_cut_off_says_why(replica: Running):
    answer = await replica.openai.responses.create(**ASK | {"max_output_tokens": 3})

    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[-1].status == "incomplete"


async def test_a_stream_tells_the_same_answer_event_by_event(replica: Running):
    whole = await replica.openai.responses.create(**ASK)

    async with replica.openai.responses.stream(**ASK) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()

    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert final.output_text == whole.output_text
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert len({event.response.id for event in events if hasattr(event, "response")}) == 1


async def test_a_schema_binds_the_text(replica: Running):
    form = {"type": "json_schema", "name": "size", "schema": SCHEMA, "strict": True}

    answer = await replica.openai.responses.create(**ASK, text={"format": form})

    assert json.loads(answer.output_text).keys() == {"size", "days"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
async def test_a_call_is_an_item_of_its_own(replica: Running, choice: Any):
    ask = ASK | {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False}

    answer = await replica.openai.responses.create(**ask)
    stream = await replica.openai.responses.create(**ask, stream=True)
    events = [event async for event in stream]

    [call] = answer.output
    assert call.type == "function_call"
    assert call.name == "weather"
    assert json.loads(call.arguments).keys() == {"size", "days"}
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(pieces) > 1
    assert "".join(pieces) == call.arguments
    [done] = [event.item for event in events if event.type == "response.output_item.done"]
    [added] = [event.item for event in events if event.type == "response.output_item.added"]
    assert (added.call_id, added.id) == (done.call_id, done.id)
    assert events[-1].response.output == [done]


async def test_a_call_and_its_output_go_back_in(with_tools: Running):
    items = [
        {"role": "user", "content": "Weather?"},
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"size": "S"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "Sunny."},
    ]
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"size": "S"}'}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."},
    ]

    answer = await with_tools.openai.responses.create(**ASK | {"input": items, "max_output_tokens": 8})

    assert answer.output_text == await chat_text(with_tools, messages, 8)


async def test_logprobs_come_with_the_text_where_they_are_asked_for(replica: Running):
    answer = await replica.openai.responses.create(**ASK, include=["message.output_text.logprobs"], top_logprobs=2)

    part = answer.output[0].content[0]
    assert "".join(token.token for token in part.logprobs).startswith(part.text)
    assert all(len(token.top_logprobs) == 2 for token in part.logprobs)


REFUSED = {
    "previous_response_id": ("resp_1", "keeps no responses"),
    "background": (True, "background"),
    "tool_choice": ({"type": "web_search"}, "function"),
    "max_output_tokens": (10**9, "max_output_tokens"),
    "input": ([{"type": "item_reference", "id": "msg_1"}], "input.0: only messages"),
}


@pytest.mark.parametrize("field", REFUSED)
async def test_what_is_not_honoured_is_refused_by_its_name(replica: Running, field: str):
    value, sentence = REFUSED[field]

    with pytest.raises(BadRequestError, match=sentence) as refusal:
        await replica.openai.responses.create(**ASK | {field: value})

    assert str(refusal.value.param).startswith(field)


async def test_no_response_can_be_fetched_later(replica: Running):
    answer = await replica.openai.responses.create(**ASK | {"max_output_tokens": 1})

    with pytest.raises(NotFoundError, match="keeps no responses"):
        await replica.openai.responses.retrieve(answer.id)


async def raw_stream(replica: Running, body: dict[str, Any], asked: str) -> bytes:
    headers = {HEADER_TOKEN_IDS: asked}
    return (await replica.post("/v1/responses", body | {"stream": True}, headers=headers)).content


def last_response(events: bytes) -> dict[str, Any]:
    last = TOKENS_MARK.sub(b"", events).rstrip().rsplit(b"\n\n", 1)[-1]
    body = json.loads(last.partition(b"\ndata: ")[2])
    return {name: value for name, value in body["response"].items() if name not in ("usage", "completed_at")}


@pytest.mark.parametrize("calls", [False, True])
async def test_another_replica_continues_a_stream_with_the_same_response(replica: Running, calls: bool):
    tools = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    body = ASK | {"seed": 7} | (tools if calls else {})
    undisturbed = await raw_stream(replica, body, REPORT)
    first = json.loads(undisturbed.partition(b"data: ")[2].partition(b"\n")[0])["response"]
    marks = list(TOKENS_MARK.finditer(undisturbed))

    for cut in {1, len(marks) // 2, len(marks) - 1, len(marks)}:
        ids = [int(i) for mark in marks[:cut] for i in mark[2].split(b",") if i]
        answers = [{"output_token_ids": ids, "finished": cut == len(marks)}]
        resume = {"answers": answers, "id": first["id"], "created": first["created_at"]}
        rest = await raw_stream(replica, body | {"slipway_resume": resume}, RESUME)

        begun = undisturbed[: marks[cut - 1].end()]
        deltas = [
            json.loads(line[6:]) for line in TOKENS_MARK.sub(b"", begun + rest).split(b"\n") if line[:5] == b"data:"
        ]
        numbers = [event["sequence_number"] for event in deltas]
        assert last_response(rest) == last_response(undisturbed)
        assert numbers == sorted(set(numbers)), "sequence numbers only grow"
        said = "".join(event["delta"] for event in deltas if event["type"].endswith(".delta"))
        assert said in json.dumps(last_response(rest)["output"][0]).replace('\\"', '"')
        assert Response.model_validate(deltas[-1]["response"]).status == "completed"
