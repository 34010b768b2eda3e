"""A request whose client does not read is paused: its blocks stay until others need them, and it resumes unchanged."""

import pytest

from slipway_runtime.messages import FinishReason
from tests.runtime.paper_worker import Play, continuation

pytestmark = pytest.mark.capability("API-10")


@pytest.mark.parametrize("overlap", [False, True])
def test_a_paused_sequence_is_in_no_plan_and_the_others_are_in_each(overlap):
    play = Play(overlap=overlap)
    play.add("slow", [1, 2, 3], max_tokens=20)
    play.add("quick", [4, 5], max_tokens=20)
    for _ in range(3):
        play.step()
    play.pause("slow")
    play.step()  # what was in flight
    live = play.pool.live
    said = play.text("slow")
    for _ in range(8):
        assert {output.request_id for output in play.step()} == {"quick"}
    assert play.text("slow") == said
    assert play.pool.live >= live, "its blocks stay"
    play.pause("slow", on=False)
    play.run()
    assert play.text("slow") == continuation([1, 2, 3], 20)
    assert play.text("quick") == continuation([4, 5], 20)
    assert play.scheduler.stats(0.0).preemptions == 0
    assert play.pool.live == 0


def test_with_everybody_paused_there_is_no_work_until_one_goes_on():
    play = Play()
    play.add("a", [1, 2, 3], max_tokens=6)
    play.add("b", [4], max_tokens=6)
    play.step()
    play.pause("a")
    play.pause("b")
    assert not play.scheduler.has_work
    assert play.scheduler.stats(0.0).running == 2
    play.pause("b", on=False)
    play.run()
    assert play.end("b").finish_reason is FinishReason.LENGTH
    assert not play.scheduler.has_work
    play.abort("a")
    assert play.scheduler.has_work, "its end is to be told"
    play.run()
    assert play.end("a").finish_reason is FinishReason.CANCELLED
    assert play.pool.live == 0


@pytest.mark.parametrize("short", [{"max_num_seqs": 1}, {"blocks": 6, "max_num_seqs": 2}], ids=["rows", "blocks"])
def test_a_paused_request_makes_room_for_a_waiting_one_and_resumes(short):
    play = Play(block_size=4, budget=16, **short)
    play.add("slow", range(1, 10), max_tokens=8)
    play.step()
    play.pause("slow")
    play.add("quick", range(11, 22), max_tokens=4)
    play.run()
    assert play.text("quick") == continuation(range(11, 22), 4)
    assert play.scheduler.stats(0.0).waiting == 1, "it lost its place, and waits for its reader"
    assert play.pool.live == 0
    play.pause("slow", on=False)
    play.run()
    assert play.text("slow") == continuation(range(1, 10), 8)


def test_a_running_sequence_takes_the_blocks_of_a_paused_one_first():
    play = Play(blocks=8, block_size=4, max_num_seqs=3)
    play.add("slow", range(1, 10), max_tokens=20, priority=5)
    play.add("quick", range(11, 16), max_tokens=18)
    play.step()
    play.pause("slow")
    play.run()
    assert play.text("quick") == continuation(range(11, 16), 18)
    assert play.scheduler.stats(0.0).preemptions == 1, "the older one, of a higher priority, but nobody reads it"
    play.abort("slow")
    play.run()
    assert play.pool.live == 0


def test_the_deadline_of_a_paused_one_is_kept():
    play = Play()
    play.add("slow", [1, 2], max_tokens=50, deadline=5.5)
    play.add("quick", [3], max_tokens=10)
    play.step()
    play.pause("slow")
    play.run()
    assert play.end("slow").finish_reason is FinishReason.TIMEOUT
    assert play.end("slow").finished_at == 6.0


def test_all_answers_of_a_paused_request_wait_and_none_is_lost():
    play = Play(max_num_seqs=2, budget=4)
    play.add("slow", range(1, 12), max_tokens=5, n=3)
    play.step()  # the first part of the prompt: the other answers wait for it
    play.pause("slow")
    play.add("a", [1], max_tokens=3)
    play.add("b", [2], max_tokens=3)
    play.run()
    assert "slow" not in play.outputs
    play.pause("slow", on=False)
    play.run()
    for index in range(3):
        assert play.text("slow", index) == continuation(range(1, 12), 5, seed=index)
    play.pause("slow")  # of somebody who has gone
    play.pause("never heard of")
    play.scheduler.check()


@pytest.mark.capability("SE-2")
def test_the_prompt_of_a_paused_request_without_a_row_still_counts_as_waiting():
    """As while its grammar is compiled: else its tokens would not count to the bound of the queue."""
    play = Play(max_num_seqs=1, budget=16)
    play.add("running", [1, 2, 3], max_tokens=30)
    play.step()
    play.add("a", range(1, 11), max_tokens=4, n=3)
    assert play.scheduler.stats(0.0).waiting_tokens == 10
    play.pause("a")
    assert play.scheduler.stats(0.0).waiting_tokens == 10
    play.pause("a", on=False)
    assert play.scheduler.stats(0.0).waiting_tokens == 10
    play.pause("a")
    play.abort("a")
    assert play.scheduler.stats(0.0).waiting_tokens == 0
    play.run()


def test_a_paused_request_that_lost_its_row_counts_with_all_tokens_that_it_has_to_compute_again():
    play = Play(block_size=4, budget=16, max_num_seqs=1)
    play.add("slow", range(1, 10), max_tokens=8)
    play.step()
    play.pause("slow")
    play.add("quick", range(11, 22), max_tokens=4)
    play.run()
    assert play.scheduler.stats(0.0).waiting_tokens >= 9
    play.pause("slow", on=False)
    play.run()
    assert play.scheduler.stats(0.0).waiting_tokens == 0
