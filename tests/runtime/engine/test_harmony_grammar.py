"""Calls of gpt-oss follow the schemas of their functions, while the rest of an answer stays free."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from slipway_runtime.engine.grammar import GrammarCompiler, GrammarLimits, GrammarRefusedError
from slipway_runtime.messages import Grammar
from tests.runtime.server.serving import TINY
from tests.runtime.server.thinking_models import gpt_oss_checkpoint

SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": ["S", "M"]}},
    "required": ["size"],
    "additionalProperties": False,
}
FUNCTIONS = [{"name": "weather", "schema": SCHEMA}, {"name": "time", "schema": {"type": "object"}}]
THEN = "<|end|><|start|>assistant"
HEADER = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
FOLLOWED = [
    "<|channel|>final<|message|>Hello!",
    f"<|channel|>analysis<|message|>Hm.{THEN}<|channel|>final<|message|>Hello!",
    f'<|channel|>analysis<|message|>Hm.{THEN}{HEADER}{{"size":"S"}}',
    ' to=functions.weather<|channel|>commentary json<|message|>{"size":"M"}',
    '<|channel|>analysis to=functions.time<|message|>{"a": 1}',
]
BROKEN = [
    "Hello!",
    f'{HEADER}{{"size":"L"',
    f'{HEADER}{{"count"',
    "<|channel|>commentary to=functions.secret",
    "<|channel|>thoughts<|message|>",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpt_oss_checkpoint(tmp_path_factory.mktemp("gpt-oss") / "checkpoint")


def compiler_of(folder: Path, limits: GrammarLimits | None = None) -> GrammarCompiler:
    return GrammarCompiler((folder / "tokenizer.json").read_text(), eos_token_ids=(2, 5), limits=limits)


def harmony(functions: Any) -> Grammar:
    return Grammar(kind="harmony", text=json.dumps(functions))


@pytest.mark.capability("SO-1")
@pytest.mark.parametrize("text", FOLLOWED + BROKEN)
def test_calls_are_bound_and_messages_are_free(folder: Path, text: str):
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    matcher = compiler_of(folder).matcher(harmony(FUNCTIONS))

    assert (matcher.validate_tokens(tokens) == len(tokens)) == (text in FOLLOWED)
    if text in FOLLOWED:
        assert matcher.consume_tokens(tokens)
        assert matcher.is_accepting(), "the answer may end here"


def test_many_functions_fit_and_limits_hold(folder: Path):
    wide = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(10)}}
    compiler_of(folder).check(harmony([{"name": f"f{number}", "schema": wide} for number in range(128)]))

    with pytest.raises(GrammarRefusedError, match="members"):
        compiler_of(folder, GrammarLimits(members=9)).check(harmony([{"name": "f", "schema": wide}]))


def test_a_vocabulary_without_channels_is_refused():
    tokenizer = (TINY / "tokenizer.json").read_text()

    with pytest.raises(GrammarRefusedError, match="harmony"):
        GrammarCompiler(tokenizer, eos_token_ids=(2,)).check(harmony(FUNCTIONS))


THINK = f"<|channel|>analysis<|message|>Hm.{THEN}"
FORCED = {"functions": FUNCTIONS, "format": None, "is_bound": True}
IN_FORM = {"functions": [], "format": {"kind": "json_schema", "text": json.dumps(SCHEMA)}, "is_bound": True}


@pytest.mark.capability("SO-1")
@pytest.mark.parametrize(
    ("grammar", "text", "is_followed"),
    [
        (FORCED, f'{THINK}{HEADER}{{"size":"S"}}', True),
        (FORCED, f'{THINK}{THINK}{HEADER}{{"size":"S"}}', True),
        (FORCED, f'{HEADER}{{"size":"S"}}', True),
        (FORCED, "<|channel|>final<|message|>Hello!", False),
        (FORCED, f"{THINK}<|channel|>final", False),
        (FORCED, "<|channel|>commentary<|message|>I look it up.", False),
        (FORCED, f'{THINK}{HEADER}{{"size":"L"', False),
        (IN_FORM, f'{THINK}<|channel|>final<|message|>{{"size":"S"}}', True),
        (IN_FORM, '<|channel|>final<|message|>{"size":"M"}', True),
        (IN_FORM, f"{THINK}<|channel|>final<|message|>Hello!", False),
        (IN_FORM, f"{THINK}{HEADER}", False),
    ],
)
def test_a_bound_answer_is_thoughts_and_then_a_call_or_the_final_message(
    folder: Path, grammar: Any, text: str, is_followed: bool
):
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    matcher = compiler_of(folder).matcher(harmony(grammar))

    assert (matcher.validate_tokens(tokens) == len(tokens)) == is_followed
    if is_followed:
        assert matcher.consume_tokens(tokens)
        assert matcher.is_accepting()
