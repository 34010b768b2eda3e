"""Pages of metrics for the dashboards: a real replica and a real gateway under traffic, an operator, a DCGM exporter.

The DCGM exporter is a stand-in: a page with the names and labels that NVIDIA publishes, and no GPU behind it. The
operator decides with its own code on a simulated cluster. A second gateway has counted what this story has no room
for: broken streams, handovers, overload; its page comes from the gateway's own metrics, and no request.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import aiohttp
import yaml
from aiohttp import web
from prometheus_client import generate_latest

from slipway_api.admin_token import serving_token, token_digest
from slipway_api.served_certificate import Certificate
from slipway_gateway.fleet import Fleet
from slipway_gateway.gateway import Gateway
from slipway_gateway.metrics import Metrics
from slipway_gateway.picker.endpoints import Endpoint, Service
from slipway_gateway.settings import GatewaySettings
from slipway_gateway.tenants import digest_of
from tests.chart.operator_page import OperatorPage
from tests.prometheus_server import Target
from tests.runtime.server.serving import a_replica

REVISION = "rev1"  # of `a_replica`
GATEWAY_KEY = b"the gateway's key"
NAMESPACE, SERVICE, POD = "demo", "chat", "chat-0"  # of `OperatorPage` too
DIGEST = token_digest(serving_token(GATEWAY_KEY, NAMESPACE, SERVICE))
COUNTING = "one two three four five six seven eight nine ten, " * 6  # a cached prefix
GPU = f'gpu="0",UUID="GPU-1",device="nvidia0",modelName="NVIDIA H100",Hostname="node-a",container="server",' \
      f'namespace="{NAMESPACE}",pod="{POD}"'  # fmt: skip
IDLE = GPU.replace('gpu="0"', 'gpu="1"').replace("GPU-1", "GPU-2").replace(f'"{NAMESPACE}"', '""').replace(POD, "")
# Of the exporter's default counters.
DCGM = {
    "DCGM_FI_DEV_GPU_UTIL": 71, "DCGM_FI_PROF_DRAM_ACTIVE": 0.62, "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 0.18,
    "DCGM_FI_DEV_FB_USED": 69000, "DCGM_FI_DEV_FB_FREE": 12000, "DCGM_FI_DEV_POWER_USAGE": 512,
    "DCGM_FI_DEV_GPU_TEMP": 61, "DCGM_FI_DEV_XID_ERRORS": 0,
}  # fmt: skip


def dcgm_page() -> str:
    """The page of a DCGM exporter on a node with two GPUs, of which the replica has one."""
    return "".join(f"{name}{{{gpu}}} {value}\n" for gpu in (GPU, IDLE) for name, value in DCGM.items())


def page_of_troubles() -> str:
    """What a gateway exports when each of its counters has counted something, and with a TLS certificate."""
    metrics = Metrics(Fleet(), open_to_anyone=False)
    metrics.add_certificate(Mock(spec=Certificate, fault=""))
    known = {"service": f"{NAMESPACE}/{SERVICE}", "revision": REVISION, "model": "tiny"}
    for counter in (
        metrics.handovers, metrics.handovers_failed, metrics.broken_streams, metrics.degraded, metrics.fallbacks,
        metrics.hedges, metrics.refused, metrics.retries, metrics.retries_denied, metrics.upstream_errors,
        metrics.kv_events, metrics.snapshot_writes,
    ):  # fmt: skip
        counter.labels(*(known.get(label, "story") for label in counter._labelnames)).inc()
    return generate_latest(metrics.registry).decode()


@asynccontextmanager
async def a_story(folder: Path) -> AsyncIterator[Mapping[str, Target]]:
    """The targets of a Prometheus, after a first round of traffic; more follows until the end."""
    async with (
        a_replica(max_num_seqs=4, gateway_token_digests=(DIGEST,), speculation="promptLookup") as replica,
        _a_gateway(folder, replica.url) as gateway,
        _pages() as pages,
        aiohttp.ClientSession() as session,
    ):
        url = f"http://127.0.0.1:{gateway.port}"
        await _round(session, url, replica.url)
        traffic = asyncio.create_task(_traffic(session, url, replica.url))
        try:
            own = {"namespace": "slipway-system"}
            replica_labels = {"namespace": NAMESPACE, "pod": POD, "service": SERVICE, "revision": REVISION}
            yield {
                "replicas": Target(f"{replica.admin_url.removeprefix('http://')}/metrics", replica_labels),
                "gateway": Target(f"127.0.0.1:{gateway.admin_port}/metrics", own | {"pod": "gateway-0"}),
                "gateway-1": Target(f"{pages}/troubles", own | {"pod": "gateway-1"}),
                "operator": Target(f"{pages}/operator", own | {"pod": "operator-0"}),
                "dcgm": Target(f"{pages}/dcgm", {}),
            }
        finally:
            assert not traffic.done(), traffic.exception()
            traffic.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await traffic


@asynccontextmanager
async def _a_gateway(folder: Path, replica: str) -> AsyncIterator[Gateway]:
    """In front of the replica; the tenant `fox` may have two requests at a time."""
    for name in ("keys", "gateway"):
        (folder / name).mkdir()
    tenants: list[dict[str, Any]] = [{"name": "fox", "keys": ["fox"], "models": ["*"], "concurrency": 2}]
    (folder / "keys" / "fox").write_text(digest_of("sk-fox"))
    (folder / "tenants.yaml").write_text(yaml.safe_dump({"tenants": tenants}))
    (folder / "gateway" / "current").write_bytes(GATEWAY_KEY)
    settings = GatewaySettings(
        host="127.0.0.1", port=0, admin_port=0, propagation_seconds=0, tenants_file=folder / "tenants.yaml",
        keys_directory=folder / "keys", key_directory=folder / "gateway", state_directory=folder,
    )  # fmt: skip
    fleet, key = Fleet(), f"{NAMESPACE}/{SERVICE}"
    fleet.set_service(key, Service(key, "tiny"))
    pod = f"{NAMESPACE}/{POD}"
    fleet.set_endpoint(pod, Endpoint(pod, key, REVISION, replica, token_digests=(DIGEST,)))
    async with Gateway(settings, fleet) as gateway:
        yield gateway


@asynccontextmanager
async def _pages() -> AsyncIterator[str]:
    """host:port of the pages /operator, /dcgm and /troubles."""
    operator = OperatorPage()
    app = web.Application()

    async def read_operator(_: web.Request) -> web.Response:
        return web.Response(text=operator.read())

    async def read_dcgm(_: web.Request) -> web.Response:
        return web.Response(text=dcgm_page())

    app.router.add_get("/operator", read_operator)
    app.router.add_get("/dcgm", read_dcgm)
    troubles = page_of_troubles()

    async def read_troubles(_: web.Request) -> web.Response:
        return web.Response(text=troubles)

    app.router.add_get("/troubles", read_troubles)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        yield f"{host}:{port}"
    finally:
        await runner.cleanup()


async def _traffic(session: aiohttp.ClientSession, gateway: str, replica: str) -> None:
    while True:
        await _round(session, gateway, replica)
        await asyncio.sleep(0.5)


async def _round(session: aiohttp.ClientSession, gateway: str, replica: str) -> None:
    """Three streams concurrently, of which the tenant's limit refuses one; a wrong key; a body without messages."""

    async def chat(key: str = "sk-fox", **fields: Any) -> int:
        body = {
            "model": "tiny", "messages": [{"role": "user", "content": COUNTING}],
            # Long enough that the answer repeats itself: drafting stops for long if nothing of it is accepted.
            "max_tokens": 96,
            "stream": True, "stream_options": {"include_usage": True},
            "temperature": 0, "ignore_eos": True,
        } | fields  # fmt: skip
        headers = {"Authorization": f"Bearer {key}"}
        async with session.post(f"{gateway}/v1/chat/completions", json=body, headers=headers) as response:
            await response.read()
            return response.status

    answers = await asyncio.gather(*(chat() for _ in range(3)))
    assert 200 in answers, answers
    assert await chat("sk-nobody") == 401
    headers = {"Authorization": f"Bearer {serving_token(GATEWAY_KEY, NAMESPACE, SERVICE)}"}
    async with session.post(f"{replica}/v1/chat/completions", json={"messages": []}, headers=headers) as response:
        assert response.status == 400
