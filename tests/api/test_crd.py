"""The CRD as a document: names beside KServe, nothing unbounded, nothing unexplained, every copy fresh."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipway_api import crd as crd_module
from slipway_api.conditions import PENDING
from slipway_api.crd import generated_files, inference_service_crd, main

ROOT = Path(__file__).resolve().parents[2]
LIST_TYPE = "x-kubernetes-list-type"

# Fields of later work are absent, not ignored.
LATER = {
    *("experimental", "hostnames", "gatewayRef"),
}


def walk(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from walk(child, f"{path}.{name}")
    if "items" in schema:
        yield from walk(schema["items"], f"{path}[]")
    if isinstance(schema.get("additionalProperties"), dict):
        yield from walk(schema["additionalProperties"], f"{path}{{}}")


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return inference_service_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


@pytest.mark.capability("OP-3")
def test_our_group_and_short_name_are_not_kserves():
    spec = inference_service_crd()["spec"]

    assert spec["group"] == "slipway.dev"
    assert spec["names"]["shortNames"] == ["infsvc"]
    assert spec["names"]["categories"] == ["inference"]


def test_every_list_and_every_map_is_bounded(schema):
    unbounded = [
        path
        for path, node in walk(schema)
        if (node.get("type") == "array" and "maxItems" not in node)
        or ("additionalProperties" in node and "maxProperties" not in node)
    ]

    assert unbounded == []


def test_every_list_says_how_it_merges(schema):
    assert [path for path, node in walk(schema) if node.get("type") == "array" and not node.get(LIST_TYPE)] == []
    for path, node in walk(schema):
        if node.get(LIST_TYPE) == "map":
            missing = set(node["x-kubernetes-list-map-keys"]) - set(node["items"]["required"])
            assert not missing, f"{path} is keyed by {missing}, which may be absent"


def test_no_float_hides_in_the_api(schema):
    assert [path for path, node in walk(schema) if node.get("type") == "number"] == []


def test_every_field_of_ours_explains_itself(schema):
    """Fields that Kubernetes explains itself, inside env, volumes and the like, may stay silent."""
    borrowed = ("env[]", "tolerations[]", "topologySpread", "volumes[]", "volumeMounts[]", "seccompProfile")
    silent = [
        path
        for path, node in walk(schema)
        if path.startswith((".spec", ".status"))
        and not path.endswith(("[]", "{}"))
        and not any(word in path for word in borrowed)
        and not node.get("description")
    ]

    assert silent == []


def test_replicas_the_autoscaler_and_room_for_adapters_stay_absent(schema):
    spec = schema["properties"]["spec"]["properties"]

    assert "lora" not in spec["runtime"]["default"]
    assert "default" not in spec["replicas"]
    assert "default" not in spec["autoscaling"]
    assert spec["routing"]["default"] == {"strategy": "PrefixCache", "requestTimeoutSeconds": 600}


def test_the_api_server_gives_a_new_object_a_status_and_adds_nothing_to_one_that_is_written(schema):
    assert [path for path, node in walk(schema["properties"]["status"]) if "default" in node] == [""]
    assert schema["properties"]["status"]["default"] == {"conditions": [PENDING]}


def test_what_is_not_built_is_absent(schema):
    names = {path.rpartition(".")[2].removesuffix("[]") for path, _ in walk(schema["properties"]["spec"])}

    assert names.isdisjoint(LATER)
    assert "role" not in schema["properties"]["spec"]["properties"]["runtime"]["properties"]  # elsewhere, it speaks


def test_scale_points_at_the_fields_that_hpa_and_keda_use():
    (version,) = inference_service_crd()["spec"]["versions"]

    assert version["subresources"]["scale"] == {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }


@pytest.mark.parametrize("name", generated_files())
def test_the_committed_copies_are_what_the_kinds_say(name):
    assert (ROOT / name).read_text() == generated_files()[name], "run `python -m slipway_api.crd`"


def test_the_check_fails_with_a_diff_and_writing_repairs_it(tmp_path, capsys):
    assert main(["--check", "--root", str(tmp_path)]) == 1
    assert "+kind: CustomResourceDefinition" in capsys.readouterr().err

    assert main(["--root", str(tmp_path)]) == 0

    assert main(["--check", "--root", str(tmp_path)]) == 0


def test_the_charts_definitions_are_plain_files_equal_to_those_for_kubectl():
    """Issue 26, item 8: the chart put its list of ServiceAccounts into a rule of its copy."""
    names = [Path(name).name for name in generated_files() if name.startswith("crds/")]

    assert names == sorted(path.name for path in (ROOT / "charts/slipway/files/crds").iterdir())
    for name in names:
        text = (ROOT / "crds" / name).read_bytes()
        assert (ROOT / "charts/slipway/files/crds" / name).read_bytes() == text
        assert yaml.safe_load(text)["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    stored = yaml.safe_load((ROOT / "crds/slipway.dev_inferenceservices.yaml").read_text())
    assert crd_module.inference_service_crd() == stored
