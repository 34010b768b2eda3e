"""What only a person can change becomes Stalled, with the name of the thing to change."""

from dataclasses import replace

import pytest

from slipway_api.conditions import ConditionStatus, find_condition
from slipway_operator.core.observed import Capacity
from slipway_operator.core.service.plan import plan
from tests.builders import T0, APod, a_pod, a_service, edited, minutes, promised, seen

GATED = {"credentialsSecretRef": {"name": "hf"}}
NO_SECRET = 'secret "hf" not found'
NO_KEY = "couldn't find key HF_TOKEN in Secret demo/hf"
OTHER = 'configmap "settings" not found'


def told(service, *pods: APod, now=T0):
    """(Stalled, Ready) of a service with these pods, the first time somebody looks."""
    status = plan(seen(promised(service, 1), *pods), now).status
    assert status is not None
    return find_condition(status.conditions, "Stalled"), find_condition(status.conditions, "Ready")


def lacking(service, message: str) -> APod:
    return a_pod(service=service).but(waiting_reason="CreateContainerConfigError", waiting_message=message)


def last_said(service, word: str) -> APod:
    return a_pod(service=service).crashing(restarts=1).but(last_word=word)


@pytest.mark.capability("OP-6", "PL-7")
@pytest.mark.parametrize("message", [NO_SECRET, NO_KEY])
def test_credentials_that_are_not_there_name_the_secret_and_its_key(message):
    service = a_service(uri="hf://org/gated", model=GATED)

    stalled, ready = told(service, lacking(service, message))

    assert stalled.reason == "CredentialsInvalid"
    assert stalled.message == f"{message}: spec.model.credentialsSecretRef asks for a Secret hf with HF_TOKEN"
    assert (ready.status, ready.reason) == (ConditionStatus.FALSE, "CredentialsInvalid")


@pytest.mark.capability("OP-6")
def test_a_secret_that_appears_is_not_called_missing_while_the_model_loads():
    service = a_service(uri="hf://org/gated", model=GATED)
    broken = plan(seen(promised(service, 1), lacking(service, NO_SECRET)), T0).status

    status = plan(seen(service.model_copy(update={"status": broken}), a_pod(service=service).loading()), T0).status

    assert find_condition(status.conditions, "Stalled") is None


@pytest.mark.parametrize("model", [{}, GATED, {"credentialsSecretRef": {"name": "settings"}}])
def test_another_part_of_the_environment_is_the_specs_own(model):
    service = a_service(uri="hf://org/model", model=model)

    stalled, _ = told(service, lacking(service, OTHER))

    assert stalled.reason == "InvalidSpec"
    assert OTHER in stalled.message
    assert "spec.runtime" in stalled.message


@pytest.mark.capability("OP-6")
@pytest.mark.parametrize(
    ("word", "reason", "sentence"),
    [
        ("ModelNotFound: s3://b/x: no objects", "ModelNotFound", "s3://b/x: no objects; check spec.model.uri"),
        (
            "CredentialsInvalid: 403 of hf://o/m",
            "CredentialsInvalid",
            "403 of hf://o/m; check the Secret of spec.model",
        ),
        ("DoesNotFit: weights 14 GiB exceed 8 GiB", "DoesNotFit", "does not fit: weights 14 GiB exceed 8 GiB"),
    ],
)
def test_the_word_that_a_runtime_leaves_is_the_reason(word, reason, sentence):
    service = a_service()

    stalled, ready = told(service, last_said(service, word))

    assert (stalled.reason, ready.reason) == (reason, reason)
    assert sentence in stalled.message


def test_what_a_runtime_said_holds_while_it_tries_again():
    """The kubelet starts it over at once, and a large model takes minutes to find out a second time."""
    service = a_service()

    stalled, ready = told(service, last_said(service, "DoesNotFit: too small").but(waiting_reason="", restarts=1))

    assert (stalled.reason, ready.reason) == ("DoesNotFit", "DoesNotFit")


@pytest.mark.capability("OP-5")
def test_a_spec_that_does_not_fit_is_told_with_the_arithmetic_while_the_old_one_serves():
    service = a_service()
    fits = promised(service, 1)
    too_long = edited(fits, runtime={"maxModelLen": 1_000_000})
    arithmetic = (
        "DoesNotFit: weights 14.00 GiB + reserve 1.00 GiB = 15.00 GiB leave 5.00 GiB of 20.00 GiB; one sequence of "
        "1000000 tokens at 131072 bytes needs 122.07 GiB of KV cache: lower maxModelLen to 40944"
    )
    old, new = a_pod(service=fits).ready(), last_said(too_long, arithmetic).slot(1)
    status = plan(seen(too_long, old, new), T0).status
    status = plan(seen(too_long.model_copy(update={"status": status}), old, new), T0).status

    stalled, ready = find_condition(status.conditions, "Stalled"), find_condition(status.conditions, "Ready")
    assert stalled.reason == "DoesNotFit"
    assert "1000000 tokens at 131072 bytes needs 122.07 GiB" in stalled.message
    assert "lower maxModelLen to 40944" in stalled.message
    assert ready.status is ConditionStatus.TRUE
    assert status.ready_replicas == 1


def test_a_claim_that_does_not_exist_is_a_model_that_does_not_exist():
    service = a_service(uri="pvc://models/llama")
    waiting = a_pod(service=service).unschedulable()

    scheduler = '0/2 nodes are available: persistentvolumeclaim "models" not found. preemption: 0/2 nodes are available'
    stalled, _ = told(service, waiting.but(unschedulable=scheduler))
    assert (stalled.reason, stalled.message) == (
        "ModelNotFound",
        'persistentvolumeclaim "models" not found; check spec.model.uri',
    )
    stalled, ready = told(service, waiting)
    assert stalled is None
    assert ready.reason == "WaitingForGPU"


@pytest.mark.parametrize(("starting", "reason"), [("Downloading", "DownloadingModel"), ("Loading", "Loading")])
def test_a_download_is_told_apart_from_a_load(starting, reason):
    service = a_service(uri="hf://org/model")
    pod = a_pod(service=service).loading().says()
    pod = pod.but(sample=replace(pod.replica.sample, starting=starting))

    stalled, ready = told(service, pod)

    assert stalled is None
    assert (ready.status, ready.reason) == (ConditionStatus.UNKNOWN, reason)
    assert ("is downloading the model" in ready.message) == (starting == "Downloading")


def holding(pod: APod, sequences: int, *, running: int = 0) -> APod:
    pod = pod.ready().streams(running)
    capacity = Capacity(max_sequences=sequences, kv_blocks=sequences * 100, bytes_per_token=4096)
    return pod.but(sample=replace(pod.replica.sample, capacity=capacity))


@pytest.mark.capability("OP-5")
def test_status_tells_what_the_smallest_replica_holds_and_stays_still():
    service = promised(a_service(replicas=2), 2)
    pods = [holding(a_pod(service=service), 9), holding(a_pod(service=service).slot(1), 7)]
    status = plan(seen(service, *pods), T0).status

    assert status.capacity.to_json() == {"maxSequences": 7, "kvBlocks": 700, "bytesPerToken": 4096}
    later = service.model_copy(update={"status": status})
    assert plan(seen(later, *pods), T0 + minutes(1)).status.capacity == status.capacity
    silent = [pod.silent() for pod in pods]
    assert plan(seen(later, *silent), T0 + minutes(1)).status.capacity == status.capacity


@pytest.mark.capability("OP-5")
def test_during_a_rollout_the_new_revision_speaks_for_the_service():
    service = promised(a_service(), 1)
    newer = edited(service, runtime={"kvCache": {"dtype": "int8"}})
    old, new = holding(a_pod(service=service), 5), holding(a_pod(service=newer), 10)

    assert plan(seen(newer, old, new), T0).status.capacity.max_sequences == 10
    assert plan(seen(newer, old), T0).status.capacity.max_sequences == 5
