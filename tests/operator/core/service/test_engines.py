"""A service of a foreign engine: its pods follow from the Engine and the spec, and from the record afterwards."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipway_api import names
from slipway_api.crd import engine_manifest
from slipway_api.inference_service import InferenceService
from slipway_operator.core.engines import PinnedEngine, find_lacking, see_engine
from slipway_operator.core.installation import NONROOT, PlacementDefaults
from slipway_operator.core.profiles import apply_profile
from slipway_operator.core.service.replicas.access import PortAccess
from slipway_operator.core.service.replicas.pod import build_pod
from slipway_operator.core.service.rollout.revision import create_revision, load_revisions, resolve
from tests.builders import IMAGE, a_service, edited
from tests.operator.core.simulated_cluster import SimulatedCluster

pytestmark = pytest.mark.capability("OP-11")

VLLM = engine_manifest("vllm")["spec"]
ENGINES = {name: engine_manifest(name)["spec"] for name in ("slipway", "vllm", "sglang")}
NEWER = {**VLLM, "image": "vllm:newer", "args": [*VLLM["args"], {"text": ["--renamed-flag"]}]}


def a_vllm_service(**spec: Any):
    runtime = {"engine": "vllm", **spec.pop("runtime", {})}
    return a_service(finalizers=(), runtime=runtime, uri=spec.pop("uri", "hf://org/model@v1"), **spec)


def pinned(spec: dict[str, Any] = VLLM, name: str = "vllm") -> PinnedEngine:
    seen = see_engine(name, {name: spec})
    assert seen is not None
    assert seen.spec is not None, seen.fault
    return PinnedEngine(name=name, spec=seen.spec, agent_image="agent:1")


def pod_of(service, engine: PinnedEngine | None, **access: Any) -> dict[str, Any]:
    digests = {"admin_digests": ("a",), "gateway_digests": ("g",)} | access
    return build_pod(
        service,
        resolve(service, IMAGE if engine is None else engine.spec.image, (), engine),
        slot=1,
        attempt=2,
        access=PortAccess(nonce="n" * 32, **digests),
        user=NONROOT,
        placement=PlacementDefaults(),
    )


def container(pod: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in pod["spec"]["containers"] if one["name"] == name)


def a_world(service, engines=ENGINES, **world: Any) -> SimulatedCluster:
    cluster = SimulatedCluster(service, load_seconds=2, **world)
    cluster.engines = dict(engines)
    cluster.reconcile()
    cluster.run(20)
    return cluster


# --- the default ------------------------------------------------------------------------------------------------------

# What the commit before this kind built: hash of the revision, and SHA-256 of the pod as JSON.
BEFORE: dict[str, tuple[dict[str, Any], str, str]] = {
    "smallest": ({}, "n727l76lhx", "f227a2ef6766688e"),
    "gpu": (
        {
            "uri": "hf://org/model@v1",
            "resources": {"gpu": {"count": 2}},
            "runtime": {
                "tensorParallelSize": 2,
                "lora": {"maxAdapters": 2},
                "maxModelLen": 4096,
                "quantization": "fp8",
            },
        },
        "zts47kgvp7",
        "51363d88653d91a7",
    ),
    "closed": (
        {
            "uri": "pvc://models/x",
            "routing": {"directAccess": "GatewayOnly"},
            "resources": {"gpu": {"count": 0}, "limits": {"cpu": "2", "memory": "4Gi"}},
            "runtime": {"env": [{"name": "A", "value": "b"}], "args": ["--x"], "image": "own:1"},
        },
        "k2hxgzgbfc",
        "fff8ba715af81eb1",
    ),
}

# Labels for dashboards and pickers, which stand before ours (ADR 174).
ADDED_LATER = names.RECOMMENDED_LABELS


@pytest.mark.parametrize("name", BEFORE)
@pytest.mark.parametrize("is_named", [False, True])
def test_nothing_changes_for_our_own_runtime(name, is_named):
    spec, hash, digest = BEFORE[name]
    runtime = {**spec.get("runtime", {}), **({"engine": "slipway"} if is_named else {})}
    service = a_service(**{**spec, "runtime": runtime})
    access = {"serving_digests": ("s",), "gateway_digests": ()} if name == "closed" else {}

    pod = pod_of(service, None, **access)
    for label in ADDED_LATER:
        del pod["metadata"]["labels"][label]

    assert resolve(service, IMAGE).hash == hash
    assert hashlib.sha256(json.dumps(pod).encode()).hexdigest()[:16] == digest
    (record,) = create_revision(service, resolve(service, IMAGE), ())
    assert "engine" not in record.manifest["data"]


def test_an_engine_named_slipway_changes_nothing_about_our_own_runtime():
    world = a_world(a_service(finalizers=()), {"slipway": {"builtIn": True, "image": "evil", "args": []}})

    assert [one["spec"]["containers"][0]["image"] for one in world.manifests.values()] == [IMAGE]


@pytest.mark.capability("SD-4")
def test_a_draft_model_is_refused_by_an_engine_without_a_flag_for_it():
    drafting = {"speculation": {"method": "draft", "draftModel": {"uri": "hf://org/small"}}}

    said = find_lacking(a_vllm_service(runtime=drafting).spec, pinned())

    assert said == (
        "engine vllm has no runtime.speculation.method draft (it has promptLookup): change "
        "spec.runtime.speculation.method, or choose another spec.runtime.engine"
    )


# --- the pod ----------------------------------------------------------------------------------------------------------


def test_the_command_line_has_what_the_spec_sets():
    service = a_vllm_service(
        runtime={"maxModelLen": 4096, "dtype": "bf16", "speculation": {"method": "promptLookup", "maxTokens": 3}}
    )

    server = container(pod_of(service, pinned()), "server")

    assert server["command"] == ["vllm", "serve", "org/model"]
    line = " ".join(server["args"])
    assert "--port 8000 --served-model-name chat" in line
    assert "--revision v1" in line
    assert "--dtype bfloat16" in line
    assert "--max-model-len 4096" in line
    assert "--max-num-seqs 64" in line
    assert json.loads(server["args"][server["args"].index("--speculative-config") + 1]) == {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 4,
    }
    assert "--enable-lora" not in line
    assert "--quantization" not in line


def test_own_arguments_come_last_and_own_variables_win():
    service = a_vllm_service(runtime={"args": ["--seed", "1"], "env": [{"name": "HF_HOME", "value": "/own"}]})

    server = container(pod_of(service, pinned()), "server")

    assert server["args"][-2:] == ["--seed", "1"]
    assert {one["name"]: one.get("value") for one in server["env"]}["HF_HOME"] == "/own"


def test_a_model_of_a_claim_is_a_path():
    assert container(pod_of(a_vllm_service(uri="pvc://models/llama"), pinned()), "server")["command"] == [
        "vllm",
        "serve",
        "/mnt/slipway/pvc/llama",
    ]


def test_the_agent_stands_beside_the_engine():
    service = a_vllm_service(runtime={"lora": {"maxAdapters": 2}})

    pod = pod_of(service, pinned())

    server, agent = container(pod, "server"), container(pod, "slipway-agent")
    assert agent["image"] == "agent:1"
    assert agent["command"] == ["slipway-agent"]
    assert agent["resources"]["limits"] == {"memory": "64Mi"}
    assert agent["ports"] == [{"name": "admin", "containerPort": 8001, "protocol": "TCP"}]
    assert [port["containerPort"] for port in server["ports"]] == [8000]
    values = {one["name"]: one.get("value") for one in agent["env"]}
    assert (
        json.loads(values["SLIPWAY_DIALECT"].replace("$$", "$"))["metrics"]["running"]
        == VLLM["dialect"]["metrics"]["running"]
    )
    assert values["SLIPWAY_ADMIN_TOKEN_SHA256"] == "a"
    assert "SLIPWAY_ADMIN_TOKEN_SHA256" not in {one["name"] for one in server["env"]}, "the engine needs no digest"
    assert agent["securityContext"] == server["securityContext"]


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_gateway_and_pickers_learn_the_engine_from_the_pod(name):
    metadata = pod_of(a_vllm_service(), pinned(ENGINES[name], name))["metadata"]

    assert metadata["annotations"][names.ANNOTATION_ENGINE] == name
    assert metadata["labels"][names.LABEL_ENGINE_TYPE] == name
    ours = pod_of(a_service(), None)["metadata"]
    assert names.ANNOTATION_ENGINE not in ours["annotations"]
    assert ours["labels"][names.LABEL_ENGINE_TYPE] == "vllm", "its metrics have vLLM's names"


def test_readiness_asks_the_agent_and_liveness_the_engine():
    server = container(pod_of(a_vllm_service(runtime={"startupTimeoutSeconds": 3600}), pinned()), "server")

    assert server["readinessProbe"]["httpGet"] == {"path": "/ready", "port": 8001}
    assert server["livenessProbe"]["httpGet"] == {"path": "/health", "port": 8000}
    startup, live = server["startupProbe"], server["livenessProbe"]
    assert startup["failureThreshold"] * startup["periodSeconds"] == 3600, "compilation is part of the start"
    assert live["failureThreshold"] * live["periodSeconds"] == VLLM["dialect"]["probe"]["restartAfterSeconds"]


def test_both_containers_wait_for_running_requests_before_the_pod_ends():
    pod = pod_of(a_vllm_service(), pinned())
    hook = container(pod, "server")["lifecycle"]["preStop"]["exec"]["command"]
    drained = {one["name"]: one.get("value") for one in container(pod, "slipway-agent")["env"]}["SLIPWAY_DRAINED_FILE"]

    assert container(pod, "slipway-agent")["lifecycle"]["preStop"]["exec"]["command"] == ["slipway-agent", "drain"]
    assert f"[ -e {drained} ]" in hook[-1]
    for name in ("server", "slipway-agent"):
        mounts = {mount["name"]: mount["mountPath"] for mount in container(pod, name)["volumeMounts"]}
        assert drained.startswith(mounts["run"]), "the file is in a volume that both have"


def test_resources_that_the_service_names_win():
    service = a_vllm_service(resources={"gpu": {"count": 1}, "requests": {"cpu": "9"}})
    world = a_world(service)

    (manifest,) = world.manifests.values()
    assert container(manifest, "server")["resources"]["requests"] == {
        "cpu": "9",
        "memory": "16Gi",
        "nvidia.com/gpu": "1",
    }


# --- fields -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"runtime": {"blockSize": 32}}, ""),
        ({"runtime": {"pooling": "mean", "task": "embed"}}, "spec.runtime.pooling (vLLM takes it from the checkpoint)"),
        ({"model": {"digest": f"sha256:{'0' * 64}"}}, "spec.model.digest"),
        ({"uri": "s3://bucket/m"}, "engine vllm loads no s3:// model (it loads hf, pvc, oci, file)"),
    ],
)
def test_a_field_without_a_flag_is_refused_in_one_sentence(spec, sentence):
    found = find_lacking(apply_profile(a_vllm_service(**spec).spec), pinned())

    assert sentence in found
    assert bool(sentence) == bool(found)


def test_a_value_that_the_engine_does_not_have_is_refused():
    sglang = pinned(ENGINES["sglang"], "sglang")

    found = find_lacking(a_vllm_service(runtime={"quantization": "int8"}).spec, sglang)

    assert found == (
        "engine sglang has no runtime.quantization int8 (it has fp8): change spec.runtime.quantization, or choose "
        "another spec.runtime.engine"
    )


def test_a_field_that_the_engine_says_nothing_of_is_refused():
    spec = {**VLLM, "fields": [], "args": [one for one in VLLM["args"] if one.get("field") != "runtime.blockSize"]}

    assert "spec.runtime.blockSize" in find_lacking(a_vllm_service(runtime={"blockSize": 32}).spec, pinned(spec))


def test_a_refused_field_is_stalled_and_nothing_starts():
    world = a_world(a_vllm_service(runtime={"maxOutputTokens": 5}))

    stalled = world.condition("Stalled")
    assert (stalled.reason, world.pods) == ("InvalidSpec", {})
    assert "engine vllm has no flag for spec.runtime.maxOutputTokens" in stalled.message


def test_an_ignored_field_is_reported_while_the_service_serves():
    world = a_world(a_vllm_service(model={"warmPrompts": [{"prompt": "x"}]}, routing={"directAccess": "GatewayOnly"}))

    honoured = world.condition("EngineFieldsHonoured")
    assert (honoured.status.value, honoured.reason) == ("False", "EngineIgnores")
    assert "model.warmPrompts (the first request with such a prompt computes it)" in honoured.message
    assert "NetworkPolicy" in honoured.message
    assert world.condition("Ready").reason == "Available"


def test_without_ignored_fields_the_condition_is_absent():
    assert a_world(a_vllm_service()).condition("EngineFieldsHonoured") is None


# --- the Engine changes, or goes --------------------------------------------------------------------------------------


def test_a_changed_engine_rolls_out_by_the_strategy_of_the_service():
    steps = [{"setWeight": 50}, {"pauseSeconds": 60}, {"setWeight": 100}]
    world = a_world(a_vllm_service(replicas=2, rollout={"strategy": "Canary", "canary": {"steps": steps}}))
    old = world.service.status.current_revision

    world.engines["vllm"] = NEWER
    world.run(20)

    new = world.service.status.update_revision
    assert new != old
    assert world.service.status.current_revision == old, "the canary pauses"
    world.run(200)
    assert world.service.status.current_revision == new
    assert {container(world.manifests[name], "server")["image"] for name in world.pods} == {"vllm:newer"}


@pytest.mark.parametrize("change", [{"description": "another"}, {"fields": VLLM["fields"][:-1]}])
def test_what_changes_no_pod_makes_no_revision(change):
    world = a_world(a_vllm_service())
    before = world.service.status.update_revision

    world.engines["vllm"] = {**VLLM, **change}
    world.run(20)

    assert world.service.status.update_revision == before


def test_with_an_image_of_its_own_a_service_does_not_follow_the_engines():
    world = a_world(a_vllm_service(runtime={"image": "own:1"}))
    before = world.service.status.update_revision

    world.engines["vllm"] = {**VLLM, "image": "vllm:newer"}
    world.run(20)

    assert world.service.status.update_revision == before


def test_a_lost_replica_of_the_stable_revision_is_rebuilt_as_its_record_says():
    steps = [{"setWeight": 50}, {"pauseSeconds": 3600}, {"setWeight": 100}]
    world = a_world(a_vllm_service(replicas=2, rollout={"strategy": "Canary", "canary": {"steps": steps}}))
    old = world.service.status.current_revision
    world.engines["vllm"] = NEWER
    world.run(20)
    before = set(world.pods)
    lost = next(name for name, pod in world.pods.items() if pod.replica.revision == old)

    world.end(lost)
    world.run(40)

    (rebuilt,) = {name for name in world.pods if world.pods[name].replica.revision == old} - (before - {lost})
    assert container(world.manifests[rebuilt], "server")["image"] == VLLM["image"]
    assert "--renamed-flag" not in container(world.manifests[rebuilt], "server")["args"]


def test_an_unknown_engine_is_stalled_and_names_those_that_exist():
    world = a_world(a_service(finalizers=(), runtime={"engine": "vlm"}))

    stalled = world.condition("Stalled")
    assert (stalled.reason, world.pods) == ("EngineNotFound", {})
    assert "there is no Engine vlm (there are sglang, slipway, vllm)" in stalled.message
    assert world.event_reasons().count("EngineNotFound") == 1

    world.engines["vlm"] = VLLM
    world.run(20)
    assert world.condition("Stalled") is None
    assert world.condition("Ready").reason == "Available"


@pytest.mark.parametrize("how", ["deleted", "unreadable"])
def test_without_its_engine_a_service_runs_on_from_the_record(how):
    world = a_world(a_vllm_service(replicas=2))
    before, revision = set(world.pods), world.service.status.update_revision
    if how == "deleted":
        del world.engines["vllm"]
    else:
        world.engines["vllm"] = {**VLLM, "args": [{"text": ["$(of.a.newer.version)"]}]}

    world.run(30)

    assert set(world.pods) == before, "nothing is replaced"
    assert world.service.status.update_revision == revision
    assert world.condition("Stalled").reason == "EngineNotFound"
    assert world.condition("Ready").status.value == "True"

    lost = min(world.pods)
    world.end(lost)
    world.run(40)
    assert len(world.pods) == 2, "a lost replica is rebuilt from the record"
    assert {container(one, "server")["image"] for one in world.manifests.values()} == {VLLM["image"]}

    world.engines["vllm"] = VLLM
    world.run(20)
    assert world.condition("Stalled") is None
    assert world.service.status.update_revision == revision


def test_without_its_engine_a_new_spec_waits_and_replicas_stay():
    world = a_world(a_vllm_service(replicas=2))
    before = set(world.pods)
    del world.engines["vllm"]

    world.service = edited(world.service, runtime={"engine": "vllm", "maxModelLen": 512})
    world.run(30)

    assert set(world.pods) == before
    assert world.condition("Stalled").reason == "EngineNotFound"
    world.engines["vllm"] = VLLM
    world.run(60)
    assert not set(world.pods) & before, "now it rolls out"


def test_a_service_returns_to_our_own_runtime_by_a_rollout():
    world = a_world(a_vllm_service(uri="file:///opt/slipway/models/tiny"))

    world.service = edited(world.service, runtime={})
    world.run(60)

    assert {len(world.manifests[name]["spec"]["containers"]) for name in world.pods} == {1}
    assert world.condition("Ready").reason == "Available"


def test_a_record_without_its_engine_is_unreadable():
    """Of a foreign engine no pod can be built without its templates."""
    world = a_world(a_vllm_service())
    (name,) = world.revisions
    stored = world.revisions[name]

    data = {key: value for key, value in stored.data.items() if key != "engine"}
    records = load_revisions(world.service, [replace(stored, data=data)])

    assert records.readable == ()
    assert records.unreadable == {stored.hash: "the engine vllm is not in it"}


# --- other accelerators -----------------------------------------------------------------------------------------------

EXAMPLES = Path(__file__).parents[4] / "examples" / "engines"


@pytest.mark.parametrize("name", ["vllm-amd", "vllm-intel", "vllm-tpu"])
def test_another_accelerator_needs_its_resource_its_image_and_its_tolerations(name):
    document = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    service = InferenceService.parse(document)
    gpu, template = document["spec"]["resources"]["gpu"], document["spec"]["template"]["spec"]
    assert find_lacking(service.spec, pinned()) == ""

    pod = pod_of(service, pinned())
    server = container(pod, "server")

    assert server["image"] == document["spec"]["runtime"]["image"]
    assert server["resources"]["limits"][gpu["resourceName"]] == str(gpu["count"])
    assert "nvidia.com/gpu" not in json.dumps(pod)
    assert server["args"][server["args"].index("--tensor-parallel-size") + 1] == str(gpu["count"])
    assert template["tolerations"][0]["key"] in {one["key"] for one in pod["spec"]["tolerations"]}
    assert pod["spec"].get("nodeSelector", {}).items() >= template.get("nodeSelector", {}).items()
