"""A model that cannot fit is refused by arithmetic before any pod; what is not known is left to the runtime."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipway_api.conditions import ConditionStatus, find_condition
from slipway_api.memory import DoesNotFit, Fits, activation_bytes, footprint
from slipway_api.runtime_spec import Dtype
from slipway_operator.core.actions import CreatePod
from slipway_operator.core.service.model.fit import check_fit, model_shape, needs_of, planned_dtype
from slipway_operator.core.service.plan import plan
from slipway_operator.core.service.rollout.revision import resolve
from tests.builders import IMAGE, T0, a_pod, a_service, edited, promised, seen, stored

LLAMA_8B = {"layers": 32, "hiddenSize": 4096, "heads": 32, "kvHeads": 8, "parameters": 8_030_261_248}
LLAMA_70B = {"layers": 80, "hiddenSize": 8192, "heads": 64, "kvHeads": 8, "parameters": 70_553_706_496}
H100 = "NVIDIA-H100-80GB-HBM3"


def on(product: str, *, count: int = 1, shape=LLAMA_8B, **runtime):
    runtime = {"maxModelLen": 8192, "tensorParallelSize": count, **runtime}
    return a_service(
        model={"shape": shape} if shape else {},
        resources={"gpu": {"count": count, "product": product}},
        runtime=runtime,
    )


def on_a_cpu(limit: str = "16Gi", *, shape=LLAMA_8B, **runtime):
    return a_service(
        model={"shape": shape},
        resources={"gpu": {"count": 0}, "limits": {"memory": limit}},
        runtime={"kvCache": {"bytes": "4Gi"}, **runtime},
    )


def planned(service):
    return check_fit(service.spec)


@pytest.mark.capability("OP-5", "OP-9")
def test_an_8b_fits_an_h100_and_the_number_of_its_requests_is_known_before_a_pod():
    fit = planned(on(H100))

    assert isinstance(fit, Fits)
    assert fit.bytes_per_token == 131_072
    assert 50 <= fit.max_sequences <= 64


@pytest.mark.capability("OP-5")
def test_a_70b_on_one_h100_is_refused_with_its_arithmetic():
    fit = planned(on(H100, shape=LLAMA_70B))

    assert isinstance(fit, DoesNotFit)
    assert "on 1 × H100 80 GB: weights 131.4" in fit.message
    assert "one sequence of 8192 tokens at 327680 bytes" in fit.message
    assert fit.message.endswith("or set resources.gpu.count and runtime.tensorParallelSize to 4")


@pytest.mark.capability("OP-5", "DD-2")
def test_the_same_model_fits_four_of_them():
    assert isinstance(planned(on(H100, count=4, shape=LLAMA_70B)), Fits)


@pytest.mark.capability("OP-9")
@pytest.mark.parametrize(
    ("product", "runtime", "message"),
    [
        ("NVIDIA-A100-SXM4-80GB", {"quantization": "fp8"}, "cannot multiply fp8.*set runtime.quantization to int8"),
        ("NVIDIA-A100-SXM4-80GB", {"kvCache": {"dtype": "fp8"}}, "has no fp8.*set runtime.kvCache.dtype to int8"),
        ("Tesla-T4", {}, "compute capability 7.5.*need 8.0"),
    ],
)
def test_a_number_format_that_the_hardware_lacks_is_refused(product, runtime, message):
    fit = planned(on(product, shape=None, **runtime))

    assert isinstance(fit, DoesNotFit)
    assert re.search(message, fit.message)


@pytest.mark.parametrize(
    "service",
    [
        on("", shape=LLAMA_70B),
        on("NVIDIA-Unheard-Of", shape=LLAMA_70B),
        on(H100, shape=None),
        a_service(resources={"gpu": {"count": 0}}),
    ],
)
def test_what_is_not_known_is_not_guessed(service):
    assert planned(service) is None


@pytest.mark.capability("OP-5")
@pytest.mark.parametrize(("dtype", "weights"), [("auto", "14.96 GiB (bf16)"), ("fp32", "14.96 GiB (fp32)")])
def test_on_a_cpu_the_weights_count_against_the_memory_limit(dtype, weights):
    service = on_a_cpu(dtype=dtype)

    fit = planned(service)

    assert isinstance(fit, DoesNotFit)
    assert f"weights {weights}" in fit.message
    assert "KV cache 4.00 GiB" in fit.message
    assert "exceed resources.limits.memory 16.00 GiB" in fit.message
    quantized = edited(service, runtime={"kvCache": {"bytes": "2Gi"}, "quantization": "int8"})
    assert planned(quantized) is None


@pytest.mark.capability("OP-5")
def test_on_a_cpu_auto_is_planned_as_the_runtime_chooses_it():
    """ADR 89: bf16 from 100 million parameters on, with activations and adapters in fp32; smaller models are fp32."""
    small = LLAMA_8B | {"parameters": 99_000_000}
    large = on_a_cpu("24Gi", lora={"maxAdapters": 4, "maxRank": 16})

    assert planned(on_a_cpu("24Gi")) is None, "14.96 GiB of weights, not 29.92"
    assert planned_dtype(on_a_cpu().spec) is Dtype.BF16
    assert planned_dtype(on_a_cpu(shape=small).spec) is Dtype.FP32
    assert planned_dtype(on_a_cpu(shape=small, dtype="bf16").spec) is Dtype.BF16
    assert planned_dtype(on(H100, shape=small).spec) is Dtype.BF16
    on_cpu, on_gpu = needs_of(large.spec), needs_of(on(H100, lora={"maxAdapters": 4, "maxRank": 16}).spec)
    shape = model_shape(large.spec)
    assert footprint(shape, on_cpu).weights == footprint(shape, on_gpu).weights
    assert footprint(shape, on_cpu).adapters == 2 * footprint(shape, on_gpu).adapters
    assert activation_bytes(shape, on_cpu) == 2 * activation_bytes(shape, on_gpu)


@pytest.mark.capability("ML-11", "OP-5")
def test_room_for_experts_is_planned_only_if_the_service_asks_for_it():
    without, with_room = (
        needs_of(on(H100, lora={"maxAdapters": 4, "experts": experts}).spec) for experts in (False, True)
    )
    assert (without.lora_experts, with_room.lora_experts) == (False, True)
    assert not needs_of(on(H100).spec).lora_experts


def test_drafts_are_planned_as_samples_of_a_step():
    assert needs_of(on(H100).spec).max_samples == 64
    assert needs_of(on(H100, speculation={"method": "promptLookup", "maxTokens": 3}).spec).max_samples == 64 * 4


@given(st.integers(1, 64), st.sampled_from([1, 2, 4, 8]))
def test_more_devices_never_make_a_model_fit_worse(length, count):
    one = planned(on(H100, shape=LLAMA_8B, maxModelLen=length * 512))
    many = planned(on(H100, count=count, shape=LLAMA_8B, maxModelLen=length * 512))

    if isinstance(one, Fits):
        assert isinstance(many, Fits)
        assert many.max_sequences >= one.max_sequences


@pytest.mark.capability("OP-5")
def test_no_pod_is_made_for_what_cannot_fit_and_the_condition_has_the_arithmetic():
    service = promised(on(H100, shape=LLAMA_70B), 1)

    decided = plan(seen(service, revisions=(stored(service),)), T0)

    assert not [one for one in decided.actions if isinstance(one, CreatePod)]
    stalled = find_condition(decided.status.conditions, "Stalled")
    assert stalled.reason == "DoesNotFit"
    assert "no replica is started: on 1 × H100 80 GB: weights 131.4" in stalled.message
    assert find_condition(decided.status.conditions, "Ready").status is ConditionStatus.FALSE


@pytest.mark.capability("OP-5")
def test_what_serves_stays_while_the_spec_asks_for_what_cannot_fit():
    serving = promised(on(H100), 1)
    asked = edited(serving, model={"uri": "hf://org/llama-70b@v1", "shape": LLAMA_70B})
    revision = resolve(asked, IMAGE)
    status = asked.status.model_copy(
        update={
            "update_revision": revision.hash,
            "revisions": (*asked.status.revisions, *promised(asked, 1).status.revisions),
        }
    )
    asked = asked.model_copy(update={"status": status})

    decided = plan(seen(asked, a_pod(service=serving).ready(), revisions=(stored(serving), stored(asked))), T0)

    assert not [one for one in decided.actions if isinstance(one, CreatePod)]
    assert find_condition(decided.status.conditions, "Ready").status is ConditionStatus.TRUE
    assert find_condition(decided.status.conditions, "Stalled").reason == "DoesNotFit"


def test_capacity_is_planned_until_a_replica_reports_its_own():
    service = promised(on(H100), 1)

    status = plan(seen(service, revisions=(stored(service),)), T0).status

    assert status.capacity.bytes_per_token == 131_072
    assert status.capacity.max_sequences == planned(on(H100)).max_sequences


def test_the_shape_of_a_model_is_no_part_of_its_revision():
    assert resolve(on(H100), IMAGE).hash == resolve(on(H100, shape=None), IMAGE).hash


@pytest.mark.capability("API-28")
def test_the_kv_cache_of_latent_attention_has_one_vector_for_each_token():
    """DeepSeek-V2-Lite: 576 numbers in 27 layers, where 16 heads of 192 and 128 would have 5,120."""
    lite = {"layers": 27, "hiddenSize": 2048, "heads": 16, "kvHeads": 16, "parameters": 15_706_484_224, "experts": 64,
            "expertsPerToken": 6, "moeIntermediateSize": 1408, "latentSize": 576}  # fmt: skip
    latents = planned(on(H100, shape=lite))
    assert isinstance(latents, Fits)
    assert latents.bytes_per_token == 27 * 576 * 2
    heads = planned(on(H100, shape={**lite, "latentSize": 0, "headDim": 160}))
    assert isinstance(heads, Fits)
    assert latents.kv_tokens > 8 * heads.kv_tokens


QWEN3_30B = {"layers": 48, "hiddenSize": 2048, "heads": 32, "kvHeads": 4, "headDim": 128, "parameters": 30_532_122_624}
EXPERTS = {"experts": 128, "expertsPerToken": 8, "moeIntermediateSize": 768}


@pytest.mark.capability("API-21")
def test_the_weights_of_all_experts_count_and_the_activations_of_a_tokens_own():
    """61 GB of weights leave room on an H100, where a dense model of as many weights would need wide activations."""
    sparse, dense = planned(on(H100, shape=QWEN3_30B | EXPERTS)), planned(on(H100, shape=QWEN3_30B))
    assert isinstance(sparse, Fits)
    assert isinstance(dense, DoesNotFit) or dense.kv_tokens < sparse.kv_tokens
    assert isinstance(planned(on("NVIDIA-L4", shape=QWEN3_30B | EXPERTS)), DoesNotFit)
