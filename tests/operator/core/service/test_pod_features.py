"""What the engine's features, and the place where the model is, make of a pod."""

import json
import shlex

import pytest

from slipway_operator.core.installation import NONROOT, PlacementDefaults
from slipway_operator.core.service.replicas.access import PortAccess
from slipway_operator.core.service.replicas.pod import arguments, build_pod
from slipway_operator.core.service.rollout.revision import Revision
from slipway_runtime.command_line import parse_arguments, serve_settings
from slipway_runtime.settings import RuntimeSettings
from tests.builders import a_service

REVISION = Revision("bcdfghjklm", "slipway/runtime:1")


def pod_of(service):
    access = PortAccess(nonce="n", admin_digests=("aa",))
    return build_pod(service, REVISION, slot=0, attempt=0, access=access, user=NONROOT, placement=PlacementDefaults())[
        "spec"
    ]


def server_of(service):
    return pod_of(service)["containers"][0]


def settings_of(service) -> RuntimeSettings:
    """What the runtime understands of the pod's command line, once the kubelet has put `$$` back to `$`."""
    command = [argument.replace("$$", "$") for argument in arguments(service, REVISION)]
    return serve_settings(parse_arguments(command), {})


def test_an_image_of_before_gets_no_flag_that_it_does_not_know():
    """A revision keeps its image: a newer operator that adds flags would crash every further replica of it."""
    service = a_service(uri="hf://org/model@abc", runtime={"image": "slipway/runtime:0.1.0"})

    assert shlex.join(arguments(service, REVISION)) == (
        "serve hf://org/model@abc --port 8000 --admin-port 8001 --drain-timeout 300 --served-name chat"
        " --revision bcdfghjklm --dtype auto --max-num-seqs 64 --max-num-batched-tokens 2048 --block-size 16"
        """ --gpu-memory-utilization 0.85 --sampling-defaults '{"max_tokens":1024}'"""
    )


def test_each_feature_reaches_the_runtime():
    service = a_service(
        runtime={
            "quantization": "int8",
            "deterministic": True,
            "kvCache": {"dtype": "fp8", "hostBytes": "2Gi"},
            "speculation": {"method": "promptLookup", "maxTokens": 6},
            "lora": {"maxAdapters": 2, "maxRank": 64},
        }
    )

    settings = settings_of(service)
    assert (settings.quantization, settings.kv_cache_dtype, settings.deterministic) == ("int8", "fp8", True)
    assert settings.kv_cache_host_bytes == 2 * 2**30
    assert (settings.speculation, settings.speculation_max_tokens) == ("promptLookup", 6)
    assert (settings.max_adapters, settings.max_cpu_adapters, settings.max_rank) == (2, 32, 64)


@pytest.mark.capability("ML-11")
def test_room_for_experts_is_a_flag_that_an_older_image_does_not_get():
    without = a_service(runtime={"lora": {"maxAdapters": 2}})
    with_room = a_service(runtime={"lora": {"maxAdapters": 2, "experts": True}})

    assert "--lora-experts" not in arguments(without, REVISION)
    assert not settings_of(without).lora_experts
    assert settings_of(with_room).lora_experts


@pytest.mark.capability("DD-3")
def test_gpus_that_share_a_model_hear_of_it_and_have_memory_to_meet_in():
    service = a_service(runtime={"tensorParallelSize": 2}, resources={"gpu": {"count": 2}})

    assert settings_of(service).tensor_parallel_size == 2
    assert {"name": "shm", "mountPath": "/dev/shm"} in server_of(service)["volumeMounts"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in pod_of(service)["volumes"]
    alone = a_service(resources={"gpu": {"count": 1}})
    assert settings_of(alone).tensor_parallel_size == 1
    assert "shm" not in {volume["name"] for volume in pod_of(alone)["volumes"]}


@pytest.mark.capability("SD-4")
def test_a_draft_model_is_fetched_with_the_credentials_of_the_model():
    service = a_service(
        uri="file:///models/large",
        model={"credentialsSecretRef": {"name": "keys"}},
        runtime={"speculation": {"method": "draft", "maxTokens": 5, "draftModel": {"uri": "hf://org/small@abc"}}},
    )

    settings = settings_of(service)
    required = {
        one["name"]: not one["valueFrom"]["secretKeyRef"]["optional"]
        for one in server_of(service)["env"]
        if "secretKeyRef" in one.get("valueFrom", {})
    }
    assert (settings.speculation, settings.speculation_max_tokens) == ("draft", 5)
    assert settings.draft_model_uri == "hf://org/small@abc"
    assert [name for name, is_required in required.items() if is_required] == ["HF_TOKEN"]
    assert "--draft-model-uri" not in arguments(a_service(), REVISION), "an older image does not know the flag"


def test_without_a_method_nobody_hears_how_much_to_guess():
    service = a_service(runtime={"speculation": {"maxTokens": 8}})

    assert not [flag for flag in arguments(service, REVISION) if "speculation" in flag]


@pytest.mark.capability("KV-10")
def test_warm_prompts_arrive_as_they_were_written():
    """Together they may be longer than Linux lets one argument be, so each travels alone."""
    system = {"role": "system", "content": 'Say "no" to $(HOME), kindly: \u00e9\n'}
    prompts = [{"prompt": "Once upon"}, {"messages": [system]}]
    service = a_service(model={"warmPrompts": prompts})

    assert settings_of(service).warm_prompts == ("Once upon", (system,))
    longest = {"prompt": "\x01" * 16_384}
    args = arguments(a_service(model={"warmPrompts": [longest] * 16}), REVISION)
    assert max(len(argument.encode()) for argument in args) < 128 * 1024


def test_adapters_of_the_start_are_arguments_like_any_other():
    service = a_service(runtime={"lora": {"maxAdapters": 2}, "args": ["--adapter", "sql=s3://bucket/sql"]})

    assert [adapter.name for adapter in settings_of(service).adapters] == ["sql"]


@pytest.mark.capability("ST-1")
@pytest.mark.parametrize(
    ("uri", "claim", "told"),
    [
        ("pvc://models/llama/8b", "models", "file:///mnt/slipway/pvc/llama/8b"),
        ("pvc://models.team-a/", "models.team-a", "file:///mnt/slipway/pvc/"),
        ("pvc://models", "models", "file:///mnt/slipway/pvc"),
    ],
)
def test_a_model_in_a_claim_is_a_directory_to_the_runtime(uri, claim, told):
    service = a_service(uri=uri)

    spec, server = pod_of(service), server_of(service)
    assert server["args"][:2] == ["serve", told]
    assert spec["volumes"][-1] == {
        "name": "slipway-pvc",
        "persistentVolumeClaim": {"claimName": claim, "readOnly": True},
    }
    assert server["volumeMounts"][-1] == {"name": "slipway-pvc", "mountPath": "/mnt/slipway/pvc", "readOnly": True}


def test_nothing_of_the_users_hides_the_models_claim():
    overlay = {
        "containers": [{"name": "server", "volumeMounts": [{"name": "mine", "mountPath": "/mnt/slipway/pvc"}]}],
        "volumes": [{"name": "mine", "emptyDir": {}}, {"name": "slipway-pvc", "emptyDir": {}}],
    }
    service = a_service(uri="pvc://models/llama", template={"spec": overlay})

    volumes = {volume["name"]: volume for volume in pod_of(service)["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in server_of(service)["volumeMounts"]}
    assert volumes[mounts["/mnt/slipway/pvc"]]["persistentVolumeClaim"]["claimName"] == "models"


@pytest.mark.capability("PL-7")
@pytest.mark.parametrize(
    ("uri", "tokenizer", "required"),
    [
        ("hf://org/model", "", {"HF_TOKEN"}),
        ("s3://bucket/model", "", {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}),
        ("https://host/model", "", {"HTTP_BEARER_TOKEN"}),
        ("file:///models/llama", "hf://org/tokenizer", {"HF_TOKEN"}),
        ("pvc://models/llama", "", set()),
    ],
)
def test_the_secret_opens_the_address_and_its_key_must_be_there(uri, tokenizer, required):
    """An optional key would be left out in silence, and the hub would say that the model does not exist."""
    service = a_service(uri=uri, model={"tokenizer": {"uri": tokenizer}, "credentialsSecretRef": {"name": "keys"}})

    references = {
        entry["name"]: entry["valueFrom"]["secretKeyRef"]
        for entry in server_of(service)["env"]
        if "secretKeyRef" in entry.get("valueFrom", {})
    }
    assert {name for name, reference in references.items() if not reference["optional"]} == required
    assert references["AWS_ENDPOINT_URL"] == {"name": "keys", "key": "AWS_ENDPOINT_URL", "optional": True}
    assert len(references) == 7


def test_no_secret_is_read_that_nobody_named():
    assert "secretKeyRef" not in json.dumps(server_of(a_service(uri="s3://bucket/model")))


@pytest.mark.capability("PL-7")
def test_a_variable_of_the_users_wins_over_the_secret():
    hub = {"name": "AWS_ENDPOINT_URL", "value": "http://minio:9000"}
    service = a_service(
        uri="s3://bucket/model", model={"credentialsSecretRef": {"name": "keys"}}, runtime={"env": [hub]}
    )

    assert hub in server_of(service)["env"]
    assert len([entry for entry in server_of(service)["env"] if entry["name"] == "AWS_ENDPOINT_URL"]) == 1
