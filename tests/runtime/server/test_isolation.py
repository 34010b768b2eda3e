"""What one caller computed is found by nobody who must not find it: other tenants, other adapters, other versions of
an adapter, other settings of the model. And what a version of an adapter began, it ends.
"""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from transformers import AutoModelForCausalLM

from slipway_runtime.engine.build import build_engine
from slipway_runtime.messages import Request, SamplingParams
from tests.runtime.adapter_folders import an_adapter
from tests.runtime.checkpoints import a_checkpoint
from tests.runtime.gateway_token import as_gateway
from tests.runtime.server.serving import TINY, Running, a_replica

in_the_loop = pytest.mark.asyncio(loop_scope="module")

LONG = "The harbour of the old town is full of small boats, and each of them has a name and a colour. " * 2
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    model = AutoModelForCausalLM.from_pretrained(TINY)
    for seed, name in enumerate(("one", "two")):
        an_adapter(root / name, model, seed=seed)
    return root


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica(folders: Path) -> AsyncIterator[Running]:
    async with a_replica(
        adapter_endpoints=True, adapter_roots=(folders,), max_adapters=2, max_cpu_adapters=4, max_rank=8,
        deterministic=True,
    ) as running:  # fmt: skip
        yield running


async def load(replica: Running, name: str, path: Path) -> None:
    loaded = await replica.post(
        "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path), "load_inplace": True}
    )
    assert loaded.status_code == 200, loaded.text


async def cached(replica: Running, tenant: str = "", model: str = "tiny", **body: Any) -> int:
    headers = as_gateway(tenant=tenant) if tenant else {}
    answer = await replica.chat(LONG, headers, model=model, max_tokens=2, **GREEDY, **body)
    assert answer.status_code == 200, answer.text
    details = answer.json()["usage"]["prompt_tokens_details"] or {}
    return int(details.get("cached_tokens") or 0)


@pytest.mark.capability("MT-2", "KV-3")
@in_the_loop
async def test_tenants_find_their_own_prefixes_and_nobody_elses(replica: Running):
    first = [await cached(replica, tenant) for tenant in ("", "red", "blue")]
    again = [await cached(replica, tenant) for tenant in ("red", "blue", "")]
    forged = [await cached(replica, cache_salt=salt) for salt in ("red", "red\x1f", "\x1fred")]
    divided = [await cached(replica, "red", cache_salt="a"), await cached(replica, "red", cache_salt="a")]
    assert first == [0, 0, 0]
    assert all(count >= 32 for count in again)
    assert forged == [0, 0, 0], "a client cannot name itself into another tenant's prefixes"
    assert divided[0] == 0
    assert divided[1] >= 32


@pytest.mark.capability("ML-9", "KV-3", "PF-25")
@in_the_loop
async def test_adapters_and_their_versions_find_their_own_prefixes_only(replica: Running, folders: Path):
    await load(replica, "a", folders / "one")
    await load(replica, "b", folders / "two")
    await cached(replica, "green")
    first = [await cached(replica, "green", model) for model in ("a", "b")]
    again = [await cached(replica, "green", model) for model in ("tiny", "a", "b")]
    await load(replica, "b", folders / "one")
    same_content = await cached(replica, "green", "b")
    await load(replica, "a", folders / "two")
    other_content = await cached(replica, "green", "a")
    assert first == [0, 0]
    assert all(count >= 32 for count in again)
    assert same_content >= 32, "a name is nothing, the content is all"
    assert other_content == 0, "what the content left behind when it was unloaded is gone"
    for name in "ab":
        await replica.post("/v1/unload_lora_adapter", {"lora_name": name})


@pytest.mark.capability("ML-9", "API-19")
@in_the_loop
async def test_a_stream_ends_on_the_version_it_began_with_while_new_requests_take_the_new_one(
    replica: Running, folders: Path
):
    """Each of several streams that run while the content changes says what it would have said alone."""
    questions = ["What is a pod?", "Tell me a story about a fox.", "Hello!"]
    ask = {"model": "a", "max_tokens": 60, **GREEDY}

    async def said(question: str) -> str:
        return str((await replica.chat(question, **ask)).json()["choices"][0]["message"]["content"])

    alone = {}
    for name in ("two", "one"):
        await load(replica, "a", folders / name)
        alone[name] = [await said(question) for question in questions]
    assert alone["one"] != alone["two"]

    started = asyncio.Semaphore(0)

    async def streamed(question: str) -> str:
        text = ""
        async with replica.streaming(question, **ask) as stream:
            async for line in stream.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
                    started.release()
        return text

    replica.steps.hold()
    running = [asyncio.create_task(streamed(question)) for question in questions]
    await replica.until(lambda stats: stats.waiting == 3)
    replica.steps.allow(6)
    for _ in questions:
        await started.acquire()
    loading = asyncio.create_task(load(replica, "a", folders / "two"))
    replica.steps.resume_steps()
    await loading
    new = [await said(question) for question in questions]
    assert await asyncio.gather(*running) == alone["one"]
    assert new == alone["two"]
    stats = await replica.until(lambda stats: stats.running + stats.waiting + stats.blocks_live == 0)
    assert stats.invalid_kv_blocks == 0


@pytest.mark.capability("PF-25", "KV-3", "KV-8")
def test_another_model_quantization_or_format_has_other_keys(tmp_path: Path):
    """The keys under which prefixes are stored, here and by whoever listens to the events."""
    a_checkpoint(tmp_path / "model")
    a_checkpoint(tmp_path / "upgraded", intermediate_size=96)
    a_checkpoint(tmp_path / "trained", seed=1)  # with the very config of the first
    shutil.copytree(tmp_path / "model", tmp_path / "elsewhere")

    def key(folder: str, **settings: Any) -> bytes:
        engine = build_engine(tmp_path / folder, kv_cache_bytes=1 << 20, max_num_seqs=1, max_model_len=64, **settings)
        params = SamplingParams(max_tokens=1)
        engine.add(Request(id="a", prompt_token_ids=tuple(range(3, 40)), params=params, arrived=0.0), 0.0)
        engine.step(0.0)
        (first, *_) = engine._scheduler.pool._block_of
        return bytes(first)

    keys = [
        key("model"),
        key("upgraded"),
        key("model", quantization="int8"),
        key("model", kv_cache_dtype="int8"),
        key("model", quantization="int8", kv_cache_dtype="int8"),
        key("model", deterministic=True),
        key("model", model_digest="sha256:of-all-of-it"),
        key("trained"),
    ]
    assert len(set(keys)) == len(keys)
    assert key("model", max_num_batched_tokens=32) == keys[0], "how it is batched changes no KV"
    assert key("elsewhere") == keys[0], "where it lies changes no KV"
