"""A stream of vLLM whose replica is lost, when the service has no other: it waits only if one may come in time."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from slipway_gateway.fleet import Fleet
from slipway_gateway.gateway import Gateway
from slipway_gateway.handover import LOOK_SECONDS
from slipway_gateway.picker.endpoints import Endpoint, Service
from slipway_gateway.settings import GatewaySettings
from tests.gateway.doubles import Runtime, begin_stream, until
from tests.gateway.test_engine_streams import BEGINNING, DEAD, DONE, event

pytestmark = [pytest.mark.capability("OP-11", "RD-4"), pytest.mark.timeout(60)]

EVER = 3600.0  # longer than the test may take: a stream that waits for it fails the test
FIRST, SECOND = "ns/chat-0", "ns/chat-1"


async def die(replica: Runtime, request: web.Request) -> web.StreamResponse:
    """The engine ends in the middle of an answer, as recorded; it is dead for whoever asks again."""
    response = await begin_stream(request)
    if replica.requests == 1:
        await response.write(b"".join(BEGINNING))
    await response.write(DEAD + DONE)
    return response


async def finish(_: Runtime, request: web.Request) -> web.StreamResponse:
    response = await begin_stream(request)
    await response.write(event(" end", [5], "length", prompt=[1, 1146, 264, 467, 383, 9]) + DONE)
    return response


class Broken:
    """A gateway with one replica of vLLM that dies, and a stream that it has begun."""

    def __init__(self, fleet: Fleet, gateway: Gateway, replica: Runtime, http: aiohttp.ClientSession) -> None:
        self.fleet, self.gateway, self.replica, self.http = fleet, gateway, replica, http

    def add(self, name: str, url: str) -> None:
        self.fleet.set_endpoint(name, Endpoint(name, "ns/chat", "r1", url, served_name="tiny", engine="vllm"))

    async def stream(self) -> list[str]:
        """The data of all events."""
        body = {"model": "chat", "prompt": "Once", "max_tokens": 16, "stream": True}
        async with self.http.post(f"http://127.0.0.1:{self.gateway.port}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            raw = (await response.read()).decode()
        return [one.removeprefix("data: ") for one in raw.split("\n\n") if one]


@asynccontextmanager
async def broken(desired: int) -> AsyncIterator[Broken]:
    async with AsyncExitStack() as stack:
        fleet = Fleet()
        fleet.set_service("ns/chat", Service("ns/chat", "chat", desired_replicas=desired))
        replica = await stack.enter_async_context(Runtime(die))
        settings = GatewaySettings(
            host="127.0.0.1", port=0, admin_port=0, propagation_seconds=0, handover_seconds=EVER, request_seconds=EVER
        )
        gateway = await stack.enter_async_context(Gateway(settings, fleet))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        case = Broken(fleet, gateway, replica, http)
        case.add(FIRST, replica.url)
        yield case


async def test_the_stream_of_an_only_replica_ends_with_an_error_event_once_it_is_not_ready():
    async with broken(desired=1) as case:
        task = asyncio.create_task(case.stream())
        await until(lambda: case.replica.requests >= 2)  # while it is ready, it is asked again
        assert not task.done()
        case.fleet.set_endpoint(FIRST, None)
        *texts, last = await task

    assert "".join(json.loads(one)["choices"][0]["text"] for one in texts) == " a né"
    assert "no other replica could continue it" in json.loads(last)["error"]["message"]


async def test_the_stream_waits_while_the_service_has_another_replica_that_may_become_ready():
    async with broken(desired=2) as case, Runtime(finish) as other:
        task = asyncio.create_task(case.stream())
        await until(lambda: case.replica.requests >= 2)
        case.fleet.set_endpoint(FIRST, None)
        await asyncio.sleep(3 * LOOK_SECONDS)  # it has looked for a replica, and there is none
        assert not task.done()
        case.add(SECOND, other.url)
        events = await task

    assert events[-1] == "[DONE]"
    assert "".join(json.loads(one)["choices"][0]["text"] for one in events[:-1]) == " a né end"
