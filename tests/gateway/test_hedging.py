"""A late first token: a second replica is asked, the first answer wins, the other is cancelled, and a budget bounds it.

Nothing waits for wall time: replicas answer when the test lets them, and the delay is set to zero.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from aiohttp import web

from slipway_gateway.first_token_times import LEAST_SAMPLES, FirstTokenTimes
from slipway_gateway.fleet import Fleet
from slipway_gateway.gateway import Gateway
from slipway_gateway.health import RetryBudget
from slipway_gateway.kinds import InferenceService
from slipway_gateway.picker.endpoints import Endpoint, Service
from slipway_gateway.settings import GatewaySettings
from slipway_gateway.watch import service_of
from tests.gateway.doubles import Runtime, a_caller, be_draining, events_of, hang_up, text_of, until

STORY = "Once upon a time."


def test_a_request_is_late_after_the_95th_percentile_of_the_last_ones():
    times = FirstTokenTimes()
    for number in range(1, LEAST_SAMPLES):
        times.record(number / 1000)
        assert times.delay() is None, "too little is known"
    times.record(1.0)
    assert times.delay() == 1.0
    for number in range(200):
        times.record(0.1 if number < 180 else number / 100)
    assert times.delay() == 1.9, "old ones count no more; 1.9 and above are a twentieth"
    for _ in range(200):
        times.record(0.5)
    assert times.delay() == 1.0, "where all take equally long, none is late before twice as long"


def test_what_hedges_cut_short_does_not_lower_the_delay():
    """One request in ten is slow. Those that are hedged count as slower than the delay, as they are."""
    times = FirstTokenTimes()
    for number in range(400):
        seconds = 2.0 if number % 10 == 0 else 0.1
        delay = times.delay()
        times.record(seconds if delay is None or seconds <= delay else delay + 0.1)

    assert times.delay() is not None
    assert 1.9 < times.delay() <= 2.1


@asynccontextmanager
async def a_hedging_gateway(
    *runtimes: Runtime, service: Service | None = None, delay: float = 0.0
) -> AsyncIterator[Gateway]:
    """Replicas in the order of preference: the gateway always tries the first one first."""
    fleet = Fleet(clock=lambda: 0.0, draw=lambda: 0.0)  # time stands still: what is left out stays so
    fleet.set_service("ns/chat", service or Service("ns/chat", "tiny", hedged_prompt_tokens=512))
    for number, runtime in enumerate(runtimes):
        name = f"ns/chat-{number}"
        fleet.set_endpoint(name, Endpoint(name, "ns/chat", runtime.revision, runtime.url))
        if number:  # busy, so that the first one is picked first
            fleet.lease(fleet.table.endpoint(name), 10_000, lambda: None).__enter__()
    for _ in range(LEAST_SAMPLES):
        fleet.destination("ns/chat").first_token_times.record(delay)
    settings = GatewaySettings(host="127.0.0.1", port=0, admin_port=0, propagation_seconds=0)
    async with Gateway(settings, fleet) as gateway:
        yield gateway


def hedges(gateway: Gateway) -> dict[str, float]:
    """Hedges by outcome."""
    found = {}
    for line in gateway.metrics.exposition().decode().splitlines():
        if line.startswith("slipway_gateway_hedges_total{"):
            found[line.split('outcome="')[1].split('"')[0]] = float(line.split()[-1])
    return found


@pytest.mark.capability("RG-5")
async def test_the_second_replica_answers_when_the_first_is_late_and_the_first_is_cancelled():
    async with Runtime() as late, Runtime() as well:
        late.hold()
        well.hold()
        async with a_hedging_gateway(late, well) as gateway, a_caller(gateway) as caller:
            asking = asyncio.create_task(_text(caller))
            await until(lambda: late.requests and well.requests)  # else it is cancelled before it was sent
            well.allow(100)
            assert await asking == STORY
            await asyncio.wait_for(late.cancelled.wait(), 5)

            assert (late.requests, well.requests) == (1, 1)
            assert late.bodies[0]["seed"] == well.bodies[0]["seed"], "both would give the same answer"
            assert hedges(gateway) == {"won": 1.0}
            assert gateway.fleet.is_ejected(gateway.fleet.table.endpoint("ns/chat-0")), "it is still silent"
            assert gateway.fleet.load(gateway.fleet.table.endpoint("ns/chat-0")).requests == 0
            assert gateway.requests.open == 0


@pytest.mark.capability("RG-5")
async def test_the_first_replica_answers_first_and_the_second_is_cancelled():
    async with Runtime() as first, Runtime() as second:
        first.hold()
        second.hold()
        async with a_hedging_gateway(first, second) as gateway, a_caller(gateway) as caller:
            asking = asyncio.create_task(_text(caller))
            await until(lambda: second.requests)
            first.allow(100)
            assert await asking == STORY
            await asyncio.wait_for(second.cancelled.wait(), 5)

            assert hedges(gateway) == {"lost": 1.0}
            assert not first.cancelled.is_set()


@pytest.mark.capability("RG-5")
@pytest.mark.parametrize("trouble", [be_draining, hang_up])
async def test_a_second_replica_that_fails_changes_nothing(trouble):
    async with Runtime() as first, Runtime(trouble) as second:
        first.hold()
        async with a_hedging_gateway(first, second) as gateway, a_caller(gateway) as caller:
            asking = asyncio.create_task(_text(caller))
            await until(lambda: second.requests)
            await asyncio.sleep(0.1)  # turns of the one event loop, in which the gateway reads of the failure first
            first.allow(100)

            assert await asking == STORY
            assert hedges(gateway) == {"failed": 1.0}


@pytest.mark.capability("RG-5")
async def test_where_the_first_one_fails_meanwhile_the_second_one_decides():
    failing = asyncio.Event()

    async def fail(runtime: Runtime, request: web.Request) -> web.StreamResponse:
        await failing.wait()
        return await hang_up(runtime, request)

    async with Runtime(fail) as first, Runtime() as second:
        second.hold()
        async with a_hedging_gateway(first, second) as gateway, a_caller(gateway) as caller:
            asking = asyncio.create_task(_text(caller))
            await until(lambda: second.requests)
            failing.set()
            second.allow(100)

            assert await asking == STORY
            assert second.requests == 1
            assert hedges(gateway) == {"won": 1.0}


@pytest.mark.capability("RG-5")
async def test_hedges_spend_the_retry_budget_and_end_with_it():
    async with Runtime() as late, Runtime() as well:
        late.hold()
        async with a_hedging_gateway(late, well) as gateway, a_caller(gateway) as caller:
            gateway.fleet.destination("ns/chat").retry_budget = RetryBudget(ratio=0.0, burst=2.0)
            for _ in range(2):
                gateway.fleet.record_success(gateway.fleet.table.endpoint("ns/chat-0"))
                assert await _text(caller) == STORY
            gateway.fleet.record_success(gateway.fleet.table.endpoint("ns/chat-0"))
            asking = asyncio.create_task(_text(caller))
            await until(lambda: hedges(gateway).get("denied"))
            late.allow(100)

            assert await asking == STORY
            assert hedges(gateway) == {"won": 2.0, "denied": 1.0}
            assert well.requests == 2


@pytest.mark.parametrize(
    ("fields", "service"),
    [
        ({"stream": False}, {}),
        ({"stream": True, "messages": [{"role": "user", "content": "word " * 1000}]}, {}),
        ({"stream": True}, {"hedged_prompt_tokens": 0}),
    ],
    ids=["not streamed", "a long prompt", "off"],
)
@pytest.mark.capability("RG-5")
async def test_what_is_not_hedged(fields, service):
    async with Runtime() as late, Runtime() as well:
        late.hold()
        known = Service("ns/chat", "tiny", **({"hedged_prompt_tokens": 512} | service))
        async with a_hedging_gateway(late, well, service=known) as gateway, a_caller(gateway) as caller:
            asking = asyncio.create_task(_status(caller, **fields))
            await until(lambda: late.requests)
            late.allow(100)

            assert await asking == 200
            assert (late.requests, well.requests) == (1, 0)
            assert hedges(gateway) == {}


@pytest.mark.capability("RG-1")
async def test_a_hedge_stays_within_the_revision():
    async with Runtime(revision="r1") as late, Runtime(revision="r2") as other:
        late.hold()
        service = Service("ns/chat", "tiny", hedged_prompt_tokens=512, weights={"r1": 100, "r2": 0})
        async with a_hedging_gateway(late, other, service=service) as gateway, a_caller(gateway) as caller:
            asking = asyncio.create_task(_text(caller))
            await until(lambda: late.requests)
            late.allow(100)

            assert await asking == STORY
            assert other.requests == 0


async def test_a_client_that_leaves_cancels_both():
    async with Runtime() as first, Runtime() as second:
        first.hold()
        second.hold()
        async with a_hedging_gateway(first, second) as gateway, a_caller(gateway) as caller:
            asking = asyncio.create_task(_text(caller))
            await until(lambda: second.requests)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await asyncio.wait_for(asyncio.gather(first.cancelled.wait(), second.cancelled.wait()), 5)
            await until(lambda: not gateway.requests.open)

            assert gateway.fleet.load(gateway.fleet.table.endpoint("ns/chat-0")).requests == 0


def test_the_field_of_the_service():
    def tokens(**routing: object) -> int:
        resource = {"metadata": {"name": "chat", "namespace": "ns"}, "spec": {"routing": routing}}
        return service_of(msgspec.convert(resource, InferenceService)).hedged_prompt_tokens

    assert tokens() == 0
    assert tokens(hedging={}) == 512
    assert tokens(hedging={"maxPromptTokens": 64}) == 64


async def _text(caller) -> str:
    async with caller.chat(stream=True) as response:
        return text_of(await events_of(response))


async def _status(caller, **fields: object) -> int:
    async with caller.chat(**fields) as response:
        await response.read()
        return response.status
