"""The top-level fields of the clients' requests are each in one list: honoured, refused, or ignored and named.

Of the fields of nested objects only this is checked: none is in two lists.

review/api-users.md 1, 2, 5, 11, 16; review/peer-suites.md 1-3, 5-8.
"""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import anthropic
import pytest
import pytest_asyncio
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from typing_extensions import is_typeddict

from slipway_runtime.server.adapter_routes import LoadLora, UnloadLora
from slipway_runtime.server.bodies import RequestBody
from slipway_runtime.server.effort import effort_arguments
from slipway_runtime.server.embeddings import EmbeddingRequest
from slipway_runtime.server.fields import LONGEST_HEADER, header_of
from slipway_runtime.server.messages_types import CountTokensRequest, MessagesRequest
from slipway_runtime.server.openai_types import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from slipway_runtime.server.responses_types import ResponsesRequest
from slipway_runtime.server.tokenizer import load_tokenizer
from tests.runtime.server.serving import Running, a_replica
from tests.scripted_model import ANSWER, write_checkpoint

ASK = {"role": "user", "content": "Weather?"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
PARAMS: list[tuple[Any, type[RequestBody]]] = [
    (chat_create_params.CompletionCreateParamsNonStreaming, ChatRequest),
    (completion_create_params.CompletionCreateParamsNonStreaming, CompletionRequest),
    (embedding_create_params.EmbeddingCreateParams, EmbeddingRequest),
    (response_create_params.ResponseCreateParamsNonStreaming, ResponsesRequest),
    (message_create_params.MessageCreateParamsNonStreaming, MessagesRequest),
    (message_count_tokens_params.MessageCountTokensParams, CountTokensRequest),
    (beta_create_params.MessageCreateParamsNonStreaming, MessagesRequest),
]


def lists_of(kind: type[RequestBody], name: str) -> list[str]:
    lists = {"honoured": kind.honoured(), "refused": kind.lists.refused, "ignored": kind.lists.ignored}
    return [which for which, names in lists.items() if name in names]


@pytest.mark.capability("API-27")
@pytest.mark.parametrize(("params", "kind"), PARAMS, ids=lambda value: getattr(value, "__module__", ""))
def test_every_field_of_the_clients_is_in_exactly_one_list(params: Any, kind: type[RequestBody]):
    assert is_typeddict(params)

    places = {name: lists_of(kind, name) for name in get_type_hints(params)}

    assert {name: found for name, found in places.items() if len(found) != 1} == {}


def objects(kind: Any) -> Iterator[type[RequestBody]]:
    """The kinds of objects in a body of this kind."""
    if isinstance(kind, type) and issubclass(kind, RequestBody):
        yield kind
        for info in kind.model_fields.values():
            yield from objects(info.annotation)
    for inner in get_args(kind):
        yield from objects(inner)


@pytest.mark.parametrize("kind", list(dict.fromkeys(kind for _, kind in PARAMS)))
def test_no_field_is_in_two_lists(kind: type[RequestBody]):
    for each in objects(kind):
        names = [*each.honoured(), *each.lists.refused, *each.lists.ignored]
        assert len(names) == len(set(names)), each


@pytest.mark.parametrize(
    ("kind", "least"),
    [
        (ChatRequest, {"messages": [ASK]}),
        (CompletionRequest, {"prompt": "x"}),
        (EmbeddingRequest, {"input": "x"}),
        (ResponsesRequest, {"input": "x"}),
        (MessagesRequest, {"messages": [ASK], "max_tokens": 8}),
        (CountTokensRequest, {"messages": [ASK]}),
        (TokenizeRequest, {"prompt": "x"}),
        (DetokenizeRequest, {"tokens": [1]}),
        (LoadLora, {"lora_name": "x", "lora_path": "/x"}),
        (UnloadLora, {"lora_name": "x"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_null_field_is_an_absent_field(kind: type[RequestBody], least: dict[str, Any]):
    """review/api-users.md 16: the law holds for the body of every endpoint."""
    names = {*kind.honoured(), *kind.lists.refused, *kind.lists.ignored}

    assert kind.model_validate(dict.fromkeys(names) | least) == kind.model_validate(least)


def test_the_header_is_bounded_and_says_how_many_more():
    header = header_of({f"messages.content.field_{i:04}": False for i in range(500)})

    shown, _, rest = header.rpartition(", +")
    assert len(header) <= LONGEST_HEADER
    assert rest == f"{500 - len(shown.split(', '))} more"


@pytest.mark.parametrize(
    ("effort", "variables", "words", "expected"),
    [
        ("high", {"reasoning_effort"}, {"medium"}, {"reasoning_effort": "high"}),
        ("max", {"reasoning_effort"}, {"medium"}, {"reasoning_effort": "high"}),
        ("minimal", {"reasoning_effort"}, {"medium"}, {"reasoning_effort": "low"}),
        ("xhigh", {"reasoning_effort"}, {"high", "max"}, {"reasoning_effort": "max"}),
        ("high", {"enable_thinking"}, set(), {"enable_thinking": True}),
        ("none", {"enable_thinking", "thinking"}, set(), {"enable_thinking": False, "thinking": False}),
        ("high", set(), set(), {}),
        ("ultra", {"reasoning_effort", "enable_thinking"}, {"medium"}, {}),
    ],
)
def test_an_effort_becomes_what_the_template_has(
    effort: str, variables: set[str], words: set[str], expected: dict[str, Any]
):
    assert effort_arguments(effort, variables, words) == expected


# --- against the engine, with a model that calls a tool and then answers


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("scripted"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica(checkpoint: Path) -> AsyncIterator[Running]:
    async with a_replica(model_path=checkpoint, tokenizer=load_tokenizer(checkpoint)) as running:
        yield running


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.capability("API-27")
@pytest.mark.parametrize("stream", [False, True])
async def test_an_unknown_field_is_ignored_named_and_counted(replica: Running, stream: bool):
    extra = {"a_field_of_tomorrow": "SECRET", "SECRET words": 1, "store": True}
    answer = await replica.chat(stream=stream, **extra)
    page = (await replica.admin("/metrics")).text

    assert answer.status_code == 200
    assert answer.headers["x-slipway-ignored"] == "a_field_of_tomorrow, *, store"
    assert 'slipway:ignored_fields_total{api="chat",engine="0",field="store",model_name="tiny"}' in page
    assert 'field="other"' in page
    assert "tomorrow" not in page


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("arguments", ['{"c', "null", "[]", '"str"', "{'a':1}", {"a": 1}, None, ""])
async def test_no_call_of_the_history_ends_a_conversation(replica: Running, arguments: Any):
    call = {"id": "c1", "type": "function", "function": {"name": "get weather", "arguments": arguments}}
    history = [ASK, {"role": "assistant", "content": None, "tool_calls": [call]},
               {"role": "tool", "tool_call_id": "c1", "content": None}]  # fmt: skip

    answer = await replica.post("/v1/chat/completions", {"messages": history})

    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == ANSWER


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.capability("API-26")
async def test_what_codex_and_claude_code_send_is_answered(replica: Running):
    """The fields of requests that Codex 0.169.0 and Claude Code 2.1.197 sent, with texts of our own."""
    codex = {
        "model": "tiny", "instructions": "You are an agent.", "client_metadata": {"a": "b"}, "store": False,
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go."}]},
                  {"type": "web_search_call", "id": "ws_1", "status": "completed"}],
        "include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}, "prompt_cache_key": "k",
        "tools": [{"type": "namespace", "name": "team", "description": "A group.", "tools": [
                       {"type": "function", "name": "get_weather", "strict": False, "parameters": SCHEMA}]},
                  {"type": "web_search", "external_web_access": False}],
        "tool_choice": "auto", "parallel_tool_calls": True, "text": {"verbosity": "low"},
    }  # fmt: skip
    claude = {
        "model": "tiny", "max_tokens": 90, "output_config": {"effort": "high"}, "thinking": {"type": "adaptive"},
        "system": [{"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}}],
        "messages": [ASK, {"role": "system", "content": "Be brief."}], "metadata": {"user_id": "u"},
        "tools": [{"name": "get_weather", "input_schema": SCHEMA, "defer_loading": True},
                  {"type": "web_search_20250305", "name": "web_search"}],
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    }  # fmt: skip
    response = await replica.post("/v1/responses", codex)
    message = await replica.post("/v1/messages", claude)
    counted = await replica.post("/v1/messages/count_tokens", claude)
    [call] = response.json()["output"]

    assert (call["namespace"], call["name"], call["arguments"]) == ("team", "get_weather", '{"city": "Bern"}')
    assert {"tools.web_search", "client_metadata"} <= set(response.headers["x-slipway-ignored"].split(", "))
    assert message.json()["content"][0]["input"] == {"city": "Paris"}
    assert "output_config.effort" in message.headers["x-slipway-ignored"]
    assert counted.json()["input_tokens"] > 0
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "Sunny."}
    again = await replica.post("/v1/responses", codex | {"input": [*codex["input"], call, output]})
    assert again.json()["output"][0]["content"][0]["text"] == ANSWER
    forced = await replica.post("/v1/responses", codex | {"tool_choice": {"type": "web_search"}})
    assert forced.status_code == 400


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.capability("API-26")
async def test_the_tool_runner_of_anthropic_runs_a_loop(replica: Running):
    """review/peer-suites.md 5: the client retries without its field `thread` only after a refusal with details."""

    @anthropic.beta_async_tool
    async def get_weather(city: str) -> str:
        """Get the weather of a city."""
        return f"Sunny in {city}."

    http = anthropic.DefaultAsyncHttpxClient(verify=False)
    async with anthropic.AsyncAnthropic(base_url=replica.url, api_key="none", http_client=http) as client:
        runner = client.beta.messages.tool_runner(model="tiny", max_tokens=90, tools=[get_weather], messages=[ASK])
        last = await runner.until_done()

    assert last.content[0].type == "text"
    assert last.content[0].text == ANSWER


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("offer", ["h2c", "TLS/1.2", "websocket"])
async def test_a_request_that_offers_an_upgrade_keeps_its_body(replica: Running, offer: str):
    """review/api-users.md 11."""
    headers = {"upgrade": offer, "connection": "Upgrade, HTTP2-Settings", "http2-settings": "AAMAAABkAAQ"}

    for _ in range(2):  # the connection stays usable
        answer = await replica.chat(headers=headers)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == ANSWER


@pytest.mark.asyncio(loop_scope="module")
async def test_null_is_not_set_for_every_optional_field(replica: Running):
    for path, kind, least in (
        ("/v1/chat/completions", ChatRequest, {"messages": [ASK]}),
        ("/v1/completions", CompletionRequest, {"prompt": "x"}),
        ("/v1/responses", ResponsesRequest, {"input": "x"}),
        ("/v1/messages", MessagesRequest, {"messages": [ASK], "max_tokens": 8}),
    ):
        names = {*kind.honoured(), *kind.lists.refused, *kind.lists.ignored}
        answer = await replica.post(path, dict.fromkeys(names) | least)
        assert answer.status_code == 200, answer.text
        assert "x-slipway-ignored" not in answer.headers
