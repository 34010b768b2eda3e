"""The operator's calls about adapters, answered by the real runtime: the contract that the doubles keep."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
import pytest_asyncio
from transformers import AutoModelForCausalLM
from yarl import URL

from slipway_api.admin_token import token_digest
from slipway_api.runtime_api import AdapterInfo, LoadAdapterRequest
from slipway_operator.adapter_client import AdapterClient, LoadRefused
from slipway_operator.keepalive import KeptConnections
from slipway_operator.replica_client import Address, Dial, ReplicaRefused
from tests.operator.adapter_double import AdapterDouble
from tests.runtime.adapter_folders import an_adapter
from tests.runtime.server.serving import TINY, Running, a_replica

pytestmark = pytest.mark.asyncio(loop_scope="module")

REPLICA = Address("team-a", "tiny-0", "127.0.0.1", nonce="n")


class Tokens:
    """The second token is the one that the pod knows, as after a rotation."""

    def tokens(self, *_: str) -> list[str]:
        return ["newer", "right"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    model = AutoModelForCausalLM.from_pretrained(TINY)
    an_adapter(root / "one", model, seed=1)
    an_adapter(root / "wide", model, rank=64)
    return root


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runtime(folders: Path) -> AsyncIterator[Running]:
    digests = (token_digest("right"),)
    async with a_replica(
        adapter_roots=(folders,),
        max_adapters=2,
        max_cpu_adapters=4,
        max_rank=8,
        token_digests=digests,
        serving_token_digests=digests,
    ) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def adapters(runtime: Running) -> AsyncIterator[AdapterClient]:
    connections = KeptConnections()

    def dial(url: str) -> Dial:
        port = URL(url).port
        assert port is not None

        async def call(
            method: str, replica: Address, path: str, headers: Mapping[str, str], body: bytes | None
        ) -> tuple[int, bytes]:
            return await connections.request(method, replica.ip, port, path, headers, body)

        return call

    yield AdapterClient(dial(runtime.admin_url), dial(runtime.url), Tokens(), Tokens())
    connections.close()


async def loaded(adapters: AdapterClient, request: LoadAdapterRequest) -> AdapterInfo:
    """Load, and wait until the replica's list says how that ended."""
    info = await adapters.load(REPLICA, request)
    async with asyncio.timeout(60):
        while info.state == "loading":
            await asyncio.sleep(0.1)
            info = next(one for one in (await adapters.list(REPLICA)).adapters if one.name == request.name)
    return info


@pytest.mark.capability("ML-2")
async def test_load_probe_list_and_unload(adapters: AdapterClient, runtime: Running, folders: Path):
    request = LoadAdapterRequest(name="one", uri=f"file://{folders}/one", version="v1")

    info = await loaded(adapters, request)
    await adapters.probe(REPLICA, "tiny", "one", is_closed=True)
    listing = await adapters.list(REPLICA)
    gone = await adapters.unload(REPLICA, "one")

    assert info.state in ("host", "slot", "disk")
    assert (info.version, info.rank) == ("v1", 4)
    assert [one.name for one in listing.adapters] == ["one"]
    assert listing.boot_id == runtime.replica.boot_id
    assert (listing.max_adapters, listing.max_cpu_adapters) == (2, 4)
    assert gone
    assert (await adapters.list(REPLICA)).adapters == ()
    assert await adapters.unload(REPLICA, "one"), "again is harmless"


@pytest.mark.capability("ML-3")
async def test_a_refusal_has_its_reason(adapters: AdapterClient, folders: Path):
    wide = LoadAdapterRequest(name="wide", uri=f"file://{folders}/wide", version="v1")
    try:
        info = await loaded(adapters, wide)
        reason, message = info.reason, info.message
    except LoadRefused as refusal:
        reason, message = refusal.reason, str(refusal)
    await adapters.unload(REPLICA, "wide")

    assert reason == "RankTooLarge"
    assert "rank 64" in message


async def test_a_probe_of_what_is_not_there_and_one_without_a_token_are_refused(adapters: AdapterClient):
    with pytest.raises(LoadRefused, match="404"):
        await adapters.probe(REPLICA, "tiny", "nothing", is_closed=True)
    with pytest.raises(LoadRefused, match="401"):
        await adapters.probe(REPLICA, "tiny", "tiny", is_closed=False)


async def test_a_wrong_admin_token_is_refused(adapters: AdapterClient):
    class Wrong:
        def tokens(self, *_: str) -> list[str]:
            return ["wrong"]

    stranger = AdapterClient(adapters.dial, adapters.dial_serving, Wrong(), Wrong())
    with pytest.raises(ReplicaRefused, match="401"):
        await stranger.list(REPLICA)


async def test_the_double_of_other_tests_answers_as_the_runtime_does(adapters: AdapterClient, folders: Path):
    double = AdapterDouble()

    async def dial(
        method: str, _replica: Address, path: str, _headers: Mapping[str, str], body: bytes | None
    ) -> tuple[int, bytes]:
        return double.answer(method, path, body, "boot")

    imitation = AdapterClient(dial, dial, Tokens(), Tokens())
    uri = f"file://{folders}/one"
    told = []
    for client in (adapters, imitation):
        double.refusals = {f"file://{folders}/none": ("DownloadFailed", "no")}
        first = await loaded(client, LoadAdapterRequest(name="a", uri=uri, version="v1", pinned=True))
        again = await loaded(client, LoadAdapterRequest(name="a", uri=uri, version="v2", pinned=True))
        try:
            missing = await loaded(client, LoadAdapterRequest(name="b", uri=f"file://{folders}/none", version="v1"))
            reason = missing.reason
        except LoadRefused as refusal:
            reason = refusal.reason
        listed = {one.name: (one.state == "failed", one.version) for one in (await client.list(REPLICA)).adapters}
        await client.probe(REPLICA, "tiny", "a", is_closed=True)
        gone = [await client.unload(REPLICA, name) for name in ("a", "b", "never")]
        told.append((first.version, again.version, again.pinned, reason, listed, gone))

    assert told[0] == told[1]
