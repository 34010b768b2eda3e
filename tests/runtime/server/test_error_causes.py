"""An error names the field that is wrong and its cause in a sentence, whichever types the field may have."""

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from slipway_runtime.models.pooling import LAST
from slipway_runtime.server.adapter_routes import LoadLora, UnloadLora
from slipway_runtime.server.embeddings import EmbeddingRequest
from slipway_runtime.server.errors import Unsupported, of_validation
from slipway_runtime.server.messages_types import CountTokensRequest, MessagesRequest
from slipway_runtime.server.openai_types import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from slipway_runtime.server.responses_types import ResponsesRequest
from slipway_runtime.server.validation_errors import first_cause
from tests.runtime.server.serving import TINY, Running, a_replica

pytestmark = pytest.mark.capability("API-8")
in_the_loop = pytest.mark.asyncio(loop_scope="module")

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
EMBEDDINGS = "/v1/embeddings"
SAYS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    COMPLETIONS: {"prompt": "Hi"},
    RESPONSES: {"input": "Hi"},
    MESSAGES: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image", "source": {}}]}


def said(content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}]}


CAUSES: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, said([{"type": "text", "text": "x"}, IMAGE]), "messages.0.content.1", "only text parts are supported"),
    (CHAT, said([{"type": "text", "text": 5}]), "messages.0.content.0.text", "expected a string, got an integer"),
    (CHAT, said([{"type": "text"}]), "messages.0.content.0.text", "required"),
    (CHAT, said(["x"]), "messages.0.content.0", "object"),
    (CHAT, said(5), "messages.0.content", "expected a string or a list of parts, got an integer"),
    (CHAT, said([{"type": "refusal", "refusal": "x"}]), "messages.0", "only an assistant's message has refusal parts"),
    (CHAT, {"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "only auto, none, required and the name"),
    (CHAT, {"tool_choice": {"type": "function"}}, "tool_choice.function", "required"),
    (
        CHAT,
        {"tool_choice": "never"},
        "tool_choice",
        "'required' or an object, got another string",
    ),
    (CHAT, {"tools": [{"type": "custom", "custom": {}}]}, "tools.0", "only functions"),
    (CHAT, {"stop": ["a", 5]}, "stop.1", "expected a string, got an integer"),
    (CHAT, {"guided_json": 5}, "guided_json", "expected an object or a string, got an integer"),
    (CHAT, {"temperature": True}, "temperature", "expected a number, got a boolean"),
    (CHAT, {"logit_bias": {"5": True}}, "logit_bias.5", "expected a number, got a boolean"),
    (CHAT, {"stop_token_ids": [True]}, "stop_token_ids.0", "expected an integer, got a "),
    (COMPLETIONS, {"prompt": ["a", 1]}, "prompt.1", "expected a string, got an integer"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt.1", "expected an integer, got a "),
    (COMPLETIONS, {"prompt": [True, False]}, "prompt.0", "expected an integer, got a "),
    (COMPLETIONS, {"prompt": [[5], [True]]}, "prompt.1.0", "expected an integer, got a "),
    # review/peer-suites.md 12e: each sentence names the culprit and all that would be right.
    (COMPLETIONS, {"prompt": 5}, "prompt", "expected a string, a list of token ids, or a list of either, got "),
    (
        COMPLETIONS,
        {"prompt": {"a": 1}},
        "prompt",
        "expected a string, a list of token ids, or a list of either, got ",
    ),
    (COMPLETIONS, {"stop": 5}, "stop", "expected a string or a list, got an "),
    (CHAT, {"stop": {"a": 1}}, "stop", "expected a string or a list, got an "),
    (CHAT, {"logit_bias": {"5": 1, "five": 1}}, "logit_bias", "are token ids, and number 2 of 2 is not one"),
    (EMBEDDINGS, {"input": 5}, "input", "expected a string, a list of token ids, or a list of either, got "),
    (COMPLETIONS, {"prompt": []}, "prompt", "is empty"),
    (RESPONSES, {"input": 5}, "input", "expected a string or a list of items, got an integer"),
    (COMPLETIONS, {"best_of": 1, "n": 2}, "best_of", "is 1, below n, which is 2"),
    (COMPLETIONS, {"best_of": 3, "n": 2}, "best_of", "above n is not supported"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0", "only text"),
    (RESPONSES, {"input": [{"type": "item_reference"}]}, "input.0", "only messages, calls"),
    (RESPONSES, {"input": [{"role": "wizard", "content": "x"}]}, "input.0.role", "'developer'"),
    (RESPONSES, {"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "only auto, none, required and the name"),
    (RESPONSES, {"top_k": True}, "top_k", "expected a number, got a boolean"),
    (MESSAGES, said([RESULT]), "messages.0.content.0.content.0", "only text blocks in the result of a tool"),
    (MESSAGES, said([{"type": "image"}]), "messages.0.content.0", "only text, tool_use, tool_result"),
    (MESSAGES, {"system": [{"type": "image"}]}, "system.0", "only text blocks"),
    (MESSAGES, {"temperature": True}, "temperature", "expected a number, got a boolean"),
    (EMBEDDINGS, {"input": []}, "input", "is empty"),
    (EMBEDDINGS, {"input": ["a", ""]}, "input", "holds an empty text"),
    (EMBEDDINGS, {"input": ["a"] * 3000}, "input", "holds 3000 texts; at most 2048"),
    (EMBEDDINGS, {"input": ["a", 1]}, "input.1", "expected a string, got an integer"),
    (EMBEDDINGS, {"input": [True]}, "input.0", "expected an integer, got a "),
    (EMBEDDINGS, {"input": [5000]}, "input", "outside the vocabulary"),
    (EMBEDDINGS, {"input": [5] * 2049}, "input", "maximum context length is 2048"),
    (EMBEDDINGS, {"input": "fox " * 200_000}, "input", "maximum context length is 2048"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica() -> AsyncIterator[Running]:
    async with a_replica() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def embedding() -> AsyncIterator[Running]:
    async with a_replica(pooling=LAST) as running:
        yield running


@in_the_loop
@pytest.mark.parametrize(("path", "fields", "param", "sentence"), CAUSES, ids=[f"{c[0]} {c[2]}" for c in CAUSES])
async def test_an_error_names_the_field_and_its_cause(
    replica: Running, embedding: Running, path: str, fields: dict[str, Any], param: str, sentence: str
):
    answer = await (embedding if path == EMBEDDINGS else replica).post(path, SAYS.get(path, {}) | fields)

    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert sentence in error["message"]
    assert param == error["param"] if path != MESSAGES else error["message"].startswith(param)


NEUTRAL: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"verbosity": "medium"}),
    (CHAT, {"a_field_of_tomorrow": None}),
    (CHAT, said([{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}])),
    (COMPLETIONS, {"best_of": 2, "n": 2}),
    (COMPLETIONS, {"best_of": 1}),
    (RESPONSES, {"truncation": "disabled"}),
    (RESPONSES, {"reasoning": {"summary": "auto"}}),
    (MESSAGES, {"system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "scope": "global"}}]}),
    (MESSAGES, {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}),
]


@in_the_loop
@pytest.mark.parametrize(("path", "fields"), NEUTRAL, ids=[f"{n[0]} {next(iter(n[1]))}" for n in NEUTRAL])
async def test_what_changes_no_answer_is_accepted(replica: Running, path: str, fields: dict[str, Any]):
    answer = await replica.post(path, SAYS[path] | fields)

    assert answer.status_code == 200, answer.text


@in_the_loop
async def test_a_text_that_fills_the_context_is_embedded(embedding: Running):
    ids = [(7 * place) % 3000 for place in range(2048)]
    whole = await embedding.post(EMBEDDINGS, {"input": ids})
    cut = await embedding.post(EMBEDDINGS, {"input": [9, *ids], "truncate_prompt_tokens": -1})
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model.model(torch.tensor([ids])).last_hidden_state[0, -1]

    assert whole.status_code == 200, whole.text
    assert whole.json()["usage"]["prompt_tokens"] == cut.json()["usage"]["prompt_tokens"] == 2048
    for answer in (whole, cut):
        vector = torch.tensor(answer.json()["data"][0]["embedding"])
        torch.testing.assert_close(vector, torch.nn.functional.normalize(expected, dim=-1), atol=5e-3, rtol=0)


def test_an_error_without_a_body_keeps_its_path():
    errors = [{"loc": ("body", "n"), "type": "int_type"}, {"loc": ("body", "m"), "type": "int_type"}]

    assert first_cause(errors, None) == (errors[0], ("n",))


BODIES = (
    ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest, CountTokensRequest, EmbeddingRequest,
    TokenizeRequest, DetokenizeRequest, LoadLora, UnloadLora,
)  # fmt: skip


@pytest.mark.parametrize("value", [5, 1.5, True, "x", [5], {"a": 1}], ids=repr)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_a_value_of_another_type_is_answered_with_field_expected_type_and_type_received(body, value):
    """review/peer-suites.md 12e: `input: 5` of Responses was answered as if only a list were accepted."""
    for field in body.honoured():
        try:
            body.model_validate({field: value})
        except Unsupported:
            continue
        except ValidationError as error:
            own = [one for one in error.errors() if one["loc"][:1] == (field,)]
            if not own or not own[0]["type"].endswith(("_type", "_parsing", "literal_error", "from_float")):
                continue
            message = of_validation(own, {field: value}).message
            assert re.fullmatch(rf"{field}(\.\w+)*: expected .+, got (an? .+|another string)", message), message
            assert "valid " not in message
