"""/v1/responses has reasoning items and /v1/messages has thinking blocks, with the stock clients, through handovers."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic
from openai.types.responses import Response

from slipway_api.names import HEADER_TOKEN_IDS
from slipway_api.stream_marks import REPORT, RESUME, TOKENS_MARK
from slipway_runtime.server.tokenizer import load_tokenizer
from tests.runtime.server.serving import Running, a_replica
from tests.runtime.server.test_reasoning_chat import CALL_OF_GPT_OSS, CHANNELS, THOUGHT, prompt_of
from tests.runtime.server.thinking_models import QWEN3, gpt_oss_checkpoint, saying, with_template

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.capability("API-18")]

RESPOND: dict[str, Any] = {"model": "tiny", "input": "What is a pod?", "max_output_tokens": 200}
FUNCTION = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}
MESSAGE: dict[str, Any] = {
    "model": "tiny", "messages": [{"role": "user", "content": "What is a pod?"}], "max_tokens": 200,
}  # fmt: skip
TOOL = {"name": "weather", "input_schema": {"type": "object"}}
THINK = {"thinking": {"type": "enabled", "budget_tokens": 1024}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def qwen() -> AsyncIterator[Running]:
    async with a_replica(tokenizer=with_template(QWEN3), deterministic=True) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    folder: Path = gpt_oss_checkpoint(tmp_path_factory.mktemp("gpt-oss") / "checkpoint")
    async with a_replica(tokenizer=load_tokenizer(folder), model_path=folder, deterministic=True) as running:
        yield running


def client_of(replica: Running) -> AsyncAnthropic:
    http = anthropic.DefaultAsyncHttpxClient(verify=False)
    return AsyncAnthropic(base_url=replica.url, api_key="none", max_retries=0, http_client=http)


async def test_a_response_begins_with_a_reasoning_item(qwen: Running):
    with saying(qwen, THOUGHT):
        answer = await qwen.openai.responses.create(**RESPOND)
        async with qwen.openai.responses.stream(**RESPOND) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()

    reasoning, message = answer.output
    assert (reasoning.type, reasoning.content[0].text, reasoning.summary) == ("reasoning", "What is < a pod?", [])
    assert message.type == "message"
    assert answer.output_text == final.output_text == "A group of containers."
    assert [item.type for item in final.output] == ["reasoning", "message"]
    assert final.output[0].content[0].text == "What is < a pod?"
    assert answer.usage.output_tokens_details.reasoning_tokens > 4
    assert final.usage.output_tokens_details == answer.usage.output_tokens_details
    kinds = [event.type for event in events]
    assert kinds[2:5] == [
        "response.output_item.added", "response.content_part.added", "response.reasoning_text.delta",
    ]  # fmt: skip
    done = kinds.index("response.reasoning_text.done")
    assert kinds[done : done + 4] == [
        "response.reasoning_text.done", "response.content_part.done", "response.output_item.done",
        "response.output_item.added",
    ]  # fmt: skip
    thoughts = [event for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(event.delta for event in thoughts) == "What is < a pod?"
    assert {event.output_index for event in thoughts} == {0}
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_logprobs_of_a_response_are_those_of_its_message(qwen: Running):
    ask = RESPOND | {"include": ["message.output_text.logprobs"]}
    with saying(qwen, THOUGHT):
        answer = await qwen.openai.responses.create(**ask)
        async with qwen.openai.responses.stream(**ask) as stream:
            final = await stream.get_final_response()

    for response in (answer, final):
        text = "".join(token.token for token in response.output[1].content[0].logprobs)
        assert "A group of containers." in text
        assert "What is" not in text


async def test_a_function_call_of_gpt_oss_and_its_reasoning_go_back_in(gpt_oss: Running):
    with saying(gpt_oss, CALL_OF_GPT_OSS):
        answer = await gpt_oss.openai.responses.create(**RESPOND, tools=[FUNCTION])
        stream = await gpt_oss.openai.responses.create(**RESPOND, tools=[FUNCTION], stream=True)
        events = [event async for event in stream]
    reasoning, message, call = answer.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
    asked = [{"role": "user", "content": "Weather?"}, *[item.model_dump() for item in answer.output], result]
    with saying(gpt_oss, "<|channel|>final<|message|>Sunny.") as requests:
        then = await gpt_oss.openai.responses.create(**RESPOND | {"input": asked}, tools=[FUNCTION])

    assert reasoning.content[0].text == "Look."
    assert message.content[0].text == "I look it up."
    assert (call.name, call.arguments) == ("weather", '{"size": "S"}')
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call.arguments
    assert len(pieces) > 1, "arguments are sent as they come"
    assert then.output_text == "Sunny."
    assert (
        "<|channel|>analysis<|message|>Look.\nI look it up.<|end|><|start|>assistant to=functions.weather"
        in prompt_of(gpt_oss, requests[0])
    )


async def test_a_message_has_thinking_blocks_only_where_they_are_asked_for(qwen: Running):
    async with client_of(qwen) as client:
        with saying(qwen, THOUGHT) as requests:
            answer = await client.messages.create(**MESSAGE, **THINK)
            async with client.messages.stream(**MESSAGE, **THINK) as stream:
                kinds = [event.type async for event in stream]
                final = await stream.get_final_message()
            adaptive = await client.messages.create(**MESSAGE, thinking={"type": "adaptive"})
            omitted = await client.messages.create(**MESSAGE, thinking={"type": "adaptive", "display": "omitted"})
        with saying(qwen, "A group of containers.") as unasked:
            plain = await client.messages.create(**MESSAGE)

    for message in (answer, final, adaptive):
        thinking, text = message.content
        assert (thinking.type, thinking.thinking) == ("thinking", "What is < a pod?")
        assert thinking.signature
        assert text.text == "A group of containers."
    assert {"thinking", "signature"} <= set(kinds)
    assert answer.usage.output_tokens == final.usage.output_tokens
    assert [block.type for block in omitted.content] == [block.type for block in plain.content] == ["text"]
    assert prompt_of(qwen, requests[0]).endswith("<|assistant|>")
    assert prompt_of(qwen, unasked[0]).endswith("<|assistant|><think>\n\n</think>\n\n")


async def test_thinking_that_cannot_be_switched_off_is_no_content(gpt_oss: Running):
    async with client_of(gpt_oss) as client:
        with saying(gpt_oss, CHANNELS):
            answer = await client.messages.create(**MESSAGE)
            async with client.messages.stream(**MESSAGE) as stream:
                final = await stream.get_final_message()

    for message in (answer, final):
        [text] = message.content
        assert text.text == "A group of containers."


async def test_a_tool_use_of_gpt_oss_and_its_thinking_go_back_in(gpt_oss: Running):
    async with client_of(gpt_oss) as client:
        with saying(gpt_oss, CALL_OF_GPT_OSS):
            async with client.messages.stream(**MESSAGE, **THINK, tools=[TOOL]) as stream:
                answer = await stream.get_final_message()
        content = [block.model_dump(exclude_none=True) for block in answer.content]
        result = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": "Sunny."}
        turns = [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
        with saying(gpt_oss, "<|channel|>final<|message|>Sunny.") as requests:
            then = await client.messages.create(
                **MESSAGE | {"messages": MESSAGE["messages"] + turns}, **THINK, tools=[TOOL]
            )

    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
    assert answer.stop_reason == "tool_use"
    assert answer.content[-1].input == {"size": "S"}
    assert then.content[0].text == "Sunny."
    assert "<|channel|>analysis<|message|>Look.\nI look it up." in prompt_of(gpt_oss, requests[0])


def events_of(stream: bytes) -> list[dict[str, Any]]:
    lines = TOKENS_MARK.sub(b"", stream).split(b"\n")
    bodies = [json.loads(line[6:]) for line in lines if line.startswith(b"data:")]
    return [{name: value for name, value in body.items() if name != "usage"} for body in bodies]


@pytest.mark.capability("API-15")
@pytest.mark.parametrize("is_call", [False, True])
async def test_another_replica_continues_a_message_event_by_event(gpt_oss: Running, is_call: bool):
    body = MESSAGE | THINK | {"seed": 7, "stream": True} | ({"tools": [TOOL]} if is_call else {})
    with saying(gpt_oss, CALL_OF_GPT_OSS if is_call else CHANNELS):
        undisturbed = (await gpt_oss.post("/v1/messages", body, headers={HEADER_TOKEN_IDS: REPORT})).content
        id = events_of(undisturbed)[0]["message"]["id"]
        marks = list(TOKENS_MARK.finditer(undisturbed))
        for cut in range(1, len(marks), 3):
            ids = [int(i) for mark in marks[:cut] for i in mark[2].split(b",") if i]
            resume = {"slipway_resume": {"answers": [{"output_token_ids": ids}], "id": id}}
            rest = (await gpt_oss.post("/v1/messages", body | resume, headers={HEADER_TOKEN_IDS: RESUME})).content

            assert events_of(undisturbed[: marks[cut - 1].end()] + rest) == events_of(undisturbed), cut


@pytest.mark.capability("API-15")
@pytest.mark.parametrize("is_call", [False, True])
async def test_another_replica_continues_a_response_with_the_same_items(gpt_oss: Running, is_call: bool):
    body = RESPOND | {"seed": 7, "stream": True} | ({"tools": [FUNCTION]} if is_call else {})
    with saying(gpt_oss, CALL_OF_GPT_OSS if is_call else CHANNELS):
        undisturbed = (await gpt_oss.post("/v1/responses", body, headers={HEADER_TOKEN_IDS: REPORT})).content
        first = events_of(undisturbed)[0]["response"]
        marks = list(TOKENS_MARK.finditer(undisturbed))
        for cut in range(1, len(marks), 3):
            ids = [int(i) for mark in marks[:cut] for i in mark[2].split(b",") if i]
            answers = [{"output_token_ids": ids}]
            resume = {"slipway_resume": {"answers": answers, "id": first["id"], "created": first["created_at"]}}
            rest = (await gpt_oss.post("/v1/responses", body | resume, headers={HEADER_TOKEN_IDS: RESUME})).content

            last = events_of(rest)[-1]["response"]
            whole = events_of(undisturbed)[-1]["response"]
            assert last["output"] == whole["output"], cut
            assert last["usage"]["output_tokens_details"] == whole["usage"]["output_tokens_details"]
            assert Response.model_validate(last).output[0].type == "reasoning"
