"""Calls come out of text the same way however it is cut, and what is no call stays text."""

import json
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipway_runtime.server import tool_calls
from slipway_runtime.server.errors import ApiError
from slipway_runtime.server.openai_types import ChatRequest
from slipway_runtime.server.prompt import ChatTemplate
from slipway_runtime.server.tool_calls import CallDelta, CallStart, Event, Parser, TextEvent
from slipway_runtime.server.tool_parsers import parser_of
from slipway_runtime.server.tools import tool_use

NAMES = {"weather", "time"}
A = '{"name": "weather", "arguments": {"city": "Bern \\"x\\" }", "days": [1, {"a": 2}]}}'
B = '{"arguments": {}, "name": "time"}'


def read(parser: Parser, text: str, cuts: list[int] | None = None) -> tuple[str, list[tuple[str, Any]], list[Event]]:
    """The text, the calls and all events of an answer that comes in pieces."""
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts or [])})
    events: list[Event] = []
    for start, end in pairwise(places):
        events += parser.push(text[start:end])
    events += parser.finish()
    said, names, arguments = "", [], []
    for event in events:
        match event:
            case TextEvent():
                said += event.text
            case CallStart():
                assert event.index == len(names)
                names.append(event.name)
                arguments.append("")
            case CallDelta():
                arguments[event.index] += event.arguments
    return said, [(n, json.loads(a)) for n, a in zip(names, arguments, strict=True)], events


WEATHER = ("weather", {"city": 'Bern "x" }', "days": [1, {"a": 2}]})
STORIES = [
    ("hermes", f"Let me see.\n<tool_call>\n{A}\n</tool_call>\n<tool_call>{B}</tool_call>\n", [WEATHER, ("time", {})]),
    ("hermes", f"<tool_call>{A}</tool_call>", [WEATHER]),
    ("mistral", f"[TOOL_CALLS] [{A}, {B}]", [WEATHER, ("time", {})]),
    (
        "mistral",
        'Well. [TOOL_CALLS]weather[ARGS]{"city": "x"}[TOOL_CALLS]time{}',
        [("weather", {"city": "x"}), ("time", {})],
    ),
    ("llama3", A.replace("arguments", "parameters"), [WEATHER]),
    ("llama3", f"<|python_tag|>{A}; {B}", [WEATHER, ("time", {})]),
    ("array", f"[{A},\n {B}]", [WEATHER, ("time", {})]),
    # review/api-users.md 6, review/peer-suites.md 4
    ("llama3", f"[{A.replace('arguments', 'parameters')}, {B}]", [WEATHER, ("time", {})]),
    ("llama3", 'Let me see. {"name": "time", "parameters": {}}', [("time", {})]),
    ("llama3", 'Let me see.\n[{"name": "time", "parameters": {}}, {"name": "time"}]', [("time", {}), ("time", {})]),
    ("phi4_mini", f"<|tool_call|>[{A}, {B}]<|/tool_call|>", [WEATHER, ("time", {})]),
    ("phi4_mini", f"functools[{A}]", [WEATHER]),
    (
        "hermes",
        "<tool_call>{'name': 'time', 'arguments': {'a': True, 'b': \"it's\"}}</tool_call>",
        [("time", {"a": True, "b": "it's"})],
    ),
    ("hermes", '<tool_call>{"name": "time", "arguments": {"a": "x\n\ty"}}</tool_call>', [("time", {"a": "x\n\ty"})]),
    ("hermes", '<tool_call>{"name": "time", "arguments": null}</tool_call>', [("time", {})]),
    ("hermes", '<tool_call>{"name": "time", "arguments": {"a": NaN}}</tool_call>', [("time", {"a": None})]),
    (
        "pythonic",
        "[weather(city='Bern', days=[1, 2.5, None, True]), time()]",
        [("weather", {"city": "Bern", "days": [1, 2.5, None, True]}), ("time", {})],
    ),
    ("pythonic", "<|python_tag|>[time(a={'b': \"]'\"}, c=true)]", [("time", {"a": {"b": "]'"}, "c": True})]),
    (
        "qwen3_coder",
        "Let me see.\n<tool_call>\n<function=time>\n<parameter=a>\n1\n</parameter>\n"
        "<parameter=b>\nline\n<b>two</b> </tool_call>\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=weather>\n</function>\n</tool_call>",
        [("time", {"a": 1, "b": "line\n<b>two</b> </tool_call>"}), ("weather", {})],
    ),
    (
        "qwen3_coder",
        "<function=time>\n<parameter=a>\n[True, None]\n</parameter></function>",
        [("time", {"a": [True, None]})],
    ),
    ("qwen3_coder", "<function=time>\n<parameter=a>\n[1]\n</parameter>\n</function>", [("time", {"a": [1]})]),
    (
        "qwen3_coder",
        "<tool_call><function=time></function><function=weather></function></tool_call>",
        [("time", {}), ("weather", {})],
    ),
]


@pytest.mark.capability("SO-1")
@pytest.mark.parametrize(("form", "text", "calls"), STORIES)
@pytest.mark.parametrize("live", [False, True])
def test_calls_of_every_form_are_found(form: str, text: str, calls: list[Any], live: bool):
    live = live and is_json(text)  # only a grammar makes calls live, and it makes JSON
    said, found, _ = read(parser_of(form, NAMES, live=live), text)

    assert found == calls
    assert said.strip() in {"", "Let me see.", "Well."}


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(STORIES), st.lists(st.integers(0, 500), max_size=12), st.booleans())
def test_the_pieces_do_not_matter(story: tuple[str, str, list[Any]], cuts: list[int], live: bool):
    form, text, calls = story
    live = live and is_json(text)
    said, found, _ = read(parser_of(form, NAMES, live=live), text, cuts)

    assert found == calls
    assert said == read(parser_of(form, NAMES, live=live), text)[0]


def is_json(text: str) -> bool:
    return not any(sign in text for sign in ("'name'", "\n\t", "null}", "NaN"))


TEXTS = [
    ("hermes", "No call at all, only a < b and <tool"),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "time", "arguments": {broken}}</tool_call> and on'),
    ("hermes", '<tool_call>{"name": "time", "argum'),
    ("hermes", "<tool_call>not json</tool_call>"),
    ("llama3", "{ is how an object begins. Then it is text."),
    ("llama3", '{"answer": 42}'),
    ("llama3", "Just words; with a {brace}."),
    ("mistral", "plain words [TOOL_CALL no"),
    ("qwen3_coder", "I use <tool_call> tags, and <function=time> too"),
    ("qwen3_coder", "<tool_call>\n<function=nobody>\n</function>\n</tool_call> and on"),
    ("qwen3_coder", "<tool_call>\n<function=time>\n<parameter=a>\ncut"),
    ("qwen3_coder", "<tool_call> <tool_call> <function= <"),
    ("pythonic", "[1, 2] is a list"),
    ("pythonic", "[nobody(a=1)]"),
    ("pythonic", "[time(a="),
    ("phi4_mini", "functools, a module; <|tool_call|>"),
    ("llama3", '[1, 2] and {"name": "nobody"}'),
    ("llama3", "; ] , so it begins"),
]


@pytest.mark.parametrize(("form", "text"), TEXTS)
def test_what_is_no_call_stays_text(form: str, text: str):
    for cuts in ([], list(range(len(text)))):
        said, found, _ = read(parser_of(form, NAMES), text, cuts)
        assert found == []
        assert said.strip() == text.strip()


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder", "mistral", "phi4_mini", "llama3", "pythonic"])
@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                "<function=time>",
                "</function>",
                "[TOOL_CALLS]",
                "[",
                "]",
                ", ",
                "{",
                "}",
                '{"name"',
                ': "time"',
                "functools",
                "<|tool_call|>",
                "<|python_tag|>",
                "words",
                " ",
                "\n",
                "'",
                '"',
                "time(",
            ]
        ),
        max_size=10,
    ),
    st.lists(st.integers(0, 200), max_size=6),
)
def test_text_without_a_call_keeps_every_visible_character(form: str, parts: list[str], cuts: list[int]):
    """review/api-users.md 6: a marker that is only mentioned is text."""
    text = "".join(parts)
    said, found, _ = read(parser_of(form, {"nobody"}), text, cuts)

    assert found == []
    assert "".join(said.split()) == "".join(text.split())


@pytest.mark.parametrize(
    "text", ["[TOOL_CALLS]<tool_call>{", '[TOOL_CALLS] nobody[ARGS]{"a": 1}', "[TOOL_CALLS]time{}", "[TOOL_CALLS][{"]
)
def test_a_bare_name_that_is_no_function_stays_as_it_was_written(text: str):
    """It was rewritten to JSON; found by the test above."""
    said, found, _ = read(parser_of("mistral", {"nobody else"}), text, [])

    assert (said, found) == (text, [])


def test_a_live_call_streams_its_name_first_and_then_its_arguments_in_pieces():
    parser = parser_of("array", NAMES, live=True)
    _, _, events = read(parser, f"[{A}]", list(range(0, 90, 7)))

    assert isinstance(events[0], CallStart)
    assert sum(isinstance(event, CallDelta) for event in events) > 3


def test_a_call_that_is_cut_off_gives_only_what_was_said_of_it():
    parser = parser_of("array", NAMES, live=True)
    events = [*parser.push('[{"name": "time", "parameters": {"zone": "Eur'), *parser.finish()]

    assert isinstance(events[0], CallStart)
    assert "".join(e.arguments for e in events if isinstance(e, CallDelta)) == '{"zone": "Eur'


@pytest.mark.parametrize("rest", ["\n", "\n</tool_c", "</tool_call>", "\n</tool_call>\n<tool_c"])
def test_what_stands_after_a_call_is_no_text_where_the_answer_is_cut_off(rest: str):
    said, found, _ = read(parser_of("hermes", NAMES), f"<tool_call>{A}{rest}")

    assert found == [WEATHER]
    assert said.strip() in {"", "<tool_c"}


def test_with_parallel_calls_off_the_first_one_counts():
    _, found, _ = read(parser_of("hermes", NAMES, most=1), STORIES[0][1])

    assert found == [WEATHER]


def test_ids_fit_the_templates_of_their_form():
    long = next(e for e in parser_of("hermes", NAMES).push(STORIES[1][1]) if isinstance(e, CallStart)).id
    short = next(e for e in parser_of("mistral", NAMES).push(f"[TOOL_CALLS] [{A}]") if isinstance(e, CallStart)).id

    assert long.startswith("call_")
    assert len(short) == 9
    assert short.isalnum()


def a_request(**fields: Any) -> ChatRequest:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in sorted(NAMES)
    ]
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], "tools": tools} | fields)


def test_tools_that_the_model_is_not_shown_are_refused_unless_forced():
    silent = ChatTemplate("{{ messages[0].content }}", {})
    with pytest.raises(ApiError) as refusal:
        tool_use(a_request(), silent)

    assert refusal.value.param == "tools"
    assert tool_use(a_request(tool_choice="none"), silent).form == ""
    assert tool_use(a_request(tool_choice="required"), silent).grammar is not None


LONG = {
    "white space before a call": ("llama3", " " * 20_000),
    "white space after a marker": ("hermes", "<tool_call>" + "\n" * 20_000 + "x"),
    "white space after a name": ("mistral", "[TOOL_CALLS]f" + " " * 20_000),
    "white space in a text": ("hermes", "words" + " " * 20_000),
    "long arguments": ("hermes", '<tool_call>{"name": "time", "arguments": {"a": "' + "x" * 20_000 + '"}}'),
    "a long key": ("hermes", '<tool_call>{"' + "k" * 20_000 + '": 1}'),
    "a long name": ("hermes", '<tool_call>{"name": "' + "n" * 20_000 + '"}'),
    "arguments as text": ("llama3", '{"name": "time", "arguments": "' + "x" * 20_000 + '"}'),
    "no call": ("llama3", "words " * 4_000),
}


@pytest.mark.capability("SE-2")
@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize(("form", "text"), LONG.values(), ids=LONG)
def test_each_character_of_an_answer_is_looked_at_a_few_times(
    form: str, text: str, live: bool, monkeypatch: pytest.MonkeyPatch
):
    """No text that grows is built again for each character, and JSON is parsed when it is complete."""
    parsed = 0

    def loads(raw: str, **options: Any) -> Any:
        nonlocal parsed
        parsed += len(raw)
        return json.loads(raw, **options)

    monkeypatch.setattr(tool_calls, "json", SimpleNamespace(loads=loads, dumps=json.dumps))
    parser = parser_of(form, NAMES, live=live)
    built = 0
    said = 0
    for char in text:
        said += sum(len(event.text) for event in parser.push(char) if isinstance(event, TextEvent))
        built += sum(len(value) for part in parts(parser) for value in vars(part).values() if isinstance(value, str))

    assert parsed <= 3 * len(text)
    assert built <= 210 * len(text), "a text of the parser has grown with the answer"
    assert said <= len(text)


def parts(parser: Any) -> list[Any]:
    """The parser and the objects that it reads with."""
    return [part for part in (parser, parser._call, parser._search, parser.calls) if part is not None]


@pytest.mark.parametrize(
    ("form", "text"),
    [LONG["white space before a call"], LONG["white space in a text"], LONG["white space after a name"]],
)
def test_white_space_beyond_any_layout_is_sent_as_text(form: str, text: str):
    parser = parser_of(form, NAMES)
    sent = sum(len(event.text) for event in parser.push(text) if isinstance(event, TextEvent))

    assert len(text) - sent <= tool_calls.MOST_LAYOUT + len("[TOOL_CALLS]")


def test_a_name_that_is_nested_too_deeply_is_no_call():
    text = '<tool_call>{"name": ' + "[" * 20_000
    said, found, _ = read(parser_of("hermes", NAMES), text + "]" * 20_000 + "}")

    assert found == []
    assert said.endswith("]}")
