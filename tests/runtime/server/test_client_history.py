"""What stock clients and agents send by themselves is accepted: their own objects, other servers' history, limits."""

from collections.abc import AsyncIterator
from typing import Any, Literal

import anthropic
import pytest
import pytest_asyncio
from openai import BadRequestError
from pydantic import BaseModel

from tests.runtime.server.serving import Running, a_replica
from tests.runtime.server.test_tool_template import FILES

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.capability("API-1", "API-18")]

ASK = {"role": "user", "content": "Which size?"}


class Size(BaseModel):
    """The format of an answer."""

    size: Literal["S", "M"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica() -> AsyncIterator[Running]:
    """A replica whose chat template shows tools and calls."""
    async with a_replica(tokenizer=FILES) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def claude(replica: Running) -> AsyncIterator[anthropic.AsyncAnthropic]:
    http = anthropic.DefaultAsyncHttpxClient(verify=False)
    async with anthropic.AsyncAnthropic(
        base_url=replica.url, api_key="none", max_retries=0, http_client=http
    ) as client:
        yield client


async def tokens(replica: Running, *messages: Any) -> list[int]:
    """The prompt that these messages make."""
    response = await replica.post("/tokenize", {"messages": list(messages)})
    assert response.status_code == 200, response.text
    return list(response.json()["tokens"])


async def test_a_parsed_message_goes_back_in_as_it_came(replica: Running):
    client = replica.openai.chat.completions
    function = {"name": "pick", "parameters": {"type": "object", "properties": {"size": {"enum": ["S", "M"]}},
                "required": ["size"], "additionalProperties": False}, "strict": True}  # fmt: skip
    tools: Any = [{"type": "function", "function": function}]

    parsed = await client.parse(model="tiny", messages=[ASK], response_format=Size, max_tokens=40, seed=1)
    called = await client.parse(
        model="tiny", messages=[ASK], tools=tools, tool_choice="required", max_tokens=60, seed=1,
        parallel_tool_calls=False,
    )  # fmt: skip
    answer, call = parsed.choices[0].message, called.choices[0].message
    assert answer.parsed is not None
    assert call.tool_calls is not None
    assert call.tool_calls[0].function.parsed_arguments is not None
    result = {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "Taken."}
    again = await client.parse(
        model="tiny", messages=[ASK, answer, ASK, call, result], response_format=Size, max_tokens=40
    )

    assert again.choices[0].message.content


async def test_a_message_of_another_server_may_have_fields_that_are_null(replica: Running):
    plain = {"role": "assistant", "content": "S"}
    vllms = plain | {
        "refusal": None, "annotations": None, "audio": None, "function_call": None, "tool_calls": [],
        "reasoning": None, "reasoning_content": None, "a_field_of_tomorrow": None,
    }  # fmt: skip

    assert await tokens(replica, ASK, vllms, ASK) == await tokens(replica, ASK, plain, ASK)
    answer = await replica.openai.chat.completions.create(
        model="tiny", messages=[ASK, vllms, ASK], max_tokens=2, extra_body={"a_field_of_tomorrow": None}
    )
    assert answer.choices[0].message.content
    raw = await replica.openai.chat.completions.with_raw_response.create(
        model="tiny", messages=[ASK, plain | {"a_field_of_tomorrow": 1}, ASK], max_tokens=2
    )
    assert raw.headers["x-slipway-ignored"] == "messages.a_field_of_tomorrow"


async def test_reasoning_goes_back_in_under_either_name(replica: Running):
    said = {"role": "assistant", "content": "S"}

    for name in ("reasoning", "reasoning_content"):
        answer = await replica.openai.chat.completions.create(
            model="tiny", messages=[ASK, said | {name: "Small is beautiful."}, ASK], max_tokens=2
        )
        assert answer.usage is not None


async def test_a_refusal_of_the_assistant_is_text_of_its_history(replica: Running):
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}

    assert await tokens(replica, ASK, refused, ASK) == await tokens(
        replica, ASK, {"role": "assistant", "content": "No."}, ASK
    )


async def test_reasoning_items_of_an_input_are_no_error(replica: Running):
    items: list[Any] = [
        ASK,
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA", "status": "completed"},
        {"role": "assistant", "content": "S"},
        ASK,
    ]
    counted = await replica.openai.responses.input_tokens.count(model="tiny", input=items)
    without = await replica.openai.responses.input_tokens.count(model="tiny", input=[*items[:1], *items[2:]])
    answer = await replica.openai.responses.create(
        model="tiny", input=items, max_output_tokens=2, reasoning={"summary": "auto"}
    )

    assert counted.input_tokens == without.input_tokens
    assert answer.output_text


async def test_input_tokens_are_counted_with_instructions_and_tools(replica: Running):
    function: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}
    ask: dict[str, Any] = {"model": "tiny", "input": "Hello!", "instructions": "Be kind.", "tools": [function]}

    counted = await replica.openai.responses.input_tokens.count(**ask)
    answer = await replica.openai.responses.create(**ask, max_output_tokens=1)
    bare = await replica.openai.responses.input_tokens.count(model="tiny", input="Hello!")

    assert answer.usage is not None
    assert counted.input_tokens == answer.usage.input_tokens > bare.input_tokens
    with pytest.raises(BadRequestError, match="keeps no responses"):
        await replica.openai.responses.input_tokens.count(model="tiny", previous_response_id="resp_1", input="x")


async def test_max_tokens_made_for_another_model_means_as_many_as_fit(replica: Running, claude: Any):
    ask: dict[str, Any] = {"model": "tiny", "messages": [ASK], "max_tokens": 64_000}
    async with claude.messages.stream(**ask, extra_body={"ignore_eos": True}) as stream:
        message = await stream.get_final_message()

    cached = message.usage.cache_read_input_tokens or 0
    assert message.stop_reason == "max_tokens"
    assert message.usage.input_tokens + cached + message.usage.output_tokens == 2048
    with pytest.raises(BadRequestError, match="maximum context length is 2048"):  # optional, so it is meant
        await replica.openai.responses.create(model="tiny", input="Hi", max_output_tokens=64_000)


async def test_what_an_agent_sends_with_each_turn_is_answered(claude: Any):
    thought = {"type": "thinking", "thinking": "Small?", "signature": "x"}
    message = await claude.messages.create(
        model="tiny",
        max_tokens=2,
        system=[{"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        thinking={"type": "adaptive"},
        messages=[
            ASK,
            {"role": "assistant", "content": [thought, {"type": "redacted_thinking", "data": "x"},
                                              {"type": "text", "text": "S"}]},
            ASK,
        ],
        extra_body={"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
    )  # fmt: skip

    assert message.content[0].type == "text"
