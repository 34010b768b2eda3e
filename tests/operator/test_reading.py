"""What becomes of a stored object that does not follow the schema any more."""

import pytest

from slipway_operator.inputs.reading import read

MODEL = {"uri": "file:///models/tiny"}


def a_body(spec: object, status: object = None) -> dict:
    return {"metadata": {"name": "chat", "namespace": "team"}, "spec": spec, "status": status or {}}


def test_a_valid_object_has_no_fault():
    reading = read(a_body({"model": MODEL, "fieldOfTomorrow": 1}))

    assert reading.fault == ""
    assert reading.service.spec.model.uri == MODEL["uri"]


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (
            {"model": MODEL, "replicas": -1},
            "spec.replicas is not valid: input should be greater than or equal to 0, not -1",
        ),
        ({}, "spec.model is missing"),
        (None, "spec is not valid: input should be a valid dictionary or instance of InferenceServiceSpec"),
        (
            {"model": MODEL, "replicas": -1, "runtime": {"dtype": "int4"}},
            "spec.runtime.dtype is not valid: input should be 'auto', 'bf16', 'fp16' or 'fp32'; "
            "also wrong: spec.replicas",
        ),
    ],
)
def test_a_fault_is_one_sentence_that_names_the_field(spec, sentence):
    assert read(a_body(spec)).fault == sentence


def test_text_that_a_user_wrote_is_not_repeated():
    reading = read(a_body({"model": MODEL, "template": "a secret"}))

    assert "spec.template" in reading.fault
    assert "a secret" not in reading.fault


def test_what_is_right_beside_a_fault_still_counts():
    spec = {"model": MODEL, "replicas": -1, "drain": {"timeoutSeconds": 7, "endpointPropagationSeconds": 1}}
    reading = read(a_body(spec, {"desiredReplicas": 3}))

    assert reading.service.spec.drain.timeout_seconds == 7
    assert reading.service.status.desired_replicas == 3


def test_a_status_that_cannot_be_read_is_no_fault_of_the_user_and_written_anew():
    reading = read(a_body({"model": MODEL}, {"readyReplicas": -1, "desiredReplicas": 3}))

    assert reading.fault == ""
    assert reading.service.status.ready_replicas is None
    assert reading.service.status.desired_replicas == 3
    assert reading.service.spec.model.uri == MODEL["uri"]


def test_a_token_in_a_projected_volume_that_was_stored_before_the_rule_is_a_fault():
    """Security finding: the API server lets an old value stay as long as nobody changes it."""
    volume = {"name": "identity", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}
    reading = read(a_body({"model": MODEL, "template": {"spec": {"volumes": [volume]}}}))

    assert "may not hold a serviceAccountToken" in reading.fault
