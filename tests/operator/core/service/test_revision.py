"""What makes a new revision, and what must not."""

import pytest

from slipway_api.inference_service import InferenceService
from slipway_api.inference_status import InferenceServiceStatus, RevisionStatus
from slipway_operator.core.service import revision
from slipway_operator.core.service.revision import digest, inputs, resolve
from tests.builders import a_service, edited, promised

BASE = a_service(runtime={"maxModelLen": 2048})


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"uri": "file:///other"}},
        {"model": {"uri": BASE.spec.model.uri, "tokenizer": {"sha256": "0" * 64}}},
        {"model": {"uri": BASE.spec.model.uri, "samplingDefaults": {"maxTokens": 5}}},
        {"model": {"uri": BASE.spec.model.uri, "chatTemplate": "{{ messages }}"}},
        {"runtime": {"maxModelLen": 1024}},
        {"runtime": {"maxModelLen": 2048, "image": "mine:1"}},
        {"resources": {"gpu": {"count": 0}}},
        {"template": {"spec": {"nodeSelector": {"zone": "a"}}}},
        {"model": {"uri": BASE.spec.model.uri, "credentialsSecretRef": {"name": "hub"}}},
        {"model": {"uri": BASE.spec.model.uri, "warmPrompts": [{"prompt": "a"}]}},
        {"runtime": {"maxModelLen": 2048, "quantization": "int8"}},
        {"runtime": {"maxModelLen": 2048, "deterministic": True}},
        {"runtime": {"maxModelLen": 2048, "tensorParallelSize": 2}},
        {"runtime": {"maxModelLen": 2048, "kvCache": {"dtype": "int8"}}},
        {"runtime": {"maxModelLen": 2048, "speculation": {"method": "promptLookup"}}},
        {"runtime": {"maxModelLen": 2048, "lora": {}}},
    ],
)
def test_what_the_user_says_of_the_pods_makes_a_new_revision(change):
    assert resolve(edited(BASE, **change), "i").hash != resolve(BASE, "i").hash


@pytest.mark.capability("OP-7")
@pytest.mark.parametrize(
    "change",
    [
        {"replicas": 7},
        {"autoscaling": {"maxReplicas": 9}},
        {"drain": {"timeoutSeconds": 7, "endpointPropagationSeconds": 1}},
        {"rollout": {"rollingUpdate": {"maxSurge": 3}}},
        {"runtime": {"maxModelLen": 2048, "maxNumSeqs": 64}},
        {"template": {"metadata": {}}},
    ],
    ids=["scale", "autoscaling", "drain", "rollout", "a default written out", "an empty overlay"],
)
def test_nothing_else_does(change):
    assert resolve(edited(BASE, **change), "i").hash == resolve(BASE, "i").hash


@pytest.mark.capability("OP-7")
def test_an_operator_with_another_default_image_changes_neither_hash_nor_image():
    service = promised(BASE, 1)
    assert resolve(service, "slipway/runtime:next") == resolve(BASE, "slipway/runtime:test")


DEFAULTS_OF_TODAY = {
    "quantization": "none",
    "deterministic": False,
    "kvCache": {"gpuMemoryUtilization": "0.85", "dtype": "auto"},
    "speculation": {"method": "none", "maxTokens": 4},
}


@pytest.mark.capability("OP-7")
@pytest.mark.parametrize(
    ("spec", "hash"),
    [
        ({"model": {"uri": "hf://org/model@main"}}, "gmcn47xcqz"),
        ({"model": {"uri": "hf://org/model@main"}, "runtime": DEFAULTS_OF_TODAY}, "gmcn47xcqz"),
        (
            {
                "model": {
                    "uri": "hf://org/model@main",
                    "chatTemplate": "{{ x }}",
                    "samplingDefaults": {"maxTokens": 1024, "topK": 20},
                },
                "runtime": {
                    "maxModelLen": 4096,
                    "kvCache": {"gpuMemoryUtilization": "0.85", "bytes": "6Mi"},
                    "env": [{"name": "A", "value": "1"}],
                },
                "resources": {"gpu": {"count": 1}, "limits": {"memory": "2Gi"}},
            },
            "pxltsz8x99",
        ),
    ],
    ids=["three lines", "three lines, with the defaults of a newer API server", "many fields"],
)
def test_services_of_the_first_release_keep_their_hash(spec, hash):
    """Written down from Slipway 0.1: another hash here would restart every replica of every user."""
    service = InferenceService.parse({"metadata": {"name": "chat"}, "spec": spec})

    assert digest(inputs(service.spec)) == hash


def test_a_revision_that_comes_back_gets_the_image_it_had():
    service = promised(BASE, 1)
    other = edited(service, runtime={"maxModelLen": 1024})
    assert resolve(other, "next").image == "next"
    assert resolve(edited(other, runtime={"maxModelLen": 2048}), "next").image == "slipway/runtime:test"


def test_revisions_never_share_the_part_of_the_hash_that_names_pods(monkeypatch):
    plain = digest(inputs(BASE.spec))
    other = RevisionStatus(name="x", hash=plain[:5] + "22222", image="i")
    taken = BASE.model_copy(update={"status": InferenceServiceStatus(revisions=(other,))})

    first = resolve(taken, "i")
    assert first.hash == digest(inputs(BASE.spec), 1)

    # The other is forgotten by now; the revision keeps the hash that its pods carry.
    mine = RevisionStatus(name="y", hash=first.hash, image="i")
    later = BASE.model_copy(update={"status": InferenceServiceStatus(revisions=(mine,))})
    assert resolve(later, "i").hash == first.hash


def test_hash_is_ten_characters_that_fit_a_label_and_make_no_words():
    value = resolve(BASE, "i").hash
    assert len(value) == revision.HASH_LENGTH
    assert not set(value) & set("aeiou013")
