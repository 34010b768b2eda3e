"""Models that think answer with reasoning and content apart, whole and streamed, through handovers, in plain chat."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from slipway_api.names import HEADER_TOKEN_IDS
from slipway_api.stream_marks import REPORT, RESUME, TOKENS_MARK
from slipway_runtime.messages import Request
from slipway_runtime.server.tokenizer import load_tokenizer
from tests.runtime.server.serving import Running, a_replica
from tests.runtime.server.test_tool_template import WEATHER
from tests.runtime.server.thinking_models import DEEPSEEK, QWEN3, gpt_oss_checkpoint, saying, with_template

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.capability("API-1")]

POD = [{"role": "user", "content": "What is a pod?"}]
ASK: dict[str, Any] = {"model": "tiny", "messages": POD, "temperature": 0, "seed": 7, "max_tokens": 200}
THOUGHT = "<think>\nWhat is < a pod?\n</think>\n\nA group of containers."
CALL = '<tool_call>{"name": "weather", "arguments": {"size": "S", "count": 1}}</tool_call>'
LOOSE: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CHANNELS = (
    "<|channel|>analysis<|message|>What is a pod?<|end|><|start|>assistant"
    "<|channel|>final<|message|>A group of containers."
)
CALL_OF_GPT_OSS = (
    "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>commentary<|message|>I look it up.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"size": "S"}'
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def qwen() -> AsyncIterator[Running]:
    async with a_replica(tokenizer=with_template(QWEN3), deterministic=True) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deepseek() -> AsyncIterator[Running]:
    async with a_replica(tokenizer=with_template(DEEPSEEK)) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    folder = gpt_oss_checkpoint(tmp_path_factory.mktemp("gpt-oss") / "checkpoint")
    async with a_replica(tokenizer=load_tokenizer(folder), model_path=folder, deterministic=True) as running:
        yield running


def prompt_of(replica: Running, request: Request) -> str:
    tokenizer = replica.models[0].prompts.files.tokenizer
    return tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)


async def streamed(replica: Running, **fields: Any) -> dict[str, Any]:
    """The message that the deltas of a stream make, with the reason it ended and its usage."""
    ask = ASK | fields | {"stream": True, "stream_options": {"include_usage": True}}
    message: dict[str, Any] = {"reasoning": "", "content": "", "calls": []}
    async for chunk in await replica.openai.chat.completions.create(**ask):
        message["usage"] = chunk.usage or message.get("usage")
        for choice in chunk.choices:
            extra = choice.delta.model_extra or {}
            assert extra.get("reasoning") == extra.get("reasoning_content")
            assert not (extra.get("reasoning") and choice.delta.content)
            message["reasoning"] += extra.get("reasoning") or ""
            message["content"] += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                if call.function.name:
                    message["calls"].append([call.function.name, ""])
                message["calls"][call.index][1] += call.function.arguments
            message["finish_reason"] = choice.finish_reason or message.get("finish_reason")
    return message


async def test_thoughts_come_apart_from_the_answer(qwen: Running):
    with saying(qwen, THOUGHT):
        answer = await qwen.openai.chat.completions.create(**ASK)
        stream = await streamed(qwen)

    message = answer.choices[0].message
    assert message.content == stream["content"] == "A group of containers."
    assert message.reasoning == message.reasoning_content == stream["reasoning"] == "What is < a pod?"
    assert answer.choices[0].finish_reason == stream["finish_reason"] == "stop"
    assert answer.usage.completion_tokens_details.reasoning_tokens > 4
    assert answer.usage.completion_tokens_details.reasoning_tokens < answer.usage.completion_tokens - 4
    assert stream["usage"] == answer.usage


async def test_a_prompt_that_opens_the_tag_begins_the_thoughts(deepseek: Running):
    with saying(deepseek, "What is a pod?\n</think>\n\nA group."):
        stream = await streamed(deepseek)
    with saying(deepseek, "I do not know"):
        unfinished = await streamed(deepseek, max_tokens=3)

    assert (stream["reasoning"], stream["content"]) == ("What is a pod?", "A group.")
    assert (bool(unfinished["reasoning"]), unfinished["content"]) == (True, "")
    assert unfinished["finish_reason"] == "length"


@pytest.mark.parametrize("off", [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}])
async def test_with_thinking_switched_off_an_answer_is_content(qwen: Running, off: dict[str, Any]):
    body = off if "reasoning_effort" in off else {"extra_body": off}
    with saying(qwen, "A <think> is a tag."):
        stream = await streamed(qwen, **body)

    assert (stream["reasoning"], stream["content"]) == ("", "A <think> is a tag.")


async def test_reasoning_can_be_left_out(qwen: Running):
    with saying(qwen, THOUGHT):
        stream = await streamed(qwen, extra_body={"include_reasoning": False})

    assert (stream["reasoning"], stream["content"]) == ("", "A group of containers.")
    assert stream["usage"].completion_tokens_details.reasoning_tokens > 4


SIZES = {"type": "object", "properties": {"size": {"enum": ["S", "M"]}}, "required": ["size"]}
FORM = {
    "type": "json_schema",
    "json_schema": {"name": "size", "schema": SIZES | {"additionalProperties": False}},
}


def begun(replica: Running, text: str) -> dict[str, Any]:
    """Fields of a request whose answer has begun with this text."""
    ids = replica.models[0].prompts.files.tokenizer.encode(text, add_special_tokens=False).ids
    return {"slipway_resume": {"answers": [{"output_token_ids": ids}]}}


async def continued(replica: Running, text: str, **fields: Any) -> dict[str, Any]:
    """The choice of an answer that began with this text; the grammar alone decides what may follow."""
    body = ASK | fields | begun(replica, text)
    answer = await replica.post("/v1/chat/completions", body, headers={HEADER_TOKEN_IDS: RESUME})
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    return choice


@pytest.mark.capability("SO-1")
@pytest.mark.parametrize("model", ["deepseek", "qwen"])
async def test_a_schema_binds_what_follows_the_thought(model: str, deepseek: Running, qwen: Running):
    """review/peer-suites.md 12f. DeepSeek's prompt opens the thought, Qwen3's leaves it to the model."""
    replica = {"deepseek": deepseek, "qwen": qwen}[model]
    thought = 'Is it { "size": 7 }?\n</think>\n\n' if model == "deepseek" else "<think>\nHm.\n</think>\n\n"
    choice = await continued(replica, thought, response_format=FORM)

    assert json.loads(choice["message"]["content"])["size"] in {"S", "M"}
    assert choice["message"]["reasoning"] == ('Is it { "size": 7 }?' if model == "deepseek" else "Hm.")
    assert choice["finish_reason"] == "stop"


@pytest.mark.capability("SO-1")
async def test_a_thought_counts_against_max_tokens(deepseek: Running):
    choice = await continued(deepseek, "I wonder", response_format=FORM, max_tokens=12)

    assert choice["finish_reason"] == "length"
    assert choice["message"]["reasoning"].startswith("I wonder")
    assert not choice["message"]["content"]


@pytest.mark.capability("SO-1")
async def test_a_schema_binds_an_answer_without_thoughts_from_its_first_token(qwen: Running, gpt_oss: Running):
    prompts = []
    for replica in (qwen, gpt_oss):
        with saying(replica, "") as requests:
            stream = await streamed(replica, response_format=FORM, reasoning_effort="none")
        prompts.append(prompt_of(replica, requests[0]))

        assert json.loads(stream["content"])["size"] in {"S", "M"}
        assert stream["reasoning"] == ""
    assert prompts[0].endswith("<|assistant|><think>\n\n</think>\n\n"), "a template with a switch has it off"
    assert prompts[1].endswith("<|start|>assistant<|channel|>final<|message|>")


@pytest.mark.capability("SO-1")
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_a_forced_call_may_think_first(qwen: Running, deepseek: Running, choice: Any):
    """In the form of the model (qwen), and as a list or its arguments alone where the template shows no tools."""
    for replica, thought in ((qwen, "<think>\nWhere?\n</think>\n\n"), (deepseek, "Where?\n</think>\n\n")):
        answer = await continued(replica, thought, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False)

        [call] = answer["message"]["tool_calls"]
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"]).keys() == {"size", "count"}
        assert answer["message"]["reasoning"] == "Where?"


async def test_without_a_reasoning_parser_a_grammar_binds_the_thoughts_too(qwen: Running):
    loaded = qwen.replica.loaded
    qwen.replica.loaded = replace(loaded, reasoning_parser="none")
    try:
        with saying(qwen, "") as requests:
            stream = await streamed(qwen, response_format=FORM)
    finally:
        qwen.replica.loaded = loaded

    assert json.loads(stream["content"])["size"] in {"S", "M"}
    assert prompt_of(qwen, requests[0]).endswith("<|assistant|><think>\n\n</think>\n\n")


async def test_a_replica_may_look_for_no_reasoning(qwen: Running):
    loaded = qwen.replica.loaded
    qwen.replica.loaded = replace(loaded, reasoning_parser="none")
    try:
        with saying(qwen, THOUGHT):
            stream = await streamed(qwen)
    finally:
        qwen.replica.loaded = loaded

    assert (stream["reasoning"], stream["content"]) == ("", THOUGHT)
    assert stream["usage"].completion_tokens_details is None


async def test_tools_are_called_after_the_thoughts(qwen: Running):
    with saying(qwen, f"<think>\nI call {CALL}.\n</think>\n\n{CALL}"):
        stream = await streamed(qwen, tools=[LOOSE])

    assert stream["reasoning"] == f"I call {CALL}."
    assert stream["calls"] == [["weather", '{"size": "S", "count": 1}']]
    assert stream["content"].strip() == ""
    assert stream["finish_reason"] == "tool_calls"


async def test_each_token_has_its_logprob_beside_its_text(qwen: Running):
    ask = ASK | {"logprobs": True}
    with saying(qwen, THOUGHT):
        whole = await qwen.openai.chat.completions.create(**ask)
        stream = await qwen.openai.chat.completions.create(**ask, stream=True)
        chunks = [chunk.choices[0] async for chunk in stream if chunk.choices]

    tokens = [token.token for token in whole.choices[0].logprobs.content]
    assert "".join(tokens).startswith(THOUGHT)
    assert [token.token for chunk in chunks if chunk.logprobs for token in chunk.logprobs.content] == tokens


async def test_earlier_reasoning_goes_to_the_template(qwen: Running):
    earlier = [*POD, {"role": "assistant", "content": "A group.", "reasoning": "Hm."}, *POD]
    with saying(qwen, "Yes.") as requests:
        await qwen.openai.chat.completions.create(**ASK | {"messages": earlier})

    prompt = prompt_of(qwen, requests[0])
    assert "<think>\nHm.\n</think>\n\nA group.<|end|>" in prompt


@pytest.mark.capability("SO-1")
async def test_channels_come_apart(gpt_oss: Running):
    with saying(gpt_oss, CHANNELS):
        answer = await gpt_oss.openai.chat.completions.create(**ASK)
        stream = await streamed(gpt_oss)

    message = answer.choices[0].message
    assert message.content == stream["content"] == "A group of containers."
    assert message.reasoning == message.reasoning_content == stream["reasoning"] == "What is a pod?"
    assert answer.usage.completion_tokens_details.reasoning_tokens > 3
    assert stream["usage"] == answer.usage


@pytest.mark.capability("SO-1")
async def test_gpt_oss_calls_functions(gpt_oss: Running):
    with saying(gpt_oss, CALL_OF_GPT_OSS):
        answer = await gpt_oss.openai.chat.completions.create(**ASK, tools=[LOOSE])
        stream = await streamed(gpt_oss, tools=[LOOSE])

    [call] = answer.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"size": "S"}')
    assert stream["calls"] == [["weather", '{"size": "S"}']]
    assert stream["reasoning"] == answer.choices[0].message.reasoning == "Look."
    assert stream["content"] == answer.choices[0].message.content == "I look it up."
    assert stream["finish_reason"] == answer.choices[0].finish_reason == "tool_calls"


@pytest.mark.capability("SO-1")
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_forced_calls_of_gpt_oss_without_thoughts_are_bound(gpt_oss: Running, choice: Any):
    forced = {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False}
    with saying(gpt_oss, "") as requests:
        stream = await streamed(gpt_oss, **forced, reasoning_effort="none")

    [[name, arguments]] = stream["calls"]
    assert name == "weather"
    assert json.loads(arguments).keys() == {"size", "count"}
    prompt = prompt_of(gpt_oss, requests[0])
    header = (
        "<|channel|>final" if choice == "required" else " to=functions.weather<|channel|>commentary <|constrain|>json"
    )
    assert prompt.endswith(f"<|start|>assistant{header}<|message|>")


THOUGHT_OF_GPT_OSS = "<|channel|>analysis<|message|>Where?<|end|><|start|>assistant"


@pytest.mark.capability("SO-1")
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_a_forced_call_of_gpt_oss_may_think_first(gpt_oss: Running, choice: Any):
    """ADR 176. The model begins the call; the grammar alone decides its arguments."""
    begun = f"{THOUGHT_OF_GPT_OSS} to=functions.weather<|channel|>"
    answer = await continued(gpt_oss, begun, tools=[WEATHER], tool_choice=choice)

    [call] = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]).keys() == {"size", "count"}
    assert answer["message"]["reasoning"] == "Where?"
    assert not answer["message"]["content"]
    assert answer["finish_reason"] == ("tool_calls" if choice == "required" else "stop")


@pytest.mark.capability("SO-1")
async def test_a_schema_binds_the_final_message_of_gpt_oss_after_its_thoughts(gpt_oss: Running):
    """ADR 176."""
    answer = await continued(gpt_oss, f"{THOUGHT_OF_GPT_OSS}<|channel|>final", response_format=FORM)

    assert json.loads(answer["message"]["content"])["size"] in {"S", "M"}
    assert answer["message"]["reasoning"] == "Where?"
    assert answer["finish_reason"] == "stop"


@pytest.mark.capability("SO-1")
async def test_a_conversation_with_calls_of_gpt_oss_goes_on(gpt_oss: Running):
    with saying(gpt_oss, CALL_OF_GPT_OSS):
        answer = await gpt_oss.openai.chat.completions.create(**ASK, tools=[LOOSE])
    message = answer.choices[0].message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "Sunny."}
    with saying(gpt_oss, "<|channel|>final<|message|>Sunny.") as requests:
        answer = await gpt_oss.openai.chat.completions.create(
            **ASK | {"messages": [*POD, message, result]}, tools=[LOOSE]
        )

    assert answer.choices[0].message.content == "Sunny."
    prompt = prompt_of(gpt_oss, requests[0])
    assert (
        "<|channel|>analysis<|message|>Look.\nI look it up.<|end|>"
        '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"size": "S"}<|call|>'
    ) in prompt


@pytest.mark.capability("SO-1")
async def test_a_strict_call_of_gpt_oss_that_begins_can_only_go_on_as_declared(gpt_oss: Running):
    begun = "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
    ids = gpt_oss.models[0].prompts.files.tokenizer.encode(begun, add_special_tokens=False).ids
    body = ASK | {"tools": [WEATHER], "slipway_resume": {"answers": [{"output_token_ids": ids}]}}
    answer = await gpt_oss.post("/v1/chat/completions", body, headers={HEADER_TOKEN_IDS: RESUME})

    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    [call] = choice["message"]["tool_calls"]
    assert choice["message"]["reasoning"] == "Look."
    assert json.loads(call["function"]["arguments"]).keys() == {"size", "count"}


async def raw_stream(replica: Running, asked: str, **fields: Any) -> bytes:
    body = ASK | fields | {"stream": True, "stream_options": {"include_usage": True}}
    return (await replica.post("/v1/chat/completions", body, headers={HEADER_TOKEN_IDS: asked})).content


def said_in(events: bytes) -> dict[str, Any]:
    lines = TOKENS_MARK.sub(b"", events).split(b"\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    said: dict[str, Any] = {"reasoning": "", "content": "", "arguments": ""}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            said["reasoning"] += delta.get("reasoning", "")
            said["content"] += delta.get("content", "")
            said["arguments"] += "".join(call["function"]["arguments"] for call in delta.get("tool_calls", ()))
            said["finish_reason"] = choice["finish_reason"]
        said["usage"] = chunk["usage"] and chunk["usage"]["completion_tokens_details"]
    return said


@pytest.mark.capability("API-15")
@pytest.mark.parametrize("script", ["thoughts", "channels", "call"])
async def test_another_replica_continues_a_stream_at_any_token(qwen: Running, gpt_oss: Running, script: str):
    """The same process stands for the other replica: nothing but the request's tokens reaches it."""
    replica = qwen if script == "thoughts" else gpt_oss
    text = {"thoughts": THOUGHT, "channels": CHANNELS, "call": CALL_OF_GPT_OSS}[script]
    fields = {"tools": [LOOSE]} if script == "call" else {}
    with saying(replica, text):
        undisturbed = await raw_stream(replica, REPORT, **fields)
        first = json.loads(undisturbed.partition(b"data: ")[2].partition(b"\n")[0])
        marks = list(TOKENS_MARK.finditer(undisturbed))
        assert len(marks) > 15
        for cut in range(1, len(marks)):
            ids = [int(i) for mark in marks[:cut] for i in mark[2].split(b",") if i]
            resume = {"answers": [{"output_token_ids": ids}], "id": first["id"], "created": first["created"]}
            rest = await raw_stream(replica, RESUME, **fields, slipway_resume=resume)

            assert said_in(undisturbed[: marks[cut - 1].end()] + rest) == said_in(undisturbed), cut
