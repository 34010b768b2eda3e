"""Which adapter is where: slots, memory, disk, and the KV that depends on it."""

import random

import pytest

from slipway_runtime.messages import AdapterState, FinishReason
from slipway_runtime.scheduling.adapter_state import Adapter
from slipway_runtime.scheduling.block_pool import BlockPool
from slipway_runtime.scheduling.eviction import LrfuOrder
from slipway_runtime.scheduling.residency import CLAIM_AFTER, LeastPopular
from slipway_runtime.scheduling.trace import Machine, play, skewed_trace
from tests.runtime.paper_worker import Play, continuation

PROMPT = list(range(1, 10))  # two full blocks of four and a token


def a_play(slots: int = 2, in_memory: int = 2, **options: object) -> Play:
    residency = {"max_adapters": slots, "max_cpu_adapters": in_memory, **options.pop("residency", {})}
    stage = Play(residency=residency, **options)
    for name in "abc":
        stage.load(name)
    return stage


def states(stage: Play) -> dict[str, AdapterState]:
    return {status.digest: status.state for status in stage.scheduler.adapters()}


@pytest.mark.capability("ML-5", "KV-3")
def test_adapters_and_the_base_answer_in_one_batch_each_in_its_own_words():
    stage = a_play(budget=64, in_memory=3)
    for adapter in ("", "a", "b"):
        stage.add(f"for {adapter}", PROMPT, max_tokens=5, adapter=adapter)
    stage.step()
    assert [new.adapter_slot for new in stage.all_plans[0].new_rows] == [-1, 0, 1]
    assert [load.digest for load in stage.all_plans[0].adapter_loads] == ["a", "b"]
    assert stage.scheduler.stats(0.0).running_adapters == ("a", "b")
    stage.run()
    for adapter in ("", "a", "b"):
        assert stage.text(f"for {adapter}") == continuation(PROMPT, 5, adapter)
        assert stage.outputs[f"for {adapter}"][0].cached_tokens == 0, "KV is never valid under another adapter"
    stage.add("again", PROMPT, max_tokens=1, adapter="a")
    stage.run()
    assert stage.outputs["again"][0].cached_tokens == 8


@pytest.mark.capability("ML-5")
def test_a_request_without_a_slot_is_skipped_and_comes_when_one_is_idle():
    stage = a_play(slots=1, in_memory=3)
    stage.add("a", PROMPT, max_tokens=6, adapter="a")
    stage.add("b", PROMPT, max_tokens=2, adapter="b")
    stage.add("base", PROMPT, max_tokens=2)
    stage.step()
    stats = stage.scheduler.stats(0.0)
    assert (stats.running, stats.running_adapters, stats.waiting_adapters) == (2, ("a",), ("b",))
    stage.run()
    assert stage.text("b") == continuation(PROMPT, 2, "b")
    assert states(stage)["b"] is AdapterState.SLOT
    assert states(stage)["a"] is AdapterState.HOST


@pytest.mark.capability("ML-5", "BS-5")
def test_a_cold_adapter_gets_its_turn_under_a_flood_for_a_hot_one():
    stage = a_play(slots=1, in_memory=3, max_num_seqs=2)
    stage.add("hot-0", PROMPT, max_tokens=4, adapter="a", tenant="hot")
    stage.step()
    stage.add("cold", PROMPT, max_tokens=2, adapter="b", tenant="cold")
    for number in range(1, 200):
        if "cold" in stage.outputs:
            break
        stage.add(f"hot-{number}", PROMPT, max_tokens=4, adapter="a", tenant="hot")
        stage.step()
    assert "cold" in stage.outputs
    assert number <= 3 * CLAIM_AFTER, "it claims the slot, and those who have it finish"
    stage.run()


@pytest.mark.capability("ML-5")
def test_what_does_not_fit_in_memory_is_read_again_when_it_is_wanted():
    stage = a_play(slots=1, in_memory=2)
    assert states(stage) == {"a": AdapterState.DISK, "b": AdapterState.HOST, "c": AdapterState.HOST}
    stage.add("c", PROMPT, max_tokens=2, adapter="c")
    stage.run()
    stage.add("b", PROMPT, max_tokens=2, adapter="b")
    stage.run()
    stage.add("a", PROMPT, max_tokens=2, adapter="a")
    stage.run()
    assert stage.text("a") == continuation(PROMPT, 2, "a")
    assert len(stage.host) == 2
    assert sorted(states(stage).values()) == [AdapterState.DISK, AdapterState.HOST, AdapterState.SLOT]


@pytest.mark.capability("ML-5")
def test_a_pinned_adapter_stays_in_memory():
    stage = Play(residency={"max_adapters": 1, "max_cpu_adapters": 2})
    stage.load("pinned", pinned=True)
    for name in "abcd":
        stage.load(name)
        stage.add(name, PROMPT, max_tokens=2, adapter=name)
        stage.run()
    assert states(stage)["pinned"] is AdapterState.HOST
    assert "pinned" in stage.host


@pytest.mark.capability("ML-9")
def test_unloading_refuses_new_requests_and_waits_for_those_in_flight():
    stage = a_play()
    stage.add("before", PROMPT, max_tokens=6, adapter="a")
    stage.step()
    assert stage.scheduler.unload_adapter("a", stage.now)
    assert states(stage)["a"] is AdapterState.DRAINING
    stage.add("after", PROMPT, max_tokens=6, adapter="a")
    stage.run()
    assert stage.text("before") == continuation(PROMPT, 6, "a")
    assert stage.end("after").finish_reason is FinishReason.ERROR
    assert "unloaded" in stage.end("after").error
    assert "a" not in states(stage)
    assert "a" not in stage.host
    assert stage.pool.members("a") == 0
    assert not stage.scheduler.unload_adapter("a", stage.now)


@pytest.mark.capability("ML-9", "ML-5")
def test_a_new_revision_runs_beside_the_old_one():
    stage = a_play(slots=2)
    stage.add("old", PROMPT, max_tokens=8, adapter="a")
    stage.step()
    stage.scheduler.unload_adapter("a", stage.now)
    stage.load("a2")
    stage.add("new", PROMPT, max_tokens=4, adapter="a2")
    stage.run()
    assert stage.text("old") == continuation(PROMPT, 8, "a")
    assert stage.text("new") == continuation(PROMPT, 4, "a2")
    assert stage.outputs["new"][0].cached_tokens == 0


def test_loading_again_while_draining_keeps_it():
    stage = a_play()
    stage.add("before", PROMPT, max_tokens=3, adapter="a")
    stage.step()
    stage.scheduler.unload_adapter("a", stage.now)
    assert not stage.scheduler.register_adapter("a", stage.now), "it is still here"
    stage.run()
    assert "a" in states(stage)


@pytest.mark.capability("ML-4")
def test_an_adapter_that_cannot_be_read_fails_its_requests_alone():
    stage = a_play()
    assert stage.scheduler.register_adapter("bad", stage.now)
    stage.add("waits", PROMPT, adapter="bad")
    stage.add("other", PROMPT, adapter="a")
    stage.step()
    stage.scheduler.note_adapter_failed("bad", "not safetensors", stage.now)
    stage.add("later", PROMPT, adapter="bad")
    stage.add("unknown", PROMPT, adapter="never heard of")
    stage.run()
    for name in ("waits", "later"):
        assert stage.end(name).error == "the adapter could not be loaded: not safetensors"
    assert stage.end("unknown").error == "the adapter is not loaded"
    assert stage.text("other") == continuation(PROMPT, 4, "a")
    assert states(stage)["bad"] is AdapterState.FAILED
    assert stage.scheduler.register_adapter("bad", stage.now), "it may be tried again"


def test_while_everybody_waits_for_storage_there_is_nothing_to_step():
    stage = a_play()
    stage.scheduler.register_adapter("slow", stage.now)
    stage.add("waits", PROMPT, adapter="slow")
    stage.step()
    assert stage.scheduler.is_stalled
    stage.add("base", PROMPT)
    assert not stage.scheduler.is_stalled


@pytest.mark.capability("ML-6", "ML-7")
def test_memory_is_one_budget_and_kv_leaves_before_its_adapter():
    stage = Play(blocks=20, residency={"max_adapters": 1, "max_cpu_adapters": 9, "block_bytes": 50, "most_blocks": 6})
    for name in "abcd":  # two blocks each
        stage.load(name)
    assert stage.pool.reserved == 6
    assert states(stage)["a"] is AdapterState.DISK, "the least wanted made room"
    assert stage.scheduler.stats(0.0).blocks_total == 14
    stage.add("b", PROMPT, max_tokens=2, adapter="b")
    stage.run()
    assert stage.pool.members("b") == 2
    for name in "acd":
        stage.now += 1000
        stage.add(name, PROMPT, max_tokens=2, adapter=name)
        stage.run()
    assert states(stage)["b"] is AdapterState.DISK
    assert stage.pool.members("b") == 0
    assert stage.scheduler.stats(0.0).invalid_kv_blocks == 0


def test_an_adapter_larger_than_all_their_memory_is_refused():
    stage = Play(blocks=20, residency={"max_adapters": 1, "block_bytes": 50, "most_blocks": 6})
    stage.load("huge", num_bytes=301)
    assert states(stage)["huge"] is AdapterState.FAILED
    assert "301 bytes" in stage.scheduler.adapters()[0].error


@pytest.mark.capability("KV-6")
def test_idle_adapters_give_their_memory_to_who_waits_for_blocks():
    room = {"max_adapters": 1, "max_cpu_adapters": 9, "block_bytes": 50, "most_blocks": 8}
    stage = Play(blocks=20, budget=64, residency=room)
    for name in "abcd":
        stage.load(name)
    assert stage.pool.reserved == 8
    for number in range(2):
        stage.add(f"r{number}", [number + 1] * 28, max_tokens=4)  # seven blocks each
    stage.step()
    assert stage.scheduler.stats(0.0).running == 2
    stage.run()


@pytest.mark.capability("ML-7")
def test_the_less_popular_of_an_adapter_and_a_prefix_is_evicted_first():
    pool = BlockPool(8)
    rule = LeastPopular(pool, half_life_seconds=10.0, shares_blocks=True)
    publish(pool, b"twice", 0.0)
    hits = pool.match([b"twice"])
    pool.hold(hits)
    pool.count_use(hits)
    pool.release(hits)  # used one and a half times: the first use counts half

    rare = Adapter("rare", popularity=1.0, last_used=0.0)
    often = Adapter("often", popularity=2.0, last_used=0.0)
    needed = Adapter("needed", popularity=0.1, last_used=0.0, requests=1)
    assert rule.next([often, rare, needed]) is rare, "an adapter with a request comes after all others"
    assert rule.is_below_next_prefix(rare)
    assert not rule.is_below_next_prefix(often)
    often.last_used = -10.0  # a half-life without a use
    assert rule.is_below_next_prefix(often)


def a_pool_by_popularity(num_blocks: int) -> BlockPool:
    pool = BlockPool(num_blocks)
    pool.evict_by(LrfuOrder(num_blocks, half_life_seconds=10.0))
    return pool


def publish(pool: BlockPool, key: bytes, now: float) -> None:
    pool.now = now
    (block,) = pool.allocate(1)
    assert pool.publish(block, key, "a")
    pool.release([block])


@pytest.mark.capability("ML-7")
def test_the_least_popular_prefix_goes_first_and_popularity_fades():
    pool = a_pool_by_popularity(2)
    publish(pool, b"often", 0.0)
    for _ in range(3):
        hits = pool.match([b"often"])
        pool.hold(hits)
        pool.count_use(hits)
        pool.release(hits)
    publish(pool, b"lately", 1.0)
    publish(pool, b"next", 2.0)
    assert pool.match([b"often"]), "used more often, though longer ago"
    publish(pool, b"much later", 60.0)
    publish(pool, b"after it", 60.0)
    assert not pool.match([b"often"]), "six half-lives later that is forgotten"
    pool.check()


@pytest.mark.capability("ML-7")
def test_an_evicted_prefix_that_is_computed_again_is_known_to_come_back():
    pool = a_pool_by_popularity(1)
    publish(pool, b"comes back", 0.0)
    publish(pool, b"once", 1.0)
    assert not pool.match([b"comes back"])
    publish(pool, b"comes back", 2.0)
    (block,) = pool.match([b"comes back"])
    assert pool.order.popularity_of(block, 2.0) > 1.0


def test_the_order_of_prefixes_does_not_grow_with_their_uses():
    pool = a_pool_by_popularity(4)
    publish(pool, b"often", 0.0)
    for _ in range(1000):
        hits = pool.match([b"often"])
        pool.hold(hits)
        pool.release(hits)
    assert len(pool.order._heap) < 100


@pytest.mark.capability("ML-6", "ML-7")
@pytest.mark.parametrize("seed", range(5))  # the policy was tuned on other seeds: ADR 11
def test_one_budget_beats_every_fixed_split_between_two_lrus_on_a_skewed_trace(seed):
    trace = skewed_trace(random.Random(seed).random, requests=300)
    aware = play(trace, dependency_aware=True)
    assert (aware.mean_invalid_share, aware.max_invalid_blocks) == (0.0, 0)
    for share in (0.125, 0.25, 0.375, 0.5):
        apart = play(trace, Machine(adapter_share=share), dependency_aware=False)
        assert aware.mean_ttft_ms < apart.mean_ttft_ms
        assert apart.max_invalid_blocks > 0


@pytest.mark.capability("ML-6")
def test_two_lrus_with_little_memory_for_adapters_fill_the_cache_with_kv_that_nobody_can_use():
    trace = skewed_trace(random.Random(0).random, adapters=64, requests=400)
    assert play(trace, Machine(adapter_share=0.125), dependency_aware=False).mean_invalid_share > 0.3
    assert play(trace, Machine(adapter_share=0.125), dependency_aware=True).max_invalid_blocks == 0


@pytest.mark.capability("ML-2")
def test_the_requests_of_an_adapter_are_counted():
    stage = a_play()

    def requests() -> int:
        return next(status.requests for status in stage.scheduler.adapters() if status.digest == "a")

    stage.add("one", PROMPT, max_tokens=2, adapter="a")
    joined = stage.scheduler.adapters_version
    assert requests() == 1

    stage.run()

    assert stage.scheduler.adapters_version > joined, "there is something new to tell"
    assert requests() == 0
