"""A hedge in front of a real runtime that is late: its engine drops the request, and counts it as aborted once."""

import asyncio
import json

import aiohttp
import pytest

from bench.servers import MODEL_NAME, Server, a_runtime
from slipway_gateway.first_token_times import LEAST_SAMPLES
from slipway_gateway.fleet import Fleet
from slipway_gateway.gateway import Gateway
from slipway_gateway.picker.endpoints import Endpoint, Service
from slipway_gateway.settings import GatewaySettings
from tests.gateway.doubles import Runtime, a_caller, events_of, text_of

pytestmark = pytest.mark.timeout(240)

LONG = {"model": MODEL_NAME, "prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, "stream": True}


async def signals_until(session: aiohttp.ClientSession, runtime: Server, **wanted: int) -> dict:
    while True:  # the runtime is another process
        async with session.get(f"{runtime.admin_url}/signals") as response:
            signals: dict = json.loads(await response.read())
        if wanted.items() <= signals.items():
            return signals
        await asyncio.sleep(0.02)


@pytest.mark.capability("RG-5", "API-7")
async def test_the_engine_of_a_late_replica_drops_a_request_that_another_one_answered():
    fleet = Fleet(clock=lambda: 0.0, draw=lambda: 0.0)
    fleet.set_service("ns/chat", Service("ns/chat", MODEL_NAME, hedged_prompt_tokens=512))
    for _ in range(LEAST_SAMPLES):
        fleet.destination("ns/chat").first_token_times.record(0.0)
    settings = GatewaySettings(host="127.0.0.1", port=0, admin_port=0, propagation_seconds=0)
    with a_runtime("--max-num-seqs", "1") as busy:
        async with (
            aiohttp.ClientSession() as session,
            Runtime() as other,
            Gateway(settings, fleet) as gateway,
            a_caller(gateway) as caller,
        ):
            for name, url in (("ns/chat-0", busy.url), ("ns/chat-1", other.url)):
                fleet.set_endpoint(name, Endpoint(name, "ns/chat", "", url))
            fleet.lease(Endpoint("ns/chat-1", "ns/chat", "", other.url), 10_000, lambda: None).__enter__()
            other.hold()
            async with session.post(f"{busy.url}/v1/completions", json=LONG) as running:
                await running.content.readline()
                asking = asyncio.create_task(_text(caller))
                before = await signals_until(session, busy, running=1, waiting=1)
                other.allow(100)
                assert await asking == "Once upon a time."
                after = await signals_until(session, busy, running=1, waiting=0)

            assert after["aborted"] == before["aborted"] + 1
            assert b'outcome="won",service="ns/chat"} 1.0' in gateway.metrics.exposition()


async def _text(caller) -> str:
    async with caller.chat(stream=True) as response:
        return text_of(await events_of(response))
