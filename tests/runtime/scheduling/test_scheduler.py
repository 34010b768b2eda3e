"""Stories of requests, told step by step over a paper worker."""

import pytest

from slipway_runtime.messages import FinishReason
from slipway_runtime.scheduling.block_pool import BlockPool
from slipway_runtime.scheduling.prefix_cache import MAX_PREEMPTIONS
from slipway_runtime.scheduling.scheduler import Scheduler
from tests.runtime.paper_worker import Play, continuation


@pytest.mark.capability("BS-1", "PF-3")
def test_a_request_joins_at_the_next_step_and_leaves_its_place_when_done():
    play = Play(max_num_seqs=2)
    play.add("a", [1, 2, 3], max_tokens=6)
    play.step()
    play.add("b", [4, 5], max_tokens=1)
    play.add("c", [6, 7], max_tokens=1)
    assert {o.request_id for o in play.step()} == {"a", "b"}
    assert {o.request_id for o in play.step()} == {"a", "c"}, "c takes the place of b while a goes on"
    play.run()
    assert play.text("a") == continuation([1, 2, 3], 6)


@pytest.mark.capability("BS-2", "PF-4")
def test_a_long_prompt_goes_through_in_chunks_while_others_decode_every_step():
    play = Play(blocks=2000, budget=64, max_num_seqs=4, block_size=16)
    for name in "abc":
        play.add(name, [ord(name)], max_tokens=600)
    play.step()
    play.add("long", [n % 40 for n in range(30_000)], max_tokens=2)
    steps = 0
    while "long" not in play.outputs:
        ids = {o.request_id for o in play.step()}
        steps += 1
        assert {"a", "b", "c"} <= ids, "everybody who decodes gets a token in each step"
        assert sum(play.plan.num_new) <= 64
    assert steps == -(-30_000 // (64 - 3))
    assert play.text("long") == continuation([n % 40 for n in range(30_000)], 1)


@pytest.mark.capability("BS-2")
def test_a_prompt_longer_than_the_budget_always_progresses():
    play = Play(budget=3, max_num_seqs=3, blocks=100)
    play.add("long", range(1, 41), max_tokens=3)
    for name in "ab":
        play.add(name, [7], max_tokens=30)
    play.run(60)
    assert play.text("long") == continuation(range(1, 41), 3)


def test_a_budget_below_the_rows_is_refused():
    with pytest.raises(ValueError, match="a step must hold a token of each running sequence"):
        Scheduler(BlockPool(4), max_num_seqs=8, max_num_batched_tokens=4, max_model_len=10)


@pytest.mark.capability("API-4")
def test_ends_at_max_tokens():
    play = Play()
    play.add("a", [1, 2, 3], max_tokens=5)
    play.run()
    assert play.text("a") == continuation([1, 2, 3], 5)
    assert play.end("a").finish_reason is FinishReason.LENGTH
    assert play.end("a").stop_token_id is None


@pytest.mark.capability("API-4")
def test_ends_at_the_full_context():
    play = Play(max_model_len=10)
    play.add("a", [1, 2, 3], max_tokens=50)
    play.run()
    assert len(play.text("a")) == 7
    assert play.end("a").finish_reason is FinishReason.LENGTH


@pytest.mark.capability("API-4")
def test_ends_at_an_end_of_sequence_token_which_is_told():
    prompt = [1, 2, 3]
    text = continuation(prompt, 20)
    eos = next(token for token in text[2:] if token not in text[:2])
    at = text.index(eos) + 1
    play = Play(eos=[eos])
    play.add("stops", prompt, max_tokens=20)
    play.add("ignores", prompt, max_tokens=20, ignore_eos=True)
    play.add("waits", prompt, max_tokens=20, min_tokens=at + 1)
    play.run()
    assert play.text("stops") == text[:at]
    assert play.end("stops").finish_reason is FinishReason.STOP
    assert play.end("stops").stop_token_id == eos
    assert play.text("ignores") == text
    assert len(play.text("waits")) > at


@pytest.mark.capability("API-4")
def test_a_stop_token_of_the_request_ends_it_even_when_eos_is_ignored():
    text = continuation([1, 2], 20)
    play = Play()
    play.add("a", [1, 2], max_tokens=20, stop_token_ids=(text[4],), ignore_eos=True)
    play.run()
    assert play.text("a") == text[: text.index(text[4]) + 1]
    assert play.end("a").stop_token_id == text[4]


@pytest.mark.capability("API-4")
@pytest.mark.parametrize("busy", [False, True])
def test_a_deadline_ends_a_request_running_or_waiting(busy):
    play = Play(max_num_seqs=1)
    if busy:
        play.add("first", [9], max_tokens=50)
    play.add("a", [1, 2, 3], max_tokens=50, deadline=5.5)
    play.run()
    assert play.end("a").finish_reason is FinishReason.TIMEOUT
    assert play.end("a").finished_at == 6.0
    assert len(play.text("a")) == (0 if busy else 5)
    assert play.pool.live == 0


@pytest.mark.capability("API-3")
def test_every_stage_has_its_time_and_every_end_its_reason():
    play = Play(max_num_seqs=1, budget=4)
    play.add("first", [1], max_tokens=2)
    play.add("a", range(1, 11), max_tokens=3)  # three chunks
    play.run()
    first, *_, last = play.outputs["a"]
    assert (first.queued_at, first.scheduled_at, first.first_token_at) == (0.0, 3.0, 5.0)
    assert last.finished_at == 7.0
    assert [o.finish_reason for o in play.outputs["a"]] == [None, None, FinishReason.LENGTH]


@pytest.mark.capability("API-7", "PF-10")
@pytest.mark.parametrize("steps", range(8))
def test_an_abort_in_any_state_gives_everything_back_before_the_next_step(steps):
    play = Play(max_num_seqs=1, budget=4, blocks=32)
    play.add("other", [9], max_tokens=3)
    play.add("a", range(1, 11), max_tokens=20)  # waits, prefills in chunks, decodes
    for _ in range(steps):
        play.step()
    live_before_it_started = play.pool.live if steps <= 2 else 0
    play.scheduler.abort("a", FinishReason.CANCELLED, play.now)
    assert play.pool.live == live_before_it_started
    play.scheduler.check()
    play.run()
    assert play.end("a").finish_reason is FinishReason.CANCELLED
    assert play.pool.live == 0
    assert play.scheduler.stats(0.0).aborted == 1


@pytest.mark.capability("API-7")
def test_an_abort_during_a_step_waits_for_the_step_to_stop_writing():
    play = Play()
    play.add("a", [1, 2, 3], max_tokens=9)
    play.step()
    plan = play.scheduler.schedule(2.0)
    play.scheduler.abort("a", FinishReason.CANCELLED, 2.0)
    assert play.pool.live == 1, "the step is still writing"
    outputs = play.scheduler.update(play.worker.execute(plan), 2.0)
    assert [(o.token_ids, o.finish_reason) for o in outputs] == [((), FinishReason.CANCELLED)]
    assert play.pool.live == 0
    play.scheduler.check()


def test_an_unknown_or_finished_request_cannot_be_aborted_twice():
    play = Play()
    play.add("a", [1], max_tokens=1)
    play.run()
    play.scheduler.abort("a", FinishReason.CANCELLED, 0.0)
    play.scheduler.abort("nobody", FinishReason.CANCELLED, 0.0)
    assert play.scheduler.stats(0.0).aborted == 0
    assert not play.scheduler.has_work


@pytest.mark.capability("KV-4")
def test_usage_counts_live_blocks_and_reports_reusable_ones_apart():
    play = Play(blocks=20)
    play.add("a", range(1, 14), max_tokens=8)
    play.step()
    stats = play.scheduler.stats(0.0)
    assert (stats.blocks_live, stats.blocks_cached) == (4, 0)
    play.run()
    stats = play.scheduler.stats(0.0)
    assert stats.blocks_live == 0, "an idle engine has no KV pressure"
    assert stats.blocks_cached == 5
    assert stats.blocks_total == 20


@pytest.mark.capability("KV-1")
def test_blocks_are_taken_as_the_sequence_grows():
    play = Play(block_size=4)
    play.add("a", [1, 2, 3], max_tokens=10)
    seen = []
    while play.scheduler.has_work:
        play.step()
        seen.append(play.pool.live)
    assert seen == [1, 1, 2, 2, 2, 2, 3, 3, 3, 0]


def test_a_prefix_is_computed_once_and_one_token_is_always_left_to_compute():
    play = Play()
    prompt = list(range(1, 9))  # two full blocks
    play.add("a", prompt, max_tokens=2)
    play.run()
    play.add("b", prompt, max_tokens=2)
    play.run()
    assert play.outputs["b"][0].cached_tokens == 4, "the second block would leave nothing to compute"
    assert play.text("b") == play.text("a")


def test_another_salt_does_not_see_the_prefix():
    play = Play()
    play.add("a", range(1, 10), cache_salt="mine")
    play.run()
    play.add("b", range(1, 10), cache_salt="yours")
    play.run()
    assert play.outputs["b"][0].cached_tokens == 0


def test_a_conversation_finds_its_own_answer_in_the_cache():
    play = Play()
    play.add("turn-1", range(1, 8), max_tokens=6)
    play.run()
    play.add("turn-2", [*range(1, 8), *play.text("turn-1"), 3], max_tokens=2)
    play.run()
    assert play.outputs["turn-2"][0].cached_tokens == 12


@pytest.mark.capability("KV-7")
def test_under_pressure_the_newest_of_the_lowest_priority_goes_and_comes_back_unchanged():
    play = Play(blocks=8, block_size=4, max_num_seqs=3, budget=32)
    play.add("old", [1, 2, 3], max_tokens=14)
    play.add("important", [4, 5, 6], max_tokens=14, priority=1)
    play.add("new", [7, 8, 9], max_tokens=14)
    preempted = set()
    while play.scheduler.has_work:
        before = play.scheduler.stats(0.0).preemptions
        ids = {o.request_id for o in play.step()}
        if play.scheduler.stats(0.0).preemptions > before:
            preempted |= {"old", "important", "new"} - ids
    assert preempted, "eight blocks are too few for three sequences of five"
    assert "important" not in preempted
    for name, prompt in (("old", [1, 2, 3]), ("important", [4, 5, 6]), ("new", [7, 8, 9])):
        assert play.text(name) == continuation(prompt, 14)


@pytest.mark.capability("KV-6")
@pytest.mark.parametrize(("blocks", "running"), [(10, 2), (9, 1)])
def test_admits_only_what_leaves_a_watermark_and_a_block_for_each_runner(blocks, running):
    play = Play(blocks=blocks, block_size=4, budget=64)
    play.add("a", range(1, 17), max_tokens=4)  # four blocks now, five at its end
    play.add("b", range(21, 37), max_tokens=4)
    play.step()
    assert play.scheduler.stats(0.0).running == running
    play.run()
    assert play.scheduler.stats(0.0).preemptions == 0


@pytest.mark.capability("PF-5", "KV-7")
def test_nobody_is_preempted_without_end():
    play = Play(blocks=12, block_size=2, max_num_seqs=6, budget=24)
    for index in range(6):
        play.add(f"r{index}", [index + 1], max_tokens=20)
    play.run()
    stats = play.scheduler.stats(0.0)
    assert 0 < stats.preemptions <= 6 * MAX_PREEMPTIONS
    for index in range(6):
        assert play.text(f"r{index}") == continuation([index + 1], 20)


@pytest.mark.capability("PF-5")
def test_a_request_that_came_back_twice_is_no_victim_of_more_important_newcomers():
    play = Play(blocks=14, block_size=2, max_num_seqs=3, budget=11)
    arrivals = {
        7: (3, 18, 1),
        15: (1, 15, 1),
        19: (1, 16, 2),
        25: (1, 19, 0),
        30: (2, 15, 0),
        32: (1, 7, 2),
        37: (3, 22, 1),
    }
    starts = dict.fromkeys(arrivals, 0)
    for tick in range(400):
        if tick in arrivals:
            length, max_tokens, priority = arrivals[tick]
            play.add(f"at {tick}", [tick] * length, max_tokens=max_tokens, priority=priority)
        if play.scheduler.has_work:
            play.step()
            for new in play.plan.new_rows:
                starts[new.token_ids[0]] += 1
    assert not play.scheduler.has_work
    assert max(starts.values()) == 1 + MAX_PREEMPTIONS


def test_a_preempted_request_counts_its_prompt_and_its_prefix_once():
    play = Play(blocks=6, block_size=2, max_num_seqs=2, budget=16)
    play.add("a", [1, 2, 3], max_tokens=8)
    play.add("b", [4, 5, 6], max_tokens=8)
    play.run()
    stats = play.scheduler.stats(0.0)
    assert stats.preemptions > 0
    assert (stats.prompt_tokens, stats.prefix_queries, stats.generated_tokens) == (6, 6, 16)
    assert stats.started == stats.admitted == stats.finished == 2
    assert sum(o.cached_tokens for o in play.outputs["b"]) == 0, "what it finds of its own after a preemption is no hit"


def test_requests_that_end_before_a_far_deadline_are_forgotten():
    """Finding 8: a deadline in the far future kept every token of every request that had one."""
    play = Play(max_num_seqs=4)
    for number in range(60):
        play.add(f"r{number}", [1, 2, 3], max_tokens=2, deadline=1e9)
        play.run()
    play.add("late", [1], max_tokens=50, deadline=play.now + 1)

    assert len(play.scheduler._table._deadlines) <= 20
    play.now += 5
    play.run()
    assert play.end("late").finish_reason is FinishReason.TIMEOUT, "deadlines still hold"
