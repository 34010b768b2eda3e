"""Guesses: the same words, in fewer steps, and none where they do not pay."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipway_runtime.messages import Request, SamplingParams
from slipway_runtime.scheduling.draft_activity import (
    ENOUGH_DRAFT_TOKENS,
    ENOUGH_STEPS,
    LONGEST_REST_TOKENS,
    REST_TOKENS,
)
from slipway_runtime.scheduling.fairness import Share
from slipway_runtime.scheduling.sequence import Sequence
from slipway_runtime.scheduling.speculation import PromptLookup, Speculation
from tests.runtime.paper_worker import Play, continuation


def a_sequence(tokens: list[int]) -> Sequence:
    params = SamplingParams(max_tokens=1000)
    request = Request(id="a", prompt_token_ids=tuple(tokens), params=params, arrived=0.0)
    return Sequence(request, 0, params, "", 1, 1000, [b""], 0.0, Share(""))


class Guesses:
    """A drafter that is told what to draft."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = tokens

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        return self.tokens[:most]


@pytest.mark.capability("SD-1")
@pytest.mark.parametrize(
    ("tokens", "drafted"),
    [
        ([1, 2, 3, 4, 5, 9, 1, 2, 3], (4, 5, 9, 1)),
        ([7, 1, 2, 8, 6, 1, 2, 9, 5, 1, 2], (9, 5, 1, 2)),  # the most recent place
        ([9, 1, 2, 8, 6, 3, 1, 2, 7, 9, 1, 2], (8, 6, 3, 1)),  # a longer match before a more recent one
        ([1, 2, 1, 2, 1, 2], (1, 2, 1, 2)),  # round and round
        ([5, 5, 5], (5, 5, 5, 5)),
        ([1, 2, 3, 4], ()),
        ([3], ()),
    ],
)
def test_what_went_on_before_goes_on_again(tokens, drafted):
    assert PromptLookup().propose(a_sequence(tokens), 4) == drafted


@settings(max_examples=100, deadline=None)
@given(tokens=st.lists(st.sampled_from([0, 1, 2, 256, 0x01010101]), min_size=1, max_size=40), most=st.integers(1, 6))
def test_the_search_in_bytes_finds_what_a_search_in_tokens_finds(tokens, most):
    def plainly() -> tuple[int, ...]:
        for length in (4, 3, 2):
            for start in range(len(tokens) - length - 1, -1, -1):
                if length < len(tokens) and tokens[start : start + length] == tokens[-length:]:
                    at, found = start + length, []
                    while len(found) < most:
                        found.append((tokens + found)[at + len(found)])
                    return tuple(found)
        return ()

    assert PromptLookup().propose(a_sequence(tokens), most) == plainly()


def test_the_search_looks_back_no_further_than_its_window():
    sequence = a_sequence([1, 2, 3, *range(10, 40), 1, 2])
    assert PromptLookup(window=100).propose(sequence, 1) == (3,)
    assert PromptLookup(window=20).propose(sequence, 1) == ()


@pytest.mark.capability("SD-1", "SD-2")
def test_a_text_that_repeats_itself_takes_fewer_steps_and_stays_the_same():
    plain, drafting = (
        Play(memory=1, blocks=200, budget=64),
        Play(memory=1, blocks=200, budget=64, speculation_max_tokens=6),
    )
    for play in (plain, drafting):
        for index in range(3):
            play.add(f"r{index}", [index + 1, 7], max_tokens=120)
        play.run()
    for index in range(3):
        expected = continuation([index + 1, 7], 120, memory=1)
        assert drafting.text(f"r{index}") == plain.text(f"r{index}") == expected
    stats = drafting.scheduler.stats(0.0)
    assert stats.steps < 0.5 * plain.scheduler.stats(0.0).steps
    assert stats.accepted_tokens > 0.8 * stats.draft_tokens
    assert sum(stats.accepted_by_position) == stats.accepted_tokens
    assert list(stats.accepted_by_position) == sorted(stats.accepted_by_position, reverse=True)
    assert stats.speculation_active
    assert drafting.pool.live == 0


def test_draft_tokens_are_counted_in_the_budget_and_take_nobodys_block():
    play = Play(memory=1, blocks=36, block_size=2, budget=6, max_num_seqs=3, speculation_max_tokens=5)
    plain = Play(memory=1, blocks=36, block_size=2, budget=6, max_num_seqs=3)
    for stage in (play, plain):
        for index in range(3):
            stage.add(f"r{index}", [index + 1], max_tokens=40)
    while play.scheduler.has_work:
        play.step()
        assert sum(play.plan.num_new) <= 6
    plain.run()
    assert play.scheduler.stats(0.0).draft_tokens > 0
    assert 0 < plain.scheduler.stats(0.0).preemptions >= play.scheduler.stats(0.0).preemptions


def test_wrong_draft_tokens_are_never_published():
    prompt = [1, 2, 3]
    play = Play(block_size=1, speculation_max_tokens=4, drafter=Guesses(49, 49, 49, 49), budget=32)
    play.add("a", prompt, max_tokens=12)
    play.run()
    expected = continuation(prompt, 12)
    assert play.text("a") == expected
    play.add("b", [*prompt, *expected[:6], 5], max_tokens=3)
    play.run()
    assert play.outputs["b"][0].cached_tokens == 9
    assert play.text("b") == continuation([*prompt, *expected[:6], 5], 3)


def test_a_right_draft_token_after_the_end_is_dropped():
    prompt = [1, 2, 3]
    expected = continuation(prompt, 8)
    play = Play(eos=[expected[2]], speculation_max_tokens=5, drafter=Guesses(*expected[1:6]), budget=32)
    play.add("a", prompt, max_tokens=12)
    play.run()
    assert play.text("a") == expected[: expected.index(expected[2]) + 1]
    assert play.scheduler.stats(0.0).generated_tokens == len(play.text("a"))


@pytest.mark.capability("SD-2", "PF-21")
def test_below_four_in_ten_it_switches_itself_off_says_so_and_overlaps_again():
    play = Play(speculation_max_tokens=4, drafter=Guesses(49, 49, 49, 49), blocks=400, budget=64, overlap=True)
    play.add("a", [1, 2, 3], max_tokens=1000)
    while play.scheduler.stats(0.0).draft_tokens < ENOUGH_DRAFT_TOKENS:
        assert play.scheduler.stats(0.0).speculation_active
        play.step()
    assert play.most_in_flight == 1
    assert not play.scheduler.stats(0.0).speculation_active
    drafts = play.scheduler.stats(0.0).drafts
    play.step()
    play.step()
    assert play.most_in_flight == 2
    assert play.scheduler.stats(0.0).drafts == drafts
    assert play.text("a") == continuation([1, 2, 3], 1000)[: len(play.text("a"))]


@pytest.mark.capability("SD-2", "PF-21")
def test_it_tries_again_after_a_rest_that_doubles_with_each_failure():
    speculation, sequence = Speculation(4), a_sequence([1])

    def fail() -> None:
        while speculation.active:
            speculation.record_accepted(sequence, 4, 0)
            speculation.update_activity(1)

    def rest() -> int:
        tokens = 0
        while not speculation.active:
            speculation.update_activity(100)
            tokens += 100
        return tokens

    rests = []
    for _ in range(8):
        fail()
        rests.append(rest())
    assert rests[:3] == [REST_TOKENS, 2 * REST_TOKENS, 4 * REST_TOKENS]
    assert max(rests) == LONGEST_REST_TOKENS


def test_with_nothing_to_guess_from_it_rests_too():
    rng = random.Random(1)
    play = Play(speculation_max_tokens=4, blocks=2000, budget=64, overlap=True)
    play.add("a", [rng.randrange(1, 10**6) for _ in range(50)], max_tokens=2 * ENOUGH_STEPS)
    play.scheduler.speculation._drafter = Guesses()
    play.run()
    assert not play.scheduler.stats(0.0).speculation_active
    assert play.most_in_flight == 2


@pytest.mark.capability("SD-2")
def test_a_row_draft_tokens_more_when_it_is_right_and_less_when_it_is_wrong():
    speculation, sequence = Speculation(8, Guesses(*range(8))), a_sequence([1, 2])
    assert len(speculation.draft(sequence, 99)) == 3
    speculation.record_accepted(sequence, 3, 3)
    assert len(speculation.draft(sequence, 99)) == 6
    speculation.record_accepted(sequence, 6, 6)
    assert len(speculation.draft(sequence, 99)) == 8
    speculation.record_accepted(sequence, 8, 1)
    assert len(speculation.draft(sequence, 99)) == 2
    assert len(speculation.draft(sequence, 1)) == 1, "no more than there is room for"
