"""The LoRAAdapter kind: its schema is bounded and explained, its names and versions follow from its spec."""

from typing import Any

import pytest

from slipway_api.adapter_conditions import CONDITIONS, EVENTS, AdapterCondition, AdapterEvent, AdapterReason
from slipway_api.crd import lora_adapter_crd
from slipway_api.lora_adapter import LoRAAdapter, source_version
from tests.api.test_crd import LIST_TYPE, walk


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    found: dict[str, Any] = lora_adapter_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


@pytest.mark.capability("OP-3")
def test_every_list_is_bounded_and_says_how_it_merges_and_every_field_explains_itself(schema):
    nodes = dict(walk(schema))
    fields = [path for path in nodes if path.startswith((".spec", ".status")) and not path.endswith("[]")]

    assert [path for path, node in nodes.items() if node.get("type") == "array" and "maxItems" not in node] == []
    assert [path for path, node in nodes.items() if node.get("type") == "array" and not node.get(LIST_TYPE)] == []
    assert [path for path, node in nodes.items() if node.get("type") == "number"] == []
    assert [path for path in fields if not nodes[path].get("description")] == []
    assert [path for path, node in walk(schema["properties"]["status"]) if "default" in node] == [""]


def test_placement_has_three_modes_and_a_bounded_priority(schema):
    modes = schema["properties"]["spec"]["properties"]["placement"]["properties"]

    assert modes["mode"]["enum"] == ["All", "Replicas", "OnDemand"]
    assert (modes["priority"]["minimum"], modes["priority"]["maximum"]) == (-1000, 1000)


def an_adapter(**spec: Any) -> LoRAAdapter:
    given = {"baseRef": {"name": "chat"}, "source": {"uri": "file:///x"}} | spec
    return LoRAAdapter.parse({"metadata": {"name": "sailor", "namespace": "demo"}, "spec": given})


def test_the_name_defaults_to_that_of_the_object():
    assert an_adapter().adapter_name == "sailor"
    assert an_adapter(adapterName="pirate").adapter_name == "pirate"
    assert str(an_adapter().base) == "demo/chat"


def test_a_version_changes_with_the_source_alone():
    version = an_adapter().version

    assert (
        version == an_adapter(placement={"pin": True}, alias={"name": "a"}).version == source_version("file:///x", "")
    )
    assert version != an_adapter(source={"uri": "file:///y"}).version
    assert version != an_adapter(source={"uri": "file:///x", "digest": "sha256:" + "0" * 64}).version


def test_every_reason_and_event_has_its_meaning():
    assert {kind for kind, *_ in CONDITIONS} == set(AdapterCondition)
    assert {reason for _, _, reason, _ in CONDITIONS} == set(AdapterReason)
    assert set(EVENTS) == set(AdapterEvent)
