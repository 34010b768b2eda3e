"""How a replica computes, where its model comes from and what opens it: the API server knows what goes together."""

import copy
from typing import Any

import pytest

from slipway_api.inference_service import InferenceService
from slipway_operator.core.service.rollout.revision import digest, inputs
from tests.api.manifests import a_manifest, apply, assert_refused, stored

pytestmark = pytest.mark.apiserver

LONG = "x" * 16_384
SYSTEM = {"role": "system", "content": "Be brief."}


def a_model(**model: Any) -> dict[str, Any]:
    return {"model": {"uri": "hf://org/model"} | model}


@pytest.mark.parametrize(
    "uri",
    [
        "hf://org/model@v1.0",
        "s3://bucket",
        "s3://my.bucket-2/models/llama 3".replace(" ", "-"),
        "http://models.internal:8080/llama/",
        "https://host/llama?version=3",
        "pvc://models",
        "pvc://models.team-a/llama/3..1",
        "file:///opt/slipway/models/tiny",
    ],
)
@pytest.mark.capability("BS-3")
def test_a_model_may_live_at_each_of_these_addresses(api, uri):
    apply(api, a_manifest("address", **a_model(uri=uri)), "--dry-run=server")


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # what is wrong, the spec, the sentence
    ("a bucket in capitals", a_model(uri="s3://Bucket/x"), "s3://bucket/prefix"),
    ("a password in the address", a_model(uri="https://user:secret@host/model"), "https://host/path"),
    ("a host without a path", a_model(uri="https://host"), "https://host/path"),
    ("a claim that can be none", a_model(uri="pvc://My_Claim/llama"), "pvc://claim/path"),
    ("a path out of the claim", a_model(uri="pvc://models/../secrets"), "pvc://claim/path"),
    ("a path that ends upwards", a_model(uri="file:///opt/.."), "file:///absolute/path"),
    ("a tokenizer in a claim", a_model(tokenizer={"uri": "pvc://models/llama"}), "uri must be hf://"),
    ("no Secret's name", a_model(credentialsSecretRef={}), "spec.model.credentialsSecretRef.name: Required value"),
    ("an empty Secret's name", a_model(credentialsSecretRef={"name": ""}), "credentialsSecretRef.name"),
    ("a warm prompt of nothing", a_model(warmPrompts=[{}]), "either a prompt or messages"),
    (
        "a warm prompt of both",
        a_model(warmPrompts=[{"prompt": "a", "messages": [SYSTEM]}]),
        "either a prompt or messages",
    ),
    ("a message without a role", a_model(warmPrompts=[{"messages": [{"content": "a"}]}]), "role: Required value"),
    (
        "a message of a tool",
        a_model(warmPrompts=[{"messages": [SYSTEM | {"role": "tool"}]}]),
        'supported values: "system", "user", "assistant"',
    ),
    ("a warm prompt too long", a_model(warmPrompts=[{"prompt": LONG + "x"}]), "may not be more than 16384"),
    (
        "messages too long together",
        a_model(warmPrompts=[{"messages": [SYSTEM, {"role": "user", "content": LONG}]}]),
        "at most 16384 characters together",
    ),
    ("too many warm prompts", a_model(warmPrompts=[{"prompt": "a"}] * 17), "must have at most 16 items"),
    ("weights of four bits", {"runtime": {"quantization": "int4"}}, 'supported values: "none", "int8", "fp8"'),
    ("a KV cache of four bits", {"runtime": {"kvCache": {"dtype": "int4"}}}, 'supported values: "auto", "fp8", "int8"'),
    (
        "heads that are not supported",
        {"runtime": {"speculation": {"method": "eagle3"}}},
        'supported values: "none", "promptLookup", "draft"',
    ),
    (
        "drafts of no model",
        {"runtime": {"speculation": {"method": "draft"}}},
        "draftModel is needed for method draft, and only there",
    ),
    (
        "a draft model that nobody uses",
        {"runtime": {"speculation": {"method": "promptLookup", "draftModel": {"uri": "hf://org/small"}}}},
        "draftModel is needed for method draft, and only there",
    ),
    (
        "a draft model on a claim",
        {"runtime": {"speculation": {"method": "draft", "draftModel": {"uri": "pvc://models/small"}}}},
        "uri must be hf://organisation/model",
    ),
    (
        "a KV cache larger than the container",
        {
            "runtime": {"kvCache": {"bytes": "2Gi"}},
            "resources": {"gpu": {"count": 0}, "limits": {"memory": "2147483648"}},
        },
        "runtime.kvCache.bytes must be below resources.limits.memory",
    ),
    (
        "host memory for KV larger than the container",
        {
            "runtime": {"kvCache": {"hostBytes": "2Gi"}},
            "resources": {"gpu": {"count": 1}, "limits": {"memory": "2147483648"}},
        },
        "runtime.kvCache.hostBytes must be below resources.limits.memory",
    ),
    ("host memory that is no quantity", {"runtime": {"kvCache": {"hostBytes": "32gb"}}}, "such as 32Gi"),
    ("pooling of a service that generates", {"runtime": {"pooling": "mean"}}, "pooling is only for task embed"),
    (
        "guesses of embeddings",
        {"runtime": {"task": "embed", "speculation": {"method": "promptLookup"}}},
        "speculation must be none",
    ),
    ("adapters of embeddings", {"runtime": {"task": "embed", "lora": {}}}, "lora is only for task generate"),
    (
        "a smoke test of embeddings",
        {"runtime": {"task": "embed"}, "rollout": {"gates": {"smoke": [{"prompt": "a", "mustMatch": "b"}]}}},
        "rollout.gates ask for text",
    ),
    ("no guesses", {"runtime": {"speculation": {"maxTokens": 0}}}, "greater than or equal to 1"),
    ("too many guesses", {"runtime": {"speculation": {"maxTokens": 33}}}, "less than or equal to 32"),
    ("perhaps deterministic", {"runtime": {"deterministic": "yes"}}, "must be of type boolean"),
    ("a day that no calendar has", {"restartAt": "2026-02-30T12:00:00Z"}, "restartAt must be a moment of the calendar"),
    ("a moment without a zone", {"restartAt": "2026-02-28T12:00:00"}, "spec.restartAt"),
    ("half a budget", {"availability": {"podDisruptionBudget": "Some"}}, "supported values"),
    ("a priority class with blanks", {"availability": {"priorityClassName": "very high"}}, "priorityClassName"),
    ("no adapters", {"runtime": {"lora": {"maxAdapters": 0}}}, "greater than or equal to 1"),
    ("a rank of nothing", {"runtime": {"lora": {"maxRank": 0}}}, "greater than or equal to 1"),
    (
        "more adapters in slots than in memory",
        {"runtime": {"lora": {"maxAdapters": 64}}},
        "maxCPUAdapters must be at least maxAdapters",
    ),
]


@pytest.mark.capability("BS-3")
@pytest.mark.parametrize(("spec", "sentence"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_what_cannot_work_is_refused_with_one_sentence(api, spec, sentence):
    assert_refused(api, a_manifest("bad", **spec), sentence)


@pytest.mark.capability("BS-3")
def test_what_can_work_is_accepted(api):
    """Every field once, at its limit, so that the cost of all rules fits."""
    everything = a_manifest(
        "features",
        suspend=True,
        restartAt="2026-05-01T12:00:00.5+02:00",
        availability={
            "podDisruptionBudget": "None",
            "maxNodeDrainBlockSeconds": 0,
            "protectStartup": False,
            "priorityClassName": "serving-high",
        },
        model={
            "uri": "s3://bucket/models/llama",
            "credentialsSecretRef": {"name": "bucket"},
            "tokenizer": {"uri": "https://host/tokenizer/"},
            "warmPrompts": [{"prompt": LONG}, *[{"messages": [SYSTEM] * 8}] * 15],
        },
        runtime={
            "quantization": "int8",
            "deterministic": True,
            "kvCache": {"dtype": "fp8", "hostBytes": "512Mi"},
            "speculation": {"method": "draft", "maxTokens": 32, "draftModel": {"uri": "s3://bucket/models/small"}},
            "lora": {"maxAdapters": 256, "maxCPUAdapters": 4096, "maxRank": 512, "experts": True},
        },
    )
    given = copy.deepcopy(everything["spec"])

    apply(api, everything)

    kept = stored(api, "features")["spec"]
    assert kept["model"].items() >= {key: given["model"][key] for key in ("uri", "warmPrompts")}.items()
    assert kept["runtime"]["lora"] == given["runtime"]["lora"]
    assert kept["runtime"]["quantization"] == "int8"


@pytest.mark.parametrize(
    "resources",
    [
        {"gpu": {"count": 0}, "limits": {"memory": "3Gi"}},
        {"gpu": {"count": 0}, "limits": {"cpu": 1}},
        {"gpu": {"count": 1}, "limits": {"memory": "1Gi"}},
    ],
    ids=["more memory", "any memory", "the GPU's memory"],
)
@pytest.mark.capability("OP-5")
def test_a_kv_cache_may_be_as_large_as_its_memory_allows(api, resources):
    manifest = a_manifest("room", runtime={"kvCache": {"bytes": "2Gi"}}, resources=resources)

    apply(api, manifest, "--dry-run=server")


def test_adapters_are_off_until_they_are_asked_for_and_then_have_room(api):
    apply(api, a_manifest("plain"))
    apply(api, a_manifest("adapters", runtime={"lora": {}}))

    plain, adapters = stored(api, "plain")["spec"]["runtime"], stored(api, "adapters")["spec"]["runtime"]
    assert "lora" not in plain
    assert adapters["lora"] == {"maxAdapters": 8, "maxCPUAdapters": 32, "maxRank": 16, "experts": False}
    assert (plain["quantization"], plain["deterministic"], plain["kvCache"]["dtype"]) == ("none", False, "auto")
    assert plain["speculation"] == {"method": "none", "maxTokens": 4}


@pytest.mark.capability("OP-7")
def test_the_defaults_that_the_api_server_writes_out_restart_nobody(api):
    manifest = a_manifest("upgraded", runtime={"maxModelLen": 2048})
    apply(api, manifest)

    as_written, as_stored = InferenceService.parse(manifest), InferenceService.parse(stored(api, "upgraded"))
    assert digest(inputs(as_stored.spec)) == digest(inputs(as_written.spec))


@pytest.mark.parametrize(
    ("field", "words"),
    [
        (".spec.model.credentialsSecretRef", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and if needed"),
        (".spec.model.warmPrompts.messages", "the chat template makes a prompt of them"),
        (".spec.runtime.quantization", "made while they load"),
        (".spec.runtime.deterministic", "alone and in any batch"),
        (".spec.runtime.kvCache.hostBytes", "part of limits.memory"),
        (".spec.runtime.speculation.method", "what followed the last tokens"),
        (".spec.runtime.speculation.draftModel", "its own KV cache, which is part of kvCache"),
        (".spec.runtime.lora", "none can be loaded"),
    ],
)
def test_kubectl_explains_every_field(api, field, words):
    assert words in " ".join(api.kubectl("explain", f"infsvc{field}").split())
