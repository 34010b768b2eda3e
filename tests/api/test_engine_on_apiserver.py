"""The API server knows what an Engine may say: named fields in templates, no code, and what it cannot do without."""

import copy
import json
from typing import Any

import pytest

from slipway_api.crd import engine_manifest
from tests.api.manifests import a_manifest, assert_refused

pytestmark = [pytest.mark.apiserver, pytest.mark.capability("OP-11")]


def an_engine(name: str = "mine", **spec: Any) -> dict[str, Any]:
    manifest = copy.deepcopy(engine_manifest("vllm"))
    manifest["metadata"]["name"] = name
    manifest["spec"] |= spec
    return {**manifest, "spec": {key: value for key, value in manifest["spec"].items() if value is not None}}


@pytest.mark.parametrize("name", ["slipway", "vllm", "sglang"])
def test_the_engines_of_the_chart_are_taken_and_nothing_of_them_is_dropped(api, name):
    text = json.dumps(engine_manifest(name))

    answer = api.kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", "-o", "json", stdin=text)

    stored = json.loads(answer)["spec"]
    for field, value in engine_manifest(name)["spec"].items():
        if field not in ("dialect", "args", "env", "resources"):
            assert stored[field] == value, field
    if name != "slipway":
        assert [one["text"] for one in stored["args"]] == [one["text"] for one in engine_manifest(name)["spec"]["args"]]
        assert stored["dialect"]["metrics"]["running"][0]["name"] == f"{name}:" + (
            "num_requests_running" if name == "vllm" else "num_running_reqs"
        )


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("a name that no field has", an_engine(command=["serve", "$(runtime.noSuchField)"]), "spec.command[1]"),
    ("an expression", an_engine(args=[{"text": ["$(servedName | upper)"]}]), "spec.args[0].text[0]"),
    ("an open bracket", an_engine(env=[{"name": "A", "text": "$(servedName"}]), "spec.env[0].text"),
    ("a condition on no field", an_engine(args=[{"field": "runtime.x", "text": ["a"]}]), "Unsupported value"),
    ("an argument of nothing", an_engine(args=[{"text": []}]), "spec.args[0].text"),
    ("no image", an_engine(image=None), "an engine needs an image"),
    ("no source of models", an_engine(sources=[]), "at least one kind of model address"),
    ("no dialect", an_engine(dialect=None), "an engine needs a dialect"),
    ("another engine that is built in", an_engine(builtIn=True), "builtIn is for the engine slipway"),
    ("an engine slipway that is none", an_engine("slipway"), "builtIn is for the engine slipway"),
    ("an unknown policy", an_engine(fields=[{"name": "model.digest", "policy": "Warn", "why": "x"}]), "Warn"),
    ("a GPU among the defaults", an_engine(resources={"requests": {"nvidia.com/gpu": "1"}}), "cpu, memory"),
    ("no file of the key", an_engine(tls={"args": ["--cert", "$(tls.certificate)"]}), "must name both files"),
    ("a metric without a name", an_engine(dialect={"engine": "x", "metrics": {"running": [{}]}}), "Required value"),
    ("a name with a dot", an_engine("my.engine"), "63 lower-case letters"),
]


@pytest.mark.parametrize(("what", "manifest", "sentence"), REFUSED, ids=[one[0] for one in REFUSED])
def test_an_engine_that_says_too_much_or_too_little_is_refused(api, what, manifest, sentence):
    assert_refused(api, manifest, sentence)


def test_a_service_of_a_foreign_engine_has_no_pool_and_pulls_nothing(api):
    engine = {"runtime": {"engine": "vllm"}}

    assert_refused(api, a_manifest("pooled", warmPool={"name": "a"}, **engine), "warmPool is only for runtime.engine")
    assert_refused(
        api,
        a_manifest("pulled", model={"uri": "oci://registry/m:1"}, prePull={}, **engine),
        "prePull is only for runtime.engine slipway",
    )


def test_a_pool_has_no_engine(api):
    pool = {
        "apiVersion": "slipway.dev/v1alpha1",
        "kind": "WarmPool",
        "metadata": {"name": "pool", "namespace": "crd-tests"},
        "spec": {
            "size": 1,
            "level": "Loaded",
            "models": [{"uri": "file:///m"}],
            "runtime": {"engine": "vllm"},
        },
    }

    assert_refused(api, pool, "the pods of a pool run Slipway's runtime")


def test_kubectl_explains_an_engine(api):
    said = api.kubectl("explain", "engine.spec.args")

    assert "text" in said
    assert "$(name)" in said
