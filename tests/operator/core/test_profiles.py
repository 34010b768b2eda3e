"""A profile fills what is left at its default; what the user sets wins, and what runs keeps what it began with."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipway_api.inference_service import Profile
from slipway_operator.core.profiles import apply_profile
from slipway_operator.core.service.rollout.revision import load_revisions, resolve
from tests.builders import IMAGE, a_service, stored


def runtime_of(profile: str | None, **runtime):
    return apply_profile(a_service(profile=profile, runtime=runtime).spec).runtime


@pytest.mark.capability("OP-8")
@pytest.mark.parametrize(
    ("profile", "seqs", "tokens", "speculation"),
    [
        (None, 64, 2048, "none"),
        ("chat", 64, 2048, "none"),
        ("coding", 32, 4096, "promptLookup"),
        ("voice", 16, 512, "none"),
        ("batch", 256, 8192, "none"),
        ("long-context", 16, 8192, "none"),
    ],
)
def test_a_profile_fills_the_limits_of_a_step(profile, seqs, tokens, speculation):
    runtime = runtime_of(profile)

    assert (runtime.max_num_seqs, runtime.max_num_batched_tokens) == (seqs, tokens)
    assert runtime.speculation.method == speculation


@pytest.mark.capability("OP-8")
def test_what_the_user_sets_wins():
    runtime = runtime_of("voice", maxNumSeqs=8, speculation={"method": "promptLookup", "maxTokens": 2})

    assert (runtime.max_num_seqs, runtime.max_num_batched_tokens) == (8, 512)
    assert runtime.speculation.max_tokens == 2


@given(st.sampled_from(list(Profile)), st.integers(1, 4096), st.integers(4096, 100_000))
def test_every_running_request_gets_a_token_in_each_step(profile, seqs, tokens):
    alone = runtime_of(profile.value, maxNumSeqs=min(seqs, 2048))
    both = runtime_of(profile.value, maxNumSeqs=seqs, maxNumBatchedTokens=tokens)

    for runtime in (alone, both):
        assert runtime.max_num_batched_tokens >= runtime.max_num_seqs


@pytest.mark.capability("OP-8", "OP-4")
def test_a_profile_is_part_of_the_revision_and_its_numbers_are_stored_with_it():
    plain, voice = a_service(), a_service(profile="voice")

    assert resolve(plain, IMAGE).hash != resolve(voice, IMAGE).hash
    (revision,) = load_revisions(voice, [stored(voice)]).readable
    assert revision.spec.runtime.max_num_batched_tokens == 512
    assert revision.apply_to(voice).spec.runtime.max_num_seqs == 16


def resources_of(profile: str | None, **spec):
    return apply_profile(a_service(profile=profile, **spec).spec).resources


@pytest.mark.capability("OP-10")
@pytest.mark.parametrize(
    ("profile", "gpus", "product", "cpus", "memory"),
    [
        ("chat", 1, "", "4", "16Gi"),
        ("chat", 1, "NVIDIA-H100-80GB-HBM3", "4", "20Gi"),
        ("batch", 8, "NVIDIA-H200", "48", "281Gi"),
        ("coding", 2, "NVIDIA-L4", "12", "32Gi"),
    ],
)
def test_a_profile_requests_cpus_and_memory_for_each_gpu(profile, gpus, product, cpus, memory):
    resources = resources_of(
        profile, resources={"gpu": {"count": gpus, "product": product}}, runtime={"tensorParallelSize": gpus}
    )

    assert resources.requests == {"cpu": cpus, "memory": memory}
    # Whole CPUs, request and limit alike: what the kubelet's static CPU manager gives to one container alone.
    assert resources.limits == {"cpu": cpus}


@pytest.mark.capability("OP-10")
@pytest.mark.parametrize(
    "spec",
    [
        {"resources": {"requests": {"cpu": "1", "memory": "2Gi"}}},
        {"resources": {"limits": {"cpu": "1", "memory": "2Gi"}}},
        {
            "template": {
                "spec": {"containers": [{"name": "server", "resources": {"limits": {"cpu": "1", "memory": "2Gi"}}}]}
            }
        },
        {"resources": {"gpu": {"count": 0}}, "runtime": {"tensorParallelSize": 1}},
        {"warmPool": {"name": "pool"}},
    ],
    ids=["requests", "limits", "the template", "no GPU", "a warm pool"],
)
def test_resources_that_the_user_names_stay_and_cpu_services_get_none(spec):
    service = a_service(profile="chat", **spec)

    assert apply_profile(service.spec).resources == service.spec.resources


def test_host_memory_for_the_kv_cache_is_requested_too():
    resources = resources_of("chat", runtime={"kvCache": {"hostBytes": "10Gi"}})

    assert resources.requests["memory"] == "26Gi"


def test_without_a_profile_nothing_is_requested():
    assert resources_of(None).requests == {}
