"""Settings that work and are likely to be regretted give one event each, once for each generation of the spec."""

from dataclasses import replace

import pytest

from slipway_api.conditions import EventReason
from slipway_api.runtime_api import StartupTimes
from slipway_operator.core.observed import Capacity, Sample
from slipway_operator.core.service.plan import plan
from slipway_operator.core.service.status.advice import find_advice
from tests.builders import T0, a_pod, a_service, promised, seen

PINNED = {"gpu": {"count": 1, "product": "NVIDIA-H100-80GB-HBM3"}}


def advice(service) -> list[str]:
    return [event.message for event in find_advice(service)]


@pytest.mark.parametrize(
    "service",
    [
        a_service(),
        a_service(uri="hf://org/model@0123abc", resources=PINNED),
        a_service(runtime={"image": "registry:5000/slipway/runtime:1.2"}),
        a_service(runtime={"image": "slipway/runtime@sha256:" + "0" * 64}),
        a_service(runtime={"maxOutputTokens": 2000}),
    ],
)
def test_nothing_is_said_about_a_careful_spec(service):
    assert advice(service) == []


@pytest.mark.capability("PF-31")
@pytest.mark.parametrize("image", ["slipway/runtime", "slipway/runtime:latest", "registry:5000/slipway/runtime"])
def test_an_image_without_a_fixed_tag_is_named(image):
    (message,) = advice(a_service(runtime={"image": image}))

    assert message.startswith(f"spec.runtime.image {image} has no fixed tag")


@pytest.mark.capability("PF-31")
def test_a_model_without_a_revision_is_named():
    (message,) = advice(a_service(uri="hf://org/model"))

    assert "hf://org/model names no revision" in message


@pytest.mark.capability("MT-3")
@pytest.mark.parametrize(
    "gpu", [{"resourceName": "nvidia.com/gpu.shared"}, {"product": "NVIDIA-A100-SXM4-80GB-SHARED"}]
)
def test_a_time_sliced_gpu_is_called_unsafe_for_latencies(gpu):
    (message,) = advice(a_service(resources={"gpu": gpu}))

    assert "time-sliced GPU" in message


@pytest.mark.capability("KV-5")
def test_a_utilization_that_leaves_too_little_is_named_on_gpus_alone():
    runtime = {"kvCache": {"gpuMemoryUtilization": "0.95"}}

    (message,) = advice(a_service(runtime=runtime))

    assert "gpuMemoryUtilization 0.95 is above 0.92" in message
    assert advice(a_service(runtime=runtime, resources={"gpu": {"count": 0}})) == []


@pytest.mark.capability("RD-2")
def test_answers_that_outlast_a_drain_are_named_with_both_numbers():
    (message,) = advice(a_service(runtime={"maxOutputTokens": 8000}))

    assert "timeoutSeconds 300" in message
    assert "(8000)" in message


@pytest.mark.capability("OP-6")
def test_advice_is_an_event_of_the_first_pass_over_a_generation_and_of_no_later_one():
    service = a_service(uri="hf://org/model")

    first = plan(seen(service), T0)
    later = plan(seen(promised(service, 1)), T0)

    assert [one.reason for one in first.events if one.reason == "Advice"] == ["Advice"]
    assert [one for one in later.events if one.reason == "Advice"] == []


@pytest.mark.capability("QZ-4")
def test_weights_that_were_quantized_twice_are_named_once_by_the_replica_that_loaded_them():
    twice = "the weights were made from org/model-bnb-4bit, which looks like bitsandbytes NF4, and are quantized again"
    service = promised(a_service(), 1)
    capacity = Capacity(
        max_sequences=4, kv_blocks=9, bytes_per_token=9, startup=StartupTimes(load_seconds=4), warnings=(twice,)
    )
    loading = Sample(at=T0, kv_usage=0, running=0, waiting=0)
    pod = a_pod(service=service).ready()

    def told(pod, service) -> list[tuple[str, str]]:
        made = plan(seen(service, pod), T0)
        return [(one.message, one.pod) for one in made.events if one.reason is EventReason.ADVICE and one.pod]

    loaded = pod.but(sample=replace(loading, capacity=capacity))
    after = plan(seen(service, loaded), T0).status

    assert told(pod.but(sample=loading), service) == []
    assert told(loaded, service) == [(f"spec.model.uri: {twice}", loaded.replica.name)]
    assert told(loaded, service.model_copy(update={"status": after})) == [], "it was told in the pass before"
