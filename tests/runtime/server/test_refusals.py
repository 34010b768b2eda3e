"""What cannot be honoured is refused with a sentence in OpenAI's shape, and nothing of a prompt comes back."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from starlette.requests import Request

from slipway_runtime.server.request_context import LONGEST_DEADLINE_SECONDS, Caller
from tests.runtime.server.serving import Running, a_replica

pytestmark = pytest.mark.asyncio(loop_scope="module")

MESSAGES = [{"role": "user", "content": "SECRET words"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica() -> AsyncIterator[Running]:
    async with a_replica(max_body_bytes=4096) as running:
        yield running


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == response.status_code
    assert "SECRET" not in response.text
    return error


CHAT_FIELDS = [
    ("temperature", 2.1),
    ("temperature", -0.1),
    ("temperature", "hot"),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_k", -2),
    ("min_p", 2),
    ("repetition_penalty", 0),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("max_tokens", 0),
    ("max_tokens", 1.5),
    ("max_completion_tokens", 0),
    ("max_tokens", 100_000),
    ("min_tokens", 5_000),
    ("seed", 2**63),
    ("stop", ""),
    ("stop", [str(i) for i in range(17)]),
    ("stop", "a" * 1025),
    ("stop", ["b", "a" * 1025]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [3072]),
    ("n", 0),
    ("n", 5),
    ("n", 129),
    ("logprobs", 3),
    ("top_logprobs", 3),
    ("logit_bias", {"5": 101.0}),
    ("logit_bias", {"5": "NaN"}),
    ("logit_bias", {"3072": 1.0}),
    ("logit_bias", {"five": 1.0}),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tool_choice", "required"),
    ("functions", [{"name": "f"}]),
    ("response_format", {"type": "yaml"}),
    ("response_format", {"type": "json_schema", "json_schema": {}}),
    ("response_format", {"type": "json_schema"}),
    ("modalities", ["audio"]),
    ("audio", {"voice": "x"}),
    ("web_search_options", {}),
    ("stream_options", {"include_usage": True}),
    ("messages", []),
    ("messages", "SECRET words"),
    ("messages.0.role", [{"role": "wizard", "content": "SECRET"}]),
    ("messages.0.name", [{"role": "user", "content": "SECRET", "name": {"x": 1}}]),
    ("typical_p", 0.5),
    ("best_of", 2),
]


@pytest.mark.parametrize(("param", "value"), CHAT_FIELDS, ids=[f"{p}={str(v)[:20]}" for p, v in CHAT_FIELDS])
async def test_a_field_that_is_not_honoured_is_a_400_that_names_it(replica: Running, param: str, value: object):
    before = replica.client.stats().admitted

    response = await replica.post(
        "/v1/chat/completions", {"model": "tiny", "messages": MESSAGES} | {param.split(".")[0]: value}
    )

    assert response.status_code == 400, response.text
    error = error_of(response)
    named = error["param"]
    assert named is not None
    assert named.startswith(param) or (param, named) == ("max_completion_tokens", "max_tokens")
    assert replica.client.stats().admitted == before


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("max_tokens", 0),
        ("best_of", 3),
        ("suffix", "end"),
        ("logprobs", 21),
        ("logprobs", True),
        ("prompt", []),
        ("prompt", ""),
        ("prompt", ["one", ""]),
        ("prompt", ["one"] * 257),
        ("prompt", [5000]),
        ("prompt", [-1]),
        ("tools", [{"type": "function"}]),
    ],
)
async def test_completions_refuse_what_they_do_not_honour(replica: Running, param: str, value: object):
    body = {"model": "tiny", "prompt": "SECRET", "add_special_tokens": False} | {param: value}
    response = await replica.post("/v1/completions", body)

    assert response.status_code == 400, response.text
    assert str(error_of(response)["param"]).startswith(param)


async def test_fields_that_ask_for_what_happens_anyway_are_welcome(replica: Running):
    neutral = {
        "n": 1,
        "logprobs": False,
        "top_logprobs": 0,
        "logit_bias": {},
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "parallel_tool_calls": True,
        "modalities": ["text"],
        "service_tier": "auto",
        "store": False,
        "user": "someone",
        "metadata": {"k": "v"},
        "stop": None,
        "seed": None,
        "max_tokens": 1,
        "stream": None,
        "top_k": -1,
    }
    response = await replica.post("/v1/chat/completions", {"model": "tiny", "messages": MESSAGES} | neutral)

    assert response.status_code == 200, response.text


async def test_messages_may_come_in_parts_which_are_lines_and_from_a_developer(replica: Running):
    parts = [{"type": "text", "text": "Hello!"}, {"type": "text", "text": "Who are you?"}]
    whole = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!\nWho are you?"}]
    split = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]

    one, other = [(await replica.post("/tokenize", {"messages": m})).json()["tokens"] for m in (whole, split)]

    assert one == other


@pytest.mark.parametrize(
    ("content", "headers"),
    [
        (b"{not json", {"content-type": "application/json"}),
        (b"", {"content-type": "application/json"}),
        (b"[1]", {"content-type": "application/json"}),
        (b'{"messages": []}', {"content-type": "text/plain"}),
        (b'{"temperature": NaN, "messages": [{"role": "user", "content": "x"}]}', {"content-type": "application/json"}),
        (b"\xff\xfe", {"content-type": "application/json"}),
    ],
)
async def test_a_body_that_is_no_request_is_a_400(replica: Running, content: bytes, headers: dict[str, str]):
    response = await replica.http.post(f"{replica.url}/v1/chat/completions", content=content, headers=headers)

    assert response.status_code == 400, response.text
    error_of(response)


async def test_unknown_paths_and_methods_answer_in_the_same_shape(replica: Running):
    nothing = await replica.http.get(f"{replica.url}/v1/nothing/{'x' * 5000}")
    wrong = await replica.http.get(f"{replica.url}/v1/chat/completions")

    assert nothing.status_code == 404
    assert len(error_of(nothing)["message"]) < 200
    assert wrong.status_code == 405
    error_of(wrong)


# What vLLM routes for other models and hosts, beyond the endpoints that are here too.
VLLM_PATHS = [
    "/classify", "/pooling", "/invocations", "/ping",
    "/v1/audio/transcriptions", "/v1/audio/translations",
]  # fmt: skip


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_every_endpoint_of_vllm_that_is_not_here_is_a_404_that_names_it(replica: Running, method: str):
    for path in VLLM_PATHS:
        other = await replica.http.request(method, f"{replica.url}{path}", json={"input": "x"})
        assert other.status_code == 404, path
        assert "not served here" in error_of(other)["message"], path
    embeddings = await replica.post("/v1/embeddings", {"input": "x"})  # of a service that generates text
    assert embeddings.status_code == 404
    error_of(embeddings)


async def test_a_body_beyond_the_limit_is_a_413_however_it_is_sent(replica: Running):
    body = json.dumps({"messages": [{"role": "user", "content": "SECRET " * 100_000}]}).encode()

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 65536):
            yield body[start : start + 65536]

    url, headers = f"{replica.url}/v1/chat/completions", {"content-type": "application/json"}
    at_once = await replica.http.post(url, content=body, headers=headers)
    chunked = await replica.http.post(url, content=chunks(), headers=headers)

    assert [at_once.status_code, chunked.status_code] == [413, 413]
    error_of(at_once)
    error_of(chunked)


async def test_senseless_internal_headers_are_a_400(replica: Running):
    response = await replica.chat(headers={"x-slipway-deadline": "soon"})

    assert response.status_code == 400
    error_of(response)


@pytest.mark.capability("API-4")
async def test_a_request_whose_deadline_has_passed_is_a_504(replica: Running):
    response = await replica.chat(headers={"x-slipway-deadline": "0"})

    assert response.status_code == 504
    error_of(response)


@pytest.mark.capability("API-4", "API-3")
async def test_a_deadline_ends_an_answer(replica: Running):
    deadline = {"x-slipway-deadline": "1.0"}
    whole = await replica.chat("Tell me a long story.", headers=deadline, ignore_eos=True, max_tokens=1900)
    async with replica.streaming(headers=deadline, ignore_eos=True, max_tokens=1900) as stream:
        lines = [line async for line in stream.aiter_lines() if line]

    assert whole.status_code == 504
    error_of(whole)
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2][6:])["choices"][0]["finish_reason"] == "timeout"
    await replica.until(lambda stats: stats.blocks_live == 0)


@pytest.mark.capability("API-8")
async def test_max_output_tokens_caps_every_answer():
    async with a_replica(max_output_tokens=5) as capped:
        answer = await capped.chat(max_tokens=50, ignore_eos=True)

    assert answer.json()["usage"]["completion_tokens"] == 5
    assert answer.json()["choices"][0]["finish_reason"] == "length"


async def test_more_requests_than_may_be_open_are_turned_away():
    async with a_replica(max_open_requests=2) as replica:
        replica.steps.hold()
        held = [asyncio.create_task(replica.chat(max_tokens=1)) for _ in range(2)]
        await replica.until(lambda stats: stats.running + stats.waiting == 2)

        refused = await replica.chat()
        replica.steps.resume_steps()

        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert [(await task).status_code for task in held] == [200, 200]


async def test_a_deadline_is_at_most_a_day():
    """Finding 8: a request keeps its place until its deadline, and a client may name any number."""
    headers = [(b"x-slipway-deadline", b"1e9")]
    assert Caller.of(Request({"type": "http", "headers": headers})).seconds == LONGEST_DEADLINE_SECONDS
