"""A process that was started without a model serves the one that POST /model brings."""

import asyncio
import hashlib
import json
from pathlib import Path

import httpx
import pytest

from slipway_api import names
from slipway_api.runtime_api import LoadModelRequest, ModelInfo
from slipway_runtime.boot_memory import STORED, BootMemory, compare_with_first_start, encode, find_excess
from tests.runtime.processes import TINY, Process, Replica, children, serving, serving_here

SPEC = LoadModelRequest(
    uri=f"file://{TINY}",
    served_name="chat",
    revision="rev7",
    kv_cache_bytes="16Mi",
    max_num_seqs=4,
    max_model_len=512,
    sampling_defaults={"temperature": 0.0, "max_tokens": 3},
)


def has_loaded(library: str, pid: int) -> bool:
    return library in Path(f"/proc/{pid}/maps").read_text()


async def reason_when_booted(http: httpx.AsyncClient, admin_url: str) -> tuple[int, str]:
    """Status and reason of /ready, once everything that needs no model is done."""
    async with asyncio.timeout(120):
        while True:
            ready = await http.get(f"{admin_url}/ready")
            if ready.json()["reason"] != "Booting":
                return ready.status_code, ready.json()["reason"]
            await asyncio.sleep(0.02)


async def test_a_process_without_a_model_loads_the_one_that_is_asked_for_and_no_other():
    async with serving_here(model=None) as replica, httpx.AsyncClient(timeout=120) as http:
        assert await reason_when_booted(http, replica.admin_url) == (503, "NoModel")
        assert (await http.get(f"{replica.admin_url}/health")).status_code == 200
        assert (await http.get(f"{replica.url}/v1/models")).status_code == 503
        for senseless in ({}, {"uri": "file:///x", "dtype": "int4"}, {"uri": "file:///x", "kvCacheBytes": "x"}):
            refused = await http.post(f"{replica.admin_url}/model", json=senseless)
            assert refused.status_code == 400, "and it still waits for a model"

        asked = await http.post(f"{replica.admin_url}/model", content=SPEC.wire())
        assert asked.status_code == 202
        assert ModelInfo.model_validate_json(asked.content).served_name == "chat"
        await replica.ready()

        again = await http.post(f"{replica.admin_url}/model", content=SPEC.wire())
        assert (again.status_code, again.json()["loaded"]) == (200, True)
        other = SPEC.model_copy(update={"max_model_len": 1024, "chat_template": "secret"})
        refused = await http.post(f"{replica.admin_url}/model", content=other.wire())
        assert refused.status_code == 409
        assert "it differs in chat_template, max_model_len" in refused.text
        assert "secret" not in refused.text

        (card, *_) = (await http.get(f"{replica.url}/v1/models")).json()["data"]
        assert (card["id"], card["revision"], card["max_model_len"]) == ("chat", "rev7", 512)
        answer = await http.post(f"{replica.url}/v1/completions", json={"model": "chat", "prompt": "The sea"})
        assert answer.status_code == 200
        assert answer.headers["x-slipway-revision"] == "rev7"


async def test_a_process_that_never_gets_a_model_ends_on_sigterm():
    async with serving_here(model=None) as replica:
        replica.terminate()
        assert await replica.ended() == 0


@pytest.mark.capability("AS-5")
async def test_a_booted_process_builds_the_engine_in_the_process_that_has_imported_torch_already():
    async with serving(model=None) as replica, httpx.AsyncClient(timeout=120) as http:
        assert await reason_when_booted(http, replica.admin_url) == (503, "NoModel")
        (engine,) = children(replica.process.pid)
        assert has_loaded("libtorch", engine), "torch is loaded before there is a model"

        await http.post(f"{replica.admin_url}/model", content=SPEC.wire())
        await replica.ready()

        assert replica.engine_pid == engine


@pytest.mark.capability("AS-5")
async def test_a_container_that_is_started_again_serves_the_model_and_asks_for_the_token_it_was_given():
    closed = SPEC.model_copy(update={"serving_token_sha256": (hashlib.sha256(b"of the gateway").hexdigest(),)})
    async with serving_here(model=None) as first, httpx.AsyncClient(timeout=120) as http:
        assert (await http.post(f"{first.admin_url}/model", content=closed.wire())).status_code == 202
        assert (await http.get(f"{first.url}/v1/models")).status_code == 401, "closed before the model answers"
        await first.ready()
        kept = (first.run_directory / "model.json").read_bytes()

    async with (
        serving_here(model=None, run_files={"model.json": kept}) as again,
        httpx.AsyncClient(timeout=120) as http,
    ):
        await again.ready()
        assert (await http.get(f"{again.url}/v1/models")).status_code == 401
        headers = {names.HEADER_SERVING_TOKEN: "of the gateway"}
        (card, *_) = (await http.get(f"{again.url}/v1/models", headers=headers)).json()["data"]
        assert (card["id"], card["revision"]) == ("chat", "rev7")


async def standing_by(replica: Replica, http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(120):
        while True:
            if (await http.get(f"{replica.admin_url}/ready")).json()["reason"] == "Standby":
                return
            await asyncio.sleep(0.02)


STANDBY_FLAGS = ("--kv-cache-bytes", "16Mi", "--max-num-seqs", "4", "--max-model-len", "512", "--served-name", "pool")


@pytest.mark.capability("AS-5")
@pytest.mark.parametrize("level", ["loaded", "sleeping"])
async def test_a_process_that_stands_by_answers_nothing_until_it_is_claimed_and_then_under_the_name_of_the_claim(level):
    digest = hashlib.sha256(b"of the gateway").hexdigest()
    claim = SPEC.model_copy(update={"serving_token_sha256": (digest,), "warm_prompts": ("The sea",)})
    async with (
        serving_here("--standby", level, *STANDBY_FLAGS) as replica,
        httpx.AsyncClient(timeout=120, headers={names.HEADER_SERVING_TOKEN: "of the gateway"}) as http,
    ):
        await standing_by(replica, http)
        asked = {"model": "pool", "prompt": "The sea"}
        assert (await http.post(f"{replica.url}/v1/completions", json=asked)).status_code == 503
        assert (await http.get(f"{replica.admin_url}/health")).status_code == 200
        for changed in ({"max_model_len": 256}, {"uri": "file:///elsewhere"}, {"kv_cache_bytes": "8Mi"}):
            other = claim.model_copy(update=changed)
            refused = await http.post(f"{replica.admin_url}/model", content=other.wire())
            assert refused.status_code == 409, "another load would be needed"
        assert (await http.get(f"{replica.admin_url}/ready")).json()["reason"] == "Standby"

        taken = await http.post(f"{replica.admin_url}/model", content=claim.wire())
        assert taken.status_code in (200, 202)
        await replica.ready()

        again = await http.post(f"{replica.admin_url}/model", content=claim.wire())
        assert (again.status_code, again.json()["loaded"]) == (200, True)
        second = claim.model_copy(update={"served_name": "other"})
        assert (await http.post(f"{replica.admin_url}/model", content=second.wire())).status_code == 409
        (card, *_) = (await http.get(f"{replica.url}/v1/models")).json()["data"]
        assert (card["id"], card["revision"]) == ("chat", "rev7")
        assert (await http.post(f"{replica.url}/v1/completions", json=asked)).status_code == 404, "the pool's name"
        answer = await http.post(f"{replica.url}/v1/completions", json=asked | {"model": "chat"})
        assert (answer.status_code, answer.headers["x-slipway-revision"]) == (200, "rev7")
        kept = (replica.run_directory / "model.json").read_bytes()

    flags = ("--standby", level, *STANDBY_FLAGS)
    async with serving_here(*flags, run_files={"model.json": kept}) as restarted:
        await restarted.ready()
        assert not any(line["message"] == "standing by" for line in restarted.log), "it was claimed before"


async def test_a_process_that_stands_by_ends_on_sigterm():
    async with serving_here("--standby", "sleeping", *STANDBY_FLAGS) as replica, httpx.AsyncClient() as http:
        await standing_by(replica, http)
        replica.terminate()
        assert await replica.ended() == 0


# --- DELETE /model


async def started_over(replica: Process, http: httpx.AsyncClient, reason: str) -> str:
    """Wait until the process listens anew and says `reason`; returns the boot id. Its ports are others in tests."""
    async with asyncio.timeout(120):
        while True:
            lines = [line for line in replica.log if line["message"] == "listening"]
            if len(lines) > 1:
                replica.url = f"http://127.0.0.1:{lines[-1]['port']}"
                replica.admin_url = f"http://127.0.0.1:{lines[-1]['admin_port']}"
                if (await http.get(f"{replica.admin_url}/ready")).json()["reason"] == reason:
                    return str((await http.get(f"{replica.admin_url}/signals")).json()["bootId"])
            assert not replica.is_over(), replica.log
            await asyncio.sleep(0.02)


def exists(path: str | Path) -> bool:
    return Path(path).exists()


def pretend_that_a_tebibyte_less_was_in_use(stored: Path) -> None:
    """Change the figures of the first start."""
    first = json.loads(stored.read_text())
    assert first["host_bytes"] > 50 << 20, "torch alone takes more"
    stored.write_bytes(encode(BootMemory(first["device_bytes"], first["host_bytes"] - (1 << 40))))


async def drain(replica: Process, http: httpx.AsyncClient) -> None:
    await http.post(f"{replica.admin_url}/drain", json={"timeoutSeconds": 30})


@pytest.mark.capability("AS-5")
async def test_a_drained_process_gives_its_model_back_starts_over_and_serves_another_one():
    digest = hashlib.sha256(b"of the gateway").hexdigest()
    closed = SPEC.model_copy(update={"serving_token_sha256": (digest,)})
    async with serving(model=None) as replica, httpx.AsyncClient(timeout=120) as http:
        assert await reason_when_booted(http, replica.admin_url) == (503, "NoModel")
        assert (await http.delete(f"{replica.admin_url}/model")).status_code == 200, "there is none to give back"
        await http.post(f"{replica.admin_url}/model", content=closed.wire())
        await replica.ready()
        (engine,) = children(replica.process.pid)
        boot = (await http.get(f"{replica.admin_url}/signals")).json()["bootId"]
        refused = await http.delete(f"{replica.admin_url}/model")
        assert refused.status_code == 409, "it takes requests"
        assert "drain first" in refused.text

        await drain(replica, http)
        assert (await http.delete(f"{replica.admin_url}/model")).status_code == 202
        assert await started_over(replica, http, "NoModel") != boot

        assert not replica.is_over(), "the container goes on"
        assert children(replica.process.pid) != [engine]
        assert not exists(f"/proc/{engine}"), "the engine that had the model has ended"
        assert not exists(replica.run_directory / "model.json"), "a restart would bring no model back"
        assert (await http.get(f"{replica.url}/v1/models")).status_code == 503, "and asks for no token of the service"

        other = SPEC.model_copy(update={"served_name": "second", "max_model_len": 256})
        assert (await http.post(f"{replica.admin_url}/model", content=other.wire())).status_code == 202
        await started_over(replica, http, "Ready")
        (card, *_) = (await http.get(f"{replica.url}/v1/models")).json()["data"]
        assert (card["id"], card["max_model_len"]) == ("second", 256)


@pytest.mark.capability("AS-5")
async def test_a_process_in_standby_gives_its_claim_back_and_stands_by_again():
    async with serving("--standby", "sleeping", *STANDBY_FLAGS) as replica, httpx.AsyncClient(timeout=120) as http:
        await standing_by(replica, http)
        assert (await http.delete(f"{replica.admin_url}/model")).status_code == 200, "nobody has claimed it"
        await http.post(f"{replica.admin_url}/model", content=SPEC.wire())
        await replica.ready()
        await drain(replica, http)

        assert (await http.delete(f"{replica.admin_url}/model")).status_code == 202
        await started_over(replica, http, "Standby")
        asked = {"model": "chat", "prompt": "The sea"}
        assert (await http.post(f"{replica.url}/v1/completions", json=asked)).status_code in (404, 503)


@pytest.mark.capability("AS-5")
async def test_a_process_whose_old_model_left_memory_in_use_says_so_and_waits_for_its_end():
    async with serving(model=None) as replica, httpx.AsyncClient(timeout=120) as http:
        assert await reason_when_booted(http, replica.admin_url) == (503, "NoModel")
        await http.post(f"{replica.admin_url}/model", content=SPEC.wire())
        await replica.ready()
        pretend_that_a_tebibyte_less_was_in_use(replica.run_directory / STORED)
        await drain(replica, http)
        await http.delete(f"{replica.admin_url}/model")

        await started_over(replica, http, "MemoryNotFreed")
        assert "GiB of host memory are in use" in (await http.get(f"{replica.admin_url}/ready")).json()["message"]


async def test_the_model_of_the_command_line_is_not_given_back():
    async with serving_here() as replica, httpx.AsyncClient(timeout=120) as http:
        await replica.ready()
        await http.post(f"{replica.admin_url}/drain", json={"timeoutSeconds": 30})
        assert (await http.delete(f"{replica.admin_url}/model")).status_code == 409


GIB = 1 << 30


@pytest.mark.parametrize(
    ("now", "excess"),
    [
        (BootMemory(GIB // 2, GIB), ""),
        (BootMemory(GIB // 2 + (200 << 20), GIB + (200 << 20)), ""),
        (BootMemory(40 * GIB, GIB), "40.0 GiB of GPU memory are in use, 0.5 GiB at the first start"),
        (BootMemory(GIB // 2, 3 * GIB), "3.0 GiB of host memory are in use, 1.0 GiB at the first start"),
        (BootMemory(0, 0), ""),
    ],
)
def test_memory_in_use_is_compared_with_the_first_start(tmp_path, now, excess):
    first = BootMemory(GIB // 2, GIB)
    assert find_excess(first, now) == excess
    assert compare_with_first_start(tmp_path, first) == "", "the first start has nothing to compare with"
    assert compare_with_first_start(tmp_path, now) == excess
    assert compare_with_first_start(tmp_path / "nowhere", now) == ""
