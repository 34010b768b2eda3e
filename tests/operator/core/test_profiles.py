"""A profile fills what is left at its default; what the user sets wins, and what runs keeps what it began with."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipway_api.inference_service import Profile
from slipway_operator.core.profiles import apply_profile
from slipway_operator.core.service.revision import load_revisions, resolve
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
    (revision,) = load_revisions(voice, [stored(voice)])
    assert revision.spec.runtime.max_num_batched_tokens == 512
    assert revision.apply_to(voice).spec.runtime.max_num_seqs == 16
