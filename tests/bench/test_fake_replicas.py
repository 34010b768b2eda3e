"""The simulated replicas of benchmarks answer as the real runtime does."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from transformers import AutoModelForCausalLM
from yarl import URL

from bench.fake_replicas import FakeReplica, content_length, listen
from slipway_api import names
from slipway_api.runtime_api import LoadAdapterRequest
from slipway_operator.keepalive import KeptConnections
from tests.runtime.adapter_folders import an_adapter
from tests.runtime.server.serving import TINY, a_replica

pytestmark = pytest.mark.asyncio(loop_scope="module")

Answer = tuple[int, bytes]


class Caller:
    """Sends the operator's requests to the two ports of one replica."""

    def __init__(self, connections: KeptConnections, admin_port: int, serving_port: int) -> None:
        self._connections = connections
        self._ports = admin_port, serving_port

    async def __call__(self, method: str, path: str, body: bytes | None = None) -> Answer:
        port = self._ports[path.startswith("/v1/")]
        headers = {"Content-Type": "application/json"}
        return await self._connections.request(method, "127.0.0.1", port, path, headers, body)

    async def load(self, request: LoadAdapterRequest) -> tuple[int, bool, str]:
        """Status, whether it serves in the end, and the reason where it does not."""
        status, raw = await self("POST", names.PATH_ADAPTERS, request.wire())
        if status >= 400:
            return status // 100, False, json.loads(raw)["error"].get("reason", "")
        info = json.loads(raw)
        async with asyncio.timeout(60):
            while info["state"] == "loading":
                await asyncio.sleep(0.02)
                listing = json.loads((await self("GET", names.PATH_ADAPTERS))[1])
                info = next(one for one in listing["adapters"] if one["name"] == request.name)
        return 2, info["state"] != "failed", info["reason"]

    async def probe(self, model: str) -> int:
        body = {"model": model, "prompt": "a", "max_tokens": 1, "temperature": 0}
        return (await self("POST", "/v1/completions", json.dumps(body).encode()))[0]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    an_adapter(root / "one", AutoModelForCausalLM.from_pretrained(TINY), seed=1)
    return root


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real(folder: Path) -> AsyncIterator[Caller]:
    connections = KeptConnections()
    async with a_replica(adapter_roots=(folder,), max_adapters=4, max_cpu_adapters=300, max_rank=8) as running:
        yield Caller(connections, URL(running.admin_url).port or 0, URL(running.url).port or 0)
    connections.close()


@pytest_asyncio.fixture(loop_scope="module")
async def fake(folder: Path) -> AsyncIterator[tuple[FakeReplica, Caller]]:
    connections, replica = KeptConnections(), FakeReplica(download_seconds=0.05)
    replica.adapters.refusals = {f"file://{folder}/none": ("DownloadFailed", "there is no adapter at this path")}
    server = await listen(lambda _address: replica, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    yield replica, Caller(connections, port, port)
    connections.close()
    server.close()


async def story(call: Caller, folder: Path) -> list[object]:
    """What the operator does with adapters, and the facts of each answer that it decides by."""
    good = LoadAdapterRequest(name="a", uri=f"file://{folder}/one", version="v1", pinned=True)
    missing = LoadAdapterRequest(name="b", uri=f"file://{folder}/none", version="v1")
    told: list[object] = [await call.probe("a"), await call.load(good), await call.probe("a")]
    told += [await call.load(good), await call.load(missing), await call.probe("b")]
    status, raw = await call("GET", names.PATH_ADAPTERS)
    listing = json.loads(raw)
    told += [status, sorted(listing), listing["maxAdapters"], listing["maxCPUAdapters"], bool(listing["bootId"])]
    told += [(one["name"], one["state"] == "failed", one["version"], one["pinned"]) for one in listing["adapters"]]
    told += [sorted(set(listing["adapters"][0]) - {"idleSeconds"})]
    for name in ("a", "b", "never"):
        told.append((await call("DELETE", f"{names.PATH_ADAPTERS}/{name}"))[0])
    told.append(json.loads((await call("GET", names.PATH_ADAPTERS))[1])["adapters"])
    return told


async def test_adapters_are_loaded_probed_listed_and_unloaded_as_by_the_runtime(real, fake, folder):
    assert await story(fake[1], folder) == await story(real, folder)


async def test_a_download_has_its_time_and_the_load_is_answered_before(fake, folder):
    replica, call = fake
    status, raw = await call("POST", names.PATH_ADAPTERS, LoadAdapterRequest(name="a", uri="file:///x").wire())

    assert (status, json.loads(raw)["state"]) == (202, "loading")
    assert await call.probe("a") == 503
    assert "a" not in replica.downloaded

    assert await call.load(LoadAdapterRequest(name="a", uri="file:///x")) == (2, True, "")
    assert "a" in replica.downloaded


async def test_signals_and_state_have_the_fields_of_the_runtimes(real, fake):
    for path in (names.PATH_SIGNALS, names.PATH_STATE):
        ours, theirs = await fake[1]("GET", path), await real("GET", path)
        assert ours[0] == theirs[0] == 200
        assert set(json.loads(ours[1])) == set(json.loads(theirs[1]))
    assert (await fake[1]("GET", "/nothing"))[0] == (await real("GET", "/nothing"))[0] == 404


async def test_a_drain_and_its_end_are_told_by_the_signals(real, fake):
    told = []
    for call in (real, fake[1]):
        said = []
        for path in (names.PATH_DRAIN, names.PATH_UNDRAIN):
            status, raw = await call("POST", path, b"{}")
            signals = json.loads((await call("GET", names.PATH_SIGNALS))[1])
            said.append((status, json.loads(raw)["draining"], signals["draining"]))
        told.append(said)

    assert told[0] == told[1]


async def test_a_load_is_told_until_another_one_is_set(fake):
    replica, call = fake
    replica.set_load(running=3, waiting=9, kv_usage=0.4)
    assert replica.told_at == 0

    signals = json.loads((await call("GET", names.PATH_SIGNALS))[1])

    assert (signals["running"], signals["waiting"], signals["kvUsage"]) == (3, 9, 0.4)
    assert replica.told_at > 0


async def test_a_request_is_complete_when_its_body_is():
    assert content_length(b"POST /adapters HTTP/1.1\r\nHost: x\r\nContent-Length: 12") == 12
    assert content_length(b"GET /signals HTTP/1.1\r\nHost: x") == 0
