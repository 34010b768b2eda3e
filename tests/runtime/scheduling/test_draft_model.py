"""A draft model beside prompt lookup: the same words in fewer steps, KV of its own, and none where it does not pay."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipway_runtime.scheduling.draft_pace import (
    FIRST_PACE,
    LONGEST_REST_TOKENS,
    REST_TOKENS,
    WORTH,
    Pace,
    draft_length,
    pace_after_tokens,
    pace_after_verification,
)
from slipway_runtime.scheduling.sequence import Sequence
from tests.runtime.paper_worker import VOCABULARY, PaperDraft, Play, continuation

SIZE = 4


def a_play(draft: PaperDraft, most: int = 4, **options: object) -> Play:
    return Play(
        draft=draft, speculation_max_tokens=most, **{"blocks": 400, "budget": 64, "draft_blocks": 400} | options
    )


def drafted(play: Play) -> list[int]:
    """The lengths of all drafts, in the order of the plans."""
    return [len(drafts) for plan in play.all_plans for drafts in plan.drafts if drafts]


@pytest.mark.capability("SD-4", "SD-1")
def test_a_draft_model_equal_to_the_model_has_every_token_accepted():
    play = a_play(PaperDraft(SIZE))
    for index in range(3):
        play.add(f"r{index}", [index + 1, 7, 9], max_tokens=60)
    play.run()
    stats = play.scheduler.stats(0.0)
    for index in range(3):
        assert play.text(f"r{index}") == continuation([index + 1, 7, 9], 60)
    assert stats.draft_model.draft_tokens == stats.draft_model.accepted_tokens == stats.accepted_tokens > 100
    assert stats.steps < 60 / 3
    assert max(drafted(play)) == 4
    assert play.draft_model.pool.live == 0


@pytest.mark.capability("SD-4", "SD-2", "PF-21")
def test_a_useless_draft_model_costs_a_bounded_number_of_passes():
    play = a_play(PaperDraft(SIZE, wrong_after=0), draft_budget=2000)
    play.add("a", [1, 2, 3], max_tokens=1200)
    play.run()
    stats = play.scheduler.stats(0.0)
    assert play.text("a") == continuation([1, 2, 3], 1200)
    assert stats.draft_model.accepted_tokens == 0
    assert drafted(play)[:3] == [3, 1, 1]
    # 3 + 1 + 1 passes, one after each rest (16, 32, 64, 128 tokens); after 256 steps it rests for all rows.
    assert stats.draft_model.passes == 5 + 4


@pytest.mark.capability("SD-4", "SD-2", "BS-7")
def test_a_draft_model_that_is_wrong_in_all_rows_stops_and_steps_overlap_again():
    play = a_play(PaperDraft(SIZE, wrong_after=0), max_num_seqs=16, overlap=True, blocks=4000, draft_blocks=4000)
    for index in range(16):
        play.add(f"r{index}", [index + 1], max_tokens=200)
    play.run()
    passes = play.draft_model.passes
    assert not play.scheduler.stats(0.0).speculation_active
    assert play.most_in_flight == 2
    for index in range(16):
        play.add(f"s{index}", [index + 1, 2], max_tokens=20)
    play.run()
    assert play.draft_model.passes == passes, "while it rests, it computes nothing"


@pytest.mark.capability("SD-4")
def test_drafts_are_as_long_as_the_row_accepts():
    play = a_play(PaperDraft(SIZE, wrong_after=1), most=8)
    play.add("a", [1, 2, 3], max_tokens=200)
    play.run()
    assert play.text("a") == continuation([1, 2, 3], 200)
    assert max(drafted(play)[5:]) <= 2
    stats = play.scheduler.stats(0.0)
    assert stats.accepted_by_position[0] == stats.drafts, "after a rejection it drafts from the right tokens"
    longer = a_play(PaperDraft(SIZE, wrong_after=6), most=8)
    longer.add("a", [1, 2, 3], max_tokens=200)
    longer.run()
    assert min(drafted(longer)[5:-2]) >= 5


@pytest.mark.capability("SD-4")
def test_each_row_has_a_length_of_its_own():
    residency = {"max_adapters": 1, "max_cpu_adapters": 1, "block_bytes": 0, "most_blocks": None}
    play = a_play(PaperDraft(SIZE), residency=residency)
    play.load("sha256:a")
    play.add("adapted", [1, 2, 3], max_tokens=60, adapter="sha256:a")
    play.add("base", [4, 5, 6], max_tokens=60)
    play.run()
    assert play.text("adapted") == continuation([1, 2, 3], 60, "sha256:a")
    assert play.text("base") == continuation([4, 5, 6], 60)
    tokens = {name: sum(output.draft_tokens for output in play.outputs[name]) for name in ("adapted", "base")}
    assert tokens["adapted"] < 12 < 30 < tokens["base"], "the draft model does not know the adapter, and rests"


@pytest.mark.capability("SD-4", "SD-1")
def test_prompt_lookup_comes_first_where_it_finds_something():
    play = a_play(PaperDraft(SIZE, 1), memory=1)
    play.add("a", [1, 7], max_tokens=120)
    play.run()
    stats = play.scheduler.stats(0.0)
    assert play.text("a") == continuation([1, 7], 120, memory=1)
    assert 0 < stats.draft_model.draft_tokens < 0.5 * stats.draft_tokens
    assert stats.accepted_tokens > 0.9 * stats.draft_tokens
    assert sum(stats.accepted_by_position) == stats.accepted_tokens


class EverySecondTime:
    """A drafter that finds something every second time, and is wrong."""

    def __init__(self) -> None:
        self.calls = 0

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        self.calls += 1
        return (VOCABULARY,) if self.calls % 2 else ()


@pytest.mark.capability("SD-4")
def test_rejected_tokens_are_computed_again_when_other_steps_came_between():
    play = a_play(PaperDraft(SIZE, wrong_after=0), drafter=EverySecondTime())
    play.add("a", [1, 2, 3], max_tokens=80)
    play.run()  # which compares the tokens of the draft model with those of the sequence
    assert play.text("a") == continuation([1, 2, 3], 80)
    assert play.scheduler.stats(0.0).draft_model.draft_tokens > 4


@pytest.mark.capability("SD-4")
def test_after_a_long_prompt_a_row_catches_up_before_it_drafts():
    play = a_play(PaperDraft(SIZE), draft_budget=8)
    play.add("long", range(1, 31), max_tokens=30)
    play.run()
    assert play.text("long") == continuation(range(1, 31), 30)
    assert play.draft.widest == 8
    first = next(index for index, plan in enumerate(play.all_plans) if plan.drafts)
    assert play.all_plans[0].num_new == (30,)
    assert first == 5, "31 tokens and those of the steps in between, in passes of 8"
    assert play.scheduler.stats(0.0).accepted_tokens > 15


@pytest.mark.capability("SD-4", "KV-1")
def test_the_draft_model_computes_an_equal_prompt_once():
    play = a_play(PaperDraft(SIZE))
    prompt = list(range(1, 41))
    play.add("a", prompt, max_tokens=10)
    play.run()
    before = play.draft_model.computed_tokens
    play.add("b", prompt, max_tokens=10)
    play.run()
    assert play.text("a") == play.text("b") == continuation(prompt, 10)
    assert before > 40
    assert play.draft_model.computed_tokens - before < 20
    before = play.draft_model.computed_tokens
    play.add("c", [*prompt, *play.text("a")], max_tokens=10)
    play.run()
    assert play.outputs["c"][0].cached_tokens == 48
    assert play.draft_model.computed_tokens - before < 30, "the answer up to its last drafts is found too"
    play.scheduler.forget_prefixes()
    assert play.draft_model.pool.cached == 0


@pytest.mark.capability("SD-4", "MT-2")
def test_the_draft_model_shares_no_prompt_between_salts():
    play = a_play(PaperDraft(SIZE))
    prompt = list(range(1, 41))
    for salt in ("a", "b"):
        before = play.draft_model.computed_tokens
        play.add(salt, prompt, max_tokens=10, cache_salt=salt)
        play.run()
        assert play.draft_model.computed_tokens - before > 40


@pytest.mark.capability("SD-4", "KV-6", "KV-7")
def test_preempted_and_aborted_sequences_return_their_draft_blocks_immediately():
    play = Play(draft=PaperDraft(SIZE), speculation_max_tokens=4, blocks=12, budget=32, draft_blocks=12)
    for index in range(4):
        play.add(f"r{index}", [index + 1] * 6, max_tokens=20)
    for _ in range(4):
        play.step()
    assert play.draft_model.pool.live > 0
    play.abort("r0")
    play.scheduler.check()
    play.run()
    assert play.scheduler.stats(0.0).preemptions > 0
    assert play.draft_model.pool.live == 0
    for index in range(1, 4):
        assert play.text(f"r{index}") == continuation([index + 1] * 6, 20)


@pytest.mark.capability("SD-4")
def test_rows_without_draft_blocks_get_no_drafts_and_the_others_do():
    play = a_play(PaperDraft(SIZE), draft_blocks=6)
    for index in range(3):
        play.add(f"r{index}", [index + 1] * 8, max_tokens=40)
    play.run()
    for index in range(3):
        assert play.text(f"r{index}") == continuation([index + 1] * 8, 40)
    assert 0 < play.scheduler.stats(0.0).accepted_tokens < 100


@pytest.mark.capability("SD-4")
def test_a_sequence_beyond_the_context_of_the_draft_model_goes_on_without_it():
    play = a_play(PaperDraft(SIZE), draft_max_model_len=20)
    play.add("a", [1, 2, 3], max_tokens=60)
    play.run()
    assert play.text("a") == continuation([1, 2, 3], 60)
    assert 0 < sum(drafted(play)) <= 20


@pytest.mark.capability("SD-4", "PF-21")
def test_a_draft_model_that_is_out_of_memory_pauses_and_ends_no_request():
    play = a_play(PaperDraft(SIZE, fails=(3,)))
    play.add("a", [1, 2, 3], max_tokens=60)
    play.run()
    stats = play.scheduler.stats(0.0)
    assert play.text("a") == continuation([1, 2, 3], 60)
    assert play.draft.calls == 3
    assert stats.draft_model.accepted_tokens == stats.draft_model.draft_tokens > 0
    assert play.draft_model.pool.live == 0


@pytest.mark.capability("SD-4")
@pytest.mark.parametrize(("rate", "length"), [(0.95, 23), (0.9, 11), (0.8, 5), (0.7, 3), (0.6, 2), (0.5, 1), (0.31, 1)])
def test_the_length_follows_the_acceptance_rate(rate, length):
    assert draft_length(Pace(kept=1e6 * rate, tried=1e6), 32) == length


@pytest.mark.capability("SD-4")
def test_a_row_rests_longer_after_each_failure_and_starts_over_after_a_success():
    pace, rests = FIRST_PACE, []
    for _ in range(12):
        while draft_length(pace, 8):
            pace = pace_after_verification(pace, 1, 0)
        rests.append(pace.rest)
        pace = pace_after_tokens(pace, pace.rest)
    assert rests[:4] == [REST_TOKENS, 2 * REST_TOKENS, 4 * REST_TOKENS, 8 * REST_TOKENS]
    assert rests[-1] == LONGEST_REST_TOKENS
    pace = pace_after_verification(pace, 1, 1)
    while draft_length(pace, 8):
        pace = pace_after_verification(pace, 1, 0)
    assert pace.rest == REST_TOKENS


@pytest.mark.capability("SD-4")
@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), max_size=60), st.integers(1, 8))
def test_a_row_drafts_only_what_is_likely_to_be_kept(steps, most):
    pace = FIRST_PACE
    for count, accepted in steps:
        length = draft_length(pace, most)
        assert 0 <= length <= most
        assert length <= 1 or pace.rate**length >= WORTH
        pace = pace_after_tokens(pace_after_verification(pace, count, min(accepted, count)), 1)
