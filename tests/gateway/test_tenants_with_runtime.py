"""Tenants in front of the real runtime: caches are shared within a tenant only, and reports of load are understood."""

from collections.abc import Iterator
from contextlib import ExitStack

import openai
import pytest
import yaml

from bench.servers import MODEL_NAME, Server, a_runtime
from slipway_api.admin_token import serving_token, token_digest
from slipway_gateway.fleet import Fleet
from slipway_gateway.gateway import Gateway
from slipway_gateway.picker.endpoints import Endpoint, Service
from slipway_gateway.settings import GatewaySettings
from slipway_gateway.tenants import digest_of

pytestmark = pytest.mark.timeout(180)

GATEWAY_KEY = b"the gateway's key"
DIGEST = token_digest(serving_token(GATEWAY_KEY, "team", "chat"))  # by which replicas of team/chat know the gateway
PROMPT = "Once upon a time there was a fox who lived by a river and counted the stars every night. " * 8


@pytest.fixture(scope="module")
def runtime() -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as environment, ExitStack() as stack:
        environment.setenv("SLIPWAY_GATEWAY_TOKEN_SHA256", DIGEST)
        yield stack.enter_context(a_runtime("--revision", "r1"))


@pytest.mark.capability("MT-1", "CO-2", "RG-3", "SE-1")
async def test_two_tenants_of_one_replica_share_its_time_and_not_its_cache(runtime: Server, tmp_path):
    (tmp_path / "keys").mkdir()
    tenants = [{"name": name, "keys": [name], "models": ["*"], "priority": 1} for name in ("fox", "hen")]
    for tenant in tenants:
        (tmp_path / "keys" / str(tenant["name"])).write_text(digest_of(f"sk-{tenant['name']}"))
    (tmp_path / "tenants.yaml").write_text(yaml.safe_dump({"tenants": tenants}))
    (tmp_path / "gateway").mkdir()
    (tmp_path / "gateway" / "current").write_bytes(GATEWAY_KEY)
    settings = GatewaySettings(
        host="127.0.0.1", port=0, admin_port=0, propagation_seconds=0,
        tenants_file=tmp_path / "tenants.yaml", keys_directory=tmp_path / "keys",
        key_directory=tmp_path / "gateway",
    )  # fmt: skip
    fleet = Fleet()
    fleet.set_service("team/chat", Service("team/chat", MODEL_NAME))
    fleet.set_endpoint("team/p", Endpoint("team/p", "team/chat", "r1", runtime.url, token_digests=(DIGEST,)))

    async def cached(tenant: str) -> int:
        client = openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key=f"sk-{tenant}", max_retries=0
        )
        answer = await client.completions.create(model=MODEL_NAME, prompt=PROMPT, max_tokens=4, temperature=0)
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        return (details.cached_tokens or 0) if details is not None else 0

    async with Gateway(settings, fleet) as gateway:
        first, again, other = await cached("fox"), await cached("fox"), await cached("hen")
        reports = fleet.destination("team/chat").reports._reports
        page = gateway.metrics.exposition().decode()

    assert first == 0
    assert again > 0
    assert other == 0, "the same prompt of another tenant is computed anew"
    assert reports["team/p"].load.kv_usage >= 0
    counted = [line for line in page.splitlines() if line.startswith("slipway_gateway_tokens_total{")]
    assert any(
        'kind="cached"' in line and 'tenant="fox"' in line and float(line.split()[-1]) == again for line in counted
    )
    assert not any('kind="cached"' in line and 'tenant="hen"' in line for line in counted)
