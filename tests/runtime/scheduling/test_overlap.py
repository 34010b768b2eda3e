"""Two plans in flight: what was sampled too much never happened, and what is in flight is not given away."""

import pytest

from slipway_runtime.messages import FinishReason, Grammar, StepResult
from tests.runtime.paper_worker import Play, continuation


@pytest.mark.capability("BS-7")
def test_the_next_plan_is_made_before_the_token_is_known():
    play = Play(overlap=True)
    play.add("a", [1, 2, 3], max_tokens=6)
    first = play.scheduler.schedule(1.0)
    second = play.scheduler.schedule(1.0)
    assert first.samples == second.samples == (True,)
    assert (second.num_computed, second.num_new) == ((3,), (1,)), "the token that the first plan samples"
    assert not play.scheduler.can_overlap, "two are enough"
    outputs = [play.scheduler.update(play.worker.execute(plan), 1.0)[0] for plan in (first, second)]
    assert [*outputs[0].token_ids, *outputs[1].token_ids] == continuation([1, 2, 3], 2)


@pytest.mark.capability("BS-7")
def test_a_token_after_the_end_is_not_told_counted_published_or_charged():
    text = continuation([1, 2, 3], 20)
    play = Play(overlap=True, eos=[text[4]], block_size=1)
    play.add("a", [1, 2, 3], max_tokens=20)
    while "a" not in play.outputs or play.end("a").finish_reason is None:
        play.step()
    assert play.plans, "one more was planned before the end was known"
    assert play.pool.live == 8, "and is still writing: three of the prompt, five sampled"
    published = play.pool.cached + play.pool.members("")
    play.run()
    assert play.text("a") == text[:5]
    assert play.pool.live == 0
    assert play.pool.cached == published == 7, "the last one sampled was never computed in time"
    stats = play.scheduler.stats(0.0)
    assert (stats.generated_tokens, stats.finished) == (5, 1)


def test_nothing_is_planned_after_a_last_token_that_is_certain():
    play = Play(overlap=True)
    play.add("a", [1, 2, 3], max_tokens=2)
    play.scheduler.schedule(1.0)
    play.scheduler.schedule(1.0)
    assert not play.scheduler.can_overlap
    play = Play(overlap=True)
    play.add("a", [1, 2, 3], max_tokens=1)
    play.scheduler.schedule(1.0)
    assert not play.scheduler.can_overlap, "there is nothing to plan"


@pytest.mark.capability("API-7", "PF-10")
@pytest.mark.parametrize("steps", range(8))
def test_an_abort_with_plans_in_flight_frees_its_blocks_after_the_last_of_them(steps):
    play = Play(overlap=True, max_num_seqs=2, budget=4)
    play.add("other", [9], max_tokens=30)
    play.add("a", range(1, 11), max_tokens=20)
    for _ in range(steps):
        play.step()
    play.abort("a")
    play.scheduler.check()
    play.step()
    play.step()
    assert play.end("a").finish_reason is FinishReason.CANCELLED
    assert play.pool.live == len({b for s in play.scheduler._table.running for b in s.blocks}), "only the other one's"
    play.run()
    assert play.text("other") == continuation([9], 30)


@pytest.mark.capability("KV-7")
def test_a_victim_in_flight_keeps_the_token_that_it_draws():
    play = Play(blocks=8, block_size=4, max_num_seqs=3, budget=32, overlap=True)
    for index in range(3):
        play.add(f"r{index}", [index + 1] * 3, max_tokens=14)
    play.run()
    assert play.scheduler.stats(0.0).preemptions > 0
    assert play.most_in_flight == 2
    for index in range(3):
        assert play.text(f"r{index}") == continuation([index + 1] * 3, 14)


def test_a_row_bound_by_a_grammar_is_planned_ahead_like_others():
    """Finding C17: one such row stopped the overlap of all. Its mask is needed only after the forward pass."""
    play = Play(overlap=True)
    play.add("free", [1], max_tokens=3)
    play.add("bound", [2], max_tokens=6, grammar=Grammar(kind="regex", text="a*"))
    play.run()
    assert play.most_in_flight == 2
    assert [new.grammar for new in play.all_plans[0].new_rows] == [False, True]
    play.add("free again", [1], max_tokens=3)
    play.run()
    assert play.most_in_flight == 2


def test_results_come_back_in_order():
    play = Play(overlap=True)
    play.add("a", [1, 2], max_tokens=4)
    play.scheduler.schedule(1.0)
    second = play.scheduler.schedule(1.0)
    with pytest.raises(AssertionError, match="in order"):
        play.scheduler.update(StepResult(step=second.step, token_ids=((1,),)), 1.0)
