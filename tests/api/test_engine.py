"""The Engine kind: templates name fields and nothing else; the chart's Engines say of each field what becomes of it."""

import pytest
from pydantic import ValidationError

from slipway_api.crd import engine_crd, engine_manifest
from slipway_api.engine import Engine, EngineSpec, Policy, render
from slipway_api.engine_fields import ALIASES, FIELDS, VARIABLES, field_texts, is_set
from slipway_api.engine_matrix import handled_fields, matrix_section
from slipway_api.inference_service import InferenceServiceSpec

pytestmark = pytest.mark.capability("OP-11")
CHART = ("vllm", "sglang")


def a_spec(**fields) -> InferenceServiceSpec:
    return InferenceServiceSpec.model_validate({"model": {"uri": "file:///m"}, **fields})


@pytest.mark.parametrize(
    "text", ["$(runtime.noSuchField)", "$(servedName", "$x", "$(servedName | upper)", "$( servedName )", "$$$(x)"]
)
def test_a_template_that_names_no_field_is_refused(text):
    with pytest.raises(ValidationError, match="pattern"):
        EngineSpec.model_validate({"command": [text]})


def test_a_value_cannot_name_another_variable():
    """Neither of ours nor of the kubelet, which replaces $(NAME) in arguments too."""
    text = render("--x=$(servedName) $$HOME", {"servedName": "$(SECRET)$"})

    assert text == "--x=$$(SECRET)$$ $$HOME"


def test_a_template_without_a_value_is_left_out():
    assert render("$(runtime.maxModelLen)", field_texts(a_spec())) is None
    assert render("$(runtime.maxModelLen)", field_texts(a_spec(runtime={"maxModelLen": 9}))) == "9"


def test_a_default_that_is_written_out_is_not_set():
    assert not is_set(a_spec(runtime={"dtype": "auto", "maxNumSeqs": 64}), "runtime.dtype")
    assert is_set(a_spec(runtime={"dtype": "bf16"}), "runtime.dtype")


def test_nothing_is_set_in_the_smallest_spec():
    assert [name for name in FIELDS if is_set(a_spec(), name)] == []


EVERYTHING = {
    "model": {
        "uri": "hf://org/model@v1",
        "digest": f"sha256:{'0' * 64}",
        "tokenizer": {"uri": "file:///t", "sha256": "1" * 64},
        "chatTemplate": "{{ x }}",
        "samplingDefaults": {"temperature": "0.5", "topK": 3, "maxTokens": 7},
        "warmPrompts": [{"prompt": "hello"}],
        "cache": {"policy": "Shared", "claimName": "c"},
    },
    "runtime": {
        "task": "embed",
        "pooling": "mean",
        "dtype": "bf16",
        "quantization": "fp8",
        "deterministic": True,
        "maxModelLen": 4096,
        "maxNumSeqs": 8,
        "maxNumBatchedTokens": 512,
        "blockSize": 32,
        "maxOutputTokens": 100,
        "tensorParallelSize": 2,
        "kvCache": {"gpuMemoryUtilization": "0.5", "dtype": "fp8", "bytes": "3Gi", "hostBytes": "1Gi"},
        "speculation": {"method": "draft", "maxTokens": 3, "draftModel": {"uri": "hf://org/small"}},
        "lora": {"maxAdapters": 2, "maxCPUAdapters": 4, "maxRank": 8, "experts": True},
    },
}


def test_every_field_can_be_set_and_has_a_text():
    spec, texts = a_spec(**EVERYTHING), field_texts(a_spec(**EVERYTHING))

    assert [name for name in FIELDS if not is_set(spec, name)] == []
    assert texts["model.samplingDefaults"] == '{"temperature":0.5,"top_k":3}'
    assert texts["runtime.kvCache.bytes"] == str(3 << 30)
    assert texts["runtime.kvCache.gibibytes"] == "3"
    assert texts["model.revision"] == "v1"


def test_room_for_adapters_alone_asks_no_engine_for_room_for_experts():
    assert not is_set(a_spec(runtime={"lora": {"maxAdapters": 2}}), "runtime.lora.experts")


@pytest.mark.parametrize("name", CHART)
def test_an_engine_of_the_chart_says_of_each_field_what_becomes_of_it(name):
    spec = Engine.model_validate(engine_manifest(name)).spec
    handled = handled_fields(spec)
    listed = {one.name for one in spec.fields}

    assert set(FIELDS) - handled == listed, "a field is in a template or in the list, and not in both"
    assert all(one.policy in Policy for one in spec.fields)
    assert spec.dialect is not None
    assert spec.dialect.engine == name


def test_the_crd_explains_every_field_and_is_of_the_cluster():
    crd = engine_crd()
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]

    assert crd["spec"]["scope"] == "Cluster"
    assert "subresources" not in crd["spec"]["versions"][0]
    assert "status" not in schema["properties"]
    silent = []

    def walk(path, node):
        for name, child in node.get("properties", {}).items():
            if not child.get("description"):
                silent.append(f"{path}.{name}")
            walk(f"{path}.{name}", child)
            if "items" in child:
                walk(f"{path}.{name}[]", child["items"])
        for key in ("maxItems", "maxProperties"):
            kind = {"maxItems": node.get("type") == "array", "maxProperties": "additionalProperties" in node}[key]
            assert not kind or key in node, f"{path} is unbounded"

    walk("spec", schema["properties"]["spec"])

    assert silent == []


def test_names_are_not_ambiguous():
    assert not set(FIELDS) & set(VARIABLES)
    assert all(field in FIELDS for field, _ in ALIASES.values())


def test_the_table_says_what_the_refusals_say():
    spec = EngineSpec.model_validate(engine_manifest("sglang")["spec"])

    lines = matrix_section({"sglang": spec}).splitlines()
    rows = {line.split("`")[1]: line for line in lines if line.startswith("| `")}

    assert set(rows) == {*FIELDS, "internalTLS"}
    assert rows["internalTLS"].endswith("| yes |")
    plain = matrix_section({"other": spec.model_copy(update={"tls": None})})
    assert "| `internalTLS` of the chart | refused: EngineWithoutTLS |" in plain
    assert "yes: the default, `fp8`" in rows["runtime.quantization"]
    assert "ignored: requests have to name them" in rows["model.samplingDefaults"]
    assert rows["runtime.maxModelLen"].endswith("| yes |")
    assert "refused: set --page-size" in rows["runtime.blockSize"]
