"""The gateway follows the KV cache of a real runtime: evictions, tenants' salts and a restart."""

import asyncio
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import aiohttp
import openai
import pytest

from bench.servers import EMBEDDED_MODEL, MODEL_NAME, Server, _script, free_ports, served_by
from slipway_api.names import HEADER_SERVING_TOKEN, PATH_TEXT_BLOCKS
from slipway_gateway.fleet import Fleet
from slipway_gateway.gateway import Gateway
from slipway_gateway.picker.affinity import rank
from slipway_gateway.picker.endpoints import Endpoint, Service
from slipway_gateway.picker.pick import Picked, pick
from slipway_gateway.picker.prefix import TOKENS_OF_BLOCK, block_hashes
from slipway_gateway.picker.scorers import RoutingRequest
from slipway_gateway.settings import GatewaySettings
from tests.gateway.doubles import Runtime, until

pytestmark = pytest.mark.timeout(240)

STORY = "Once upon a time there was a bear who lived in a house at the end of the village. " * 12


@contextmanager
def a_small_runtime(ports: list[int], *flags: str) -> Iterator[Server]:
    """A runtime with room for three prompts, on these ports."""
    with tempfile.TemporaryDirectory(prefix="slipway-run-") as run:
        flags = ("--kv-cache-bytes", "4Mi", "--max-model-len", "512", "--max-num-seqs", "2", *flags)
        command = [_script("slipway-runtime"), "serve", f"file://{EMBEDDED_MODEL}", "--served-name", MODEL_NAME, *flags]
        where = ["--host", "127.0.0.1", "--port", str(ports[0]), "--admin-port", str(ports[1])]
        environment = {"OMP_NUM_THREADS": "1", "SLIPWAY_RUN_DIR": run}
        with served_by([*command, *where], Path(run) / "runtime.log", environment, (ports[0], ports[1])) as server:
            yield server


async def complete(server: Server | Gateway, prompt: str) -> int:
    """Ask for one token; how much of the prompt the replica had cached."""
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    answer = await client.completions.create(model=MODEL_NAME, prompt=prompt, max_tokens=1, temperature=0)
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    return details.cached_tokens or 0 if details is not None else 0


REQUEST = RoutingRequest(
    MODEL_NAME, cost=1, blocks=block_hashes([b"", b"", b"", b"", json.dumps(STORY).encode(), b""], "", MODEL_NAME)
)


def preferred(fleet: Fleet) -> tuple[str, int]:
    """The replica that a request for the story would go to, and how many tokens it is believed to have cached there."""
    picked = pick(fleet.table.route("ns/chat"), REQUEST, loads={}, prefixes=fleet.prefixes, draw=0.5, tie_break=0.5)
    assert isinstance(picked, Picked)
    return picked.endpoint.name, picked.matched_tokens


@pytest.mark.capability("RG-4", "KV-8")
async def test_an_evicted_prefix_and_a_restarted_replica_are_not_preferred():
    ports = free_ports(2)
    fleet = Fleet()
    fleet.set_service("ns/chat", Service("ns/chat", MODEL_NAME))
    # The home of the story is the other replica, so that only what is cached brings a request to the real one.
    real, other = sorted(("ns/chat-0", "ns/chat-1"), key=lambda name: rank(REQUEST.blocks[0], name))
    settings = GatewaySettings(host="127.0.0.1", port=0, admin_port=0, propagation_seconds=0, kv_events=True)
    async with Runtime() as double, Gateway(settings, fleet) as gateway:
        with a_small_runtime(ports) as runtime:
            fleet.set_endpoint(real, Endpoint(real, "ns/chat", "r1", runtime.url))
            await until(lambda: gateway.kv_feeds.live)
            await complete(gateway, STORY)
            fleet.set_endpoint(other, Endpoint(other, "ns/chat", "r1", double.url))
            stored = gateway.metrics.kv_events.labels("stored")._value
            await until(lambda: stored.get())
            assert preferred(fleet) == (real, len(REQUEST.blocks) * TOKENS_OF_BLOCK)
            assert await complete(gateway, STORY) >= 128, "and the replica does have it"

            # Others, straight to the replica and twice each, since a prompt seen once evicts nothing that is reused.
            for number in range(12):
                await complete(runtime, f"Story {number // 2}. {number // 2} bears went to the river. " * 14)
            await until(lambda: preferred(fleet) == (other, 0))
            assert await complete(runtime, STORY) < TOKENS_OF_BLOCK, "the replica had evicted it"
            fleet.set_endpoint(other, None)

            await complete(gateway, STORY)
            fleet.set_endpoint(other, Endpoint(other, "ns/chat", "r1", double.url))
            await until(lambda: preferred(fleet)[0] == real)
        with a_small_runtime(ports):
            await until(lambda: preferred(fleet) == (other, 0))


@pytest.mark.capability("SE-1")
async def test_a_closed_runtime_shows_its_feed_to_gateways_only():
    digest = sha256(b"a token").hexdigest()
    with a_small_runtime(free_ports(2), "--serving-token-sha256", digest) as runtime:
        url = f"{runtime.url}{PATH_TEXT_BLOCKS}"
        async with aiohttp.ClientSession() as session:
            async with session.get(url) as response:
                assert response.status == 401
            async with session.get(url, headers={HEADER_SERVING_TOKEN: "a token"}) as response:
                assert response.status == 200
                assert b'"reset":true' in await asyncio.wait_for(response.content.readline(), 10)
