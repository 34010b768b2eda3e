"""Streams of an adapter continue only where it is loaded; and an engine that dies costs no stream."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace

import aiohttp
import pytest
import pytest_asyncio

from slipway_api.inference_service import RoutingStrategy
from slipway_gateway.fleet import Fleet
from slipway_gateway.gateway import Gateway
from slipway_gateway.picker.endpoints import Adapter, Endpoint, Service
from slipway_gateway.settings import GatewaySettings
from tests.gateway.doubles import MODEL, until
from tests.gateway.handovers import MESSAGES, Pair, Read, a_pair
from tests.runtime.processes import TINY, Process, serving

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

CHAT = "/v1/chat/completions"
ADAPTERS = TINY.parent / "adapters"
ADAPTER = "sailor"
BODY = {"messages": MESSAGES, "max_tokens": 40, "seed": 3, "temperature": 0.8, "ignore_eos": True}
BODY |= {"stream_options": {"include_usage": True}}


def have_loaded(pair: Pair, *loaded: bool) -> None:
    """What the replicas' pods say of the adapter."""
    for number, has in enumerate(loaded):
        endpoint = pair.gateway.fleet.table.endpoint(f"static/{MODEL}-{number}")
        adapters = frozenset({ADAPTER} if has else ())
        pair.gateway.fleet.set_endpoint(endpoint.name, replace(endpoint, adapters=adapters))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[Pair]:
    engine = {"max_adapters": 1, "max_cpu_adapters": 2, "max_rank": 8}
    engine |= {"adapter_endpoints": True, "adapter_roots": (ADAPTERS,)}
    async with a_pair(engine=engine, handover_seconds=20.0) as pair:
        for running in pair.replicas:
            body = {"lora_name": ADAPTER, "lora_path": str(ADAPTERS / ADAPTER)}
            assert (await running.post("/v1/load_lora_adapter", body)).status_code == 200
        pair.gateway.fleet.set_adapter(f"static/{ADAPTER}", Adapter(f"static/{ADAPTER}", ADAPTER, f"static/{MODEL}"))
        have_loaded(pair, True, True)
        yield pair


@pytest.mark.capability("RD-4", "ML-1", "API-19")
async def test_a_stream_of_an_adapter_continues_on_another_replica_with_the_same_text(pair: Pair):
    base = await pair.ask(CHAT, BODY)
    whole = await pair.ask(CHAT, BODY | {"model": ADAPTER})
    [size] = pair.cuts.sizes
    assert whole.texts != base.texts, "the adapter has a voice of its own"

    for cut in (1, size // 3, size // 2, size - 14):
        read = await pair.ask(CHAT, BODY | {"model": ADAPTER}, cut)
        assert read == whole, f"cut after byte {cut} of {size}"
        assert [body["model"] for body in pair.cuts.bodies] == [ADAPTER, ADAPTER]


@pytest.mark.capability("RD-4", "ML-1")
async def test_a_stream_of_an_adapter_waits_for_a_replica_that_has_loaded_it(pair: Pair):
    """The other replica could compute the base model, which would be another voice in the middle of a sentence."""
    whole = await pair.ask(CHAT, BODY | {"model": ADAPTER})
    have_loaded(pair, True, False)
    asking = asyncio.create_task(pair.ask(CHAT, BODY | {"model": ADAPTER}, 3000))
    await until(lambda: pair.cuts.sizes == [3000])
    have_loaded(pair, False, False)  # the first replica is lost, and a new one loads
    await asyncio.sleep(0.3)  # three looks for a replica
    assert len(pair.cuts.bodies) == 1, "nobody was asked"
    have_loaded(pair, False, True)

    assert await asking == whole
    assert len(pair.cuts.bodies) == 2
    have_loaded(pair, True, True)


@pytest.mark.capability("RD-4", "SE-8")
async def test_a_stream_of_an_adapter_continues_though_a_service_has_the_adapters_full_name(pair: Pair):
    """review/control-plane.md 15: the handover went back from the key to a name, which meant the service."""
    whole = await pair.ask(CHAT, BODY | {"model": ADAPTER})
    fleet = pair.gateway.fleet
    fleet.set_service(f"static/{ADAPTER}", Service(f"static/{ADAPTER}", "another-name"))
    try:
        assert await pair.ask(CHAT, BODY | {"model": ADAPTER}, 3000) == whole
    finally:
        fleet.set_service(f"static/{ADAPTER}", None)
    assert [body["model"] for body in pair.cuts.bodies] == [ADAPTER, ADAPTER]


async def asked(http: aiohttp.ClientSession, gateway: Gateway, model: str, seed: int) -> Read:
    body = BODY | {"model": model, "seed": seed, "max_tokens": 150, "stream": True}
    async with http.post(f"http://127.0.0.1:{gateway.port}{CHAT}", json=body) as response:
        assert response.status == 200, await response.text()
        return Read.of(await response.read())


@pytest.mark.capability("RD-9", "RD-4", "API-19")
async def test_an_engine_that_is_killed_behind_the_gateway_cuts_no_stream_and_changes_no_text():
    flags = ["--deterministic", "--max-adapters", "1", "--max-rank", "8", "--revision", "r1"]
    flags += ["--served-name", MODEL, "--adapter", f"{ADAPTER}=file://{ADAPTERS / ADAPTER}"]
    key = f"team/{MODEL}"
    async with AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(serving(*flags)) for _ in range(2)]
        await asyncio.gather(*(replica.ready() for replica in replicas))
        fleet = Fleet()
        fleet.set_service(key, Service(key, MODEL, weights={"r1": 100}, strategy=RoutingStrategy.ROUND_ROBIN))
        fleet.set_adapter(f"team/{ADAPTER}", Adapter(f"team/{ADAPTER}", ADAPTER, key))
        for number, replica in enumerate(replicas):
            fleet.set_endpoint(f"p{number}", an_endpoint(number, replica, key))
        settings = GatewaySettings(host="127.0.0.1", port=0, admin_port=0, handover_seconds=30.0)
        gateway = await stack.enter_async_context(Gateway(settings, fleet))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        questions = [(model, seed) for model in (MODEL, ADAPTER) for seed in range(3)]
        whole = [await asked(http, gateway, model, seed) for model, seed in questions]
        assert all(read.ends == 1 and not read.errors for read in whole)

        running = [asyncio.create_task(asked(http, gateway, model, seed)) for model, seed in questions]
        victim = fleet.table.endpoint("p0")
        await until(lambda: fleet.load(victim).requests >= 2 and not fleet.destination(key).leases)
        os.kill(replicas[0].engine_pid, signal.SIGKILL)
        reads = await asyncio.gather(*running)
        handed_over = sum(
            sample.value
            for metric in gateway.metrics.handovers.collect()
            for sample in metric.samples
            if sample.name.endswith("_total")
        )
    assert list(reads) == whole
    assert handed_over >= 2, "the streams of the dead engine went on elsewhere"


def an_endpoint(number: int, replica: Process, key: str) -> Endpoint:
    return Endpoint(f"p{number}", key, "r1", replica.url, served_name=MODEL, adapters=frozenset({ADAPTER}))
