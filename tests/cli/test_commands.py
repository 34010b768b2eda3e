"""Verbs that need no cluster: what they print, in both forms, and what they say to bad input."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from slipway_cli.cluster import Cluster
from slipway_cli.explain import explain_plan, explain_scaling, explain_status
from slipway_cli.main import app
from slipway_cli.templates import read_templates, resolve_templates
from slipway_cli.traces import BadInputError, read_service, read_trace
from slipway_operator.core.service.plan import plan
from tests.builders import T0, a_pod, a_service, promised, seen

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SHAPE = {"layers": 32, "hiddenSize": 4096, "heads": 32, "kvHeads": 8, "parameters": 8_030_261_248}


def manifest(path: Path, **spec) -> Path:
    body = {
        "apiVersion": "slipway.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "chat"},
        "spec": {"model": {"uri": "hf://org/model@1", "shape": SHAPE}, **spec},
    }
    file = path / "chat.yaml"
    file.write_text(yaml.safe_dump(body))
    return file


def run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.capability("BM-4")
def test_plan_prints_memory_concurrency_and_cost(tmp_path):
    file = manifest(
        tmp_path,
        runtime={"maxModelLen": 8192},
        resources={"gpu": {"product": "NVIDIA-H100-80GB-HBM3"}},
        autoscaling={"minReplicas": 2, "maxReplicas": 5},
    )

    result = run("plan", "-f", file, "--gpu-hour-cost", 2.0, "-o", "json")

    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["fits"] is True
    assert found["memoryGiB"]["weights"] == pytest.approx(14.96, abs=0.01)
    assert found["kvCache"]["bytesPerToken"] == 131_072
    assert found["costPerMonth"] == {"min": 2 * 730 * 2.0, "max": 5 * 730 * 2.0}


@pytest.mark.capability("BM-4", "OP-5")
def test_plan_fails_where_the_model_does_not_fit_and_says_the_arithmetic(tmp_path):
    file = manifest(
        tmp_path, runtime={"maxModelLen": 8192}, resources={"gpu": {"product": "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb"}}
    )

    result = run("plan", "-f", file)

    assert result.exit_code == 1
    assert "weights 14.96 GiB" in result.output


@pytest.mark.capability("BM-3")
def test_simulate_prints_changes_and_waits(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("seconds,requests_per_second\n0,1\n60,80\n120,0\n")
    file = manifest(tmp_path, autoscaling={"maxReplicas": 3})

    found = json.loads(run("simulate", "-f", file, "--trace", trace, "--cold-start", 10, "-o", "json").output)
    table = run("simulate", "-f", file, "--trace", trace, "--cold-start", 10)

    assert found["changes"][0]["reason"] == "ScaledUp"
    assert found["requests"] == 60 + 80 * 60
    assert "replica hours" in table.output


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("seconds\n0\n", "no column requests_per_second"),
        ("seconds,requests_per_second\n", "no rows"),
        ("seconds,requests_per_second\n5,1\n5,2\n", "seconds must grow"),
        ("seconds,requests_per_second\n0,many\n", "line 2"),
        ("seconds,requests_per_second\n0,-1\n", "loads are not negative"),
        ("seconds,requests_per_second,output_tokens\n0,1,x\n", "line 2"),
    ],
)
def test_a_bad_trace_is_one_sentence(tmp_path, text, sentence):
    file = tmp_path / "trace.csv"
    file.write_text(text)

    with pytest.raises(BadInputError, match=sentence):
        read_trace(file)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("kind: Pod\n", "0 InferenceServices"),
        ("kind: InferenceService\nmetadata: {name: a}\nspec: {}\n", "spec.model"),
        ("a: [", "chat.yaml"),
    ],
)
def test_a_bad_manifest_is_one_sentence(tmp_path, text, sentence):
    file = tmp_path / "chat.yaml"
    file.write_text(text)

    with pytest.raises(BadInputError, match=sentence):
        read_service(file)


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"runtime": {"maxModelLenn": 4096}}, "spec.runtime.maxModelLenn"),
        ({"replica": 2}, "spec.replica"),
        ({"runtime": {"env": [{"name": "A", "valeu": "b"}]}}, "spec.runtime.env[].valeu"),
    ],
)
def test_a_misspelt_field_is_refused_as_the_api_server_refuses_it(spec, field, tmp_path):
    """review/shipping.md 36"""
    file = tmp_path / "service.yaml"
    manifest = {"kind": "InferenceService", "metadata": {"name": "a"}, "spec": {"model": {"uri": "file:///m"}} | spec}
    file.write_text(json.dumps(manifest))

    with pytest.raises(BadInputError, match=re.escape(f"unknown field {field};")):
        read_service(file)


def test_every_example_has_only_known_fields():
    services = [one for one in EXAMPLES.glob("*.yaml") if one.read_text().count("kind: InferenceService") == 1]
    assert len(services) > 10
    for file in services:
        assert read_service(file).metadata.name


@pytest.mark.capability("OP-6")
def test_status_and_why_scale_say_what_the_status_says():
    service = promised(a_service(autoscaling={"maxReplicas": 3}), 1)
    status = plan(seen(service, a_pod(service=service).ready().says(waiting=9)), T0).status
    service = service.model_copy(update={"status": status})

    shown, scaled = explain_status(service), explain_scaling(service)

    assert (shown["ready"], shown["revisions"][0]["weight"]) == ("True", 100)
    assert scaled["desired"] == 3
    assert scaled["history"][0]["reason"] == scaled["because"]
    assert "QueueDepth 9.00 > 2.00" in scaled["because"]


@pytest.mark.capability("OP-6")
def test_why_scale_names_the_limit_by_the_field_that_sets_it(monkeypatch):
    service = promised(a_service(autoscaling={"maxReplicas": 2}), 1)
    status = plan(seen(service, a_pod(service=service).ready().says(waiting=9)), T0).status
    monkeypatch.setattr(Cluster, "__init__", lambda *_arguments: None)
    monkeypatch.setattr(Cluster, "service", lambda _self, _name: service.model_copy(update={"status": status}))

    printed = run("why-scale", "chat").output

    assert "limited by maxReplicas" in printed
    assert "LimitedByMax" not in printed


@pytest.mark.capability("CO-1", "OB-6", "PF-23")
def test_status_shows_the_error_budget_and_the_cost_with_its_unit(monkeypatch):
    service = a_service(
        slo={"windowDays": 7},
        status={
            "slo": {"ttftP95Seconds": "0.412", "errorBudgetRemainingPercent": "87.5", "periods": []},
            "cost": {"gpus": 2, "perHour": "5.00", "perMillionOutputTokens": "1.25", "currency": "USD"},
        },
    )
    monkeypatch.setattr(Cluster, "__init__", lambda *_arguments: None)
    monkeypatch.setattr(Cluster, "service", lambda _self, _name: service)

    printed = run("status", "chat").output
    data = json.loads(run("status", "chat", "-o", "json").output)

    assert "error budget: 87.5 % of 7 days left" in printed
    assert "cost: 5.00 USD an hour for 2 GPUs; 1.25 USD for a million output tokens" in printed
    assert data["slo"]["ttftP95Seconds"] == "0.412"
    assert data["cost"]["perMillionOutputTokens"] == "1.25"


def test_status_tells_of_an_upgrade_that_is_on_offer():
    service = promised(a_service(), 1)
    observed = seen(service, a_pod(service=service).ready())
    newer = replace(observed, defaults=replace(observed.defaults, runtime_image="slipway/runtime:next"))

    status = plan(newer, T0).status
    shown = explain_status(service.model_copy(update={"status": status}))

    assert shown["pendingUpgrade"]["image"] == "slipway/runtime:next"
    assert "OnSpecChange" in shown["pendingUpgrade"]["reason"]


@pytest.mark.capability("BM-4", "OP-5")
def test_the_plan_of_a_service_on_a_cpu_names_its_number_format_and_what_the_processor_decides():
    shape = {"layers": 32, "hiddenSize": 4096, "heads": 32, "kvHeads": 8, "parameters": 8_030_261_248}
    resources = {"gpu": {"count": 0}, "limits": {"memory": "24Gi"}}
    known = explain_plan(a_service(model={"shape": shape}, resources=resources, runtime={"kvCache": {"bytes": "4Gi"}}))
    unknown = explain_plan(a_service(model={"shape": shape}, resources={"gpu": {"count": 0}}))

    assert (known["fits"], known["dtype"]) == (True, "bf16")
    assert "in bf16; a processor without AVX2 or NEON computes in fp32" in known["message"]
    assert known["memoryGiB"]["weights"] == pytest.approx(14.96, abs=0.01)
    assert known["memoryGiB"]["of"] == 24.0
    assert unknown["fits"] is None
    assert "spec.runtime.kvCache.bytes and spec.resources.limits.memory" in unknown["message"]


@pytest.mark.capability("BM-4", "OP-11")
@pytest.mark.parametrize("gpus", [0, 1])
def test_the_plan_of_another_engine_states_that_its_memory_is_not_calculated(gpus: int):
    """The arithmetic is our runtime's: its reserve and its number format on a CPU do not hold for vLLM."""
    shape = {"layers": 32, "hiddenSize": 4096, "heads": 32, "kvHeads": 8, "parameters": 8_030_261_248}
    resources = {"gpu": {"count": gpus, "product": "H100" if gpus else ""}, "limits": {"memory": "1Gi"}}
    runtime = {"engine": "vllm", "maxModelLen": 8192, "kvCache": {"bytes": "4Gi"}}

    found = explain_plan(
        a_service(model={"shape": shape}, resources=resources, runtime=runtime, replicas=2), gpu_hour_cost=2.0
    )

    assert (found["fits"], found["dtype"]) == (None, None)
    assert found["message"] == (
        "not calculated: engine vllm plans its own memory; "
        "start one replica, and read the size of its KV cache in its log"
    )
    assert not {"memoryGiB", "kvCache"} & found.keys()
    assert found["replicas"] == {"min": 2, "max": 2}
    assert ("costPerMonth" in found) is bool(gpus)


def test_a_manifest_without_a_shape_is_not_guessed():
    found = explain_plan(a_service(replicas=2))

    assert found["fits"] is None
    assert found["replicas"] == {"min": 2, "max": 2}


TEMPLATE = {
    "apiVersion": "slipway.dev/v1alpha1",
    "kind": "ServiceTemplate",
    "metadata": {"name": "gold"},
}
GOLD = {
    "resources": {"gpu": {"product": "NVIDIA-H100-80GB-HBM3"}},
    "autoscaling": {"minReplicas": 2, "maxReplicas": 5},
}


def template_file(path: Path, **spec) -> Path:
    file = path / "gold.yaml"
    file.write_text(yaml.safe_dump(TEMPLATE | {"spec": GOLD | spec}))
    return file


@pytest.mark.capability("OP-15", "BM-4")
def test_plan_merges_templates_and_names_the_origin_of_each_block(tmp_path):
    drain = {"timeoutSeconds": 60}
    file = manifest(tmp_path, runtime={"maxModelLen": 8192}, baseRefs=[{"name": "gold"}], drain=drain)

    result = run("plan", "-f", file, "-t", template_file(tmp_path), "--gpu-hour-cost", 2.0, "-o", "json")

    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["fits"] is True
    assert found["costPerMonth"] == {"min": 2 * 730 * 2.0, "max": 5 * 730 * 2.0}
    origins = {name: block["from"] for name, block in found["blocks"].items()}
    assert origins["resources"] == origins["autoscaling"] == "ServiceTemplate gold"
    assert (origins["drain"], origins["rollout"]) == ("service", "default")
    assert found["blocks"]["drain"]["value"]["timeoutSeconds"] == 60

    table = run("plan", "-f", file, "-t", template_file(tmp_path)).output
    assert re.search(r"autoscaling +.*ServiceTemplate gold +.*maxReplicas", table)


@pytest.mark.capability("OP-15")
@pytest.mark.parametrize(
    ("templates", "sentence"),
    [
        (None, "there is no ServiceTemplate gold (there are none)"),
        ({"drain": {"timeoutSecond": 3}}, "unknown field spec.drain.timeoutSecond"),
        ({"resources": {"gpu": {"count": 4}}}, "spec.resources is from ServiceTemplate gold"),
    ],
    ids=["missing", "a typing error", "a conflict"],
)
def test_plan_refuses_what_the_operator_would_refuse(tmp_path, templates, sentence):
    file = manifest(tmp_path, baseRefs=[{"name": "gold"}])
    files = [template_file(tmp_path, **templates)] if templates else []

    with pytest.raises(BadInputError) as refused:
        resolve_templates(read_service(file), read_templates(files))

    assert sentence in str(refused.value)


@pytest.mark.capability("OP-15")
def test_simulate_scales_by_the_inherited_limits(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("seconds,requests_per_second\n0,0.1\n20,0\n")
    file = manifest(tmp_path, baseRefs=[{"name": "gold"}])

    result = run("simulate", "-f", file, "--trace", trace, "--seconds", 30, "-t", template_file(tmp_path), "-o", "json")

    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["moments"][-1]["desired"] == 2
