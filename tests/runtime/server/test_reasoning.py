"""Reasoning, content and calls come out of an answer's text the same way however it is cut, at a cost linear in it."""

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipway_runtime.command_line import parse_arguments, serve_settings
from slipway_runtime.messages import FinishReason, TokenLogprobs
from slipway_runtime.server import harmony, markers, reasoning
from slipway_runtime.server.answer_parts import AnswerParser, ReasoningUse
from slipway_runtime.server.generation import Delta
from slipway_runtime.server.harmony import ASSISTANT, HarmonyParser
from slipway_runtime.server.reasoning import Begin, Part, ReasoningEvent, Splitter, ThinkParser, beginning_of, form_of
from slipway_runtime.server.tool_calls import CallDelta, CallStart, TextEvent
from slipway_runtime.server.tool_parsers import parser_of

Said = tuple[str, str, list[tuple[str, str]]]  # reasoning, content, calls


def parts_of(splitter: Splitter, text: str, cuts: list[int] | None = None) -> list[Part]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts or [])})
    parts = [part for start, end in pairwise(places) for part in splitter.push(text[start:end])]
    return [*parts, *splitter.finish()]


def said_in(parts: list[Part]) -> Said:
    thoughts, content = "", ""
    calls: list[tuple[str, str]] = []
    for part in parts:
        match part:
            case ReasoningEvent():
                thoughts += part.text
            case TextEvent():
                content += part.text
            case CallStart():
                assert part.index == len(calls)
                calls.append((part.name, ""))
            case CallDelta():
                name, arguments = calls[part.index]
                calls[part.index] = name, arguments + part.arguments
    return thoughts, content, calls


def thinks(begins: Begin = Begin.EITHER) -> Callable[[], Splitter]:
    return lambda: ThinkParser(begins)


def channels(prompt: str = ASSISTANT, most_calls: int | None = None) -> Callable[[], Splitter]:
    return lambda: HarmonyParser(prompt, {"weather", "time"}, most_calls=most_calls)


THINK: list[tuple[str, Callable[[], Splitter], str, tuple[str, str]]] = [
    ("thoughts and an answer", thinks(), "<think>\nHm.\n</think>\n\nHello!", ("Hm.", "Hello!")),
    ("white space first", thinks(), "\n <think>Hm.</think>Hello!", ("Hm.", "Hello!")),
    ("no thoughts", thinks(), "Hello!", ("", "Hello!")),
    ("white space and no thoughts", thinks(), "\n Hello!", ("", "\n Hello!")),
    ("only white space", thinks(), "\n\n", ("", "\n\n")),
    ("nothing thought", thinks(), "<think>\n\n</think>\n\nHello!", ("", "Hello!")),
    ("an end without a beginning", thinks(), "</think>\n\nHello!", ("", "Hello!")),
    ("paragraphs", thinks(), "<think>\nA\n\nB\n\n</think>C\n\nD\n", ("A\n\nB", "C\n\nD\n")),
    ("tags in the answer", thinks(), "<think>A</think>Write <think>x</think>.", ("A", "Write <think>x</think>.")),
    ("tags in an answer without thoughts", thinks(), "Write <think>x</think>.", ("", "Write <think>x</think>.")),
    ("a tag in the thoughts", thinks(), "<think>A <think> b</think>C", ("A <think> b", "C")),
    ("cut off in the thoughts", thinks(), "<think>\nA\n", ("A\n", "")),
    ("cut off in a tag", thinks(), "<think>A</thi", ("A</thi", "")),
    ("cut off in the first tag", thinks(), "<thi", ("", "<thi")),
    ("less-than signs", thinks(), "<think>1 < 2 <</think>3 < 4 <", ("1 < 2 <", "3 < 4 <")),
    ("opened by the prompt", thinks(Begin.REASONING), "Hm.\n</think>\n\nHello!", ("Hm.", "Hello!")),
    ("opened twice", thinks(Begin.REASONING), "<think>\nHm.</think>Hello!", ("Hm.", "Hello!")),
    ("opened and never closed", thinks(Begin.REASONING), "\nHm.", ("Hm.", "")),
    ("switched off by the prompt", thinks(Begin.CONTENT), "<think>A</think>B", ("", "<think>A</think>B")),
]
A = "<|channel|>analysis<|message|>"
F = "<|channel|>final<|message|>"
TO_WEATHER = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
THEN = "<|end|><|start|>assistant"
HARMONY: list[tuple[str, Callable[[], Splitter], str, Said]] = [
    ("thoughts and an answer", channels(), f"{A}Hm.{THEN}{F}Hello!<|return|>", ("Hm.", "Hello!", [])),
    ("an end that is no text", channels(), f"{A}Hm.{THEN}{F}Hello!", ("Hm.", "Hello!", [])),
    ("a call", channels(), f'{A}Hm.{THEN}{TO_WEATHER}{{"a": 1}}<|call|>', ("Hm.", "", [("weather", '{"a": 1}')])),
    (
        "a recipient before the channel",
        channels(),
        ' to=functions.time<|channel|>commentary json<|message|>{"a": 1}',
        ("", "", [("time", '{"a": 1}')]),
    ),
    (
        "a call on the channel of thoughts",
        channels(),
        '<|channel|>analysis to=functions.time <|constrain|>json<|message|>{"a": 1}<|call|>',
        ("", "", [("time", '{"a": 1}')]),
    ),
    ("a call without arguments", channels(), f"{TO_WEATHER}<|call|>", ("", "", [("weather", "{}")])),
    (
        "a preamble and two calls",
        channels(),
        f"<|channel|>commentary<|message|>I look.{THEN}{TO_WEATHER}{{}}<|call|><|start|>assistant{TO_WEATHER}{{}}",
        ("", "I look.", [("weather", "{}"), ("weather", "{}")]),
    ),
    (
        "one call at most",
        channels(most_calls=1),
        f"{TO_WEATHER}{{}}<|call|>{TO_WEATHER}[]",
        ("", "", [("weather", "{}")]),
    ),
    (
        "an unknown function",
        channels(),
        "<|channel|>commentary to=functions.secret <|constrain|>json<|message|>{}<|call|>",
        ("", "{}", []),
    ),
    (
        "an unknown tool in the thoughts",
        channels(),
        "<|channel|>analysis to=python code<|message|>1+1",
        ("1+1", "", []),
    ),
    ("messages of one kind", channels(), f"{A}One.{THEN}{A}Two.{THEN}{F}A{THEN}{F}B", ("One.\nTwo.", "A\nB", [])),
    ("ends that are missing", channels(), f"{A}Hm.{F}Hello!", ("Hm.", "Hello!", [])),
    ("no channels", channels(), "Hello! 1 < 2 <", ("", "Hello! 1 < 2 <", [])),
    ("words like a header", channels(), " to be", ("", " to be", [])),
    ("text after an end", channels(), f"{F}A<|end|> B", ("", "A\nB", [])),
    ("cut off in a header", channels(), f"{A}Hm.{THEN}<|channel|>fi", ("Hm.", "", [])),
    ("cut off in a marker", channels(), f"{F}Hello<|en", ("", "Hello<|en", [])),
    ("a header of the prompt", channels(f"{ASSISTANT}{F}Hel"), "lo", ("", "lo", [])),
    ("thoughts that the prompt begins", channels(f"{ASSISTANT}{A}Hm, "), f"so.{THEN}{F}A", ("so.", "A", [])),
    ("a prompt of another form", channels("Question:"), "Hello", ("", "Hello", [])),
    ("a header without end", channels(), "<|channel|>" + "x" * 300, ("", "<|channel|>" + "x" * 300, [])),
]
STORIES = [(name, make, text, (*said, [])) for name, make, text, said in THINK] + HARMONY


@pytest.mark.capability("API-1")
@pytest.mark.parametrize(("make", "text", "said"), [pytest.param(*story[1:], id=story[0]) for story in STORIES])
def test_an_answer_is_split(make: Callable[[], Splitter], text: str, said: Said):
    assert said_in(parts_of(make(), text)) == said
    assert said_in(parts_of(make(), text, list(range(len(text))))) == said, "character by character"


PIECES = [
    "<think>", "</think>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>",
    "<|return|>", "analysis", "final", "assistant", " to=functions.weather", "{}", "\n", " ", "<", "<|", "</", "Hi",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)
SPLITTERS = [*(thinks(begins) for begins in Begin), channels(), channels("x"), channels(most_calls=0)]


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(SPLITTERS), TEXTS, st.lists(st.integers(0, 400), max_size=12))
def test_the_pieces_do_not_matter(make: Callable[[], Splitter], text: str, cuts: list[int]):
    assert said_in(parts_of(make(), text, cuts)) == said_in(parts_of(make(), text))


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(SPLITTERS), TEXTS, st.integers(0, 400), st.lists(st.integers(0, 400), max_size=12))
def test_what_was_sent_depends_on_the_text_so_far_only(
    make: Callable[[], Splitter], text: str, length: int, cuts: list[int]
):
    """So a replica that is given the tokens of a stream knows which parts the client has."""
    begun = text[: length % (len(text) + 1)]
    places = sorted({0, len(begun), *(cut % (len(begun) + 1) for cut in cuts)})
    in_pieces, at_once = make(), make()
    parts = [part for start, end in pairwise(places) for part in in_pieces.push(begun[start:end])]

    assert said_in(parts) == said_in(at_once.push(begun))
    assert in_pieces.is_reasoning == at_once.is_reasoning


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(list(Begin)), TEXTS, st.lists(st.integers(0, 400), max_size=12))
def test_think_tags_and_the_line_breaks_beside_them_are_all_that_is_lost(begins: Begin, text: str, cuts: list[int]):
    thoughts, content, _ = said_in(parts_of(ThinkParser(begins), text, cuts))

    assert without_tags(thoughts + content) == without_tags(text)
    assert content == "" or text.endswith(content)


def without_tags(text: str) -> str:
    return re.sub(r"</?think>|\s", "", text)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.sampled_from([A, F]), st.text("ab <|\n", max_size=12)), max_size=6),
    st.lists(st.integers(0, 400)),
)
def test_headers_are_all_that_is_lost_of_channels(messages: list[tuple[str, str]], cuts: list[int]):
    text = "".join(f"{header}{body}{THEN}" for header, body in messages)
    thoughts, content, calls = said_in(parts_of(channels()(), text, cuts))

    assert thoughts == "\n".join(body for header, body in messages if header == A and body)
    assert content == "\n".join(body for header, body in messages if header == F and body)
    assert not calls


@pytest.mark.parametrize("make", SPLITTERS)
def test_nothing_comes_after_the_end(make: Callable[[], Splitter]):
    splitter = make()
    parts_of(splitter, "<think>A\n\n</thi")

    assert splitter.finish() == []


class CountingFinder(markers.MarkerFinder):
    """Counts the characters that the finder looks at."""

    work = 0

    def _certain(self, text: str, at: int) -> int:
        CountingFinder.work += len(text)
        return super()._certain(text, at)


@pytest.mark.parametrize("make", [thinks(), thinks(Begin.REASONING), channels()])
@pytest.mark.parametrize("letter", ["x", "\n", "<", "<|start|>", "<|channel|>x", "<think>", "</thin", "to=", "<|mes"])
def test_the_work_is_linear_in_the_text(make: Callable[[], Splitter], letter: str, monkeypatch: pytest.MonkeyPatch):
    """Each character is looked at, and held back, a bounded number of times, whatever it is."""
    monkeypatch.setattr(reasoning, "MarkerFinder", CountingFinder)
    monkeypatch.setattr(harmony, "MarkerFinder", CountingFinder)

    def work(length: int) -> int:
        CountingFinder.work = 0
        splitter = make()
        for char in letter * (length // len(letter)):
            splitter.push(char)
            held = [value for value in vars(splitter).values() if isinstance(value, str)]
            assert max(map(len, held)) <= 2 * harmony.LONGEST_HEADER
        return CountingFinder.work

    assert work(4000) <= 2.1 * work(2000)


@pytest.mark.parametrize(
    ("template", "wanted", "form"),
    [
        ("{{ '<|im_start|>assistant\n' }}{{ content.split('</think>')[-1] }}", "auto", "think"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "auto", "harmony"),
        ("{{ messages }}", "auto", ""),
        ("{{ messages }}", "think", "think"),
        ("</think>", "none", ""),
    ],
)
def test_the_template_or_the_command_line_says_the_form(template: str, wanted: str, form: str):
    assert form_of(template, wanted) == form


def test_a_flag_chooses_the_parser():
    def chosen(*flags: str) -> str:
        return serve_settings(parse_arguments(["serve", "file:///model", *flags]), {}).reasoning_parser

    assert chosen() == "auto"
    assert chosen("--reasoning-parser", "think") == "think"
    assert chosen("--reasoning-parser", "") == "auto", "empty: not set"


@pytest.mark.parametrize(
    ("prompt", "continued", "begins"),
    [
        ("<|im_start|>assistant\n", None, Begin.EITHER),
        ("What is <think>?<|im_end|><|im_start|>assistant\n", None, Begin.EITHER),
        ("<|Assistant|><think>\n", None, Begin.REASONING),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", None, Begin.CONTENT),
        ("assistant\n<think>\nHm", "<think>\nHm", Begin.REASONING),
        ("assistant\n<think>\nHm</think>A", "<think>\nHm</think>A", Begin.CONTENT),
        ("assistant\nHello", "Hello", Begin.CONTENT),
    ],
)
def test_the_prompt_says_what_the_answer_begins_with(prompt: str, continued: str | None, begins: Begin):
    assert beginning_of(prompt, continued=continued) is begins


def answer_of(tokens: list[str], sizes: list[int], **fields: Any) -> list[Delta]:
    """The deltas of an answer whose steps have so many tokens."""
    deltas, at = [], 0
    while at < len(tokens):
        size = sizes.pop() if sizes else len(tokens)
        taken = tokens[at : at + size]
        ends = tuple(len("".join(taken[: number + 1])) for number in range(len(taken) - 1))
        ids = tuple(range(at, at + len(taken)))
        logprobs = tuple(TokenLogprobs(token_id=i, logprob=0.0, rank=1, top=()) for i in ids)
        at += len(taken)
        reason = FinishReason.STOP if at >= len(tokens) else None
        deltas.append(Delta("".join(taken), ids, reason, text_ends=ends, logprobs=logprobs, **fields))
    return deltas


TOKENS = ["<think>", "\n", "Hm", ".", "\n", "</th", "ink>", "\n\n", "Hel", "lo"]


@settings(deadline=None)
@given(st.lists(st.integers(1, 4), max_size=10), st.booleans())
def test_tokens_of_reasoning_are_counted_alike_in_any_steps(sizes: list[int], has_logprobs: bool):
    use = ReasoningUse(form="think", has_logprobs=has_logprobs)
    parser = AnswerParser(ThinkParser(Begin.EITHER), None, use)
    segments = [segment for delta in answer_of(TOKENS, sizes) for segment in parser.read(delta)]

    assert parser.reasoning_tokens == 5, "without the tags"
    assert said_in([part for segment in segments for part in segment.parts]) == ("Hm.", "Hello", [])
    scored = [token.token_id for segment in segments for token in segment.logprobs]
    assert scored == ([*range(10)] if has_logprobs else [6, 7, 8, 9])


def test_hidden_reasoning_is_counted_and_not_sent():
    parser = AnswerParser(ThinkParser(Begin.EITHER), None, ReasoningUse(form="think", is_shown=False))
    segments = [segment for delta in answer_of(TOKENS, [1, 2, 3]) for segment in parser.read(delta)]

    assert said_in([part for segment in segments for part in segment.parts]) == ("", "Hello", [])
    assert parser.reasoning_tokens == 5


def test_calls_are_looked_for_in_the_content_only():
    call = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
    parser = AnswerParser(ThinkParser(Begin.EITHER), parser_of("hermes", {"time": {}}), ReasoningUse(form="think"))
    [delta] = answer_of([f"<think>{call}</think>{call}"], [])

    assert said_in([part for segment in parser.read(delta) for part in segment.parts]) == (call, "", [("time", "{}")])
