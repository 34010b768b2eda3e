"""What makes a new revision, and what must not."""

from dataclasses import replace

import pytest

from slipway_api.inference_service import InferenceService
from slipway_api.inference_status import InferenceServiceStatus, RevisionStatus
from slipway_operator.core.installation import NONROOT, PlacementDefaults
from slipway_operator.core.service.replicas.access import PortAccess
from slipway_operator.core.service.replicas.pod import build_pod
from slipway_operator.core.service.rollout import revision
from slipway_operator.core.service.rollout.revision import (
    create_revision,
    delete_revisions,
    digest,
    inputs,
    load_revisions,
    resolve,
)
from tests.builders import a_service, edited, promised, stored

BASE = a_service(runtime={"maxModelLen": 2048})


@pytest.mark.capability("API-6")
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


@pytest.mark.capability("OP-13")
def test_what_is_stored_is_built_again_as_it_was_whatever_the_defaults_and_the_spec_say_today():
    """Finding 2, and a changed default of the schema: it mixes no arguments within one revision."""
    kept = stored(BASE)
    spec = dict(kept.data["spec"]) | {"runtime": dict(kept.data["spec"]["runtime"]) | {"maxNumSeqs": 7}}
    kept = replace(kept, data={"image": "runtime:then", "spec": spec})

    (loaded,) = load_revisions(BASE, [kept]).readable
    assert resolve(BASE, "runtime:now", [loaded]).image == "runtime:then"

    edited_since = edited(
        BASE, model={"uri": "file:///other"}, drain={"timeoutSeconds": 7, "endpointPropagationSeconds": 1}
    )
    access = PortAccess(nonce="n", admin_digests=())
    pod = build_pod(
        loaded.apply_to(edited_since),
        loaded,
        slot=0,
        attempt=0,
        access=access,
        user=NONROOT,
        placement=PlacementDefaults(),
    )
    (server,) = pod["spec"]["containers"]
    assert server["image"] == "runtime:then"
    assert server["args"][server["args"].index("--max-num-seqs") + 1] == "7"
    assert BASE.spec.model.uri in server["args"]
    assert pod["spec"]["terminationGracePeriodSeconds"] == 37, "drain is not part of a revision"


@pytest.mark.capability("OP-13")
def test_a_stored_revision_comes_back_byte_for_byte():
    (loaded,) = load_revisions(BASE, [stored(BASE)]).readable
    assert loaded.apply_to(BASE).spec == BASE.spec
    assert create_revision(BASE, loaded, [stored(BASE)]) == ()


def test_what_cannot_be_read_or_belongs_to_another_service_is_not_taken_for_stored():
    broken = replace(stored(BASE), data={"image": "i", "spec": {"model": 3}})
    assert (
        load_revisions(BASE, [broken, replace(stored(BASE), data={}), stored(BASE, owner_uid="another")]).readable == ()
    )


def test_the_store_forgets_what_status_forgets_but_nothing_that_has_pods():
    service = promised(BASE, 1)
    old = replace(stored(BASE), hash="old", name="chat-old", uid="uid-of-old")
    (forgotten,) = delete_revisions(service, [stored(service), old], populated=())
    assert (forgotten.name, forgotten.uid) == ("chat-old", "uid-of-old")
    assert delete_revisions(service, [stored(service), old], populated={"old"}) == ()
    assert delete_revisions(service, [replace(old, owner_uid="another")], populated=()) == ()


def test_hash_is_ten_characters_that_fit_a_label_and_make_no_words():
    value = resolve(BASE, "i").hash
    assert len(value) == revision.HASH_LENGTH
    assert not set(value) & set("aeiou013")
