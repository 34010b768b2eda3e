"""The real `slipway-gateway` process, killed and started again while the API server is away."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import openai
import pytest

from bench.servers import free_ports
from slipway_api.admin_token import admin_token
from slipway_api.names import HEADER_ADMIN_TOKEN, SERVING_PORT
from slipway_gateway.snapshot import FILE_NAME
from slipway_kube.resources import INFERENCE_SERVICES, PODS
from tests.fakes import FakeApiServer
from tests.gateway.doubles import Runtime, until
from tests.gateway.objects import a_pod_object, a_service_object

ADDRESS = "127.0.8.88"  # of the replica, on this machine
KEY = "a-key-for-tests"


class Process:
    """One gateway process, and how to ask it."""

    def __init__(self, folder: Path, server: FakeApiServer, *settings: str) -> None:
        self.folder = folder
        self.port, self.admin_port = free_ports(2)
        cluster = {"name": "x", "cluster": {"server": server.url}}
        context = {"name": "x", "context": {"cluster": "x", "user": "x"}}
        config = {"apiVersion": "v1", "kind": "Config", "current-context": "x", "contexts": [context]}
        config |= {"clusters": [cluster], "users": [{"name": "x", "user": {}}]}
        (folder / "kubeconfig").write_text(json.dumps(config))
        (folder / "current").write_text(KEY + "\n")
        (folder / "state").mkdir(exist_ok=True)
        self.command = [
            str(Path(sys.executable).parent / "slipway-gateway"),
            *("--host", "127.0.0.1", "--port", str(self.port), "--admin-port", str(self.admin_port)),
            *settings,
        ]
        self.environment = {
            "KUBECONFIG": str(folder / "kubeconfig"),
            "SLIPWAY_GATEWAY_KEY_DIR": str(folder),
            "SLIPWAY_PROPAGATION_SECONDS": "0",
            "POD_NAME": "gateway-0",
        }
        self.running: asyncio.subprocess.Process | None = None

    async def start(self, session: aiohttp.ClientSession) -> None:
        """Start it, and return when its ports are open."""
        with (self.folder / "gateway.log").open("ab") as output:
            self.running = await asyncio.create_subprocess_exec(
                *self.command, env=self.environment, stdout=output, stderr=output
            )
        while True:
            try:
                async with session.get(f"http://127.0.0.1:{self.admin_port}/health"):
                    return
            except aiohttp.ClientConnectionError:
                assert self.running.returncode is None, (self.folder / "gateway.log").read_text()
                await asyncio.sleep(0.05)

    async def kill(self) -> None:
        assert self.running is not None
        if self.running.returncode is None:
            self.running.send_signal(signal.SIGKILL)
        await self.running.wait()

    async def get(self, session: aiohttp.ClientSession, path: str) -> tuple[int, str]:
        headers = {HEADER_ADMIN_TOKEN: admin_token(KEY.encode(), "slipway-system", "gateway-0")}
        async with session.get(f"http://127.0.0.1:{self.admin_port}{path}", headers=headers) as response:
            return response.status, await response.text()

    async def is_ready(self, session: aiohttp.ClientSession) -> bool:
        return (await self.get(session, "/ready"))[0] == 200


@asynccontextmanager
async def a_process(folder: Path, server: FakeApiServer, *settings: str) -> AsyncIterator[Process]:
    process = Process(folder, server, *settings)
    try:
        yield process
    finally:
        await process.kill()


@pytest.mark.capability("RD-8")
async def test_a_killed_gateway_serves_again_while_the_api_server_is_away(tmp_path):
    """Chaos: a gateway that was killed in an outage of the API server answered 503 until the outage was over."""
    async with (
        Runtime(address=ADDRESS, port=SERVING_PORT) as runtime,
        FakeApiServer() as server,
        aiohttp.ClientSession() as session,
        a_process(tmp_path, server, "--state-directory", str(tmp_path / "state")) as process,
    ):
        uid = server.put(INFERENCE_SERVICES, a_service_object(served_name="tiny", r1=100))["metadata"]["uid"]
        server.put(PODS, a_pod_object("p1", owner_uid=uid, address=ADDRESS))
        await process.start(session)
        await until((tmp_path / "state" / FILE_NAME).exists)

        server.down = True
        await process.kill()
        await process.start(session)

        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{process.port}/v1", api_key="none", max_retries=0)
        answers = await asyncio.gather(
            *(client.chat.completions.create(model="tiny", messages=[]) for _ in range(20)), return_exceptions=True
        )
        assert [one for one in answers if isinstance(one, BaseException)] == []
        assert runtime.requests == 20
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=[])

        ready, routes, metrics = [await process.get(session, path) for path in ("/ready", "/debug/routes", "/metrics")]
        assert ready[0] == 200
        assert json.loads(ready[1])["fromSnapshot"] is True
        assert "the API server does not answer" in ready[1]
        assert json.loads(routes[1])["fromSnapshot"] is True
        assert "slipway_gateway_routes_from_snapshot 1.0" in metrics[1]

        server.down = False
        while json.loads((await process.get(session, "/debug/routes"))[1])["fromSnapshot"]:
            pass
        await client.chat.completions.create(model="tiny", messages=[])
        assert "slipway_gateway_routes_from_snapshot 0.0" in (await process.get(session, "/metrics"))[1]


@pytest.mark.capability("RD-8")
async def test_without_a_kept_table_requests_wait_a_moment_and_are_refused(tmp_path):
    async with (
        FakeApiServer() as server,
        aiohttp.ClientSession() as session,
        a_process(tmp_path, server) as process,
    ):
        server.down = True
        await process.start(session)
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{process.port}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.InternalServerError) as refused:
            await client.chat.completions.create(model="tiny", messages=[])

        assert (refused.value.status_code, refused.value.response.headers["Retry-After"]) == (503, "1")
        assert not await process.is_ready(session)


@pytest.mark.capability("RD-8")
async def test_a_request_that_comes_before_the_first_list_waits_for_it(tmp_path):
    """Kubernetes may send requests to a container that has just restarted."""
    async with (
        Runtime(address=ADDRESS, port=SERVING_PORT),
        FakeApiServer() as server,
        aiohttp.ClientSession() as session,
        a_process(tmp_path, server) as process,
    ):
        process.environment["SLIPWAY_ROUTES_WAIT_SECONDS"] = "60"
        uid = server.put(INFERENCE_SERVICES, a_service_object(served_name="tiny", r1=100))["metadata"]["uid"]
        server.put(PODS, a_pod_object("p1", owner_uid=uid, address=ADDRESS))
        server.down = True
        await process.start(session)
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{process.port}/v1", api_key="none", max_retries=0)
        asked = asyncio.create_task(client.chat.completions.create(model="tiny", messages=[]))
        await until(lambda: len(server.requests) > 4)  # it has tried to list in vain

        assert not asked.done()
        server.down = False
        assert (await asked).choices[0].message.content == "Once upon a time."
