"""The whole engine with grammars: at a temperature of 2 a small model writes nonsense, and every answer validates."""

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, RootModel, StringConstraints

from slipway_runtime.engine.build import build_engine
from slipway_runtime.engine.engine import Engine
from slipway_runtime.engine.grammar import GrammarCompiler
from slipway_runtime.messages import FinishReason, Grammar, Output, Request, SamplingParams, StepResult

TINY = Path(__file__).parents[3] / "models" / "tiny"
EOS = 2
PROMPT = (1, 1146, 1134, 264, 467)
COMPILER = GrammarCompiler((TINY / "tokenizer.json").read_text(), eos_token_ids=(EOS,))


class Pet(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    kind: Literal["cat", "dog"]
    age: Annotated[int, Field(ge=0, le=99)]


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    name: Annotated[str, StringConstraints(pattern="^[A-Z][a-z]{1,6}$")]
    glad: bool
    pets: Annotated[list[Pet], Field(max_length=2)]


class AnyObject(RootModel[dict[str, object]]):
    pass


KINDS = {
    "object": Grammar(kind="json_object", text=""),
    "person": Grammar(kind="json_schema", text=json.dumps(Person.model_json_schema())),
    "digits": Grammar(kind="regex", text=r"[0-9]{3}-[0-9]{3,5}"),
    "colour": Grammar(kind="choice", text='["red", "green and blue", "grey"]'),
    "sum": Grammar(kind="lark", text='start: term ("+" term){1,4}\nterm: /[0-9]{1,3}/ | "(" start ")"'),
}


def validate(kind: str, text: str) -> None:
    match kind:
        case "object":
            AnyObject.model_validate_json(text)
        case "person":
            Person.model_validate_json(text)
        case "digits":
            assert re.fullmatch(KINDS["digits"].text, text)
        case "colour":
            assert text in ("red", "green and blue", "grey")
        case "sum":
            assert re.fullmatch(r"[0-9+()]+", text)
            assert isinstance(eval(re.sub(r"\b0+(?=\d)", "", text)), int)


@pytest.fixture(scope="module", params=["none", "promptLookup", "overlapped"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    kinds = {
        "none": {"speculation": "none", "speculation_max_tokens": 0},
        "promptLookup": {"speculation": "promptLookup", "speculation_max_tokens": 3},
        "overlapped": {"overlap": True},
    }
    return build_engine(TINY, kv_cache_bytes=2 << 20, max_num_seqs=6, max_num_batched_tokens=64, **kinds[request.param])


def ask(engine: Engine, id: str, grammar: Grammar | None, *, n: int = 1, output: tuple[int, ...] = (), **how) -> None:
    params = SamplingParams(**{"max_tokens": 60, "temperature": 2.0, **how})
    engine.add(Request(id=id, prompt_token_ids=PROMPT, params=params, arrived=0.0, grammar=grammar, n=n,
                       output_token_ids=output), 0.0)  # fmt: skip


def run(engine: Engine) -> dict[tuple[str, int], tuple[list[int], Output]]:
    """All answers: their tokens and their last words."""
    tokens: dict[tuple[str, int], list[int]] = {}
    last: dict[tuple[str, int], Output] = {}
    for _ in range(3000):
        if not engine.has_work:
            engine.idle()
            return {key: (tokens[key], last[key]) for key in tokens}
        for output in engine.step(0.0).outputs:
            key = output.request_id, output.index
            assert key not in last or last[key].finish_reason is None, "one last word"
            tokens.setdefault(key, []).extend(output.token_ids)
            last[key] = output
    raise AssertionError("still at work")


def text_of(tokens: list[int]) -> str:
    return COMPILER.vocabulary.decode_str([token for token in tokens if token != EOS])


@pytest.mark.capability("SO-1", "SO-3")
def test_every_answer_validates_or_says_that_it_was_cut(engine):
    for kind, grammar in KINDS.items():
        ask(engine, kind, grammar, n=3, seed=sum(kind.encode()))
    ask(engine, "free", None, n=2, seed=9, ignore_eos=True)
    answers = run(engine)
    assert len(answers) == 3 * len(KINDS) + 2
    whole = 0
    for (kind, _), (tokens, last) in answers.items():
        if kind == "free":
            assert (len(tokens), last.finish_reason) == (60, FinishReason.LENGTH)
        elif last.finish_reason is FinishReason.STOP:
            validate(kind, text_of(tokens))
            whole += 1
        else:
            assert last.finish_reason is FinishReason.LENGTH
            assert COMPILER.matcher(KINDS[kind]).consume_tokens(tokens), "what was cut is the beginning of an answer"
    assert whole >= 9
    assert engine._grammars.mask_seconds > 0
    assert (engine.stats(0.0).draft_tokens > 0) == (engine.facts.speculation != "none")


@pytest.mark.capability("SO-2")
def test_nobody_else_waits_while_a_grammar_compiles(engine, monkeypatch: pytest.MonkeyPatch):
    may_compile, woken = threading.Event(), threading.Event()
    compiler = engine._grammars._compiler
    matcher = compiler.matcher
    monkeypatch.setattr(compiler, "matcher", lambda grammar: may_compile.wait(300) and matcher(grammar))
    monkeypatch.setattr(engine._grammars, "wake", woken.set)
    ask(engine, "bound", KINDS["digits"])
    ask(engine, "free", None, max_tokens=5, ignore_eos=True)

    others = run(engine)
    while_it_compiles = engine.stats(0.0)
    may_compile.set()
    assert woken.wait(60)
    answers = run(engine)

    assert [(key, len(tokens)) for key, (tokens, _) in others.items()] == [(("free", 0), 5)]
    assert (while_it_compiles.running, while_it_compiles.waiting) == (0, 1)
    assert answers.keys() == {("bound", 0)}
    validate("digits", text_of(answers["bound", 0][0]))


@pytest.mark.capability("SO-1")
def test_greedy_answers_with_logprobs_stay_within_the_grammar(engine):
    ask(engine, "colour", KINDS["colour"], temperature=0.0, logprobs=5)
    ask(engine, "digits", KINDS["digits"], temperature=0.0, logit_bias=((EOS, 100.0), (500, 100.0)), min_tokens=30)
    answers = run(engine)
    validate("colour", text_of(answers["colour", 0][0]))
    validate("digits", text_of(answers["digits", 0][0]))
    assert answers["digits", 0][0][-1] == EOS
    # review/engine.md F14: min_tokens filled the answer with end tokens after the grammar had ended
    assert answers["digits", 0][0].count(EOS) == 1


@pytest.mark.capability("SO-1", "KV-7")
def test_an_answer_goes_on_from_what_was_said_elsewhere(engine):
    ask(engine, "person", KINDS["person"], seed=4)
    tokens, last = run(engine)["person", 0]
    ask(engine, "resumed", KINDS["person"], seed=4, output=tuple(tokens[:7]))
    rest, resumed = run(engine)["resumed", 0]
    assert tokens[:7] + rest == tokens
    assert resumed.finish_reason == last.finish_reason
    ask(engine, "lost", KINDS["person"], output=tuple(COMPILER.vocabulary.tokenize_str("once upon")))
    assert run(engine)["lost", 0][1].finish_reason is FinishReason.ERROR


@pytest.mark.capability("SO-2")
def test_a_grammar_that_was_not_checked_ends_its_own_request_only(engine):
    ask(engine, "bad", Grammar(kind="regex", text="(a"))
    ask(engine, "good", KINDS["colour"])
    ask(engine, "free", None, max_tokens=5, ignore_eos=True)
    answers = run(engine)
    tokens, last = answers["bad", 0]
    assert (tokens, last.finish_reason) == ([], FinishReason.ERROR)
    assert "cannot be compiled" in last.error
    validate("colour", text_of(answers["good", 0][0]))
    assert len(answers["free", 0][0]) == 5


@pytest.mark.capability("SO-1", "KV-7")
def test_grammars_survive_preemption():
    tight = build_engine(TINY, kv_cache_bytes=13 * 16 * 2048, max_num_seqs=6, max_num_batched_tokens=64)
    roomy = build_engine(TINY, kv_cache_bytes=4 << 20, max_num_seqs=6, max_num_batched_tokens=64)
    never_short = Grammar(kind="regex", text=r"([a-z]{1,9} ){100}")  # so that the pool is surely too small
    for engine in (tight, roomy):
        for seed in range(5):
            ask(engine, f"r{seed}", never_short if seed % 2 else KINDS["person"], seed=seed, max_tokens=30)
    one, other = run(tight), run(roomy)
    assert tight.stats(0.0).preemptions > 0
    assert {key: tokens for key, (tokens, _) in one.items()} == {key: tokens for key, (tokens, _) in other.items()}


@pytest.mark.capability("SO-1", "BS-7")
def test_answers_with_and_without_a_grammar_are_those_of_the_plain_loop(monkeypatch: pytest.MonkeyPatch):
    """Finding C17: one row with a grammar stopped the overlap of all rows."""
    answers, ahead = [], []
    for overlap in (False, True):
        one = build_engine(TINY, kv_cache_bytes=2 << 20, max_num_seqs=6, max_num_batched_tokens=64, overlap=overlap)
        update = one._scheduler.update

        def watched(result: StepResult, now: float, one: Engine = one, update=update) -> list[Output]:
            ahead.append(len(one._scheduler._in_flight))
            return update(result, now)

        monkeypatch.setattr(one._scheduler, "update", watched)
        ahead.clear()
        for index, (kind, grammar) in enumerate(KINDS.items()):
            ask(one, kind, grammar, seed=index)
        ask(one, "free", None, seed=9, ignore_eos=True)
        answers.append({key: (tokens, last.finish_reason) for key, (tokens, last) in run(one).items()})
    assert answers[0] == answers[1]
    assert ahead.count(2) > len(ahead) // 2, "most steps were planned and launched before the last one was followed"
