"""Pods of vLLM for benchmarks of the operator: a real agent process in each, beside a server in vLLM's shape.

The agent has the pod's own environment, dialect and token included, and listens at the pod's address. The server is in
this process: it shows the load that the benchmark sets.
"""

import asyncio
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from bench.changes import Object
from bench.control_plane import ControlPlane
from bench.fake_replicas import FakeReplica
from slipway_api import names
from slipway_api.crd import engine_manifest
from slipway_kube.client import Client
from slipway_kube.resources import ENGINES
from tests.agent.stand_in import StandIn, listening

ENGINE = "vllm"
AGENT_CONTAINER = "slipway-agent"
START_SECONDS = 60.0


class ShownLoad(StandIn):
    """A server in vLLM's shape that shows the load of a replica, and records when it was first read."""

    def __init__(self, replica: FakeReplica) -> None:
        super().__init__()
        self.replica = replica

    async def _metrics(self, request: web.Request) -> web.Response:
        shown = self.replica.signals
        self.running, self.waiting, self.kv_usage = shown.running, shown.waiting, shown.kv_usage
        self.replica.told_at = self.replica.told_at or time.monotonic()
        return await super()._metrics(request)


class VllmPlane(ControlPlane):
    """A control plane whose pods have an agent."""

    def __init__(self, client: Client, kubeconfig: Path, folder: Path) -> None:
        super().__init__(client, kubeconfig, folder)
        self._pods = AsyncExitStack()
        self._is_closing = False

    async def apply_engine(self) -> None:
        """Apply the chart's Engine of vLLM."""
        await self.client.apply(ENGINES.path(name=ENGINE), engine_manifest(ENGINE), field_manager="user")

    async def open_ports(self, pod: Object, replica: FakeReplica, ip: str) -> None:
        """Start the engine and its agent; returns when the agent is ready."""
        engine = await self._pods.enter_async_context(listening(ShownLoad(replica)))
        folder = self._pods.enter_context(tempfile.TemporaryDirectory(prefix="slw"))
        agent = await asyncio.create_subprocess_exec(
            Path(sys.executable).with_name("slipway-agent"),
            env=agent_environment(pod, engine.url, folder, ip),
            stderr=asyncio.subprocess.DEVNULL,
        )
        self._pods.push_async_callback(_end, agent)
        async with asyncio.timeout(START_SECONDS), aiohttp.ClientSession() as http:
            ready = f"http://{ip}:{names.ADMIN_PORT}{names.PATH_READY}"
            while not self._is_closing and not await _is_ready(http, ready):
                assert agent.returncode is None, "the agent ended"
                await asyncio.sleep(0.05)

    async def close(self) -> None:
        """End the agents and the engines, of pods that still start too."""
        self._is_closing = True
        await self._pods.aclose()


def agent_environment(pod: Object, engine_url: str, folder: str, ip: str) -> dict[str, str]:
    """The environment of the pod's agent, with the addresses and folders of this machine."""
    (container,) = (one for one in pod["spec"]["containers"] if one["name"] == AGENT_CONTAINER)
    given = {one["name"]: one["value"].replace("$$", "$") for one in container["env"] if "value" in one}
    here = {
        "SLIPWAY_ENGINE_URL": engine_url,
        "SLIPWAY_HOST": ip,
        "SLIPWAY_RUN_DIR": folder,
        "SLIPWAY_DRAINED_FILE": f"{folder}/drained",
    }
    return given | here


async def _is_ready(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(url) as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


async def _end(process: Any) -> None:
    if process.returncode is None:
        process.terminate()
    await process.wait()
