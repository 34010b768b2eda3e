"""The responses API and Anthropic's messages are routed, limited, accounted and continued as chat is."""

import gzip
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio
import yaml
from aiohttp.test_utils import make_mocked_request

from slipway_gateway.apis import error_event
from slipway_gateway.errors import unknown_model
from slipway_gateway.mirror import text_of
from slipway_gateway.request_body import parse
from slipway_gateway.request_state import RequestState
from slipway_gateway.sse import says_its_end
from slipway_gateway.tenants import digest_of
from tests.gateway.doubles import MODEL
from tests.gateway.handovers import MESSAGES, Pair, a_pair

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.capability("API-18")]

KEY = "sk-research-secret"
RESPONSES, ANTHROPIC = "/v1/responses", "/v1/messages"
ASKS: dict[str, dict[str, Any]] = {
    RESPONSES: {"input": "Tell me a story about a fox.", "max_output_tokens": 16, "seed": 3},
    ANTHROPIC: {"messages": MESSAGES, "max_tokens": 16, "seed": 3},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    directory = tmp_path_factory.mktemp("tenants")
    (directory / "keys").mkdir()
    (directory / "keys" / "laptops").write_text(digest_of(KEY))
    tenant = {"name": "research", "keys": ["laptops"], "models": ["*"], "maxTokens": 100, "defaultMaxTokens": 7}
    (directory / "tenants.yaml").write_text(yaml.safe_dump({"tenants": [tenant]}))
    async with a_pair(tenants_file=directory / "tenants.yaml", keys_directory=directory / "keys") as pair:
        pair.http.headers["Authorization"] = f"Bearer {KEY}"
        yield pair


def a_client(pair: Pair, key: str = KEY) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{pair.gateway.port}", api_key=key, max_retries=0)


def an_openai_client(pair: Pair) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{pair.gateway.port}/v1", api_key=KEY, max_retries=0)


def counted(pair: Pair, kind: str) -> float:
    return sum(
        sample.value
        for family in pair.gateway.metrics.registry.collect()
        for sample in family.samples
        if sample.name == "slipway_gateway_tokens_total" and sample.labels["kind"] == kind
    )


async def test_both_clients_are_answered_and_their_tokens_counted(pair: Pair):
    before = {kind: counted(pair, kind) for kind in ("input", "output")}

    response = await an_openai_client(pair).responses.create(model=MODEL, **body_of(RESPONSES))
    message = await a_client(pair).messages.create(model=MODEL, messages=MESSAGES, max_tokens=16)
    async with a_client(pair).messages.stream(model=MODEL, messages=MESSAGES, max_tokens=16) as stream:
        streamed = await stream.get_final_message()
    tokens = await a_client(pair).messages.count_tokens(model=MODEL, messages=MESSAGES)

    assert response.output_text
    assert message.content[0].text
    assert response.usage is not None
    for said in (message, streamed):
        assert said.usage.input_tokens + (said.usage.cache_read_input_tokens or 0) == tokens.input_tokens
    prompts, answers = response.usage.input_tokens, response.usage.output_tokens
    prompts += 2 * tokens.input_tokens
    answers += message.usage.output_tokens + streamed.usage.output_tokens
    # Counting tokens is answered as well, and its own answer says how many.
    assert counted(pair, "input") - before["input"] == prompts + tokens.input_tokens
    assert counted(pair, "output") - before["output"] == answers


def body_of(path: str) -> dict[str, Any]:
    return {name: value for name, value in ASKS[path].items() if name != "seed"}


async def test_a_tenants_limits_hold_under_the_names_of_each_api(pair: Pair):
    no_limit = await an_openai_client(pair).responses.create(
        model=MODEL, input="Tell me a story.", extra_body={"ignore_eos": True}
    )
    with pytest.raises(openai.BadRequestError, match="max_output_tokens is 101") as too_many:
        await an_openai_client(pair).responses.create(model=MODEL, input="Hello!", max_output_tokens=101)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens is 101"):
        await a_client(pair).messages.create(model=MODEL, messages=MESSAGES, max_tokens=101)

    assert too_many.value.param == "max_output_tokens"
    assert no_limit.usage is not None
    assert no_limit.usage.output_tokens == 7


async def test_refusals_of_the_gateway_have_the_shape_of_the_api(pair: Pair):
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await a_client(pair).messages.create(model="nonsense", messages=MESSAGES, max_tokens=1)
    with pytest.raises(anthropic.AuthenticationError) as stranger:
        await a_client(pair, "sk-wrong").messages.create(model=MODEL, messages=MESSAGES, max_tokens=1)
    async with pair.http.get(f"http://127.0.0.1:{pair.gateway.port}{ANTHROPIC}") as wrong_method:
        body = await wrong_method.json()

    assert unknown.value.body == {
        "type": "error",
        "error": {"type": "not_found_error", "message": unknown_model("nonsense").message},
        "request_id": unknown.value.request_id,
    }
    assert unknown.value.request_id == unknown.value.response.headers["x-request-id"]
    assert stranger.value.body["error"]["type"] == "authentication_error"
    assert stranger.value.response.headers["www-authenticate"] == "Bearer"
    assert (wrong_method.status, body["type"]) == (405, "error")
    assert body["request_id"] == wrong_method.headers["request-id"]


async def test_tokens_of_an_input_are_counted_as_its_answer_counts_them(pair: Pair):
    client = an_openai_client(pair)
    before = counted(pair, "output")

    tokens = await client.responses.input_tokens.count(model=MODEL, input="Tell me a story about a fox.")
    generated = counted(pair, "output")
    answer = await client.responses.create(model=MODEL, **body_of(RESPONSES))

    assert answer.usage is not None
    assert tokens.input_tokens == answer.usage.input_tokens
    assert generated == before
    with pytest.raises(openai.NotFoundError):
        await client.responses.input_tokens.count(model="nonsense", input="x")


async def test_an_error_of_a_replica_has_the_id_under_which_the_gateway_logs_it(pair: Pair):
    with pytest.raises(anthropic.BadRequestError, match="only text, tool_use") as refusal:
        await a_client(pair).messages.create(
            model=MODEL,
            max_tokens=1,
            messages=[{"role": "user", "content": [{"type": "image"}]}],  # type: ignore[list-item,typeddict-item]
        )

    assert refusal.value.request_id == refusal.value.body["request_id"]  # type: ignore[index]
    assert refusal.value.request_id == refusal.value.response.headers["x-request-id"]


async def test_models_are_listed_as_the_client_asks_and_a_head_has_no_body(pair: Pair):
    url = f"http://127.0.0.1:{pair.gateway.port}/v1/models"
    listed = [model async for model in a_client(pair).models.list()]
    found = await a_client(pair).models.retrieve(MODEL)
    openais = [model async for model in an_openai_client(pair).models.list()]

    assert [(model.id, model.type, model.display_name) for model in listed] == [(MODEL, "model", MODEL)]
    assert found.display_name == MODEL
    assert [(model.id, model.object) for model in openais] == [(MODEL, "model")]
    for path in (url, f"{url}/{MODEL}"):
        async with pair.http.head(path) as head, pair.http.get(path) as get:
            assert head.status == get.status == 200
            assert head.headers["content-type"] == get.headers["content-type"]
            assert await head.read() == b""


async def test_a_compressed_body_is_415_from_the_gateway_as_from_the_replica(pair: Pair):
    """review/control-plane.md 2"""
    body = json.dumps({"model": MODEL} | body_of(RESPONSES)).encode()
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    url = f"http://127.0.0.1:{pair.gateway.port}{RESPONSES}"

    async with pair.http.post(url, data=gzip.compress(body), headers=headers) as answer:
        assert answer.status == 415


async def read(pair: Pair, path: str, *cuts: int) -> list[dict[str, Any]]:
    """The events of a stream whose answers are cut so, without what differs between two runs."""
    pair.cuts.at[:] = cuts
    pair.cuts.sizes.clear()
    pair.cuts.bodies.clear()
    body = {"model": MODEL, "stream": True} | ASKS[path]
    async with pair.http.post(f"http://127.0.0.1:{pair.gateway.port}{path}", json=body) as response:
        raw = await response.read()
    assert b": tokens" not in raw
    bodies = [json.loads(line[6:]) for line in raw.split(b"\n") if line.startswith(b"data: ")]
    [id] = {id for body in bodies if (id := (body.get("response") or body.get("message") or {}).get("id"))}
    unique = id.partition("_")[2]
    return [json.loads(json.dumps(_comparable(body)).replace(unique, "ID")) for body in bodies]


def _comparable(body: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in body.items() if name not in {"sequence_number", "usage"}}
    for part in ("response", "message"):
        if part in kept:
            kept[part] = {n: v for n, v in kept[part].items() if n not in {"created_at", "usage"}}
    return kept


@pytest.mark.capability("RD-4")
@pytest.mark.parametrize("path", ASKS)
async def test_a_stream_that_is_cut_goes_on_elsewhere_and_nothing_is_missing_or_said_twice(pair: Pair, path: str):
    whole = await read(pair, path)
    size = pair.cuts.sizes[0]
    draw = random.Random(7)

    for at in [size // 3, size - 3, *(draw.randrange(200, size) for _ in range(4))]:
        assert await read(pair, path, at) == whole, f"cut after {at} of {size} bytes"
        assert len(pair.cuts.bodies) == 2


@pytest.mark.parametrize("path", [RESPONSES, ANTHROPIC])
async def test_an_error_event_ends_a_stream_of_its_api(path: str):
    event = error_event(path, "The answer broke off: lost.", "BadGatewayError", 502)

    kind, data = event.removesuffix(b"\n\n").split(b"\n")
    assert says_its_end(event)
    assert kind == b"event: error"
    assert json.loads(data.removeprefix(b"data: "))["type"] == "error"
    assert b"The answer broke off" in data


@pytest.mark.parametrize(
    ("tail", "usage", "finish"),
    [
        (b'{"output":[],"usage":{"input_tokens":5,"input_tokens_details":{"cached_tokens":2},"output_tokens":3}}',
         (5, 2, 3), ""),
        (b'{"stop_reason":"end_turn","usage":{"input_tokens":5,"cache_read_input_tokens":16,"output_tokens":3}}',
         (21, 16, 3), "end_turn"),
        (b'{"finish_reason":"stop","stop_reason":"secret","usage":{"prompt_tokens":5,"completion_tokens":3}}',
         (5, 0, 3), "stop"),
    ],
)  # fmt: skip
async def test_usage_and_end_are_read_in_the_words_of_each_api(tail: bytes, usage: tuple[int, ...], finish: str):
    record = RequestState("id", "/v1/messages", status=200, forwarded=1.0)
    record.tail.append(tail)

    said = record.usage()

    assert (said.input, said.cached, said.output) == usage
    assert record.runtime_finish() == finish


async def test_prompts_of_all_apis_have_blocks_to_route_by():
    long = "x" * 5000
    bodies: list[dict[str, Any]] = [{"input": long}, {"instructions": long, "input": "a"}, {"system": long}]
    request = make_mocked_request("POST", RESPONSES)

    parsed = [parse(json.dumps({"model": "m"} | body).encode(), request) for body in bodies]
    limited = parse(b'{"model": "m", "max_output_tokens": 9}', request)

    assert all(one.routing.blocks for one in parsed)
    assert limited.max_tokens == 9


async def test_answers_of_other_apis_are_not_compared_by_a_mirror():
    assert text_of(b'{"type":"message","content":[{"type":"text","text":"a"}]}') is None
    assert text_of(b'event: message_start\ndata: {"type":"message_start"}\n\n') is None
