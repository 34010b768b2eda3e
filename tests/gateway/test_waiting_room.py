"""The waiting room: who waits, the bounds, the order, and what the operator is told; with real replicas behind it."""

import asyncio
from contextlib import asynccontextmanager

import openai
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slipway_api.adapter_conditions import STALLED_CAUSES as ADAPTER_CAUSES
from slipway_api.vocabulary import STALLED_CAUSES
from slipway_gateway.errors import cannot_start
from slipway_gateway.fleet import Fleet
from slipway_gateway.gateway import Gateway
from slipway_gateway.picker.endpoints import Adapter, Endpoint, Service, WaitLimits
from slipway_gateway.settings import GatewaySettings
from slipway_gateway.waiting_room import LOADING_BYTES, LOADING_REQUESTS, HeldRequests, wait_limits
from tests.gateway.doubles import MODEL, Runtime, a_caller, events_of, until

KEY = "team/chat"
LIMITS = WaitLimits(requests=100, bytes=1 << 20, seconds=30)


def a_service(**facts) -> Service:
    return Service(**{"key": KEY, "served_name": MODEL, "activation": LIMITS} | facts)


@asynccontextmanager
async def a_scaled_gateway(**facts):
    """A gateway of one service that has no replica yet."""
    fleet = Fleet()
    fleet.set_service(KEY, a_service(**facts))
    async with Gateway(GatewaySettings(host="127.0.0.1", port=0, admin_port=0), fleet) as gateway:
        yield gateway


def add(gateway: Gateway, runtime: Runtime, name: str = "p0", **facts) -> None:
    gateway.fleet.set_endpoint(name, Endpoint(name=name, service=KEY, revision="r1", url=runtime.url, **facts))


def waiting(gateway: Gateway) -> int:
    return gateway.fleet.demand.waiting(KEY)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, LIMITS),
        ({"desired_replicas": 2}, LIMITS),
        ({"activation": None, "desired_replicas": 2}, WaitLimits(LOADING_REQUESTS, LOADING_BYTES, 10)),
        ({"activation": None}, None),
        ({"is_suspended": True}, None),
        ({"is_suspended": True, "activation": None, "desired_replicas": 2}, None),
    ],
)
@pytest.mark.capability("RG-7")
def test_which_requests_may_wait(facts, expected):
    assert wait_limits(a_service(**facts), 10) == expected


@pytest.mark.capability("RG-7")
async def test_the_first_requests_are_held_and_answered_when_a_replica_comes():
    async with Runtime() as runtime, a_scaled_gateway() as gateway:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key="none", max_retries=0)
        message = {"role": "user", "content": "Tell me a story."}
        calls = [
            asyncio.create_task(client.chat.completions.create(model=MODEL, messages=[message])) for _ in range(20)
        ]
        await until(lambda: waiting(gateway) == 20)
        [demand] = gateway.fleet.demand.report(gateway.fleet.table.services).services
        assert (demand.waiting_requests, demand.open_requests) == (20, 0)
        assert demand.waiting_bytes > 0
        add(gateway, runtime)
        answers = await asyncio.gather(*calls)

        assert {answer.choices[0].message.content for answer in answers} == {"Once upon a time."}
        assert waiting(gateway) == 0


@pytest.mark.capability("RG-7")
async def test_not_more_requests_fall_on_the_first_replica_than_it_runs_and_the_oldest_go_first():
    async with (
        Runtime().hold() as runtime,
        a_scaled_gateway(max_num_seqs=2) as gateway,
        a_caller(gateway) as caller,
    ):
        calls = []
        for number in range(6):
            calls.append(asyncio.create_task(caller.chat(seed=number).__aenter__()))
            await until(lambda number=number: waiting(gateway) == number + 1)
        add(gateway, runtime)
        await until(lambda: runtime.requests == 2)
        late = asyncio.create_task(caller.chat(seed=6).__aenter__())
        await until(lambda: waiting(gateway) == 5)
        assert runtime.requests == 2, "the new request queues behind the held ones"
        for done in range(7):
            runtime.allow(1)
            await until(lambda done=done: runtime.requests == min(7, done + 3))

        assert [(await call).status for call in (*calls, late)] == [200] * 7
        assert sorted(body["seed"] for body in runtime.bodies[:2]) == [0, 1]
        assert [body["seed"] for body in runtime.bodies[2:]] == [2, 3, 4, 5, 6]
        assert waiting(gateway) == 0
        await until(lambda: not gateway.requests._waiting_room._services)


@pytest.mark.capability("RG-7")
async def test_beyond_the_count_or_the_bytes_is_503_with_a_time_to_come_back():
    for limits in (WaitLimits(1, 1 << 20, 30), WaitLimits(100, 150, 30)):
        async with Runtime() as runtime, a_scaled_gateway(activation=limits) as gateway, a_caller(gateway) as caller:
            first = asyncio.create_task(caller.chat().__aenter__())
            await until(lambda gateway=gateway: waiting(gateway) == 1)
            async with caller.chat() as response:
                assert response.status == 503
                assert response.headers["Retry-After"] == "10"
                assert response.headers["retry-after-ms"] == "10000"
            [demand] = gateway.fleet.demand.report(gateway.fleet.table.services).services
            assert (demand.waiting_requests, demand.refused_requests) == (1, 1)
            add(gateway, runtime)
            assert (await first).status == 200


@pytest.mark.capability("RG-7")
async def test_after_its_time_a_request_is_refused_and_nothing_of_it_stays():
    async with a_scaled_gateway(activation=WaitLimits(9, 9999, 0.05)) as gateway, a_caller(gateway) as caller:
        async with caller.chat(stream=True) as response:
            assert response.status == 503
            assert "Retry-After" in response.headers
            assert "0.05 s" in (await response.json())["error"]["message"]

        assert waiting(gateway) == 0
        assert not gateway.requests._waiting_room._services


@pytest.mark.capability("RG-7")
async def test_a_client_that_leaves_takes_its_request_with_it():
    async with Runtime() as runtime, a_scaled_gateway() as gateway, a_caller(gateway) as caller:
        leaving = asyncio.create_task(caller.chat().__aenter__())
        staying = asyncio.create_task(caller.chat().__aenter__())
        await until(lambda: waiting(gateway) == 2)
        leaving.cancel()
        await until(lambda: waiting(gateway) == 1)
        add(gateway, runtime)

        assert (await staying).status == 200
        assert runtime.requests == 1


@pytest.mark.parametrize("facts", [{"is_suspended": True}, {"activation": None}])
async def test_where_no_replica_will_come_the_refusal_is_immediate(facts):
    async with a_scaled_gateway(**facts) as gateway, a_caller(gateway) as caller, caller.chat() as response:
        assert response.status == 503
        assert "Retry-After" in response.headers
        assert gateway.fleet.demand.report(gateway.fleet.table.services).services == ()


async def test_what_waits_for_a_service_that_is_deleted_or_suspended_is_refused():
    for service, status in ((None, 404), (a_service(is_suspended=True), 503)):
        async with a_scaled_gateway() as gateway, a_caller(gateway) as caller:
            call = asyncio.create_task(caller.chat().__aenter__())
            await until(lambda gateway=gateway: waiting(gateway) == 1)
            gateway.fleet.set_service(KEY, service)
            assert (await call).status == status


@pytest.mark.parametrize("desired", [0, 1])
@pytest.mark.capability("RG-7", "OP-18")
async def test_a_service_that_cannot_start_refuses_immediately_with_reason_and_remedy(desired):
    """review/shipping.md 33: requests waited the whole queue time, and were asked to try again later."""
    async with (
        a_scaled_gateway(stalled="QuotaExceeded", desired_replicas=desired) as gateway,
        a_caller(gateway) as caller,
        caller.chat() as response,
    ):
        message = (await response.json())["error"]["message"]
        assert response.status == 503
        assert "QuotaExceeded. A ResourceQuota forbids the pods. Remedy, for the owner of the quota" in message
        assert "again later" not in message
        assert response.headers["x-should-retry"] == "false"
        assert gateway.fleet.demand.report(gateway.fleet.table.services).services == ()


@pytest.mark.capability("RG-7", "OP-18")
async def test_requests_that_wait_are_refused_when_their_service_cannot_start():
    async with a_scaled_gateway() as gateway, a_caller(gateway) as caller:
        calls = [asyncio.create_task(caller.chat().__aenter__()) for _ in range(2)]
        await until(lambda: waiting(gateway) == 2)
        gateway.fleet.set_service(KEY, a_service(stalled="DoesNotFit"))
        for call in calls:
            response = await call
            assert (response.status, "DoesNotFit" in await response.text()) == (503, True)


@pytest.mark.capability("RG-7", "OP-18")
async def test_a_stalled_service_answers_with_the_replicas_that_it_has():
    async with (
        Runtime() as runtime,
        a_scaled_gateway(stalled="ImagePullFailed") as gateway,
        a_caller(gateway) as caller,
    ):
        add(gateway, runtime)
        async with caller.chat() as response:
            assert response.status == 200


@pytest.mark.parametrize("has_base", [True, False])
@pytest.mark.capability("RG-7", "OP-18")
async def test_an_adapter_that_no_replica_can_load_is_refused_immediately(has_base):
    """review/shipping.md 33: a request for an adapter of the wrong rank waited."""
    async with Runtime() as runtime, a_scaled_gateway() as gateway, a_caller(gateway) as caller:
        if has_base:
            add(gateway, runtime)
        gateway.fleet.set_adapter("team/a", Adapter("team/a", "support", KEY, stalled="RankTooLarge"))
        async with caller.chat(model="support") as response:
            message = (await response.json())["error"]["message"]
        assert response.status == 503
        assert "No replica can load support: RankTooLarge." in message
        assert "Raise spec.runtime.lora.maxRank of the InferenceService" in message


def test_every_reason_of_stalled_has_a_meaning_and_a_remedy_for_clients():
    for causes, is_adapter in ((STALLED_CAUSES, False), (ADAPTER_CAUSES, True)):
        for reason, cause in causes.items():
            assert cause.remedy in cannot_start("chat", reason, is_adapter=is_adapter).message
    assert "SomethingNew." in cannot_start("chat", "SomethingNew").message, "an operator may know more reasons"


@pytest.mark.capability("ML-8", "RG-7")
async def test_a_request_for_an_adapter_waits_for_the_base_and_then_for_the_replica_that_has_it():
    async with Runtime() as runtime, a_scaled_gateway() as gateway, a_caller(gateway) as caller:
        gateway.fleet.set_adapter("team/a", Adapter("team/a", "support", KEY))
        call = asyncio.create_task(caller.chat(model="support", stream=True).__aenter__())
        await until(lambda: waiting(gateway) == 1)
        add(gateway, runtime)
        assert waiting(gateway) == 1, "it has not loaded the adapter yet"
        add(gateway, runtime, adapters=frozenset({"support"}))
        response = await call

        assert response.status == 200
        assert response.headers["x-slipway-adapter"] == "support"
        assert runtime.bodies == [runtime.bodies[0] | {"model": "support"}]
        await events_of(response)


@pytest.mark.capability("RG-7")
async def test_a_request_for_an_adapter_on_demand_waits_until_a_replica_has_loaded_it():
    async with Runtime() as runtime, a_scaled_gateway() as gateway, a_caller(gateway) as caller:
        add(gateway, runtime)
        gateway.fleet.set_adapter("team/a", Adapter("team/a", "support", KEY))
        async with caller.chat(model="support") as refused:
            assert refused.status == 503, "nothing loads an adapter of another mode because it is asked for"
        gateway.fleet.set_adapter("team/a", Adapter("team/a", "support", KEY, on_demand=True))
        call = asyncio.create_task(caller.chat(model="support").__aenter__())

        def demand():
            return gateway.fleet.demand.report(gateway.fleet.table.services).services

        await until(lambda: demand() and demand()[0].adapters)
        assert [(one.adapter, one.waiting_requests) for one in demand()[0].adapters] == [("support", 1)]
        assert waiting(gateway) == 0, "no further replica is needed"
        async with caller.chat() as base:
            assert base.status == 200, "requests for the base wait for nothing"
        add(gateway, runtime, adapters=frozenset({"support"}))
        assert (await call).status == 200
        assert demand()[0].adapters == ()


class HeldRequestsMachine(RuleBasedStateMachine):
    """Against a plain list: first in, first out, and never beyond the bounds."""

    LIMITS = WaitLimits(requests=5, bytes=50, seconds=1)

    def __init__(self) -> None:
        super().__init__()
        self.held: HeldRequests[int] = HeldRequests()
        self.model: list[tuple[int, int]] = []
        self.number = 0

    @rule(size=st.integers(0, 40))
    def add(self, size: int) -> None:
        self.number += 1
        fits = len(self.model) < 5 and sum(held for _, held in self.model) + size <= 50
        assert (not self.held.add(self.number, size, self.LIMITS)) == fits
        if fits:
            self.model.append((self.number, size))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def leave(self, data) -> None:
        one = data.draw(st.sampled_from(self.model))
        assert self.held.remove(one[0])
        assert not self.held.remove(one[0])
        self.model.remove(one)

    @rule(most=st.integers(-1, 7))
    def release(self, most: int) -> None:
        count = max(0, most)
        assert self.held.release(most) == [number for number, _ in self.model[:count]]
        del self.model[:count]

    @invariant()
    def counts_agree(self) -> None:
        assert (len(self.held), self.held.bytes) == (len(self.model), sum(size for _, size in self.model))


TestHeldRequests = pytest.mark.capability("RG-7")(HeldRequestsMachine.TestCase)
