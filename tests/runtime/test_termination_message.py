"""The sentence that a runtime leaves behind in its pod when it cannot serve."""

from pathlib import Path

import pytest

from slipway_runtime.engine.launch import EngineNotLoadedError
from slipway_runtime.models.config_values import DoesNotFitError
from slipway_runtime.serve import engine_death_message, termination_message
from slipway_runtime.storage.fetch import Access, AccessDeniedError, FetchError, RetryPolicy, fetch

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "hunter2"}
NOBODY_THERE = Access.of({**KEYS, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"})


def why_not(uri: str, cache: Path) -> str:
    with pytest.raises(FetchError) as refused:
        fetch(uri, cache=cache, access=NOBODY_THERE, retry=RetryPolicy(attempts=1))
    return termination_message(uri, refused.value)


def test_a_model_that_is_not_there_is_told_in_a_word_that_the_operator_knows(tmp_path: Path):
    assert why_not("file:///nowhere", tmp_path) == "ModelNotFound: file:///nowhere: there is no directory /nowhere"


@pytest.mark.capability("OP-6")
def test_refused_credentials_are_told_in_a_word_that_the_operator_knows():
    refused = AccessDeniedError("the hub refuses org/gated: 401")

    assert termination_message("hf://org/gated", refused) == "CredentialsInvalid: the hub refuses org/gated: 401"


@pytest.mark.capability("OP-5")
def test_what_does_not_fit_is_told_in_a_word_that_crosses_from_the_engines_process():
    """Only the message crosses, so the message begins with the word."""
    told = DoesNotFitError("weights 14 GiB exceed 8 GiB")
    carried = EngineNotLoadedError(str(told))

    for error in (told, carried):
        assert termination_message("hf://org/large", error) == "DoesNotFit: weights 14 GiB exceed 8 GiB"


def test_a_source_that_does_not_answer_is_named_with_its_host(tmp_path: Path):
    message = why_not("s3://bucket/x", tmp_path)
    assert message.startswith("HubUnreachable: s3://bucket/x does not answer: 127.0.0.1:9: the connection is refused")


def test_any_other_refusal_is_told_as_what_it_is():
    assert (
        termination_message("file:///x", FileNotFoundError("no config.json"))
        == "cannot serve file:///x: no config.json"
    )


@pytest.mark.capability("SE-2")
def test_what_may_be_a_password_or_a_signature_is_not_told():
    said = termination_message("https://me:SECRET@host/model?X-Amz-Signature=SECRET", FetchError("no answer"))

    assert said == "cannot serve https://host/model: no answer"


@pytest.mark.capability("RD-7")
@pytest.mark.parametrize(
    ("error", "is_fault"),
    [
        ("CUDA error: uncorrectable ECC error encountered", True),
        ("CUDA error: no CUDA-capable device is detected", True),
        ("RuntimeError: NVML: GPU is lost", True),
        ("CUDA error: an illegal memory access was encountered", False),  # a bug: the same GPU computes on
        ("CUDA error: device-side assert triggered", False),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", False),
    ],
)
def test_a_gpu_that_failed_is_told_from_a_program_that_failed(error: str, is_fault: bool):
    assert engine_death_message(error).startswith("GPUFault: ") == is_fault
    assert termination_message("file:///m", EngineNotLoadedError(error)).startswith("GPUFault: ") == is_fault
    assert error in engine_death_message(error)
