"""Invalid manifests are refused with one clear sentence, and change nothing."""

import time

import pytest

from e2e.cluster.access import CommandError
from e2e.manifests import as_yaml, chat, static
from e2e.slipway import Slipway, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.mark.capability("OP-1", "BS-3")
def test_what_the_api_server_can_judge_is_refused_at_once(clean: Slipway) -> None:
    both = chat("both", replicas=2)

    with pytest.raises(CommandError) as refused:
        clean.apply(as_yaml(both))

    assert "replicas" in refused.value.stderr
    assert "autoscaling" in refused.value.stderr
    assert clean.services() == []


@pytest.mark.capability("ST-2")
@pytest.mark.parametrize(
    ("change", "reason", "words"),
    [
        ({"model": {"uri": "file:///opt/slipway/models/nowhere"}}, ("ModelNotFound",), "nowhere"),
        ({"runtime": {"image": "slipway/runtime:none"}}, ("ImagePullFailed",), "slipway/runtime:none"),
        (
            {"model": {"uri": "hf://org/gated", "credentialsSecretRef": {"name": "nobodys"}}},
            ("CredentialsInvalid",),
            'secret "nobodys" not found: spec.model.credentialsSecretRef asks for a Secret nobodys with HF_TOKEN',
        ),
        ({"model": {"uri": "pvc://nobodys/llama"}}, ("ModelNotFound",), 'persistentvolumeclaim "nobodys" not found'),
        (
            {"runtime": {"dtype": "fp32", "maxModelLen": 2048, "kvCache": {"bytes": "1Mi"}}},
            ("DoesNotFit",),
            "max_model_len is 2048, and the KV cache holds",
        ),
    ],
    ids=[
        "a model that is not there",
        "an image that is not there",
        "a Secret that is not there",
        "a claim that is not there",
        "a cache without room for one request",
    ],
)
def test_what_only_running_shows_becomes_a_condition_that_says_what_is_wrong(
    clean: Slipway, change: dict[str, object], reason: tuple[str, ...], words: str
) -> None:
    clean.apply(as_yaml(static("wrong", 1, **change)))

    stalled = wait_for("the service is stalled", lambda: clean.condition("wrong", "Stalled"), timeout=120)

    assert stalled["reason"] in reason
    assert words in stalled["message"]
    ready = clean.condition("wrong", "Ready")
    assert ready is not None
    assert (ready["status"], ready["reason"]) == ("False", stalled["reason"])


def test_a_request_that_cannot_be_scheduled_says_so_and_stays_one_pod(clean: Slipway) -> None:
    of_tomorrow = {"gpu": {"count": 1, "resourceName": "nvidia.com/gpu-of-tomorrow"}}
    clean.apply(as_yaml(static("huge", 1, resources=of_tomorrow)))

    ready = wait_for(
        "the condition names the GPUs",
        lambda: (c := clean.condition("huge", "Ready")) and c["reason"] == "NoSuitableNode" and c,
        timeout=60,
    )

    assert "nvidia.com/gpu" in ready["message"]
    assert len(clean.pods("huge")) == 1


@pytest.mark.capability("OP-6")
def test_an_image_that_cannot_be_pulled_is_one_reason_and_one_warning_through_every_retry(clean: Slipway) -> None:
    """Finding 17: with each retry of the kubelet the reason went from ImagePullFailed to Loading and back."""
    clean.apply(as_yaml(static("steady", 1, runtime={"image": "slipway/runtime:none"})))
    wait_for("the service is stalled", lambda: clean.condition("steady", "Stalled"), timeout=120)

    seen = set()
    until = time.monotonic() + 45  # the kubelet tries again after 10 s and after 20 s
    while time.monotonic() < until:
        ready, stalled = clean.condition("steady", "Ready"), clean.condition("steady", "Stalled")
        seen.add((ready and ready["reason"], ready and ready["message"], stalled and stalled["reason"]))
        time.sleep(0.5)

    assert {(reason, stalled) for reason, _, stalled in seen} == {("ImagePullFailed", "ImagePullFailed")}
    assert len(seen) == 1, seen
    assert len(clean.notes("steady", "ImagePullFailed")) == 1
