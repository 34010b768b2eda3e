"""Adapters by name: selected by `model`, loaded and unloaded while others are served, refused with a sentence."""

import asyncio
import json
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import structlog
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModelForCausalLM

from slipway_api.runtime_api import AdapterList, BootList, LoadAdapterRequest, StartupTimes
from slipway_runtime.server.adapter_registry import AdapterSource
from slipway_runtime.server.boot import load_adapters, load_boot_list, read_boot_list
from slipway_runtime.server.errors import ApiError
from slipway_runtime.settings import BootAdapter
from slipway_runtime.storage.fetch import fetch, release
from slipway_runtime.storage.source import OutOfSpaceError
from tests.runtime.adapter_folders import an_adapter
from tests.runtime.checkpoints import a_checkpoint
from tests.runtime.expert_adapters import an_expert_adapter
from tests.runtime.server.serving import TINY, Running, a_replica
from tests.runtime.storage.origin import Origin, an_origin

pytestmark = pytest.mark.asyncio(loop_scope="module")

GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    model = AutoModelForCausalLM.from_pretrained(TINY)
    for seed, name in enumerate(("one", "two")):
        an_adapter(root / name, model, seed=seed)
    an_adapter(root / "wide", model, rank=64)
    shutil.copytree(root / "one", root / "broken")
    (root / "broken" / "adapter_model.safetensors").write_bytes(b"not what it says")
    return root


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica(folders: Path) -> AsyncIterator[Running]:
    async with a_replica(
        adapter_endpoints=True, adapter_roots=(folders,), max_adapters=2, max_cpu_adapters=4, max_rank=8
    ) as running:
        yield running


async def load(replica: Running, name: str, path: Path | str, **more: Any) -> Any:
    return await replica.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)} | more)


async def said(replica: Running, model: str) -> str:
    response = await replica.chat("What is a pod?", model=model, **GREEDY)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


@pytest.mark.capability("ML-2", "API-9")
async def test_an_adapter_is_loaded_used_named_and_unloaded(replica: Running, folders: Path):
    base = await said(replica, "tiny")
    loaded = await load(replica, "one", folders / "one")
    again = await load(replica, "one", folders / "one")
    answer = await replica.chat("What is a pod?", model="one", **GREEDY)
    models = (await replica.http.get(f"{replica.url}/v1/models")).json()["data"]
    one = (await replica.http.get(f"{replica.url}/v1/models/one")).json()
    gone = await replica.post("/v1/unload_lora_adapter", {"lora_name": "one"})
    after = await replica.chat(model="one")
    twice = await replica.post("/v1/unload_lora_adapter", {"lora_name": "one"})

    assert loaded.status_code == 200
    assert again.status_code == 400, "a name that is taken, whatever its content: as vLLM answers"
    assert again.json()["error"]["type"] == "InvalidUserInput"
    assert loaded.text == "Success: LoRA adapter 'one' added successfully."
    assert answer.json()["model"] == answer.headers["x-slipway-adapter"] == "one"
    assert answer.json()["system_fingerprint"].startswith("tiny/rev1/")
    assert answer.json()["choices"][0]["message"]["content"] != base
    assert await said(replica, "tiny") == base
    assert [(m["id"], m["parent"]) for m in models] == [("tiny", None), ("one", "tiny")]
    assert one == models[1]
    assert one["root"] == str(folders / "one"), "where it came from, as vLLM says it"
    assert gone.text == "Success: LoRA adapter 'one' removed successfully."
    assert after.status_code == 404
    assert after.json()["error"]["message"] == "The model `one` does not exist."
    assert twice.status_code == 404
    assert twice.json()["error"]["type"] == "NotFoundError"
    assert twice.json()["error"]["message"] == "The lora adapter 'one' cannot be found.", "in vLLM's words"


async def test_an_adapters_root_is_the_shortest_form_of_its_path(replica: Running, folders: Path):
    loaded = await load(replica, "roundabout", folders / "two" / ".." / "one")
    card = (await replica.http.get(f"{replica.url}/v1/models/roundabout")).json()
    await replica.post("/v1/unload_lora_adapter", {"lora_name": "roundabout"})

    assert loaded.status_code == 200, loaded.text
    assert card["root"] == str(folders / "one")


REFUSED = [
    ({"lora_path": "one"}, 400),
    ({"lora_name": "x"}, 400),
    ({"lora_name": "tiny", "lora_path": "{root}/one"}, 400),
    ({"lora_name": "team-a/tiny", "lora_path": "{root}/one"}, 400),
    ({"lora_name": "../x", "lora_path": "{root}/one"}, 400),
    ({"lora_name": "x", "lora_path": "{root}/../../etc"}, 400),
    ({"lora_name": "x", "lora_path": "/etc"}, 400),
    ({"lora_name": "x", "lora_path": "relative/one"}, 400),
    ({"lora_name": "x", "lora_path": "ftp://host/one"}, 400),
    ({"lora_name": "x", "lora_path": "ftp://[host"}, 400),
    ({"lora_name": "x", "lora_path": "{root}/wide"}, 400),
    ({"lora_name": "x", "lora_path": "{root}/broken"}, 400),
]


@pytest.mark.capability("ML-4", "SE-2")
@pytest.mark.parametrize(("body", "status"), REFUSED, ids=[str(body) for body, _ in REFUSED])
async def test_what_cannot_be_an_adapter_is_refused_and_the_rest_goes_on(
    replica: Running, folders: Path, body: dict[str, str], status: int
):
    sent = {key: value.replace("{root}", str(folders)) for key, value in body.items()}
    refused = await replica.post("/v1/load_lora_adapter", sent)

    assert refused.status_code == status, refused.text
    assert str(folders) not in refused.text, "where files lie is nobody's business"
    assert (await replica.chat(max_tokens=1)).status_code == 200
    if sent.get("lora_name") == "x":
        failed = await replica.chat(model="x")
        assert failed.status_code in {404, 503}
        assert str(folders) not in failed.text
        await replica.post("/v1/unload_lora_adapter", {"lora_name": "x"})


@pytest.mark.parametrize("name", ["tiny", "team-a/tiny"])
async def test_the_name_of_the_base_is_taken_also_in_place(replica: Running, folders: Path, name: str):
    for more in ({}, {"load_inplace": True}):
        refused = await load(replica, name, folders / "one", **more)

        assert refused.status_code == 400
        assert refused.json()["error"]["type"] == "InvalidUserInput"


@pytest.mark.capability("ML-9")
async def test_new_content_takes_the_name_over_and_what_runs_finishes_on_the_old(replica: Running, folders: Path):
    await load(replica, "a", folders / "one")
    on_one = await said(replica, "a")
    taken = await load(replica, "a", folders / "two")
    async with replica.streaming("What is a pod?", model="a", **GREEDY | {"max_tokens": 40}) as stream:
        lines = stream.aiter_lines()
        first = [await anext(lines) for _ in range(4)]
        replaced = await load(replica, "a", folders / "two", load_inplace=True)
        rest = [line async for line in lines]
    events = [json.loads(line[6:]) for line in first + rest if line.startswith("data: {")]
    streamed = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    on_two = await said(replica, "a")

    assert taken.status_code == 400
    assert replaced.status_code == 200
    assert streamed.startswith(on_one[:20]), "one answer, one content"
    assert on_two != on_one
    await replica.post("/v1/unload_lora_adapter", {"lora_name": "a"})


@pytest.mark.capability("ML-2")
async def test_the_admin_port_tells_the_truth_and_is_idempotent(replica: Running, folders: Path):
    body = {"name": "b", "uri": f"file://{folders}/one", "pinned": True}
    loaded = [await replica.admin("/adapters", "POST", json=body) for _ in range(3)]
    await replica.until(lambda _: replica.models[0].adapters.info("b").state != "loading")
    await said(replica, "b")
    listed = (await replica.admin("/adapters")).json()
    state = (await replica.admin("/state")).json()
    gone = [await replica.admin("/adapters/b", "DELETE") for _ in range(2)]

    assert {response.status_code for response in loaded} <= {200, 202}
    [info] = [each for each in listed["adapters"] if each["name"] == "b"]
    assert info["state"] in {"host", "slot"}
    assert info["digest"].startswith("sha256:")
    assert info["pinned"]
    assert info["bytes"] > 0
    assert [each | {"idleSeconds": 0} for each in state["adapters"]] == [
        each | {"idleSeconds": 0} for each in listed["adapters"]
    ]
    assert listed["bootId"] == replica.replica.boot_id
    assert {response.status_code for response in gone} <= {200, 202}
    wrong = await replica.admin("/adapters", "POST", json=body | {"digest": "sha256:00"})
    assert wrong.status_code == 400


@pytest.mark.capability("ML-9")
async def test_gateways_see_the_adapters_in_the_metrics(replica: Running, folders: Path):
    await load(replica, "m", folders / "two")
    await said(replica, "m")
    page = (await replica.http.get(f"{replica.admin_url}/metrics")).text
    families = {family.name: family for family in text_string_to_metric_families(page)}

    [sample] = families["vllm:lora_requests_info"].samples
    assert set(sample.labels) == {"max_lora", "running_lora_adapters", "waiting_lora_adapters"}
    assert sample.labels["max_lora"] == "2"
    paid = {s.labels["adapter"] for s in families["slipway:tokens"].samples}
    assert "m" in paid


@pytest.mark.capability("SD-2", "OB-2")
async def test_acceptance_of_drafts_is_counted_for_each_adapter(folders: Path):
    async with a_replica(max_adapters=1, max_rank=8, adapter_roots=(folders,), speculation="promptLookup") as drafting:
        assert (
            await drafting.admin("/adapters", "POST", json={"name": "m", "uri": f"file://{folders}/one"})
        ).is_success
        await drafting.until(lambda _: drafting.models[0].adapters.info("m").state != "loading")
        for model in ("tiny", "m"):
            body = {
                "model": model,
                "prompt": "one two three four one two three four one two",
                **GREEDY,
                "max_tokens": 40,
            }
            assert (await drafting.post("/v1/completions", body)).is_success
        page = (await drafting.http.get(f"{drafting.admin_url}/metrics")).text
    families = {family.name: family for family in text_string_to_metric_families(page)}

    counted = {
        (s.labels["adapter"], s.labels["kind"]): s.value
        for s in families["slipway:tokens"].samples
        if s.labels["kind"] in ("draft", "accepted")
    }
    for kind in ("draft", "accepted"):
        [sample] = families[f"vllm:spec_decode_num_{kind}_tokens"].samples
        assert counted["", kind] + counted["m", kind] == sample.value
    assert counted["", "draft"] > 0 < counted["m", "draft"]


async def test_adapters_are_off_unless_asked_for():
    async with a_replica() as off:
        hidden = await load(off, "x", "/x")
        refused = await off.admin("/adapters", "POST", json={"name": "x", "uri": "/x"})
        model = await off.admin("/model")
        other = await off.admin("/model", "POST", json={"uri": "hf://somebody/else"})

    assert hidden.status_code == 404
    assert refused.status_code == 400
    assert model.json()["servedName"] == "tiny"
    assert other.status_code == 409
    assert "it differs in uri" in other.text


@pytest.mark.capability("ML-2")
async def test_an_adapter_comes_from_a_web_server_while_others_are_told_that_it_loads(folders: Path, tmp_path: Path):
    may_go_on = threading.Event()
    brought: list[Path] = []

    def slowly(uri: str) -> Path:
        may_go_on.wait(300)
        brought.append(fetch(uri, cache=tmp_path, at_most_bytes=1 << 20))
        return brought[-1]

    with an_origin() as origin:
        origin.files = {f"/one/{file.name}": file.read_bytes() for file in (folders / "one").iterdir()}
        origin.files["/one/"] = b""
        async with a_replica(fetch_adapter=slowly, max_adapters=1, max_cpu_adapters=1, max_rank=8) as replica:
            body = {"name": "far", "uri": f"{origin.url}/one"}
            asked = await replica.admin("/adapters", "POST", json=body)
            early = await replica.chat(model="far", max_tokens=1)
            may_go_on.set()
            registry = replica.models[0].adapters
            await replica.until(lambda _: registry.info("far").state != "loading")
            listed = await replica.admin("/adapters")
            text = await said(replica, "far")

    assert asked.status_code == 202
    assert asked.json()["state"] == "loading"
    assert early.status_code == 503
    assert listed.json()["adapters"][0]["state"] in {"host", "slot"}, listed.text
    assert text
    assert brought[0].is_relative_to(tmp_path)


async def test_the_source_is_told_which_addresses_a_client_named(folders: Path):
    """Finding 6: what a client names is fetched without secrets, and not from private networks."""
    told: list[tuple[str, bool]] = []

    def fetch_adapter(uri: str, from_client: bool, _credentials: Any) -> Path:
        told.append((uri, from_client))
        return folders / "one"

    async with a_replica(max_adapters=2, max_cpu_adapters=2, max_rank=8, adapter_endpoints=True) as replica:
        replica.models[0].adapters._source = AdapterSource(fetch_adapter, lambda _: None)
        await load(replica, "theirs", "https://host/theirs")
        await replica.admin("/adapters", "POST", json={"name": "ours", "uri": "https://host/ours"})

    assert told == [("https://host/theirs", True), ("https://host/ours", False)]


@pytest.mark.capability("ML-2")
async def test_content_that_loads_under_a_second_name_outlives_the_first_one(folders: Path):
    async with a_replica(adapter_roots=(folders,), max_adapters=1, max_rank=8) as replica:
        registry = replica.models[0].adapters
        await registry.load("first", f"file://{folders}/one")
        replica.steps.hold()
        loading = asyncio.create_task(registry.load("second", f"file://{folders}/one"))
        while not replica.client._calls:  # noqa: ASYNC110  until the engine is asked for it
            await asyncio.sleep(0.01)
        leaving = await registry.unload("first")
        replica.steps.resume_steps()
        await asyncio.gather(loading, leaving)

        assert await said(replica, "second")
        assert [info.name for info in registry.infos()] == ["second"]
        gone = await registry.unload("second")
        assert await gone
        assert replica.client.adapters == ()


class NodeCache:
    """A cache with room for one adapter, and a web server that has several."""

    def __init__(self, origin: Origin, cache: Path, adapters: dict[str, Path]) -> None:
        self.cache = cache
        self._url = origin.url
        for name, folder in adapters.items():
            origin.files |= {f"/{name}/{file.name}": file.read_bytes() for file in folder.iterdir()} | {
                f"/{name}/": b""
            }
        largest = max(sum(file.stat().st_size for file in folder.iterdir()) for folder in adapters.values())
        self._limit = largest + 4096  # the manifest counts too

    def uri(self, name: str) -> str:
        return f"{self._url}/{name}"

    def fetch(self, uri: str) -> Path:
        return fetch(uri, cache=self.cache, limit_bytes=self._limit)

    def release(self, folder: Path) -> None:
        release(folder, cache=self.cache)

    def has_room(self) -> bool:
        """Whether something else can be fetched; what nobody holds is evicted for it."""
        try:
            self.release(self.fetch(self.uri("other")))
        except OutOfSpaceError:
            return False
        return True


@pytest.mark.capability("ST-4", "ML-2")
async def test_the_node_keeps_a_fetched_adapter_while_a_name_means_it_and_not_longer(folders: Path, tmp_path: Path):
    adapters = {"one": folders / "one", "other": folders / "two"}
    with an_origin() as origin:
        node = NodeCache(origin, tmp_path, adapters)
        async with a_replica(
            adapter_endpoints=True, fetch_adapter=node.fetch, release_adapter=node.release, max_adapters=1, max_rank=8
        ) as replica:

            async def unloaded(name: str) -> None:
                gone = await registry.unload(name)
                if gone is not None:
                    await gone

            registry = replica.models[0].adapters
            with pytest.raises(ApiError, match="other content than the digest says"):
                await registry.load("one", node.uri("one"), digest="sha256:00")
            room_after_a_refusal = node.has_room()
            assert (await load(replica, "one", node.uri("one"))).status_code == 200
            assert (await load(replica, "again", node.uri("one"))).status_code == 200
            in_place = await load(replica, "again", node.uri("one"), load_inplace=True)
            assert in_place.status_code == 200, "asking again is harmless"
            room_while_two_mean_it = node.has_room()
            await unloaded("again")
            room_while_one_means_it = node.has_room()
            text = await said(replica, "one")
            await unloaded("one")
            room_afterwards = node.has_room()

    assert room_after_a_refusal
    assert not room_while_two_mean_it
    assert not room_while_one_means_it
    assert text
    assert room_afterwards


@pytest.mark.capability("ML-4")
async def test_an_adapter_that_does_not_load_at_the_start_is_told_once_and_keeps_nobody_from_answering(folders: Path):
    async with a_replica(adapter_roots=(folders,), max_adapters=1, max_rank=8, load=False) as replica:
        with structlog.testing.capture_logs() as logged:
            await load_adapters(replica.models[0], [BootAdapter("b", f"file://{folders}/broken")])
        replica.replica.ready_with(replica.models[0], StartupTimes())
        [known] = replica.models[0].adapters.infos()
        answers = [(await replica.chat(model=name, max_tokens=1)).status_code for name in ("tiny", "b")]

    [line] = [entry for entry in logged if "adapter" in entry["event"]]
    assert (line["log_level"], line["event"], line["adapter"]) == ("warning", "adapter not loaded", "b")
    assert line["reason"].startswith("the adapter cannot be used")
    assert answers == [200, 503]
    assert (known.name, known.state, known.reason) == ("b", "failed", "EngineRejected"), "as /state has it"
    assert known.message == line["reason"]


WIDE = {"name": "x", "uri": "file://{root}/wide", "version": "v1"}
REASONS = [
    (WIDE, "RankTooLarge"),
    ({"name": "x", "uri": "file://{root}/one", "digest": "sha256:" + "0" * 64}, "DigestMismatch"),
    ({"name": "x", "uri": "file://{root}/nothing"}, "DownloadFailed"),
    ({"name": "x", "uri": "file://{root}/broken"}, "EngineRejected"),
]


@pytest.mark.capability("ML-3", "ML-4")
@pytest.mark.parametrize(("body", "reason"), REASONS, ids=[body["uri"][14:] + reason for body, reason in REASONS])
async def test_a_refusal_names_its_cause_in_one_word_and_the_list_repeats_it(
    replica: Running, folders: Path, body: dict[str, str], reason: str
):
    asked = {key: value.replace("{root}", str(folders)) for key, value in body.items()}
    refused = await replica.admin("/adapters", "POST", json=asked)
    await replica.until(lambda _: replica.models[0].adapters.info("x").state != "loading")
    listed = AdapterList.model_validate_json((await replica.admin("/adapters")).content)
    (info,) = [one for one in listed.adapters if one.name == "x"]

    assert info.state == "failed"
    assert info.reason == reason
    assert info.version == body.get("version", "")
    if refused.status_code != 202:
        assert refused.json()["error"]["reason"] == reason
    assert (listed.max_adapters, listed.max_cpu_adapters) == (2, 4)
    await replica.admin("/adapters/x", "DELETE")


@pytest.mark.capability("ML-11", "ML-4")
async def test_an_adapter_of_experts_without_room_for_them_names_the_field_of_the_base(tmp_path: Path):
    model = a_checkpoint(tmp_path / "model", "mixtral", num_local_experts=4, num_experts_per_tok=2)
    an_expert_adapter(tmp_path / "experts", model, "modules", seed=1)
    room: dict[str, Any] = {"model_path": tmp_path / "model", "max_adapters": 1, "max_rank": 8, "max_model_len": 160}
    async with a_replica(adapter_roots=(tmp_path,), **room) as replica:
        await replica.admin("/adapters", "POST", json={"name": "x", "uri": f"file://{tmp_path}/experts"})
        await replica.until(lambda _: replica.models[0].adapters.info("x").state != "loading")
        info = replica.models[0].adapters.info("x")

    assert (info.state, info.reason) == ("failed", "CapacityExceeded")
    assert info.message.endswith("set spec.runtime.lora.experts (--lora-experts)")


async def test_a_load_repeats_its_version_and_the_same_content_takes_a_new_one(replica: Running, folders: Path):
    body = {"name": "versioned", "uri": f"file://{folders}/one"}
    versions = []
    for version in ("v1", "v2"):
        await replica.admin("/adapters", "POST", json=body | {"version": version})
        await replica.until(lambda _: replica.models[0].adapters.info("versioned").state != "loading")
        versions.append(replica.models[0].adapters.info("versioned").version)
    await replica.admin("/adapters/versioned", "DELETE")

    assert versions == ["v1", "v2"]


@pytest.mark.capability("ML-2")
async def test_the_boot_list_is_loaded_before_ready_and_one_bad_entry_stops_no_other(
    replica: Running, folders: Path, tmp_path: Path
):
    entries = tuple(
        LoadAdapterRequest(name=name, uri=f"file://{folders}/{folder}", version="v1")
        for name, folder in (("boot-one", "one"), ("boot-none", "nothing"), ("boot-two", "two"))
    )
    (tmp_path / "adapters.json").write_bytes(BootList(adapters=entries).wire())
    (tmp_path / "garbage.json").write_text("{")

    await load_boot_list(replica.models[0], read_boot_list(tmp_path / "adapters.json"))
    states = {info.name: info.state for info in replica.models[0].adapters.infos() if info.name.startswith("boot-")}
    for name in states:
        await replica.admin(f"/adapters/{name}", "DELETE")

    assert states.pop("boot-none") == "failed"
    assert set(states) == {"boot-one", "boot-two"}
    assert set(states.values()) <= {"host", "disk", "slot"}
    assert read_boot_list(tmp_path / "garbage.json") == read_boot_list(tmp_path / "absent.json") == ()


async def test_credentials_of_a_load_reach_the_source_and_nothing_else(replica: Running, folders: Path):
    seen: list[dict[str, str]] = []

    def fetch_it(uri: str, _from_client: bool, credentials: Any) -> Path:
        seen.append(dict(credentials))
        return folders / "one"

    registry = replica.models[0].adapters
    before, registry._source = registry._source, AdapterSource(fetch_it, lambda _: None)
    try:
        with structlog.testing.capture_logs() as logs:
            body = {"name": "secret", "uri": "s3://bucket/one", "credentials": {"AWS_REGION": "r", "LD_PRELOAD": "x"}}
            await replica.admin("/adapters", "POST", json=body)
            await replica.until(lambda _: registry.info("secret").state != "loading")
    finally:
        registry._source = before
    listed = (await replica.admin("/adapters")).text
    await replica.admin("/adapters/secret", "DELETE")

    assert seen == [{"AWS_REGION": "r"}]
    assert "LD_PRELOAD" not in listed + str(logs)
