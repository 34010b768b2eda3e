"""Loads of adapters that fail, race or hang leave nothing behind and stop nothing else."""

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from slipway_runtime.server import adapter_registry
from slipway_runtime.server.adapter_registry import adapter_roots
from slipway_runtime.server.errors import ApiError
from tests.runtime.adapter_folders import an_adapter
from tests.runtime.server.serving import TINY, Running, a_replica

ROOM: dict[str, Any] = {"max_adapters": 2, "max_cpu_adapters": 2, "max_rank": 8}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    an_adapter(root / "good", AutoModelForCausalLM.from_pretrained(TINY), seed=0)
    return root


def corrupt(folders: Path, number: int) -> Path:
    """An adapter whose weights are none, with content of its own."""
    folder = folders / f"corrupt-{number}"
    shutil.copytree(folders / "good", folder)
    (folder / "adapter_model.safetensors").write_bytes(b"no weights: %d" % number)
    return folder


def engine_paths(replica: Running) -> dict[str, Path]:
    loader = replica.steps._engine._adapters
    assert loader is not None
    return loader._paths


def test_an_adapter_on_the_command_line_may_lie_in_any_folder_and_opens_only_that_one():
    """review/peer-suites.md 10"""
    usual = adapter_roots(Path("/cache"), Path("/models/a/tiny"))

    roots = adapter_roots(Path("/cache"), Path("/models/a/tiny"), named=["file:///data/sailor", "hf://org/adapter"])

    assert roots == (*usual, Path("/data/sailor"))


@pytest.mark.capability("ML-4", "SE-2")
async def test_the_engine_forgets_each_adapter_that_it_rejected(folders: Path):
    async with a_replica(adapter_roots=(folders,), **ROOM) as replica:
        registry = replica.models[0].adapters
        await registry.load("good", f"file://{folders}/good")
        for number in range(200):
            with pytest.raises(ApiError, match="cannot be used"):
                await registry.load(f"bad-{number}", f"file://{corrupt(folders, number)}")
        kept = registry.find("good")
        assert kept is not None
        await replica.until(lambda _: len(replica.client.adapters) == 1)
        known, paths = [status.digest for status in replica.client.adapters], list(engine_paths(replica))
        for number in range(200):
            assert await registry.unload(f"bad-{number}") is None
        await (await registry.unload("good") or asyncio.sleep(0))
        await replica.until(lambda _: not replica.client.adapters)

        assert known == paths == [kept.digest]
        assert not engine_paths(replica)
        assert not registry.all()
        assert not registry._locks
        assert not registry._fetched


@pytest.mark.capability("ML-4")
async def test_an_adapter_that_was_rejected_may_be_loaded_again_when_it_is_whole(folders: Path, tmp_path: Path):
    async with a_replica(adapter_roots=(folders, tmp_path), **ROOM) as replica:
        registry = replica.models[0].adapters
        folder = tmp_path / "mended"
        shutil.copytree(corrupt(folders, 1000), folder)
        with pytest.raises(ApiError):
            await registry.load("a", f"file://{folder}")
        shutil.copy(folders / "good" / "adapter_model.safetensors", folder)
        await registry.load("a", f"file://{folder}")

        assert (await replica.chat(model="a", max_tokens=1)).status_code == 200


@pytest.mark.capability("ML-2")
async def test_a_name_is_loaded_by_one_call_at_a_time_also_around_an_unload(folders: Path):
    at_work, most = 0, 0
    permits = threading.Semaphore(0)
    counting = threading.Lock()

    def fetch(_uri: str) -> Path:
        nonlocal at_work, most
        with counting:
            at_work += 1
            most = max(most, at_work)
        permits.acquire(timeout=60)
        with counting:
            at_work -= 1
        return folders / "good"

    async def until(condition: Any) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110  the thread's numbers are asked for
                await asyncio.sleep(0.005)

    async with a_replica(fetch_adapter=fetch, **ROOM) as replica:
        registry = replica.models[0].adapters
        first = asyncio.create_task(registry.load("a", "https://host/1"))
        await until(lambda: at_work == 1)
        unload = asyncio.create_task(registry.unload("a"))
        await asyncio.sleep(0)
        second = asyncio.create_task(registry.load("a", "https://host/2"))
        await asyncio.sleep(0)
        permits.release()
        await asyncio.gather(first, unload)
        await until(lambda: at_work == 1)
        third = asyncio.create_task(registry.load("a", "https://host/3"))
        await asyncio.sleep(0.05)
        permits.release(2)
        await asyncio.gather(second, third)

    assert most == 1


@pytest.mark.capability("ML-2", "SE-2")
async def test_hosts_that_send_nothing_stop_neither_other_work_of_threads_nor_the_operators_loads(folders: Path):
    go_on = threading.Event()

    def fetch(uri: str) -> Path:
        if "slow" in uri:
            go_on.wait(60)
        return folders / "good"

    async with a_replica(fetch_adapter=fetch, **ROOM) as replica:
        registry = replica.models[0].adapters
        slow = [
            asyncio.create_task(registry.load(f"slow-{number}", f"https://slow/{number}", from_client=True))
            for number in range(64)  # more than asyncio's own executor has threads
        ]
        try:
            async with asyncio.timeout(30):
                await asyncio.to_thread(lambda: None)
                loaded = await registry.load("ours", "https://host/ours")
        finally:
            go_on.set()
            await asyncio.gather(*slow)

    assert loaded.digest


@pytest.mark.capability("ML-2")
async def test_a_load_that_takes_too_long_is_given_up_and_its_files_are_released(
    folders: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(adapter_registry, "FETCH_SECONDS", 0.05)
    go_on, released = threading.Event(), threading.Event()

    def fetch(_uri: str) -> Path:
        go_on.wait(60)
        return folders / "good"

    async with a_replica(fetch_adapter=fetch, release_adapter=lambda _: released.set(), **ROOM) as replica:
        registry = replica.models[0].adapters
        with pytest.raises(ApiError, match="did not come from this address within") as refused:
            await registry.load("slow", "https://slow/a")
        go_on.set()

        assert refused.value.status == 404
        assert await asyncio.to_thread(released.wait, 60)
        assert registry.info("slow").state == "failed"
