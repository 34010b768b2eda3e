"""A tenant floods the gateway of a real replica: its excess is refused, and another tenant keeps its share."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from slipway_api.admin_token import serving_token, token_digest
from slipway_gateway.fleet import Fleet
from slipway_gateway.gateway import Gateway
from slipway_gateway.picker.endpoints import Endpoint, Service
from slipway_gateway.settings import GatewaySettings
from slipway_gateway.tenants import digest_of
from slipway_runtime.messages import EngineStats
from tests.gateway.doubles import MODEL, until
from tests.runtime.server.serving import a_replica

pytestmark = pytest.mark.timeout(180)

GATEWAY_KEY = b"the gateway's key"
DIGEST = token_digest(serving_token(GATEWAY_KEY, "team", "chat"))  # by which the replica knows its gateway
FLOOD, ADMITTED, MODEST = 60, 24, 6  # requests: of the flooding tenant, within its limit, of the other tenant
ROWS, TOKENS = 4, 8


@asynccontextmanager
async def a_gateway_with_two_tenants(url: str, folder: Path) -> AsyncIterator[Gateway]:
    """`fox` may have ADMITTED requests at a time, `hen` as many as it likes; both use one service."""
    (folder / "keys").mkdir()
    tenants: list[dict[str, Any]] = [{"name": name, "keys": [name], "models": ["*"]} for name in ("fox", "hen")]
    tenants[0]["concurrency"] = ADMITTED
    for tenant in tenants:
        (folder / "keys" / tenant["name"]).write_text(digest_of(f"sk-{tenant['name']}"))
    (folder / "tenants.yaml").write_text(yaml.safe_dump({"tenants": tenants}))
    (folder / "gateway").mkdir()
    (folder / "gateway" / "current").write_bytes(GATEWAY_KEY)
    settings = GatewaySettings(
        host="127.0.0.1", port=0, admin_port=0, propagation_seconds=0,
        tenants_file=folder / "tenants.yaml", keys_directory=folder / "keys", key_directory=folder / "gateway",
    )  # fmt: skip
    fleet = Fleet()
    fleet.set_service("team/chat", Service("team/chat", MODEL))
    fleet.set_endpoint("team/p", Endpoint("team/p", "team/chat", "rev1", url, token_digests=(DIGEST,)))
    async with Gateway(settings, fleet) as gateway:
        yield gateway


@pytest.mark.capability("MT-1", "RG-6", "BS-6", "OP-14")
async def test_a_flooding_tenants_excess_is_refused_and_another_tenant_keeps_its_share_of_the_steps(tmp_path: Path):
    async with (
        a_replica(max_num_seqs=ROWS, gateway_token_digests=(DIGEST,)) as replica,
        a_gateway_with_two_tenants(replica.url, tmp_path) as gateway,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key="sk-fox", max_retries=0) as fox,
        fox.with_options(api_key="sk-hen") as hen,
    ):
        refused: list[openai.RateLimitError] = []

        async def ask(client: openai.AsyncOpenAI, number: int) -> int:
            try:
                answer = await client.completions.create(
                    model=MODEL, prompt=f"Story {number}", max_tokens=TOKENS, extra_body={"ignore_eos": True}
                )
            except openai.RateLimitError as refusal:
                refused.append(refusal)
                return 0
            assert answer.usage is not None
            return answer.usage.completion_tokens

        def queued(count: int) -> bool:
            return replica.client.stats().admitted == before + count

        before = replica.client.stats().admitted
        replica.steps.hold()
        flood = [asyncio.create_task(ask(fox, number)) for number in range(FLOOD)]
        await until(lambda: len(refused) == FLOOD - ADMITTED)
        await until(lambda: queued(ADMITTED))
        modest = [asyncio.create_task(ask(hen, number)) for number in range(MODEST)]
        await until(lambda: queued(ADMITTED + MODEST))  # behind all of the flood, in a queue that were first come first

        steps: list[EngineStats] = []
        replica.client.on_step = steps.append
        replica.steps.resume_steps()
        answered, flooded = await asyncio.gather(*modest), await asyncio.gather(*flood)

    assert answered == [TOKENS] * MODEST
    assert sorted(flooded) == [0] * (FLOOD - ADMITTED) + [TOKENS] * ADMITTED
    assert all(int(refusal.response.headers["Retry-After"]) >= 1 for refusal in refused)

    waiting = [dict(step.waiting_by_tenant) for step in steps]
    arrived = next(index for index, now in enumerate(waiting) if now.get("hen"))
    started = next(index for index, now in enumerate(waiting) if index > arrived and not now.get("hen"))
    begun_meanwhile = waiting[arrived].get("fox", 0) - waiting[started].get("fox", 0)
    assert begun_meanwhile <= MODEST + ROWS, "rows that become free are shared by the two, to within one batch"
    shared = (MODEST + MODEST + ROWS) / ROWS * (TOKENS + 1)  # steps: the requests of both, in full batches
    assert steps[started].steps - steps[arrived].steps <= shared
    assert waiting[started].get("fox", 0) >= ADMITTED - ROWS - begun_meanwhile > 0, "most of the flood still waits"
