"""Cold prefixes go to host memory and come back instead of being computed, under the key that they had."""

import pytest

from slipway_runtime.messages import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Demote,
    FreeHostMemory,
    Medium,
    Promote,
)
from slipway_runtime.scheduling import host_tier
from slipway_runtime.scheduling.host_tier import HostTier
from tests.runtime.paper_worker import Play, continuation

SYSTEM = list(range(1, 17))  # four blocks


def chat(play: Play, name: str, prompt: list[int], max_tokens: int = 1, **fields: object) -> int:
    """Play one request to its end; how much of its prompt was found."""
    play.add(name, prompt, max_tokens, **fields)
    play.run()
    assert play.text(name) == continuation(prompt, max_tokens, fields.get("adapter", ""))
    return play.outputs[name][0].cached_tokens


def others(play: Play, count: int, length: int = 29) -> None:
    """So many prompts that nobody sends again; of the usual length each takes eight blocks and leaves seven."""
    for _ in range(count):
        number = len(play.outputs)
        chat(play, f"other {number}", [20 + number] * length)


def moves(play: Play) -> list[object]:
    return [move for plan in play.all_plans for move in plan.host_moves]


@pytest.mark.capability("KV-12")
@pytest.mark.parametrize("overlap", [False, True])
def test_an_evicted_prefix_comes_back_from_host_memory_and_is_not_computed(overlap):
    play = Play(blocks=12, budget=64, host_blocks=40, overlap=overlap)
    chat(play, "first", [*SYSTEM, 40])
    others(play, 2)
    assert play.tier.held == 7
    computed = play.scheduler.stats(0.0).computed_tokens

    assert chat(play, "again", [*SYSTEM, 41]) == 16
    stats = play.scheduler.stats(0.0)
    assert stats.computed_tokens == computed + 1, "all but the last token came back"
    assert (stats.prefix_hits, stats.host_hits, stats.promotions) == (16, 16, 4)
    assert stats.host_active


@pytest.mark.capability("KV-12")
def test_a_plan_names_the_copies_in_the_order_in_which_they_are_safe():
    play = Play(blocks=6, budget=64, host_blocks=8)
    chat(play, "a", [1] * 8 + [2])
    chat(play, "b", [3] * 12 + [4])
    chat(play, "c", [5] * 12 + [6])
    play.add("a again", [1] * 8 + [7], max_tokens=1)
    play.step()

    made = play.plan.host_moves
    assert [type(move) for move in made] == [Demote] * (len(made) - 2) + [Promote] * 2, "room first, then what needs it"
    assert {move.block for move in made if isinstance(move, Promote)} <= set(play.plan.new_blocks[0])
    assert play.plan.num_computed == (8,)


@pytest.mark.capability("KV-12")
def test_a_slot_is_read_before_it_is_given_to_another_block_in_the_same_plan():
    play = Play(blocks=6, budget=64, host_blocks=1)
    chat(play, "a", [1] * 4 + [2])
    chat(play, "all there is", [3] * 21)
    play.add("a again", [1] * 4 + [5], max_tokens=1)
    play.add("beside", [6], max_tokens=1)
    play.step()

    back, out = play.plan.host_moves
    assert isinstance(back, Promote)
    assert isinstance(out, Demote)
    assert back.slot == out.slot
    assert play.text("a again") == continuation([1] * 4 + [5], 1)


@pytest.mark.capability("KV-12")
def test_requests_of_the_same_step_share_the_blocks_that_are_copied_back():
    play = Play(blocks=14, budget=64, host_blocks=40)
    chat(play, "first", [*SYSTEM, 40])
    others(play, 3)
    for name in ("x", "y"):
        play.add(name, [*SYSTEM, 41], max_tokens=2)
    play.run()

    assert [play.outputs[name][0].cached_tokens for name in ("x", "y")] == [16, 16]
    assert play.scheduler.stats(0.0).promotions == 4, "copied back once"
    assert play.text("x") == play.text("y") == continuation([*SYSTEM, 41], 2)


@pytest.mark.capability("KV-12")
def test_evicted_again_it_costs_no_second_copy():
    play = Play(blocks=12, budget=64, host_blocks=60)
    for number in range(3):
        chat(play, f"turn {number}", [*SYSTEM, 40 + number])
        others(play, 1, length=45)  # all blocks there are
    read = [move.slot for move in moves(play) if isinstance(move, Promote)]
    written = [move.slot for move in moves(play) if isinstance(move, Demote)]

    assert len(read) == 8
    assert len(set(read)) == 4
    assert len(written) == len(set(written)) == play.tier.held


@pytest.mark.capability("KV-12", "KV-7")
def test_a_preempted_request_resumes_with_its_blocks_of_host_memory():
    play = Play(blocks=8, block_size=2, max_num_seqs=2, budget=16, host_blocks=32)
    play.add("a", [1, 2, 3], max_tokens=10)
    play.add("b", [4, 5, 6], max_tokens=10)
    play.run()
    stats = play.scheduler.stats(0.0)

    assert stats.preemptions > 0
    assert stats.promotions > 0
    assert [play.text("a"), play.text("b")] == [continuation([1, 2, 3], 10), continuation([4, 5, 6], 10)]
    without = Play(blocks=8, block_size=2, max_num_seqs=2, budget=16)
    without.add("a", [1, 2, 3], max_tokens=10)
    without.add("b", [4, 5, 6], max_tokens=10)
    without.run()
    assert stats.computed_tokens < without.scheduler.stats(0.0).computed_tokens


@pytest.mark.capability("KV-12", "KV-9")
def test_it_is_bounded_and_a_prompt_seen_once_does_not_push_out_one_in_use():
    play = Play(blocks=9, budget=64, host_blocks=20)
    for number in range(2):
        chat(play, f"turn {number}", [*SYSTEM, 40 + number])
        others(play, 2)
    others(play, 6)
    assert play.tier.held == play.tier.total == 20
    assert chat(play, "again", [*SYSTEM, 44]) == 16
    assert chat(play, "seen once", [22] * 28) == 0


def test_blocks_on_both_sides_of_a_gap_are_found_together():
    play = Play(blocks=12, budget=64, host_blocks=40)
    chat(play, "first", [*SYSTEM, 40])
    root, *_, leaf = play.all_plans[0].new_blocks[0][:4]
    play.pool.hold([root, leaf])  # while somebody uses these, the two between them are evicted
    play.pool.evict_next()
    play.pool.evict_next()
    play.pool.release([root, leaf])

    assert chat(play, "again", [*SYSTEM, 41]) == 16
    assert play.scheduler.stats(0.0).promotions == 2


@pytest.mark.capability("KV-12", "KV-3", "MT-2")
def test_nobody_finds_what_was_computed_under_another_salt_or_adapter():
    play = Play(blocks=12, budget=64, host_blocks=60, residency={"max_adapters": 2})
    for name in ("sha256:x", "sha256:y"):
        play.load(name)
    chat(play, "mine", [*SYSTEM, 40], cache_salt="mine")
    chat(play, "x", [*SYSTEM, 40], adapter="sha256:x")
    others(play, 3)

    assert chat(play, "yours", [*SYSTEM, 40], cache_salt="yours") == 0
    assert chat(play, "y", [*SYSTEM, 40], adapter="sha256:y") == 0
    assert chat(play, "base", [*SYSTEM, 40]) == 0
    assert chat(play, "x again", [*SYSTEM, 40], adapter="sha256:x") == 16
    assert chat(play, "mine again", [*SYSTEM, 40], cache_salt="mine") == 16


@pytest.mark.capability("KV-12", "PF-25")
def test_it_goes_with_its_adapter_and_with_a_flush():
    play = Play(blocks=12, budget=64, host_blocks=60, residency={"max_adapters": 1})
    play.load("sha256:x")
    chat(play, "x", [*SYSTEM, 40], adapter="sha256:x")
    others(play, 2)
    assert play.tier.members("sha256:x") == 4
    play.scheduler.unload_adapter("sha256:x", play.now)
    assert play.tier.members("sha256:x") == 0
    assert play.scheduler.stats(0.0).invalid_kv_blocks == 0
    play.load("sha256:x")
    assert chat(play, "x again", [*SYSTEM, 41], adapter="sha256:x") == 0

    others(play, 2)
    assert play.tier.held
    play.scheduler.forget_prefixes()
    assert play.tier.held == 0
    assert chat(play, "after the flush", [*SYSTEM, 42]) == 0


def test_a_request_for_prompt_logprobs_takes_nothing_from_host_memory():
    play = Play(blocks=12, budget=64, host_blocks=40)
    chat(play, "first", [*SYSTEM, 40])
    others(play, 2)
    assert chat(play, "scored", [*SYSTEM, 40], prompt_logprobs=1) == 0
    assert play.scheduler.stats(0.0).promotions == 0


@pytest.mark.capability("KV-12")
def test_with_few_hits_it_gives_its_memory_back_and_tries_again_after_a_rest():
    play = Play(blocks=9, budget=64, host_blocks=20, host_enough=1)
    others(play, 5)  # the twenty slots are full
    assert play.tier.held == 20
    assert play.tier.active, "to be filled is no failure"
    others(play, 4)
    stats = play.scheduler.stats(0.0)
    assert (stats.host_active, stats.host_blocks) == (False, 0)
    assert moves(play)[-1] == FreeHostMemory()
    assert play.worker.host == {}

    resting = len(moves(play))
    others(play, 9)  # after which fewer than four times twenty blocks were asked for
    assert not play.tier.active
    assert len(moves(play)) == resting
    others(play, 2)
    assert play.tier.active
    others(play, 6)  # filled, and judged
    others(play, 4)
    assert not play.tier.active
    others(play, 13)
    assert not play.tier.active, "the second rest is twice as long"


def test_it_is_judged_by_the_share_of_what_the_device_missed():
    def after(found: int, asked: int) -> bool:
        tier = HostTier(10, 4, enough=10)
        for number in range(20):
            tier.demote(number + 1, b"%d" % number, "")
            tier.update_activity()
        tier.count(asked, found)
        for number in range(20, 30):
            tier.demote(number + 1, b"%d" % number, "")
        tier.update_activity()
        return tier.active

    assert after(found=2, asked=10)
    assert not after(found=1, asked=10)
    assert after(found=0, asked=9), "not enough to judge by"
    assert host_tier.MIN_HIT_RATE == 0.2


@pytest.mark.capability("KV-12", "KV-8")
def test_events_tell_a_router_what_is_in_which_memory():
    play = Play(blocks=12, budget=64, host_blocks=24, host_enough=1, kv_events=True)
    known: dict[Medium, set[bytes]] = {Medium.DEVICE: set(), Medium.HOST: set()}

    def listen() -> None:
        for event in play.scheduler.take_kv_events():
            match event:
                case BlockStored():
                    assert not known[event.medium] & set(event.block_hashes)
                    known[event.medium] |= set(event.block_hashes)
                    if event.medium is Medium.DEVICE:
                        assert len(event.token_ids) == 4 * len(event.block_hashes)
                    else:
                        assert (event.token_ids, event.parent_block_hash) == ((), None)
                case BlockRemoved():
                    assert set(event.block_hashes) <= known[event.medium]
                    known[event.medium] -= set(event.block_hashes)
                case AllBlocksCleared():
                    known[Medium.DEVICE].clear()
                    known[Medium.HOST].clear()
        assert known[Medium.DEVICE] == play.pool._block_of.keys()
        assert known[Medium.HOST] == play.tier._slots._block_of.keys()

    seen_full = False
    for number in range(14):
        chat(play, f"turn {number}", [*SYSTEM, 40 + number])
        others(play, 1)
        seen_full |= play.tier.held == play.tier.total
        listen()
        if number == 5:
            play.scheduler.forget_prefixes()
            play.add("x", SYSTEM, max_tokens=2)
            play.run()
            listen()
    assert seen_full
    play.tier._asked, play.tier._found, play.tier._copied = 100, 0, 100
    play.tier.update_activity()
    listen()
    assert not known[Medium.HOST]
