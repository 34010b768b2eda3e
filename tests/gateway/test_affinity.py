"""Affinity and ejection of slow replicas through a real gateway: what a client sends decides where it goes."""

import asyncio

import pytest
from aiohttp import web

from slipway_gateway.fleet import Fleet
from slipway_gateway.gateway import Gateway
from slipway_gateway.load_reports import LOAD_FORMAT, LOAD_FORMAT_HEADER, LOAD_HEADER
from slipway_gateway.outliers import LatencyOutliers, OutlierPolicy
from slipway_gateway.picker.endpoints import Endpoint, Service
from slipway_gateway.picker.scorers import ReplicaLoad
from slipway_gateway.settings import GatewaySettings
from tests.gateway.doubles import Runtime, a_caller, a_gateway, answer_whole, events_of, speak

SYSTEM = {"role": "system", "content": "You are a patient teacher of chess. " * 40}


def turns(conversation: int, count: int) -> list[dict]:
    """The messages of the first turns of a conversation."""
    messages = [SYSTEM]
    for turn in range(count):
        messages.append({"role": "user", "content": f"Conversation {conversation}, question {turn}. " * 12})
        if turn < count - 1:
            messages.append({"role": "assistant", "content": "An answer with some words in it. " * 12})
    return messages


@pytest.mark.capability("RG-4", "DD-5")
async def test_every_turn_of_a_conversation_goes_to_the_replica_of_its_first():
    async with Runtime() as one, Runtime() as two, Runtime() as three:
        replicas = [one, two, three]
        async with a_gateway(one, two, three) as gateway, a_caller(gateway) as caller:
            for conversation in range(6):
                for count in range(1, 5):
                    async with caller.chat(messages=turns(conversation, count)) as response:
                        assert response.status == 200
        served = [{body["messages"][1]["content"] for body in replica.bodies} for replica in replicas]

    assert sum(len(conversations) for conversations in served) == 6, "no conversation was at two replicas"


@pytest.mark.capability("RG-4")
@pytest.mark.parametrize("where", ["header", "prompt_cache_key", "user"])
async def test_a_named_session_stays_at_one_replica(where: str):
    async with Runtime() as one, Runtime() as two, Runtime() as three:
        async with a_gateway(one, two, three) as gateway, a_caller(gateway) as caller:
            for session in range(12):
                name = f"session-{session}"
                headers = {"x-slipway-session-id": name} if where == "header" else {}
                fields = {} if where == "header" else {where: name}
                for _ in range(3):
                    async with caller.chat(headers=headers, metadata={"session": name}, **fields) as response:
                        assert response.status == 200
        served = [{body["metadata"]["session"] for body in runtime.bodies} for runtime in (one, two, three)]

    assert sum(map(len, served)) == 12
    assert all(served), "sessions are spread over the replicas"


@pytest.mark.capability("RG-3")
async def test_what_a_replica_reports_beside_an_answer_is_asked_for_and_kept_from_the_client():
    async def report(runtime: Runtime, request: web.Request) -> web.StreamResponse:
        response = await answer_whole(runtime, request)
        response.headers[LOAD_HEADER] = (
            "TEXT named_metrics.kv_cache_usage_perc=0.75, named_metrics.num_requests_waiting=4"
        )
        return response

    async with Runtime(report) as runtime, a_gateway(runtime) as gateway, a_caller(gateway) as caller:
        async with caller.chat() as response:
            assert LOAD_HEADER not in response.headers
        (endpoint,) = gateway.fleet.table.resolve("tiny").endpoints
        known = gateway.fleet.destination(endpoint.service).reports.fresh(asyncio.get_running_loop().time())

    assert runtime.headers[0][LOAD_FORMAT_HEADER] == LOAD_FORMAT
    assert known == {endpoint.name: ReplicaLoad(0.75, foreign_waiting=4)}


@pytest.mark.capability("PF-17", "RG-5")
async def test_a_slow_replica_among_fast_ones_gets_no_more_requests():
    """The streams are real; their latencies are long because the slow replica waits before each word."""

    async def dawdle(runtime: Runtime, request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.08)
        return await speak(runtime, request)

    async with Runtime(dawdle) as slow, Runtime() as fast, Runtime() as quick:
        fleet = _fleet(slow, fast, quick)
        policy = OutlierPolicy(ttft_floor_seconds=0.04, itl_floor_seconds=10.0, min_samples=3, judgements=1)
        fleet.destination("team/chat").slowness = LatencyOutliers(policy)
        settings = GatewaySettings(host="127.0.0.1", port=0, admin_port=0, propagation_seconds=0)
        async with Gateway(settings, fleet) as gateway, a_caller(gateway) as caller:
            for number in range(60):
                async with caller.chat(stream=True, messages=[{"role": "user", "content": str(number)}]) as response:
                    assert (await events_of(response))[-1] == "[DONE]"
            endpoint = fleet.table.endpoint("team/chat-0")
            assert endpoint is not None
            assert fleet.is_ejected(endpoint)
            page = gateway.metrics.exposition().decode()

    assert slow.requests < 20
    assert 'slipway_gateway_endpoints_ejected{model="tiny",revision="r1",service="team/chat"} 1.0' in page


def _fleet(*runtimes: Runtime) -> Fleet:
    fleet = Fleet()
    fleet.set_service("team/chat", Service("team/chat", "tiny"))
    for number, runtime in enumerate(runtimes):
        fleet.set_endpoint(f"team/chat-{number}", Endpoint(f"team/chat-{number}", "team/chat", "r1", runtime.url))
    return fleet
