"""How much worse a new revision may answer the golden prompts."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipway_api.rollout_spec import Gates, GoldenGate
from slipway_operator.core.actions import GoldenTest, SmokeResult
from slipway_operator.core.health import judge as judge_health
from slipway_operator.core.service.rollout.gates import MOST_ERRORS, check_gates
from slipway_operator.core.service.rollout.golden import (
    MOST_PROMPTS,
    GoldenError,
    GoldenPrompt,
    judge_answers,
    parse_config_map,
    parse_prompts,
)
from tests.builders import T0, a_pod, minutes

GATES = Gates(golden=GoldenGate(uri="configmap://golden/prompts.jsonl"))
TEST = GoldenTest(
    uri="configmap://golden/prompts.jsonl",
    config_map="golden",
    key="prompts.jsonl",
    max_drop=2.0,
    max_disagreement=5.0,
)


def judge(prompts, new, stable):
    return judge_answers(TEST, prompts, new, stable)


def a_hundred(right):
    """Answers to a hundred prompts of which so many are right."""
    return ["yes"] * right + ["no"] * (100 - right)


PROMPTS = [GoldenPrompt(prompt=f"p{number}", answer="yes") for number in range(100)]


@pytest.mark.capability("QZ-2")
@pytest.mark.parametrize(
    ("new", "stable", "passes", "says"),
    [
        (100, 100, True, "100.0% of 100 stored answers after 100.0%: 0.0 points lost"),
        (98, 100, True, "2.0 points lost, 2 allowed"),
        (97, 100, False, "97.0% of 100 stored answers after 100.0%: 3.0 points lost, 2 allowed"),
        (97, 96, True, "0.0 points lost"),
        (60, 62, True, "2.0% of 100 answers differ"),
        (100, 94, False, "6.0% of 100 answers differ from the stable revision's, 5% allowed"),
        (98, None, True, "98.0% of 100 stored answers after 100.0%"),
        (97, None, False, "3.0 points lost"),
    ],
)
def test_the_drop_and_the_disagreement_have_their_limits(new, stable, passes, says):
    verdict = judge(PROMPTS, a_hundred(new), None if stable is None else a_hundred(stable))

    assert verdict.is_passed is passes
    assert says in verdict.sentence
    assert "golden prompts of configmap://golden/prompts.jsonl" in verdict.sentence


@pytest.mark.capability("QZ-2")
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60))
def test_a_revision_that_differs_too_often_never_passes_and_an_equal_one_always_does(answers):
    prompts = [GoldenPrompt(prompt="p", answer="yes") for _ in answers]
    new = ["yes" if right else "no" for right, _ in answers]
    stable = ["yes" if right else "no" for _, right in answers]

    verdict = judge(prompts, new, stable)

    differ = sum(one != other for one, other in answers)
    lost = sum(was for _, was in answers) - sum(right for right, _ in answers)
    assert verdict.is_passed == (differ * 100 <= 5 * len(answers) and lost * 100 <= 2 * len(answers))
    assert judge(prompts, stable, stable).is_passed


def test_where_nothing_can_be_compared_nothing_passes():
    verdict = judge([GoldenPrompt(prompt="p")], ["a text"], None)

    assert not verdict.is_passed
    assert "no line has a stored answer, and no stable replica is ready" in verdict.sentence


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "there is no prompt"),
        ("\n\n", "there is no prompt"),
        ("a secret text", "line 1 is not a JSON object"),
        ('{"prompt": "p"}\n{"promt": "a secret text"}', "line 2 is not a JSON object"),
        ('{"prompt": ""}', "line 1 needs a prompt"),
        ('{"prompt": "p", "maxTokens": 0}', "maxTokens of 1 to 256"),
        ("\n".join([json.dumps({"prompt": "p"})] * (MOST_PROMPTS + 1)), "at most 200"),
    ],
)
def test_prompts_that_cannot_be_read_are_refused_without_their_text(text, says):
    with pytest.raises(GoldenError, match=says) as refused:
        parse_prompts(text)

    assert "secret" not in str(refused.value)


def test_a_key_that_is_missing_is_named():
    with pytest.raises(GoldenError, match=r"no key prompts\.jsonl"):
        parse_config_map({"data": {"other": ""}}, "prompts.jsonl")


def test_prompts_do_not_show_in_a_repr():
    (prompt,) = parse_prompts('{"prompt": "a secret", "answer": "a text", "maxTokens": 4}')

    assert (prompt.prompt, prompt.answer, prompt.max_tokens) == ("a secret", "a text", 4)
    assert "secret" not in repr(prompt)


# --- the gate ---------------------------------------------------------------------------------------------------------


def members_of(*pods):
    return judge_health([pod.replica for pod in pods], {}, startup_timeout=minutes(30), now=T0)


def gate(*stable, result=None):
    """The gate of a revision whose one replica is ready, beside these replicas of the stable one."""
    new = members_of(a_pod("new").ready())
    return check_gates(
        GATES,
        new,
        stable_members=members_of(*stable),
        revision="new",
        model="chat",
        stable_model="chat",
        was_passed=False,
        results={new[0].replica.uid: result} if result else {},
        now=T0,
    )


def test_the_prompts_are_asked_beside_a_ready_replica_of_the_stable_revision():
    (ask,) = gate(a_pod("old").slot(0), a_pod("old").slot(1).ready()).actions

    assert ask.golden.beside.startswith("chat-old-1")
    assert (ask.golden.config_map, ask.golden.key) == ("golden", "prompts.jsonl")


def test_a_stable_replica_that_is_not_ready_for_a_moment_is_waited_for():
    state = gate(a_pod("old"))

    assert (state.actions, state.is_passed, state.failed_because) == ((), False, "")


def test_without_any_stable_replica_the_stored_answers_count():
    (ask,) = gate().actions

    assert ask.golden.beside == ""


@pytest.mark.capability("QZ-2")
def test_a_bad_verdict_fails_the_revision_with_its_sentence():
    state = gate(result=SmokeResult(at=T0, golden="golden prompts of x: 9.0 points lost"))

    assert state.failed_because == "golden prompts of x: 9.0 points lost"
    assert not state.is_passed


def test_prompts_that_cannot_be_judged_fail_it_after_some_tries():
    error = SmokeResult(at=T0, errors=MOST_ERRORS, error="ConfigMap golden does not exist", is_golden=True)

    assert gate(result=error).failed_because.endswith("got no answer 5 times: ConfigMap golden does not exist")
