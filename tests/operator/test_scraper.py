"""Asking replicas for their signals: how often, and when an answer deserves a new look at the service."""

import asyncio
from collections import Counter
from datetime import timedelta
from itertools import pairwise

import pytest

from slipway_api.runtime_api import AdapterInfo, BlockCounts
from slipway_operator.core.observed import Capacity, FailedAdapter, Sample
from slipway_operator.inputs.scraper import Target, matters
from tests.operator.scraped_fleet import T0, Fleet, a_state
from tests.operator.virtual_time import run_in_virtual_time


def test_busy_replicas_are_asked_every_one_and_a_half_seconds_and_idle_ones_every_fifteen():
    fleet = Fleet()
    fleet.load = {"busy": 3, "idle": 0}

    run_in_virtual_time(fleet.watch_for(60))

    assert 35 <= fleet.calls_of("busy") <= 40
    assert 4 <= fleet.calls_of("idle") <= 5


@pytest.mark.capability("AS-4")
def test_a_broken_and_a_hanging_replica_block_no_other():
    fleet = Fleet()
    fleet.load = {"busy": 3, "broken": 1, "hanging": 1}
    fleet.broken, fleet.hanging = {"broken"}, {"hanging"}

    run_in_virtual_time(fleet.watch_for(60))

    assert fleet.calls_of("busy") >= 35
    assert fleet.calls_of("hanging") <= 18
    assert fleet.errors


@pytest.mark.capability("AS-4")
def test_silence_is_recorded_as_nothing_so_the_last_sample_grows_old():
    fleet = Fleet()
    fleet.load = {"chat-0": 3}

    async def story() -> None:
        task = asyncio.create_task(fleet.run())
        await asyncio.sleep(10)
        fleet.broken = {"chat-0"}
        last = fleet.scraper.sample("chat-0")
        await asyncio.sleep(60)

        assert last is not None
        assert fleet.scraper.sample("chat-0") == last
        task.cancel()

    run_in_virtual_time(story())


def test_a_replica_that_never_answered_has_no_sample():
    fleet = Fleet()
    fleet.load = {"chat-0": 3}
    fleet.broken = {"chat-0"}

    run_in_virtual_time(fleet.watch_for(30))

    assert fleet.scraper.sample("chat-0") is None


def test_an_idle_replica_that_begins_to_drain_is_asked_within_two_seconds():
    fleet = Fleet()
    fleet.load = {"idle": 0}

    async def story() -> None:
        task = asyncio.create_task(fleet.run())
        await asyncio.sleep(20)
        asked = fleet.calls_of("idle")
        fleet.draining = {"idle"}
        await asyncio.sleep(2.5)

        assert fleet.calls_of("idle") > asked
        task.cancel()

    run_in_virtual_time(story())


def test_an_idle_fleet_wakes_nobody_after_its_first_answers():
    fleet = Fleet()
    fleet.load = {f"chat-{number}": 0 for number in range(20)}

    run_in_virtual_time(fleet.watch_for(120))

    assert fleet.news == {"chat": 20}


def test_the_calls_of_a_large_fleet_are_spread_over_the_interval():
    fleet = Fleet()
    fleet.load = {f"chat-{number}": 1 for number in range(400)}

    run_in_virtual_time(fleet.watch_for(10))

    per_quarter = Counter(int(at / 0.25) for at, _ in fleet.asked)
    assert max(per_quarter.values()) < 120  # 400 replicas over 8 quarters of an interval: 50 each on average


def test_samples_of_replicas_that_are_gone_are_forgotten():
    fleet = Fleet()
    fleet.load = {"chat-0": 1}

    async def story() -> None:
        task = asyncio.create_task(fleet.run())
        await asyncio.sleep(5)
        fleet.load = {}
        await asyncio.sleep(1)

        assert fleet.scraper.sample("chat-0") is None
        task.cancel()

    run_in_virtual_time(story())


@pytest.mark.capability("OP-14")
@pytest.mark.parametrize("services", [1, 160])
def test_a_healthy_sample_behind_640_silent_replicas_is_taken_in_its_interval(services):
    """Finding 10: 640 silent replicas shared 64 slots with everybody, and a healthy sample waited 20 s."""
    fleet = Fleet()
    fleet.load = {f"silent-{number}": 1 for number in range(640)} | {"busy": 1}
    fleet.services = {f"silent-{number}": f"silent-{number % services}" for number in range(640)}
    fleet.hanging = set(fleet.services)

    run_in_virtual_time(fleet.watch_for(60))

    asked = [at for at, uid in fleet.asked if uid == "busy"]
    assert len(asked) >= 26
    assert max(later - earlier for earlier, later in pairwise(asked)) <= 4.0  # its interval, and one wait in line
    assert max(later - earlier for earlier, later in pairwise(asked[2:])) <= 2.1  # silence is known from then on


def test_after_a_takeover_the_calls_that_were_due_for_long_do_not_come_at_once():
    fleet = Fleet()

    async def story() -> None:
        for number in range(400):
            fleet.load[f"chat-{number}"] = 1
            fleet.scraper.watch(Target(f"chat-{number}", f"chat-{number}", "chat"))
        await asyncio.sleep(300)
        await fleet.watch_for(2)

    run_in_virtual_time(story())

    assert max(Counter(int(at / 0.25) for at, _ in fleet.asked).values()) < 120


def test_a_replica_that_was_told_to_drain_is_asked_at_once():
    fleet = Fleet()
    fleet.load = {"idle": 0}

    async def story() -> None:
        task = asyncio.create_task(fleet.run())
        await asyncio.sleep(20)
        asked = fleet.calls_of("idle")
        fleet.scraper.ask_soon("idle")
        await asyncio.sleep(0.1)

        assert fleet.calls_of("idle") == asked + 1
        task.cancel()

    run_in_virtual_time(story())


@pytest.mark.parametrize(
    ("before", "after", "is_news"),
    [
        (None, {"running": 0}, True),
        ({"running": 0}, {"running": 0}, False),
        ({"running": 0}, {"running": 1}, True),
        ({"running": 2}, {"running": 0}, True),
        ({"running": 2}, {"running": 2}, True),
        ({"running": 0}, {"running": 0, "draining": True}, True),
        ({"running": 0, "draining": True}, {"running": 0, "draining": True}, True),
        ({"running": 0}, {"running": 0, "boot_id": "boot-2"}, True),
        ({"running": 0}, {"running": 0, "seconds": 100}, True),
        ({"running": 0, "starting": "Downloading"}, {"running": 0, "starting": "Loading"}, True),
        ({"running": 0, "starting": "Loading"}, {"running": 0, "starting": "Loading"}, False),
        ({"running": 0}, {"running": 0, "outdated_certificate_ends": T0}, True),
        ({"running": 0}, {"running": 0, "capacity": Capacity(max_sequences=1, kv_blocks=9, bytes_per_token=9)}, True),
    ],
)
def test_a_sample_matters_when_a_decision_could_change(before, after, is_news):
    def sample(seconds: float = 15, **facts) -> Sample:
        return Sample(at=T0 + timedelta(seconds=seconds), **{"boot_id": "boot", "kv_usage": 0.1, "waiting": 0, **facts})

    assert matters(None if before is None else sample(0, **before), sample(**after)) is is_news


@pytest.mark.capability("OP-5")
def test_what_a_replica_holds_is_asked_for_once_in_its_life():
    fleet = Fleet()
    fleet.load = {"chat-0": 0}

    async def story() -> None:
        task = asyncio.create_task(fleet.run())
        await asyncio.sleep(60)
        assert fleet.described == ["chat-0"]
        sample = fleet.scraper.sample("chat-0")
        assert sample is not None
        assert sample.capacity == Capacity(max_sequences=3, kv_blocks=1000, bytes_per_token=8192)

        fleet.boot_id = "another engine"
        await asyncio.sleep(60)
        assert fleet.described == ["chat-0"] * 2
        task.cancel()

    run_in_virtual_time(story())


@pytest.mark.capability("OP-18")
def test_a_failed_adapter_is_looked_at_again_until_it_is_there():
    fleet = Fleet()
    fleet.load = {"chat-0": 0}
    failed = AdapterInfo(name="sql", state="failed", reason="DownloadFailed", message="it does not exist")
    fleet.adapters = (failed, AdapterInfo(name="chess", state="host"))

    def known() -> tuple[FailedAdapter, ...] | None:
        sample = fleet.scraper.sample("chat-0")
        return sample.capacity.failed_adapters if sample is not None and sample.capacity is not None else None

    async def story() -> None:
        task = asyncio.create_task(fleet.run())
        await asyncio.sleep(60)
        assert known() == (FailedAdapter("sql", "DownloadFailed", "it does not exist"),)
        news = fleet.news["chat"]
        fleet.mute = {"chat-0"}
        await asyncio.sleep(20)
        assert known(), "no answer is no success"
        assert fleet.news["chat"] == news, "an idle replica with the same failure wakes nobody"

        fleet.mute, fleet.adapters = set(), (AdapterInfo(name="sql", state="host"),)
        await asyncio.sleep(20)
        assert known() == ()
        assert fleet.news["chat"] == news + 1
        asked = len(fleet.described)
        await asyncio.sleep(60)
        assert len(fleet.described) == asked
        task.cancel()

    run_in_virtual_time(story())


def test_a_replica_that_keeps_its_state_to_itself_is_still_heard():
    fleet = Fleet()
    fleet.load, fleet.mute = {"chat-0": 3}, {"chat-0"}

    run_in_virtual_time(fleet.watch_for(10))

    sample = fleet.scraper.sample("chat-0")
    assert sample is not None
    assert (sample.running, sample.capacity) == (3, None)


def test_a_replica_that_loads_is_followed_closely_and_its_silence_is_no_error():
    fleet = Fleet()
    fleet.load, fleet.broken, fleet.starting = {"chat-0": 0}, {"chat-0"}, {"chat-0": "Downloading"}

    async def story() -> None:
        task = asyncio.create_task(fleet.run())
        await asyncio.sleep(10)
        assert fleet.errors == []
        fleet.broken = set()
        await asyncio.sleep(10)
        sample = fleet.scraper.sample("chat-0")
        assert sample is not None
        assert sample.starting == "Downloading"
        assert fleet.calls_of("chat-0") >= 9
        assert fleet.described == []
        task.cancel()

    run_in_virtual_time(story())


@pytest.mark.capability("OP-5")
@pytest.mark.parametrize(
    ("facts", "sequences"),
    [
        ({}, 3),  # 1,000 blocks, 256 for a request of full length
        ({"max_model_len": 4097}, 3),  # 257 blocks
        ({"max_num_seqs": 2}, 2),
        ({"max_model_len": 17}, 64),  # 500 would fit, 64 may run
        ({"blocks": BlockCounts(total=0, live=0, cached=0, free=0)}, None),
        ({"max_model_len": 0}, None),
    ],
)
def test_capacity_is_counted_in_requests_of_full_length(facts, sequences):
    capacity = Capacity.of(a_state(**facts))

    assert (capacity.max_sequences if capacity else None) == sequences


@pytest.mark.capability("AS-10")
def test_a_burst_on_an_idle_service_is_seen_within_two_seconds_of_the_gateways_word():
    """Item 9: an idle replica was asked every 15 s, so the first reaction to a burst took as long."""
    fleet = Fleet()
    fleet.load = {"a": 0, "b": 0, "other": 0}
    fleet.services = {"other": "code"}

    async def burst() -> tuple[float, int]:
        task = asyncio.create_task(fleet.run())
        await asyncio.sleep(60)
        fleet.news.clear()
        calls_of_others = fleet.calls_of("other")
        begun = asyncio.get_running_loop().time()
        fleet.scraper.ask_service("chat")  # the request is at the gateway, and reaches its replica a moment later
        await asyncio.sleep(0.5)
        fleet.load["b"] = 40
        while not fleet.news["chat"]:  # noqa: ASYNC110  virtual time: it costs nothing to look
            await asyncio.sleep(0.01)
        seen_after = asyncio.get_running_loop().time() - begun
        task.cancel()
        return seen_after, fleet.calls_of("other") - calls_of_others

    seen_after, calls_of_others = run_in_virtual_time(burst())

    assert seen_after <= 2.1
    assert calls_of_others <= 1, "replicas of other services are left alone"


def test_every_report_of_a_gateway_costs_no_call():
    fleet = Fleet()
    fleet.load = {"a": 0}

    async def reports() -> int:
        task = asyncio.create_task(fleet.run())
        await asyncio.sleep(60)
        before = fleet.calls_of("a")
        for _ in range(1000):
            fleet.scraper.ask_service("chat")
            fleet.scraper.ask_service("a service without replicas")
            await asyncio.sleep(0.01)
        task.cancel()
        return fleet.calls_of("a") - before

    assert run_in_virtual_time(reports()) <= 7, "ten seconds at the busy pace"


def test_after_a_burst_that_was_none_the_idle_pace_returns():
    fleet = Fleet()
    fleet.load = {"a": 0}

    async def quiet() -> int:
        task = asyncio.create_task(fleet.run())
        await asyncio.sleep(60)
        fleet.scraper.ask_service("chat")
        await asyncio.sleep(30)
        before = fleet.calls_of("a")
        await asyncio.sleep(60)
        task.cancel()
        return fleet.calls_of("a") - before

    assert 3 <= run_in_virtual_time(quiet()) <= 5


def learn_of(fleet: Fleet, uid: str, *, running: int, age: float = 1.0) -> None:
    at = T0 + timedelta(seconds=asyncio.get_running_loop().time() - age)
    fleet.scraper.learn(uid, at=at, kv_usage=0.7, running=running, waiting=1)


@pytest.mark.capability("AS-4")
def test_fresh_load_of_another_source_replaces_calls_and_its_outage_brings_them_back():
    fleet = Fleet()
    fleet.load = {"a": 5}

    async def story() -> tuple[int, int]:
        task = asyncio.create_task(fleet.run())
        await asyncio.sleep(10)
        before = fleet.calls_of("a")
        for _ in range(30):
            learn_of(fleet, "a", running=9)
            sample = fleet.scraper.sample("a")
            assert (sample.running, sample.kv_usage, sample.boot_id) in ((9, 0.7, "boot"), (5, 0.5, "boot"))
            await asyncio.sleep(2)
        with_source = fleet.calls_of("a") - before
        await asyncio.sleep(15)
        before = fleet.calls_of("a")
        await asyncio.sleep(60)
        task.cancel()
        return with_source, fleet.calls_of("a") - before

    with_source, without = run_in_virtual_time(story())

    assert with_source <= 6, "a minute at the idle pace"
    assert without >= 26, "a minute at the busy pace"


@pytest.mark.capability("AS-4")
def test_old_load_of_another_source_never_replaces_what_the_replica_said():
    fleet = Fleet()
    fleet.load = {"a": 5}

    async def story() -> int:
        task = asyncio.create_task(fleet.run())
        await asyncio.sleep(10)
        before = fleet.calls_of("a")
        for _ in range(30):
            learn_of(fleet, "a", running=9, age=20)  # scraped every half a minute
            learn_of(fleet, "a", running=9, age=-60)  # a clock that is a minute ahead
            learn_of(fleet, "unknown", running=9)
            assert fleet.scraper.sample("a").running == 5
            await asyncio.sleep(2)
        task.cancel()
        return fleet.calls_of("a") - before

    assert run_in_virtual_time(story()) >= 26
    assert fleet.scraper.sample("unknown") is None


def test_a_replica_whose_port_is_silent_is_known_by_another_source():
    fleet = Fleet()
    fleet.load, fleet.broken = {"a": 5}, {"a"}

    async def story() -> None:
        task = asyncio.create_task(fleet.run())
        await asyncio.sleep(5)
        assert fleet.scraper.sample("a") is None
        learn_of(fleet, "a", running=9)
        task.cancel()

    run_in_virtual_time(story())

    assert fleet.scraper.sample("a").running == 9
    assert fleet.news["chat"] == 1
