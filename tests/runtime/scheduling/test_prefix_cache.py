"""Prefixes: kept by those who come back, flushed when asked, told to routers."""

from collections.abc import Iterable

import pytest

from slipway_runtime.messages import AllBlocksCleared, BlockRemoved, BlockStored
from tests.runtime.paper_worker import Play, continuation

SYSTEM = list(range(1, 17))  # four blocks


@pytest.mark.capability("KV-9")
def test_a_long_prompt_seen_once_does_not_push_out_a_prefix_in_use():
    play = Play(blocks=40, budget=64)
    for number in range(3):
        play.add(f"chat-{number}", [*SYSTEM, 20 + number], max_tokens=2)
        play.run()
    for number in range(4):
        play.add(f"once-{number}", [(n * 7 + number) % 41 + 3 for n in range(120)], max_tokens=2)  # thirty blocks
        play.run()
    play.add("chat again", [*SYSTEM, 33], max_tokens=2)
    play.run()
    assert play.outputs["chat again"][0].cached_tokens == 16
    assert play.outputs["once-3"][0].cached_tokens == 0


@pytest.mark.capability("KV-9")
def test_what_was_hot_once_does_not_keep_its_place_for_ever():
    play = Play(blocks=20, budget=200)
    for number in range(12):
        prompt = [number + 10] * 15 + [number]
        for name in ("first", "second"):
            play.add(f"{name}-{number}", prompt, max_tokens=1)
            play.run()
    play.add("old", [10] * 15 + [0], max_tokens=1)
    play.add("new", [21] * 15 + [11], max_tokens=1)
    play.run()
    assert play.outputs["old"][0].cached_tokens == 0
    assert play.outputs["new"][0].cached_tokens == 12


def test_coming_back_after_a_preemption_makes_nothing_hot():
    play = Play(blocks=6, block_size=2, max_num_seqs=2, budget=16)
    play.add("a", [1, 2, 3], max_tokens=8)
    play.add("b", [4, 5, 6], max_tokens=8)
    play.run()
    assert play.scheduler.stats(0.0).preemptions > 0
    assert play.pool.cached > 0
    assert not any(play.pool.order.used_again)


@pytest.mark.capability("PF-25", "KV-8")
def test_after_a_flush_nothing_is_found_not_even_what_is_in_use():
    play = Play(budget=64)
    play.add("a", SYSTEM, max_tokens=8)
    play.step()
    play.scheduler.forget_prefixes()
    play.add("b", SYSTEM, max_tokens=2)
    play.run()
    assert play.outputs["b"][0].cached_tokens == 0
    assert play.text("a") == continuation(SYSTEM, 8)


@pytest.mark.capability("MT-2", "KV-3")
def test_another_tenants_salt_or_another_model_finds_nothing():
    play = Play(model="llama int8")
    play.add("a", SYSTEM, cache_salt="mine")
    play.run()
    play.add("b", SYSTEM, cache_salt="yours")
    play.run()
    assert play.outputs["b"][0].cached_tokens == 0
    keys = [play.scheduler._table._new(play.add("c", SYSTEM), 0, "", 0.0).keys[0]]
    other = Play(model="llama fp8")
    assert other.scheduler._table._new(other.add("c", SYSTEM), 0, "", 0.0).keys[0] not in keys


@pytest.mark.capability("KV-8")
def test_events_tell_a_router_which_prefixes_are_here():
    play = Play(blocks=8, budget=64, kv_events=True, residency={"max_adapters": 1})
    play.load("sha256:x")
    known: dict[bytes, tuple[tuple[int, ...], bytes | None]] = {}

    def listen() -> list[object]:
        events = play.scheduler.take_kv_events()
        for event in events:
            if isinstance(event, BlockStored):
                parent = event.parent_block_hash
                assert parent is None or parent in known
                for index, key in enumerate(event.block_hashes):
                    known[key] = (event.token_ids[index * 4 : index * 4 + 4], parent)
                    parent = key
            elif isinstance(event, BlockRemoved):
                for key in event.block_hashes:
                    del known[key]
            else:
                known.clear()
        assert known.keys() == play.pool._block_of.keys(), "a router knows what the pool knows"
        return list(events)

    play.add("a", SYSTEM, max_tokens=2, adapter="sha256:x")
    play.step()
    (stored,) = listen()
    assert stored.token_ids == tuple(SYSTEM)
    assert (stored.parent_block_hash, stored.block_size, stored.adapter) == (None, 4, "sha256:x")
    assert len(stored.block_hashes) == 4
    play.run()
    for number in range(5):
        play.add(f"{number}", [number + 20] * 17, max_tokens=3)
        play.run()
        listen()
    play.scheduler.forget_prefixes()
    assert listen() == [AllBlocksCleared()]
    assert Play().scheduler.take_kv_events() == (), "off unless asked for"


@pytest.mark.capability("BM-2")
def test_switched_off_nothing_is_found_and_nothing_stays():
    play = Play(blocks=32, budget=64, shares_prefixes=False)
    for name in ("first", "again"):
        play.add(name, [*SYSTEM, 20], max_tokens=2)
        play.run()

    assert play.outputs["again"][0].cached_tokens == 0
    assert (play.scheduler.pool.cached, play.scheduler.pool.free) == (0, 32)


def a_blocked_request(**options: object) -> tuple[Play, list[int]]:
    """A request with a cached prefix of 16 blocks that lacks blocks; the number of lookups in each step from now on."""
    play = Play(blocks=48, budget=256, **options)
    prefix = [n % 41 + 3 for n in range(64)]
    play.add("before", prefix, max_tokens=1)
    play.run()
    play.add("runs", [n % 37 + 5 for n in range(100)], max_tokens=30)
    play.step()
    lookups: list[int] = []
    match, step = play.pool.match, play.step

    def counted(keys: Iterable[bytes]) -> list[int]:
        lookups[-1] += 1
        return match(keys)

    play.pool.match = counted  # type: ignore[method-assign]

    def counting_step() -> object:
        lookups.append(0)
        return step()

    play.step = counting_step  # type: ignore[method-assign]
    play.add("waits", [*prefix, *(n % 31 + 7 for n in range(60))], max_tokens=2)
    return play, lookups


@pytest.mark.capability("KV-3")
def test_a_request_that_lacks_blocks_is_not_looked_up_again_until_blocks_come_back():
    """review/engine.md F13: a prefix of 128k tokens cost 3.7 ms in each step."""
    play, lookups = a_blocked_request()
    play.run()
    assert len(play.outputs["waits"]) > 0
    assert play.outputs["waits"][0].cached_tokens >= 56, "some of the prefix"
    blocked = lookups[: lookups.index(0) + 20]
    assert blocked[0] > 0
    assert sum(blocked) == blocked[0], "one lookup, and none in the following steps"


def test_a_request_that_lacks_blocks_is_looked_up_when_another_one_ends():
    play, lookups = a_blocked_request()
    for _ in range(3):
        play.step()
    assert lookups[1:] == [0, 0]
    play.abort("runs")
    play.step()
    play.step()
    assert sum(lookups[3:]) > 0
    play.run()
    assert play.outputs["waits"][0].cached_tokens >= 56, "some of the prefix"
