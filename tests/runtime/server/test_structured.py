"""An answer that is bound to a form has it; a form that cannot be followed is refused before anything runs."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from slipway_runtime.engine.grammar import GrammarCompiler, GrammarRefusedError
from slipway_runtime.messages import Grammar
from slipway_runtime.serve import _make_ready
from slipway_runtime.server.errors import ApiError
from slipway_runtime.server.structured import MAX_WAITING, GrammarValidator
from slipway_runtime.settings import RuntimeSettings
from tests.runtime.server.serving import Running, a_replica

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": ["S", "M"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["size", "count"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": " ?"},  # the tiny model would fill the rest with spaces, up to the bound
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
TIME = {
    "type": "function",
    "function": {"name": "time", "parameters": {"type": "object", "additionalProperties": False}},
}
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Please."}], "temperature": 0, "max_tokens": 120}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica() -> AsyncIterator[Running]:
    async with a_replica() as running:
        yield running


async def ask(replica: Running, **fields: Any) -> dict[str, Any]:
    response = await replica.post("/v1/chat/completions", ASK | fields)
    assert response.status_code == 200, response.text
    return dict(response.json()["choices"][0])


def fits(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"size", "count"} and value["size"] in {"S", "M"} and 0 <= value["count"] <= 9


@pytest.mark.capability("SO-1")
@pytest.mark.parametrize(
    "field",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        {"guided_json": SCHEMA},
    ],
    ids=["response_format", "structured_outputs", "as text", "compact", "guided"],
)
async def test_an_answer_validates_against_its_schema(replica: Running, field: dict[str, Any]):
    for sampled in ({}, {"temperature": 1.5, "seed": 5}):
        choice = await ask(replica, **field, **sampled)
        assert choice["finish_reason"] == "stop"
        assert fits(choice["message"]["content"])


@pytest.mark.capability("SO-1")
async def test_expressions_choices_and_grammars_bind_too(replica: Running):
    by_regex = await ask(replica, structured_outputs={"regex": r"[0-9]{4}-[0-9]{2}"})
    by_choice = await ask(replica, structured_outputs={"choice": ["yes", "no", "maybe"]})
    by_grammar = await ask(replica, structured_outputs={"grammar": 'start: "a" "b"{1,3} "c"'})
    in_a_completion = await replica.post(
        "/v1/completions", {"prompt": "It is", "max_tokens": 20, "guided_choice": ["cold", "warm"]}
    )

    assert re.fullmatch(r"[0-9]{4}-[0-9]{2}", by_regex["message"]["content"])
    assert by_choice["message"]["content"] in {"yes", "no", "maybe"}
    assert re.fullmatch(r"ab{1,3}c", by_grammar["message"]["content"])
    assert in_a_completion.json()["choices"][0]["text"] in {"cold", "warm"}


@pytest.mark.capability("SO-3")
async def test_an_answer_that_is_cut_off_says_so_and_streams_alike(replica: Running):
    bound = {"structured_outputs": {"json": SCHEMA}}
    cut = await ask(replica, **bound, max_tokens=2)
    whole = await ask(replica, **bound)
    async with replica.http.stream(
        "POST", f"{replica.url}/v1/chat/completions", json=ASK | bound | {"stream": True}
    ) as stream:
        chunks = [json.loads(line[6:]) async for line in stream.aiter_lines() if line.startswith("data: {")]

    assert cut["finish_reason"] == "length"
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert text == whole["message"]["content"]


# --- tools


@pytest.mark.capability("SO-1")
async def test_a_required_call_names_a_tool_and_its_arguments_are_json(replica: Running):
    choice = await ask(replica, tools=[WEATHER, TIME], tool_choice="required", parallel_tool_calls=False)

    [call] = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert call["type"] == "function"
    if call["function"]["name"] == "weather":
        assert fits(call["function"]["arguments"])
    else:
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("time", {})


@pytest.mark.capability("SO-1")
async def test_a_named_call_is_that_tool_and_finishes_with_stop_as_in_vllm(replica: Running):
    named = {"type": "function", "function": {"name": "weather"}}
    choice = await ask(replica, tools=[WEATHER, TIME], tool_choice=named)

    [call] = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "stop"
    assert call["function"]["name"] == "weather"
    assert fits(call["function"]["arguments"])


@pytest.mark.capability("SO-1")
@pytest.mark.parametrize("tool_choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_a_streamed_call_says_its_name_first_and_joins_to_the_same_call(replica: Running, tool_choice: Any):
    tools = {"tools": [WEATHER], "tool_choice": tool_choice, "parallel_tool_calls": False}
    whole = (await ask(replica, **tools))["message"]["tool_calls"][0]

    stream = await replica.openai.chat.completions.create(model="tiny", stream=True, **ASK, **tools)
    calls = [call async for c in stream for call in (c.choices[0].delta.tool_calls or [])]

    assert calls[0].id
    assert calls[0].function.name == "weather"
    assert calls[0].function.arguments == ""
    assert all(call.index == 0 and call.id is None and call.function.name is None for call in calls[1:])
    assert len(calls) > 2, "arguments come in fragments"
    assert "".join(call.function.arguments for call in calls) == whole["function"]["arguments"]


async def test_a_conversation_with_calls_in_it_is_read(replica: Running):
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"size": "S"}'}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."},
    ]
    answer = await replica.post("/v1/chat/completions", ASK | {"messages": messages, "max_tokens": 3})

    # The embedded model's template reads content and nothing else: it says so, and the server lives.
    assert answer.status_code in {200, 400}
    assert (await replica.chat(max_tokens=1)).status_code == 200


# --- the validator


REFUSED = [
    ({"structured_outputs": {"regex": "(unclosed"}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": "start: nothing_there"}}, "structured_outputs"),
    ({"structured_outputs": {"json": "{not json"}}, "structured_outputs"),
    ({"structured_outputs": {"json": {"type": "wizard"}}}, "structured_outputs"),
    ({"structured_outputs": {"json": {"enum": list(range(5000))}}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"structural_tag": {"x": 1}}}, "structured_outputs"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format"),
    ({"tools": [WEATHER, WEATHER], "tool_choice": "required"}, "tools"),
    ({"tools": [WEATHER]}, "tools"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools"),
    ({"tools": [{"type": "retrieval"}]}, "tools"),
]


@pytest.mark.capability("SO-2")
@pytest.mark.parametrize(("field", "param"), REFUSED, ids=[str(f)[:50] for f, _ in REFUSED])
async def test_what_cannot_be_followed_is_a_400_that_names_the_field(
    replica: Running, field: dict[str, Any], param: str | None
):
    before = replica.client.stats().admitted

    response = await replica.post("/v1/chat/completions", ASK | field)

    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert len(error["message"]) <= 500
    if param is not None:
        assert str(error["param"]).startswith(param)
    assert replica.client.stats().admitted == before


class Slow(GrammarCompiler):
    """A compiler that a hostile schema keeps busy until the test lets it go."""

    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.loop = asyncio.get_running_loop()

    def check(self, grammar: Grammar) -> None:
        if grammar.kind == "regex":
            asyncio.run_coroutine_threadsafe(self.released.wait(), self.loop).result()
        if grammar.text == "bad":
            raise GrammarRefusedError("it is bad")


@pytest.mark.capability("SO-2")
async def test_a_hostile_grammar_costs_its_sender_the_limit_and_the_others_nothing():
    compiler = Slow()
    validator = GrammarValidator(lambda: compiler, seconds=0.2, cpu_seconds=lambda _: 1e9)

    with pytest.raises(ApiError) as slow:
        await validator.check(Grammar(kind="regex", text="x"), "guided_regex")
    await validator.check(Grammar(kind="choice", text="good"), "guided_choice")
    with pytest.raises(ApiError) as bad:
        await validator.check(Grammar(kind="choice", text="bad"), "guided_choice")
    compiler.released.set()

    assert (slow.value.status, slow.value.param) == (400, "guided_regex")
    assert (bad.value.status, bad.value.message) == (400, "guided_choice: it is bad")


async def test_checks_do_not_pile_up_without_bound():
    compiler = Slow()
    validator = GrammarValidator(lambda: compiler, seconds=5)
    checks = [asyncio.create_task(validator.check(Grammar(kind="regex", text=str(i)), "r")) for i in range(MAX_WAITING)]
    await asyncio.sleep(0)

    with pytest.raises(ApiError) as refused:
        await validator.check(Grammar(kind="regex", text="one more"), "r")
    compiler.released.set()
    await asyncio.gather(*checks)

    assert refused.value.status == 429


async def test_a_time_out_that_is_not_the_grammars_fault_can_be_tried_again():
    """review/api-users.md 13."""
    compiler = Slow()  # it waits, and uses no processor time: as on a machine that others keep busy
    validator = GrammarValidator(lambda: compiler, seconds=0.2)

    with pytest.raises(ApiError) as busy:
        await validator.check(Grammar(kind="regex", text="x"), "guided_regex")
    compiler.released.set()

    assert busy.value.status == 503
    assert (busy.value.headers or {})["Retry-After"] == "5"


async def test_the_vocabulary_is_read_once_however_many_grammars_come_first():
    """review/api-users.md 13."""
    made = 0
    compiler = Slow()

    def make() -> GrammarCompiler:
        nonlocal made
        made += 1
        time.sleep(0.05)
        return compiler

    validator = GrammarValidator(make)
    await asyncio.gather(*(validator.check(Grammar(kind="choice", text=str(i)), "c") for i in range(4)))

    assert made == 1


async def test_the_vocabulary_is_read_before_the_replica_is_ready():
    """review/api-users.md 13: the first grammars waited for it within their own time limit."""
    seen: list[bool] = []
    async with a_replica(load=False) as running:
        compiler = Slow()

        def make() -> GrammarCompiler:
            seen.append(running.replica.loaded is not None)
            return compiler

        model = replace(running.models[0], grammars=GrammarValidator(make))
        await _make_ready(RuntimeSettings(model_uri="file:///x"), SimpleNamespace(seconds=0.0), model, running.replica)

        assert seen == [False]
        assert running.replica.loaded is model
