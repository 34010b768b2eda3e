"""Laws of inheritance: blocks are whole, the service wins, then the last template; every reader sees the same spec."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipway_api.crd import inference_service_crd, service_template_crd
from slipway_api.inference_service import InferenceService, InferenceServiceSpec
from slipway_api.service_template import (
    BLOCKS,
    ServiceTemplateSpec,
    blocks_of,
    merge,
    own_blocks,
    stack,
    with_inherited,
)

pytestmark = pytest.mark.capability("OP-15")

VALUES: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "resources": st.fixed_dictionaries({}, optional={"requests": st.just({"cpu": "2"}), "gpu": st.just({"count": 0})}),
    "template": st.sampled_from([{}, {"metadata": {"labels": {"team": "a"}}}, {"spec": {"nodeSelector": {"x": "y"}}}]),
    "autoscaling": st.builds(lambda most: {"maxReplicas": most}, st.integers(1, 9)),
    "rollout": st.sampled_from([{}, {"strategy": "Recreate"}, {"rollingUpdate": {"maxSurge": 2}}]),
    "drain": st.builds(lambda limit: {"timeoutSeconds": limit}, st.sampled_from([30, 60, 300])),
    "availability": st.sampled_from([{}, {"podDisruptionBudget": "None"}]),
    "budget": st.sampled_from([{"maxGPUs": 8}, {"gpuHourCost": "2.5"}]),
    "slo": st.sampled_from([{"ttftP95Seconds": "0.5"}, {"itlP95Seconds": "0.1", "windowDays": 7}]),
}
BLOCKS_AS_JSON = st.fixed_dictionaries({}, optional=VALUES)


def a_spec(blocks: dict[str, Any], **more: Any) -> InferenceServiceSpec:
    return InferenceServiceSpec.model_validate({"model": {"uri": "hf://org/model@1"}, **blocks, **more})


def layer(blocks: dict[str, Any]) -> dict[str, Any]:
    return dict(blocks_of(ServiceTemplateSpec.model_validate(blocks)))


def test_the_laws_cover_every_block():
    assert set(VALUES) == set(BLOCKS)


@given(BLOCKS_AS_JSON, BLOCKS_AS_JSON, BLOCKS_AS_JSON)
def test_templates_stack_in_any_grouping_and_the_last_one_with_a_block_wins(first, second, third):
    a, b, c = layer(first), layer(second), layer(third)

    assert stack([stack([a, b]), c]) == stack([a, stack([b, c])]) == stack([a, b, c])
    for block in BLOCKS:
        last = next((one[block] for one in (c, b, a) if block in one), None)
        assert stack([a, b, c]).get(block) == last


@given(BLOCKS_AS_JSON, BLOCKS_AS_JSON)
def test_a_block_of_the_service_is_never_changed_and_an_absent_one_is_the_templates_or_the_default(own, inherited):
    spec = a_spec(own)
    merged = merge(spec, layer(inherited))

    assert own_blocks(spec) == set(own), "also a block at its defaults, such as rollout: {}"
    for block in BLOCKS:
        written = own.get(block, inherited.get(block))
        assert getattr(merged, block) == getattr(a_spec({} if written is None else {block: written}), block)
    rest = set(InferenceServiceSpec.model_fields) - set(BLOCKS)
    assert all(getattr(merged, name) == getattr(spec, name) for name in rest)


@given(BLOCKS_AS_JSON)
def test_without_templates_nothing_changes(own):
    assert merge(a_spec(own), {}) == a_spec(own)


@given(BLOCKS_AS_JSON, BLOCKS_AS_JSON)
def test_the_record_in_status_gives_every_reader_the_merged_spec(own, inherited):
    blocks = layer(inherited)
    record = {block: value.to_json() for block, value in blocks.items()}
    spec = {"model": {"uri": "hf://org/model@1"}, "baseRefs": [{"name": "gold"}], **own}
    body = {"metadata": {"name": "chat"}, "spec": spec, "status": {"inherited": record}}

    read = InferenceService.model_validate(with_inherited(body)).spec

    assert read == merge(a_spec(own, baseRefs=[{"name": "gold"}]), blocks)


def test_without_references_a_record_that_is_left_over_counts_for_nothing():
    body = {"spec": {"model": {}}, "status": {"inherited": {"drain": {"timeoutSeconds": 1}}}}

    assert with_inherited(body) == body


def schema_of(crd: dict[str, Any]) -> dict[str, Any]:
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return dict(schema["properties"]["spec"]["properties"])


def test_the_api_server_writes_no_block_that_nobody_wrote():
    """Else a block at its defaults could not be told from one that the service writes."""
    service, template = schema_of(inference_service_crd()), schema_of(service_template_crd())

    assert set(template) == {"description", *BLOCKS}
    for block in BLOCKS:
        assert "default" not in service[block]
        assert "default" not in template[block]
        assert service[block]["properties"] == template[block]["properties"]
