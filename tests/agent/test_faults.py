"""An agent beside an engine that is slow, dead, restarted, or answers nonsense: what it says, and never says."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from slipway_agent.adapters import Adapters
from slipway_agent.engine import Engine, EngineRefused, EngineUnreadable
from slipway_agent.refusal import Refusal
from slipway_agent.replica import Replica
from slipway_api.dialect import Dialect, built_in, parse
from slipway_api.runtime_api import LoadAdapterRequest, ReadyReason
from tests.agent.stand_in import StandIn, listening

pytestmark = pytest.mark.capability("OP-11")


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Beside:
    """A replica beside the stand-in, with the clock in the test's hand: nothing probes but the test."""

    replica: Replica
    adapters: Adapters
    engine: Engine
    clock: Clock = field(default_factory=Clock)

    async def probed(self) -> ReadyReason:
        await self.replica.probe()
        await asyncio.sleep(0)
        return self.replica.ready().reason

    async def refused(self, call: Any) -> Refusal:
        with pytest.raises(Refusal) as caught:
            await call
        return caught.value


def dialect(**change: Any) -> Dialect:
    raw = built_in("vllm").to_json()
    raw["probe"] |= {"timeoutSeconds": 1}
    return parse(json.dumps(raw | change))


@asynccontextmanager
async def beside(url: str, spoken: Dialect | None = None, *, most: int | None = 2) -> AsyncIterator[Beside]:
    spoken = spoken or dialect()
    async with aiohttp.ClientSession(auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None)) as session:
        clock, engine = Clock(), Engine(session, url)
        replica, adapters = Replica(spoken, engine, clock=clock), Adapters(spoken, engine, most=most)
        yield Beside(replica, adapters, engine, clock)
        await adapters.stop()
        await replica.stop()


async def test_an_engine_that_does_not_listen_yet_is_loading():
    async with listening(StandIn()) as engine:
        url = engine.url
    async with beside(url) as one:
        assert await one.probed() is ReadyReason.LOADING
        signals = await one.replica.signals()
        assert (signals.starting, signals.running) == ("Loading", 0)
        async with listening(StandIn(), int(url.rpartition(":")[2])):
            assert await one.probed() is ReadyReason.READY
            assert (await one.replica.signals()).starting == ""


async def test_an_engine_that_answers_503_while_it_starts_is_loading_and_later_dead():
    async with listening(StandIn(health_status=503)) as engine, beside(engine.url) as one:
        assert await one.probed() is ReadyReason.LOADING
        engine.health_status = 200
        assert await one.probed() is ReadyReason.READY
        engine.health_status = 503
        assert await one.probed() is ReadyReason.ENGINE_DEAD
        assert (await one.replica.signals()).not_ready == "EngineDead"


async def test_a_silent_engine_stays_ready_for_a_while_because_it_may_compile():
    async with listening(StandIn()) as engine, beside(engine.url) as one:
        assert await one.probed() is ReadyReason.READY
        engine.hang = {"/health", "/metrics"}
        assert await one.probed() is ReadyReason.READY
        one.clock.now += 29
        assert one.replica.ready().ready
        one.clock.now += 2
        assert one.replica.ready().reason is ReadyReason.STEP_LOOP_STALLED
        refusal = await one.refused(one.replica.signals())
        assert refusal.status == 503
        engine.hang = set()
        assert await one.probed() is ReadyReason.READY


async def test_a_restarted_engine_is_another_one_without_adapters_and_its_boot_list_loads_again():
    async with listening(StandIn()) as engine, beside(engine.url) as one:
        boots: list[str] = []

        async def booted() -> None:
            one.adapters.forget()
            boots.append(one.replica.boot_id)

        one.replica.on_boot = booted
        await one.probed()
        first = one.replica.boot_id
        port = int(engine.url.rpartition(":")[2])
        assert (await one.replica.signals()).boot_id == first
    async with beside(engine.url) as other, listening(StandIn(start_time=1.0), port) as engine:
        other.replica.on_boot = booted
        await other.probed()
        assert other.replica.boot_id == first, "another agent beside the same start"
        engine.start_time = 2.0
        other.clock.now += 1
        assert (await other.replica.signals()).boot_id != first, "no probe has seen the engine gone"
        await asyncio.sleep(0)
        assert len(boots) == 3
        assert not other.replica.ready().ready, "whether the new one sleeps is not known"
        assert await other.probed() is ReadyReason.READY


async def test_without_a_start_time_counters_that_fall_are_a_restart():
    raw = built_in("vllm").to_json()
    del raw["metrics"]["startTime"]
    async with listening(StandIn(tokens=100)) as engine, beside(engine.url, parse(json.dumps(raw))) as one:
        await one.probed()
        first = one.replica.boot_id
        one.clock.now += 1
        assert (await one.replica.signals()).boot_id == first
        engine.tokens = 5
        one.clock.now += 1
        assert (await one.replica.signals()).boot_id != first


@pytest.mark.parametrize(
    "page", [b"", b"not a page", b"vllm:num_requests_running NaN\n", b"\x1f\x8b\x08 compressed", b"x" * 20_000]
)
async def test_metrics_that_cannot_be_read_are_an_error_in_signals_and_never_zeros(page: bytes):
    async with listening(StandIn()) as engine, beside(engine.url) as one:
        await one.probed()
        engine.page = page
        one.clock.now += 1
        refusal = await one.refused(one.replica.signals())
        assert refusal.status == 503
        assert "metrics page" in str(refusal) or "metric" in str(refusal)
        assert await one.probed() is ReadyReason.READY, "it serves all the same"


async def test_a_drain_that_cannot_count_is_never_over_and_says_so():
    async with listening(StandIn()) as engine, beside(engine.url) as one:
        await one.probed()
        engine.page = b"garbage"
        one.clock.now += 1
        assert (await one.refused(one.replica.drain())).status == 503
        assert one.replica.draining, "it has begun all the same"
        assert one.replica.ready().reason is ReadyReason.DRAINING
        one.clock.now += 3600
        assert (await one.refused(one.replica.drain())).status == 503
        assert (await one.refused(one.replica.signals())).status == 503
        engine.page = None
        one.clock.now += 1
        assert (await one.replica.drain()).running == 1, "one count of zero is not certain yet"
        one.clock.now += 2
        assert (await one.replica.drain()).is_drained


@pytest.mark.parametrize("fault", ["no count", "no metrics", "nonsense"])
async def test_a_drain_needs_the_count_of_open_requests_too(fault: str):
    async with listening(StandIn()) as engine, beside(engine.url) as one:
        await one.probed()
        if fault == "no count":
            engine.hang = {"/load"}
        elif fault == "nonsense":
            engine.loads = -1
        else:
            engine.hang = {"/metrics"}
        one.clock.now += 1
        assert (await one.refused(one.replica.drain())).status == 503


async def test_a_request_that_no_metric_shows_yet_keeps_a_drain_open():
    async with listening(StandIn(loads=1)) as engine, beside(engine.url) as one:
        await one.probed()
        for _ in range(3):
            one.clock.now += 10
            assert (await one.replica.drain()).running == 1
        engine.loads = 0
        one.clock.now += 1
        assert not (await one.replica.drain()).is_drained
        engine.loads = 1
        one.clock.now += 1.5
        assert not (await one.replica.drain()).is_drained
        engine.loads = 0
        one.clock.now += 1.5
        assert not (await one.replica.drain()).is_drained, "it has been quiet for no time"
        one.clock.now += 2
        assert (await one.replica.drain()).is_drained


async def test_a_drain_is_not_over_while_routers_may_send_requests():
    async with listening(StandIn()) as engine, beside(engine.url) as one:
        await one.probed()
        await one.replica.drain(refuse_after_seconds=10)
        one.clock.now += 9
        assert not (await one.replica.drain(refuse_after_seconds=10)).is_drained
        one.clock.now += 2
        assert (await one.replica.drain(refuse_after_seconds=10)).is_drained, "asking again makes it no longer"


async def test_an_engine_that_ends_during_a_drain_is_not_counted_as_idle():
    async with listening(StandIn()) as engine:
        url = engine.url
    async with beside(url) as one:
        async with listening(StandIn(), int(url.rpartition(":")[2])):
            assert await one.probed() is ReadyReason.READY
            await one.replica.drain()
        one.clock.now += 100
        assert await one.probed() is ReadyReason.LOADING
        assert (await one.refused(one.replica.signals())).status == 503, "a closing server closes its port first"
        assert (await one.refused(one.replica.drain())).status == 503


async def test_an_engine_that_was_never_there_drains_at_once():
    async with beside("http://127.0.0.1:9") as one:
        await one.probed()
        assert (await one.replica.drain()).is_drained


async def test_undrain_makes_it_ready_again():
    async with listening(StandIn()) as engine, beside(engine.url) as one:
        await one.probed()
        await one.replica.drain()
        assert not (await one.replica.undrain()).draining
        assert one.replica.ready().ready


@pytest.mark.parametrize("path", ["/metrics", "/load", "/v1/models"])
async def test_a_body_without_an_end_is_cut(path: str):
    async with listening(StandIn(endless=path)) as engine, beside(engine.url) as one:
        is_page = path == "/metrics"
        call = one.engine.page(path, frozenset({"x"}), seconds=20) if is_page else one.engine.get(path, seconds=20)
        with pytest.raises(EngineUnreadable):
            await call


async def test_many_endless_bodies_at_once_hold_little_memory_and_all_end():
    async with listening(StandIn(endless="/v1/models")) as engine, beside(engine.url) as one:
        calls = [one.engine.get("/v1/models", seconds=20) for _ in range(20)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(result, EngineUnreadable) for result in results)


async def test_an_engine_without_sleep_refuses_it_in_a_sentence():
    async with listening(StandIn(has_sleep=False)) as engine, beside(engine.url) as one:
        assert await one.probed() is ReadyReason.READY, "an engine without the call is awake"
        refusal = await one.refused(one.replica.sleep(1))
        assert (refusal.status, str(refusal)) == (501, "this vllm was started without sleep: it has no /sleep")
        assert one.replica.ready().ready
    async with listening(StandIn()) as engine, beside(engine.url, dialect(sleep=None)) as one:
        await one.probed()
        assert (await one.refused(one.replica.sleep(1))).status == 501


async def test_sleep_is_refused_while_requests_are_open_or_cannot_be_counted_and_for_other_levels():
    async with listening(StandIn(loads=1)) as engine, beside(engine.url) as one:
        await one.probed()
        assert (await one.refused(one.replica.sleep(1))).status == 409
        engine.page = b""
        one.clock.now += 1
        assert (await one.refused(one.replica.sleep(1))).status == 503
        assert (await one.refused(one.replica.sleep(2))).status == 400
        assert ("POST", "/sleep") not in engine.calls
        assert one.replica.ready().ready


async def test_an_agent_that_restarts_beside_a_sleeping_engine_is_not_ready():
    async with listening(StandIn(asleep=True)) as engine, beside(engine.url) as one:
        assert await one.probed() is ReadyReason.SLEEPING
        await one.replica.wake_up()
        assert one.replica.ready().ready


async def test_an_engine_that_does_not_say_whether_it_sleeps_is_not_ready():
    async with listening(StandIn()) as engine, beside(engine.url) as one:
        engine.hang = {"/is_sleeping"}
        assert await one.probed() is ReadyReason.LOADING
        engine.hang = set()
        assert await one.probed() is ReadyReason.READY


async def test_an_engine_that_hangs_in_sleep_is_not_ready_until_it_says_that_it_is_awake():
    raw = built_in("vllm").to_json()
    raw["sleep"]["seconds"] = 1
    async with listening(StandIn()) as engine, beside(engine.url, parse(json.dumps(raw))) as one:
        await one.probed()
        engine.hang = {"/sleep"}
        assert (await one.refused(one.replica.sleep(1))).status == 503
        assert not one.replica.ready().ready
        assert await one.probed() is ReadyReason.READY


async def test_an_engine_error_is_told_to_the_caller_and_its_text_is_no_part_of_the_exception():
    async with listening(StandIn()) as engine, beside(engine.url) as one:
        with pytest.raises(EngineRefused) as caught:
            await one.engine.post("/v1/unload_lora_adapter", {"lora_name": "secret"}, seconds=5)
        assert "secret" not in str(caught.value)
        assert caught.value.detail == "The lora adapter 'secret' cannot be found."


# --- adapters


def asked(name: str = "one", uri: str = "file:///tmp", **more: Any) -> LoadAdapterRequest:
    return LoadAdapterRequest(name=name, uri=uri, **more)


async def test_a_load_that_takes_long_goes_on_and_one_that_fails_is_listed_with_its_reason(tmp_path):
    async with listening(StandIn(load_seconds=0.5)) as engine, beside(engine.url) as one:
        await one.probed()
        info, is_over = await one.adapters.load(asked(uri=f"file://{tmp_path}"))
        assert (info.state, is_over) == ("loading", False)
        assert [each.state for each in await one.adapters.infos()] == ["loading"]
        again, is_over = await one.adapters.load(asked(uri=f"file://{tmp_path}"))
        assert (again.state, is_over) == ("loading", False)
        await asyncio.sleep(0.8)
        assert [each.state for each in await one.adapters.infos()] == ["host"]
        assert [path for _, path in engine.calls].count("/v1/load_lora_adapter") == 1
        await one.adapters.load(asked("two", f"file://{tmp_path}/missing"))
        await asyncio.sleep(0.8)
        (_, failed) = await one.adapters.infos()
        assert (failed.state, failed.reason) == ("failed", "DownloadFailed")
        assert "No adapter found" in failed.message


async def test_another_content_takes_the_name_over_in_place_and_a_failure_leaves_the_old_one(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    async with listening(StandIn()) as engine, beside(engine.url) as one:
        await one.probed()
        first, _ = await one.adapters.load(asked(uri=f"file://{tmp_path}/a", version="1"))
        second, _ = await one.adapters.load(asked(uri=f"file://{tmp_path}/b", version="2"))
        assert first.digest != second.digest
        assert engine.adapters == {"one": f"{tmp_path}/b"}
        assert ("POST", "/v1/unload_lora_adapter") not in engine.calls, "it never was without an answer"
        await one.refused(one.adapters.load(asked(uri=f"file://{tmp_path}/c", version="3")))
        (info,) = await one.adapters.infos()
        assert (info.state, info.uri) == ("host", f"file://{tmp_path}/b")


async def test_the_same_address_is_not_loaded_again_because_the_engine_keeps_cached_blocks_of_it(tmp_path):
    async with listening(StandIn()) as engine, beside(engine.url) as one:
        await one.probed()
        await one.adapters.load(asked(uri=f"file://{tmp_path}", version="1"))
        info, _ = await one.adapters.load(asked(uri=f"file://{tmp_path}", version="2"))
        assert info.version == "2"
        assert [path for _, path in engine.calls].count("/v1/load_lora_adapter") == 1


async def test_an_agent_that_restarts_takes_the_engines_adapters_over(tmp_path):
    async with listening(StandIn(adapters={"one": str(tmp_path)})) as engine, beside(engine.url) as one:
        await one.probed()
        (info,) = await one.adapters.infos()
        assert (info.uri, info.state) == (f"file://{tmp_path}", "host")
        _, is_over = await one.adapters.load(asked(uri=f"file://{tmp_path}", version="1"))
        assert is_over
        assert ("POST", "/v1/load_lora_adapter") not in engine.calls


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (asked(uri="s3://bucket/x"), "vllm can load only from file:// and hf://"),
        (asked(uri="hf://a/b@main"), "hf://organisation/name, without a revision"),
        (asked(uri="file:///a/../b"), "has no '..' in it"),
        (asked(name="../x"), "an adapter's name is made of"),
        (asked(digest="sha256:0"), "digest cannot be checked"),
        (asked(pinned=True), "vllm pins no adapters"),
    ],
)
async def test_what_the_engine_cannot_do_is_refused_before_it_is_asked(request_: LoadAdapterRequest, sentence: str):
    async with listening(StandIn()) as engine, beside(engine.url) as one:
        await one.probed()
        refusal = await one.refused(one.adapters.load(request_))
        assert (refusal.status, refusal.reason) == (400, "EngineRejected")
        assert sentence in str(refusal)
        assert not [path for _, path in engine.calls if "lora" in path]


async def test_an_engine_without_adapters_has_none_and_refuses_them():
    async with listening(StandIn()) as engine, beside(engine.url, dialect(adapters=None)) as one:
        await one.probed()
        assert (one.adapters.most, await one.adapters.infos()) == (0, [])
        assert (await one.refused(one.adapters.load(asked()))).status == 400
        assert await one.adapters.unload("one")
    async with listening(StandIn()) as engine, beside(engine.url, most=0) as one:
        await one.probed()
        assert (await one.refused(one.adapters.load(asked()))).status == 400
