"""Answers follow their grammars token by token: with draft tokens, in mixed batches, after preemption, continued."""

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest

from slipway_runtime.engine.grammar import GrammarCompiler
from slipway_runtime.engine.matchers import Grammars
from slipway_runtime.messages import (
    FinishReason,
    Grammar,
    NewSequence,
    Output,
    Request,
    SamplingParams,
    SchedulerOutput,
    TokenMasks,
)

TINY = Path(__file__).parents[3] / "models" / "tiny" / "tokenizer.json"
V, EOS = 3072, 2
COMPILER = GrammarCompiler(TINY.read_text(), eos_token_ids=(EOS,))


def request(id: str, grammar: Grammar | None, *, n: int = 1, output: tuple[int, ...] = ()) -> Request:
    params = SamplingParams(max_tokens=50)
    return Request(id=id, prompt_token_ids=(1,), params=params, arrived=0.0, grammar=grammar, n=n,
                   output_token_ids=output)  # fmt: skip


def spell(text: str) -> list[int]:
    return COMPILER.vocabulary.tokenize_str(text)


def regex(text: str) -> Grammar:
    return Grammar(kind="regex", text=text)


class StepLoop:
    """The step loop of the grammars, without model and scheduler; each answer has a row of its own."""

    def __init__(self, *requests: Request, threads: int = 1) -> None:
        self.grammars = Grammars(COMPILER, threads=threads)
        self.keys = [(request.id, index) for request in requests for index in range(request.n)]
        for request in requests:
            self.grammars.start(request)
        self.new = tuple(
            NewSequence(row=row, token_ids=(1,), num_prompt_tokens=1, params=SamplingParams(max_tokens=1),
                        request_id=id, index=index)
            for row, (id, index) in enumerate(self.keys)
        )  # fmt: skip

    def masks(self, *drafts: str | list[int]) -> dict[int, set[int]]:
        """What each sample of a step may sample, by its place; samples that are not bound are missing."""
        drafted = tuple(tuple(spell(draft) if isinstance(draft, str) else draft) for draft in drafts)
        plan = SchedulerOutput(
            step=1,
            new_rows=self.new,
            rows=tuple(range(len(self.keys))),
            num_new=tuple(1 + len(draft) for draft in drafted or ((),) * len(self.keys)),
            samples=(True,) * len(self.keys),
            drafts=drafted if any(drafted) else (),
        )
        self.new = ()
        return allowed(self.grammars.masks(plan)())

    def emit(self, row: int, tokens: str | list[int], reason: FinishReason | None = None) -> str:
        id, index = self.keys[row]
        tokens = tuple(spell(tokens) if isinstance(tokens, str) else tokens)
        return self.grammars.accept(Output(request_id=id, index=index, token_ids=tokens, finish_reason=reason))


def allowed(masks: TokenMasks | None) -> dict[int, set[int]]:
    if masks is None:
        return {}
    words = np.frombuffer(masks.words, dtype=np.uint8).reshape(len(masks.samples), -1)
    bits = np.unpackbits(words, axis=1, count=V, bitorder="little")
    return {sample: set(np.flatnonzero(row).tolist()) for sample, row in zip(masks.samples, bits, strict=True)}


def starts(text: str, *texts: str) -> bool:
    return any(one.startswith(text) for one in texts)


@pytest.mark.capability("SO-1")
def test_masks_advance_with_what_was_emitted_and_end_with_the_end():
    loop = StepLoop(request("a", regex("ab?c")))
    (first,) = loop.masks().values()
    assert first == {token for token in range(V) if spell_back(token) and starts(spell_back(token), "abc", "ac")}
    assert loop.emit(0, "a") == ""
    (second,) = loop.masks().values()
    assert EOS not in second
    assert loop.emit(0, "c") == ""
    assert loop.masks() == {0: {EOS}}
    assert loop.emit(0, [EOS], FinishReason.STOP) == ""
    assert len(loop.grammars) == 0
    assert loop.masks() == {}


def spell_back(token: int) -> str:
    return "" if COMPILER.vocabulary.is_special_token(token) else COMPILER.vocabulary.decode_str([token])


@pytest.mark.capability("SO-1")
def test_after_the_end_only_ends_come_however_many_are_wanted():
    loop = StepLoop(request("a", regex("ab?")))
    assert loop.emit(0, "a") == ""
    assert EOS in loop.masks()[0]
    for _ in range(3):
        assert loop.emit(0, [EOS]) == ""
        assert loop.masks() == {0: {EOS}}
    assert loop.masks([EOS, EOS]) == {0: {EOS}, 1: {EOS}, 2: {EOS}}
    assert loop.emit(0, "b") != ""


@pytest.mark.capability("SO-1", "SD-1")
def test_each_draft_token_has_its_mask_and_leaves_no_trace():
    loop = StepLoop(request("free", None), request("a", regex("([ac][bd]){3}")), request("b", regex("x*")))
    before = loop.masks("zz", "", "")
    places = 1 + len(spell("zz"))
    assert set(before) == {places, places + 1}
    a, b = spell("a")[0], spell("b")[0]
    masks = loop.masks("zz", [a, b, a, a, b], [])
    assert set(masks) == {places, places + 1, places + 2, places + 3, places + 6}, (
        "none after a draft token that is refused"
    )
    assert a in masks[places]
    assert a not in masks[places + 1]
    assert b in masks[places + 1]
    assert a in masks[places + 2]
    assert b in masks[places + 3]
    assert masks[places + 6] == before[places + 1]
    assert loop.masks("zz", "", "") == before
    assert loop.emit(1, [a, b]) == ""
    ended = loop.masks([], [a, b, a, b, EOS], [EOS, EOS])
    assert ended[1 + 4] == ended[1 + 5] == {EOS}
    assert ended[7 + 1] == ended[7 + 2] == {EOS}
    assert loop.emit(1, [a, b, a, b, EOS]) == ""


@pytest.mark.capability("SO-1")
def test_answers_of_one_request_stand_apart_and_rows_change_hands():
    loop = StepLoop(request("a", regex("ab|ba"), n=2))
    assert loop.emit(0, "a") == ""
    masks = loop.masks()
    assert spell("a")[0] not in masks[0]
    assert spell("a")[0] in masks[1]
    # The first is preempted; the second comes back in its row.
    loop.new = (NewSequence(row=0, token_ids=(1,), num_prompt_tokens=1, params=SamplingParams(max_tokens=1),
                            request_id="a", index=1),)  # fmt: skip
    assert spell("a")[0] in loop.masks()[0]


@pytest.mark.capability("SO-1")
def test_given_output_is_replayed_and_must_fit():
    loop = StepLoop(request("a", regex("hello world"), output=tuple(spell("hello"))))
    assert all(spell_back(token).startswith(" ") for token in loop.masks()[0])
    lost = StepLoop(request("a", regex("hello"), output=tuple(spell("goodbye"))))
    assert lost.masks() == {0: {EOS}}
    assert "does not allow" in lost.emit(0, [EOS])


@pytest.mark.capability("SO-1")
def test_a_grammar_that_breaks_allows_only_an_end_and_says_so():
    for grammar, sentence in (
        (regex("(a"), "cannot be compiled"),
        (Grammar(kind="x", text=""), "not a kind of grammar"),
    ):
        loop = StepLoop(request("a", grammar), request("b", regex("[xy]")))
        masks = loop.masks("aa", "")
        assert masks[0] == {EOS}
        assert spell("x")[0] in masks[max(masks)], "the others go on"
        assert sentence in loop.emit(0, [EOS])
        assert len(loop.grammars) == 1
    loop = StepLoop(request("a", regex("aaa")))
    assert loop.emit(0, "ab") == "a token was sampled that the grammar does not allow"


JSON = Grammar(
    kind="json_schema",
    text=json.dumps({
        "type": "object", "required": ["tags", "kind"], "additionalProperties": False,
        "properties": {"tags": {"type": "array", "items": {"enum": ["a", "bb"]}, "maxItems": 3},
                       "kind": {"type": "string", "pattern": "^[a-z]{2,6}$"}},
    }),
)  # fmt: skip


@pytest.mark.capability("SO-1", "SD-1")
@pytest.mark.parametrize("drafting", [False, True], ids=["plain", "drafting"])
def test_random_draws_within_the_masks_always_end_in_a_valid_text(drafting):
    """The step loop with a worker that samples evenly from what is allowed, and drafts from what was allowed before."""
    dice = random.Random(5)
    loop = StepLoop(request("j", JSON), request("free", None), request("r", regex("(ab|ba){2,20}!")))
    texts: dict[int, list[int]] = {0: [], 1: [], 2: []}
    done: set[int] = set()
    for _ in range(200):
        drafts = [
            [] if not drafting or row in done else dice.choices(range(3, V), k=dice.randrange(3)) for row in texts
        ]
        if drafting and 0 not in done:
            drafts[0] = sorted(loop.masks([], [], [])[0])[:2]
        masks = loop.masks(*drafts)
        first = 0
        for row, draft in enumerate(drafts):
            kept: list[int] = []
            for place in range(first, first + 1 + len(draft)):
                sampled = dice.choice(sorted(masks.get(place, range(3, V))))
                if (
                    drafting
                    and len(kept) < len(draft)
                    and dice.random() < 0.7
                    and draft[len(kept)] in masks.get(place, ())
                ):
                    sampled = draft[len(kept)]
                kept.append(sampled)
                if sampled == EOS or len(kept) > len(draft) or sampled != draft[len(kept) - 1]:
                    break
            first += 1 + len(draft)
            if row in done or row == 1:
                continue
            texts[row] += kept
            ends = EOS in kept
            assert loop.emit(row, kept, FinishReason.STOP if ends else None) == ""
            done |= {row} if ends else set()
        if done == {0, 2}:
            break
    assert done == {0, 2}
    answer = json.loads(COMPILER.vocabulary.decode_str(texts[0][:-1]))
    assert set(answer) == {"tags", "kind"}
    assert set(answer["tags"]) <= {"a", "bb"}
    assert re.fullmatch("[a-z]{2,6}", answer["kind"])
    assert re.fullmatch("(ab|ba){2,20}!", COMPILER.vocabulary.decode_str(texts[2][:-1]))


@pytest.mark.capability("SO-1", "BS-7")
def test_masks_of_a_step_launched_ahead_wait_for_the_outputs_of_the_step_before():
    loop = StepLoop(request("a", regex("ab?c")), request("b", regex("xy")))
    steps = [
        SchedulerOutput(step=step, new_rows=loop.new if step == 1 else (), rows=(0, 1), num_new=(1, 1),
                        samples=(True, True))
        for step in (1, 2, 3)
    ]  # fmt: skip
    first = allowed(loop.grammars.masks(steps[0])())
    ahead = loop.grammars.masks(steps[1])
    assert not ahead.__self__.done()
    loop.emit(0, "a")
    loop.emit(1, [], FinishReason.CANCELLED)  # its sample is dropped, and gets no mask
    assert not ahead.__self__.done()
    loop.grammars.follow(1)
    second = allowed(ahead())
    assert first.keys() == {0, 1}
    assert second == {0: {token for token in range(V) if spell_back(token) and starts(spell_back(token), "bc", "c")}}
    given_up = loop.grammars.masks(steps[2])
    loop.grammars.follow(3)  # both steps were given up
    assert given_up() is not None


@pytest.mark.capability("SO-1")
def test_masks_that_several_threads_fill_are_the_same():
    """Finding C17: one thread made the masks row by row. Among them an ended and a broken answer."""
    texts = ["[a-z]+", "[0-9]{3}", "(yes|no)", "ab?c", "", "x"]
    made = []
    for threads in (1, 3):
        loop = StepLoop(*(request(str(index), regex(text)) for index, text in enumerate(texts)), threads=threads)
        loop.masks()
        loop.emit(0, "a")
        loop.emit(3, "a")
        loop.emit(5, "x")
        loop.grammars._answers["2", 0].error = "broken"
        made.append(loop.masks())
    assert made[0] == made[1]
    assert made[0][2] == made[0][5] == {EOS}
    assert len(made[0][0]) > 100
