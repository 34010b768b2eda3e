"""How requests end that do not finish: in whatever state they are, once, and with nothing left behind."""

import json
from collections.abc import Callable

import pytest

from slipway_runtime.messages import (
    FinishReason,
    Grammar,
    LoadAdapter,
    Request,
    ResetPrefixCache,
    SamplingParams,
    UnloadAdapter,
)
from tests.runtime.engine.everything import GRAMMAR, Model, Served, a_model

CANCELLED, ERROR = FinishReason.CANCELLED, FinishReason.ERROR
SLOW = Grammar(kind="json_schema", text=json.dumps({"enum": [f"word number {n}" for n in range(1500)]}))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return a_model(tmp_path_factory.mktemp("endings"))


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "overlapped"])
def served(request: pytest.FixtureRequest, model: Model) -> Served:
    return Served(model, overlap=request.param, max_num_seqs=2, max_num_batched_tokens=16, max_adapters=1, max_rank=8)


def ask(served: Served, id: str, tokens: int = 3, max_tokens: int = 20, **fields) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=fields.pop("ignore_eos", True))
    prompt = tuple((len(id) * 100 + n) % 3000 + 3 for n in range(tokens))
    served.engine.add(Request(id=id, prompt_token_ids=prompt, params=params, arrived=0.0, **fields), 0.0)


def take(served: Served, steps: int = 1) -> None:
    for _ in range(steps):
        for output in served.engine.step(0.0).outputs:
            told = served.outputs.setdefault((output.request_id, output.index), [])
            assert not told or told[-1].finish_reason is None, "nothing comes after the end"
            told.append(output)


def waiting(served: Served) -> None:
    ask(served, "first", max_tokens=8)
    ask(served, "second", max_tokens=8)
    take(served)
    ask(served, "x")


def in_the_middle_of_its_prompt(served: Served) -> None:
    ask(served, "x", tokens=70)
    take(served, 2)


def sampled(served: Served) -> None:
    ask(served, "x")
    take(served, 4)


def sampling_within_a_grammar(served: Served) -> None:
    ask(served, "x", grammar=GRAMMAR)
    take(served, 4)


def while_its_grammar_compiles(served: Served) -> None:
    ask(served, "first", max_tokens=8)
    take(served, 2)
    grammars = served.engine._grammars
    grammars.wake = lambda: None  # where somebody can be woken, it stands aside meanwhile
    ask(served, "x", grammar=SLOW)
    grammars.wake = None


def while_its_adapter_is_read(served: Served) -> None:
    ask(served, "x", adapter=served.digests[1])
    assert served.engine._scheduler.is_stalled


def several_at_once(served: Served) -> None:
    ask(served, "x", n=3)
    take(served, 4)


def several_before_the_first(served: Served) -> None:
    ask(served, "x", tokens=70, n=3)
    take(served, 2)


STATES = [
    waiting, in_the_middle_of_its_prompt, sampled, sampling_within_a_grammar, while_its_grammar_compiles,
    while_its_adapter_is_read, several_at_once, several_before_the_first,
]  # fmt: skip


@pytest.mark.capability("API-7", "BS-7")
@pytest.mark.parametrize("bring_there", STATES, ids=lambda state: state.__name__)
def test_an_abort_in_any_state_gives_everything_back_within_a_step(
    served: Served, model: Model, bring_there: Callable[[Served], None]
):
    engine = served.engine
    served.outputs.clear()
    if bring_there is while_its_adapter_is_read:
        engine.control(UnloadAdapter(call=5, digest=served.digests[1]), 0.0)
        engine.control(LoadAdapter(call=6, digest=served.digests[1], path=str(model.adapters[0])), 0.0)
    before = engine.stats(0.0)
    bring_there(served)
    others = sum(output[0] != "x" for output in served.outputs)
    answers = engine.stats(0.0).admitted - before.admitted - others

    engine.abort("x", CANCELLED, 0.0)
    take(served)

    after = engine.stats(0.0)
    told = [outputs[-1].finish_reason for (id, _), outputs in served.outputs.items() if id == "x"]
    assert told == [CANCELLED] * answers
    assert after.aborted - before.aborted == answers
    assert after.running + after.waiting == others
    assert not engine._grammars._answers
    assert (after.blocks_live > 0) == (others > 0)
    engine._scheduler.check()

    served.finish()
    end = engine.stats(0.0)
    assert end.blocks_live == end.running == end.waiting == 0
    assert end.finished - before.finished == others, "the others never noticed"
    assert all(len(served.tokens(id)) == 8 for id, _ in served.outputs if id != "x")


@pytest.mark.capability("API-7")
@pytest.mark.parametrize("steps", [0, 1, 2, 8])
@pytest.mark.parametrize("index", [0, 1])
def test_one_of_several_answers_may_go_and_the_other_says_what_it_would_have_said(served: Served, steps, index):
    served.engine.control(ResetPrefixCache(call=0), 0.0)
    served.outputs.clear()
    ask(served, "alone", tokens=20)
    served.finish()
    before = served.engine.stats(0.0)
    ask(served, "alone", tokens=20, n=2)
    alone, served.outputs = served.tokens("alone"), {}
    take(served, steps)
    served.engine.abort("alone", CANCELLED, 0.0, index)
    served.finish()
    assert served.tokens("alone", 1 - index) == alone
    assert served.outputs["alone", index][-1].finish_reason is CANCELLED
    after = served.engine.stats(0.0)
    assert (after.finished - before.finished, after.aborted - before.aborted) == (1, 1)
    assert after.blocks_live == 0


@pytest.mark.capability("SO-2")
def test_a_grammar_that_cannot_be_followed_ends_its_answer_with_one_word_and_no_other(served: Served):
    """With ignore_eos too, an answer whose grammar is broken ends with the step that finds it out."""
    served.outputs.clear()
    before = served.engine.stats(0.0)
    ask(served, "beside", max_tokens=12)
    take(served, 2)
    ask(served, "broken", grammar=Grammar(kind="regex", text="(a"), ignore_eos=True)
    served.finish()
    (last,) = served.outputs["broken", 0]
    assert (last.finish_reason, last.token_ids) == (ERROR, ())
    assert "cannot be compiled" in last.error
    assert len(served.tokens("beside")) == 12
    after = served.engine.stats(0.0)
    # Its only token was the end of the sequence, so it has finished, with an error.
    assert (after.finished - before.finished, after.aborted - before.aborted) == (2, 0)
    assert after.blocks_live == len(served.engine._grammars) == 0
