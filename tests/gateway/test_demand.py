"""Demand: what a gateway counts, when its version changes, and the two answers of its admin port."""

import asyncio

import pytest

from slipway_api import names
from slipway_api.gateway_api import DemandReport, OutcomesReport
from slipway_gateway.demand import QUIET_SECONDS, Demand, Held
from slipway_gateway.fleet import STATIC_NAMESPACE
from tests.gateway.doubles import (
    MODEL,
    Runtime,
    a_caller,
    a_gateway,
    die_after_two_words,
    events_of,
    hang_up,
    until,
)

SERVICE = f"{STATIC_NAMESPACE}/{MODEL}"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def a_demand() -> tuple[Demand, Clock]:
    clock = Clock()
    return Demand("boot", clock=clock), clock


def report_of(demand: Demand):
    [service] = demand.report({"ns/chat"}).services
    return service


@pytest.mark.capability("AS-9")
def test_the_first_request_after_a_quiet_time_is_news_and_the_next_ones_are_not():
    demand, clock = a_demand()
    before = demand.version
    for _ in range(100):  # a request every second, one at a time
        demand.start_request("ns/chat")
        demand.end_request("ns/chat")
        clock.now += 1.0

    assert demand.version == before + 1

    clock.now += QUIET_SECONDS
    demand.start_request("ns/chat")
    assert demand.version == before + 2


@pytest.mark.capability("AS-9", "RG-7")
def test_refusals_of_a_full_waiting_room_are_news_at_each_doubling_and_end_with_the_waiting():
    demand, _ = a_demand()
    held = Held("ns/chat", size=10)
    since = demand.start_waiting(held)
    before = demand.version
    for _ in range(100):
        demand.refuse("ns/chat")

    assert report_of(demand).refused_requests == 100
    assert demand.version == before + 7, "1, 2, 4 … 64"

    demand.stop_waiting(held, since)
    assert report_of(demand).refused_requests == 0


@pytest.mark.capability("AS-9")
def test_a_burst_is_news_at_each_doubling_and_a_number_that_swings_is_announced_once():
    demand, _ = a_demand()
    before = demand.version
    for _ in range(3):
        for _ in range(64):
            demand.start_request("ns/chat")
        for _ in range(63):
            demand.end_request("ns/chat")
        demand.end_request("ns/chat")

    assert demand.version == before + 7, "1, 2, 4, 8, 16, 32, 64; the second and third wave bring nothing new"


def test_the_first_and_the_last_waiting_request_are_news():
    demand, clock = a_demand()
    start = demand.version
    first = demand.start_waiting(Held("ns/chat", 100))
    clock.now += 3
    second = demand.start_waiting(Held("ns/chat", 200))

    assert demand.version == start + 1
    assert report_of(demand).waiting_requests == 2
    assert report_of(demand).waiting_bytes == 300
    assert report_of(demand).longest_wait_seconds == 3

    demand.stop_waiting(Held("ns/chat", 100), first)
    assert (demand.version, report_of(demand).longest_wait_seconds) == (start + 1, 0)
    demand.stop_waiting(Held("ns/chat", 200), second)
    assert demand.version == start + 2


def test_an_adapter_that_requests_wait_for_is_news_but_no_demand_for_a_replica_where_there_is_one():
    demand, _ = a_demand()
    start = demand.version
    held = Held("ns/chat", 100, adapter="sailor", needs_replica=False)
    first, second = demand.start_waiting(held), demand.start_waiting(held)

    assert demand.version == start + 1
    assert report_of(demand).waiting_requests == 0
    assert report_of(demand).idle_seconds == 0
    assert [(one.adapter, one.waiting_requests) for one in report_of(demand).adapters] == [("sailor", 2)]

    demand.stop_waiting(held, first)
    assert demand.version == start + 1
    demand.stop_waiting(held, second)
    assert demand.version == start + 2
    assert report_of(demand).adapters == ()


def test_idle_time_counts_from_the_end_of_the_last_request():
    demand, clock = a_demand()
    demand.start_request("ns/chat")
    clock.now += 50
    assert report_of(demand).idle_seconds == 0
    demand.end_request("ns/chat")
    clock.now += 7
    assert report_of(demand).idle_seconds == 7


def test_a_deleted_service_is_forgotten_once_its_requests_have_ended():
    demand, _ = a_demand()
    demand.start_request("ns/chat")
    assert len(demand.report(()).services) == 1
    demand.end_request("ns/chat")
    assert demand.report(()).services == ()


async def test_a_wait_ends_with_the_next_version_or_with_its_time():
    demand, _ = a_demand()
    waiting = asyncio.create_task(demand.wait(demand.version, 60))
    await asyncio.sleep(0)
    assert not waiting.done()
    demand.start_request("ns/chat")
    await waiting
    await demand.wait(demand.version, 0.0)
    await demand.wait(demand.version - 1, 60)


@pytest.mark.capability("AS-9")
async def test_the_long_poll_answers_when_a_request_comes():
    async with Runtime().hold() as runtime, a_gateway(runtime) as gateway, a_caller(gateway) as caller:

        async def poll(after: int) -> DemandReport:
            path = f"{names.PATH_DEMAND}?after={after}&wait_seconds=30"
            async with caller.session.get(caller.admin_url + path) as response:
                return DemandReport.model_validate_json(await response.read())

        empty = await poll(-1)
        polling = asyncio.create_task(poll(empty.version))
        calling = asyncio.create_task(caller.chat(stream=True).__aenter__())
        report = await polling

        assert empty.services == ()
        assert [(one.service, one.open_requests) for one in report.services] == [(SERVICE, 1)]
        runtime.allow(100)
        response = await calling
        await events_of(response)
        await until(lambda: gateway.requests.open == 0)
        [service] = (await poll(-1)).services
        assert (service.open_requests, service.idle_seconds is not None) == (0, True)


async def test_a_question_that_is_no_number_is_refused():
    async with (
        Runtime() as runtime,
        a_gateway(runtime) as gateway,
        a_caller(gateway) as caller,
        caller.session.get(f"{caller.admin_url}{names.PATH_DEMAND}?after=soon") as response,
    ):
        assert response.status == 400


async def outcomes_of(caller) -> dict[str, tuple[int, int]]:
    async with caller.session.get(caller.admin_url + names.PATH_OUTCOMES) as response:
        report = OutcomesReport.model_validate_json(await response.read())
    return {one.revision: one for one in report.revisions}


@pytest.mark.capability("EV-1")
async def test_streams_count_with_their_first_token_the_times_between_tokens_and_their_usage():
    async with Runtime() as runtime, a_gateway(runtime) as gateway, a_caller(gateway) as caller:
        for _ in range(3):
            runtime.hold().allow(1)
            async with caller.chat(stream=True) as response:
                await response.content.readany()  # the first word has come; now the others
                runtime.allow(100)
                await response.read()
        async with caller.chat() as response:
            await response.read()
        await until(lambda: gateway.requests.open == 0)
        outcomes = (await outcomes_of(caller))["static"]

        assert (outcomes.requests, outcomes.errors) == (4, 0)
        assert sum(outcomes.ttft) == 3
        assert sum(outcomes.itl) > 0
        assert outcomes.output_tokens == 20


@pytest.mark.capability("EV-1")
async def test_a_stream_that_breaks_and_a_request_that_no_replica_answers_are_errors_of_the_revision():
    async with Runtime(die_after_two_words) as runtime, a_gateway(runtime) as gateway, a_caller(gateway) as caller:
        async with caller.chat(stream=True) as response:
            await events_of(response)
        runtime.behaviour = hang_up
        async with caller.chat() as response:
            assert response.status == 502
        await until(lambda: gateway.requests.open == 0)
        outcomes = (await outcomes_of(caller))["static"]

        assert (outcomes.requests, outcomes.errors) == (2, 2)


async def test_what_the_client_left_does_not_count():
    async with Runtime().hold() as runtime, a_gateway(runtime) as gateway, a_caller(gateway) as caller:
        runtime.allow(1)
        response = await caller.chat(stream=True)
        await response.content.readany()
        response.close()
        await runtime.cancelled.wait()
        await until(lambda: gateway.requests.open == 0)

        outcomes = (await outcomes_of(caller))["static"]
        assert (outcomes.requests, outcomes.errors, sum(outcomes.ttft)) == (0, 0, 0)


async def service_outcomes_of(caller):
    async with caller.session.get(caller.admin_url + names.PATH_OUTCOMES) as response:
        report = OutcomesReport.model_validate_json(await response.read())
    return {one.service: one for one in report.services}


@pytest.mark.capability("OB-6")
async def test_the_service_counts_each_request_once_as_its_client_saw_it():
    async with (
        Runtime(hang_up) as broken,
        Runtime() as whole,
        a_gateway(broken, whole) as gateway,
        a_caller(gateway) as caller,
    ):
        for _ in range(4):  # some of them are retried: their clients see nothing of it
            async with caller.chat(stream=True) as response:
                assert response.status == 200
                await response.read()
        await until(lambda: gateway.requests.open == 0)
        [service] = (await service_outcomes_of(caller)).values()

        assert (service.requests, service.errors, service.good) == (4, 0, 4)
        assert service.output_tokens > 0
        assert sum(service.ttft) == 4


@pytest.mark.capability("OB-6")
async def test_a_service_without_a_replica_spends_its_error_budget():
    async with Runtime(hang_up) as runtime, a_gateway(runtime) as gateway, a_caller(gateway) as caller:
        [service] = gateway.fleet.table.services
        for endpoint in gateway.fleet.table.route(service).endpoints:
            gateway.fleet.set_endpoint(endpoint.name, None)
        async with caller.chat() as response:
            assert response.status == 503
        await until(lambda: gateway.requests.open == 0)
        [counted] = (await service_outcomes_of(caller)).values()

        assert (counted.requests, counted.errors, counted.good) == (1, 1, 0)
