"""No number of a client, in no field and no header, ends the engine or leaves a stream behind: each gets a 2xx or 4xx.

The numeric fields are read off the request types, so a new one is tested from its first day.
"""

import json
import math
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from slipway_runtime.models.pooling import MEAN
from slipway_runtime.server.embeddings import EmbeddingRequest
from slipway_runtime.server.messages_types import MessagesRequest
from slipway_runtime.server.openai_types import ChatRequest, CompletionRequest, DetokenizeRequest
from slipway_runtime.server.responses_types import ResponsesRequest
from tests.runtime.gateway_token import as_gateway
from tests.runtime.server.serving import Running, a_replica

in_the_loop = pytest.mark.asyncio(loop_scope="module")

MESSAGES = [{"role": "user", "content": "Hello!"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/completions": {"prompt": "Hello!", "max_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/responses": {"input": "Hello!", "max_output_tokens": 2},
    "/detokenize": {"tokens": [5]},
    "/v1/embeddings": {"input": "Hello!"},
}
KINDS: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/messages": MessagesRequest,
    "/v1/responses": ResponsesRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/embeddings": EmbeddingRequest,
}
HEADERS = ("x-slipway-deadline", "x-slipway-priority", "x-slipway-text-blocks")


def numeric_fields(kind: type[BaseModel]) -> list[str]:
    """The fields of a request type that hold a number, or may hold anything."""
    schema = kind.model_json_schema()
    named = {name: json.dumps(field) for name, field in schema["properties"].items()}
    holders = {name for name, definition in schema.get("$defs", {}).items() if _is_numeric(json.dumps(definition))}
    return [
        name
        for name, text in named.items()
        if _is_numeric(text) or any(f"$defs/{holder}" in text for holder in holders)
    ]


def _is_numeric(schema: str) -> bool:
    return '"type": "integer"' in schema or '"type": "number"' in schema


EDGES = [2**exponent + off for exponent in (7, 15, 16, 31, 32, 53, 63, 64, 128) for off in (-1, 0, 1)]
NUMBERS = st.one_of(
    st.sampled_from([number * sign for number in EDGES for sign in (1, -1)]),
    st.sampled_from([0, 1, 2, 20, 10**30, -(10**30), 10**400, 10**4000]),
    st.sampled_from([math.nan, math.inf, -math.inf, -0.0, 1e308, -1e308, 5e-324, 1e-300, 1e-46, 0.5]),
    st.integers(),
    st.floats(),
)


def shaped(number: Any) -> st.SearchStrategy[Any]:
    """The number alone, in a list, and as the key and the value of an object."""
    return st.sampled_from([number, number, number, [number], [5, number], {"5": number}, {str(number): 1}])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def generating() -> AsyncIterator[Running]:
    async with a_replica() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def embedding() -> AsyncIterator[Running]:
    async with a_replica(pooling=MEAN) as running:
        yield running


async def sent(replica: Running, path: str, body: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
    """Send the body with whatever numbers it has: httpx would refuse NaN."""
    content = json.dumps(body, default=str).encode()
    headers = {"content-type": "application/json", **headers}
    return await replica.http.post(f"{replica.url}{path}", content=content, headers=headers)


async def assert_survived(replica: Running, response: httpx.Response) -> None:
    assert 200 <= response.status_code < 300 or 400 <= response.status_code < 500 or response.status_code == 504, (
        response.text
    )
    if "json" in response.headers.get("content-type", "") and response.status_code < 300:
        json.loads(response.text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert replica.client.alive, replica.client.error
    stats = await replica.until(lambda stats: not stats.running and not stats.waiting)
    assert not replica.client._streams
    assert not replica.client._sent
    assert stats.blocks_live == 0


def of(path: str) -> Any:
    """A body of this path with one to three numeric fields of a client."""
    fields = st.dictionaries(
        st.sampled_from(numeric_fields(KINDS[path])), NUMBERS.flatmap(shaped), min_size=1, max_size=3
    )
    return fields.map(lambda given: BODIES[path] | given)


many = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


def test_the_numeric_fields_are_found():
    assert {"top_k", "seed", "logit_bias", "stop_token_ids", "n", "slipway_resume"} <= set(numeric_fields(ChatRequest))
    assert {"top_k", "seed", "priority", "max_tokens"} <= set(numeric_fields(MessagesRequest))
    assert {"prompt", "best_of", "logprobs"} <= set(numeric_fields(CompletionRequest))


@pytest.mark.capability("SE-2")
@pytest.mark.parametrize("number", [2**31, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])
@in_the_loop
async def test_a_top_k_of_any_size_is_the_whole_vocabulary_or_a_400(generating: Running, path: str, number: int):
    response = await sent(generating, path, BODIES[path] | {"top_k": number}, {})

    assert response.status_code == (200 if number < 2**63 else 400), response.text
    await assert_survived(generating, response)


@pytest.mark.capability("SE-2")
@pytest.mark.parametrize("value", ["2147483648", "1001", "-1001", str(2**64), "9" * 5000, "1" + "0" * 30, "nan", "1.5"])
@in_the_loop
async def test_a_priority_header_out_of_range_is_a_400(generating: Running, value: str):
    body = BODIES["/v1/chat/completions"]
    response = await sent(generating, "/v1/chat/completions", body, as_gateway(priority=value))

    assert response.status_code == 400
    await assert_survived(generating, response)


@pytest.mark.capability("SE-2")
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])
@given(data=st.data())
@many
@in_the_loop
async def test_no_number_ends_an_engine_that_generates(generating: Running, path: str, data: st.DataObject):
    body = data.draw(of(path))

    await assert_survived(generating, await sent(generating, path, body, {}))


@pytest.mark.capability("SE-2")
@pytest.mark.parametrize("path", ["/v1/embeddings", "/detokenize"])
@given(data=st.data())
@many
@in_the_loop
async def test_no_number_ends_an_engine_that_embeds(embedding: Running, path: str, data: st.DataObject):
    body = data.draw(of(path))

    await assert_survived(embedding, await sent(embedding, path, body, {}))


@pytest.mark.capability("SE-2")
@given(name=st.sampled_from(HEADERS), number=NUMBERS, form=st.sampled_from(["{}", "{}:{}:", "0:{}:", "{}:1:", "1_{}"]))
@many
@in_the_loop
async def test_no_number_in_a_header_ends_an_engine(generating: Running, name: str, number: Any, form: str):
    path = "/v1/chat/completions"

    value = form.replace("{}", str(number)[:4000])
    await assert_survived(generating, await sent(generating, path, BODIES[path], {name: value}))


@pytest.mark.capability("SE-2")
@given(ids=st.lists(NUMBERS, max_size=4), created=NUMBERS)
@many
@in_the_loop
async def test_no_number_of_a_resumed_answer_ends_an_engine(generating: Running, ids: list[Any], created: Any):
    path = "/v1/chat/completions"
    resume = {"answers": [{"output_token_ids": ids}], "created": created}

    body = BODIES[path] | {"slipway_resume": resume, "stream": True}
    await assert_survived(generating, await sent(generating, path, body, {"x-slipway-token-ids": "resume"}))


@in_the_loop
async def test_a_call_whose_second_prompt_cannot_be_sent_leaves_no_first_one_behind(
    generating: Running, monkeypatch: pytest.MonkeyPatch
):
    generate, sent_before = generating.client.generate, []

    def break_at_the_second(request: Any) -> Any:
        if sent_before:
            raise RuntimeError("as a defect would")
        sent_before.append(request.id)
        return generate(request)

    monkeypatch.setattr(generating.client, "generate", break_at_the_second)
    body = {"prompt": ["one", "two"], "max_tokens": 1000, "ignore_eos": True}
    failed = await generating.post("/v1/completions", body)

    assert failed.status_code == 500
    assert sent_before
    assert not generating.client._streams
    await generating.until(lambda stats: not stats.running and not stats.waiting)
