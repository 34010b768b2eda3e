"""KubeAI as a peer: its pods become pods of our runtime, and a peer that never scaled is at least so much slower."""

import pytest

from bench.kubeai import ENGINE, PATIENCE, Reaction, section
from bench.kubeai_controller import CHART_DEFAULTS, FASTEST, configuration, engine_patches, network
from slipway_api import names
from slipway_runtime.command_line import parse_arguments, serve_settings


def test_the_engine_that_both_run_is_a_command_line_of_our_runtime():
    patches = {one["path"].rpartition("/")[2]: one.get("value") for one in engine_patches(ENGINE)}
    environment = {one["name"]: one["value"] for one in patches["env"]}

    settings = serve_settings(parse_arguments(patches["args"]), environment)

    assert settings.admin_host == "::", "the kubelet must reach /ready"


def test_its_pods_get_the_probes_of_our_operator_and_the_folders_that_the_runtime_writes_to():
    patches = engine_patches(ENGINE)
    probes = [one["value"]["httpGet"] for one in patches if one["path"].endswith("Probe")]
    mounts = {one["value"]["mountPath"] for one in patches if one["path"].endswith("volumeMounts/-")}

    assert probes == [{"path": names.PATH_READY, "port": names.ADMIN_PORT}] * 2
    assert mounts == {"/tmp", names.CACHE_DIRECTORY, names.RUN_DIRECTORY}
    assert [one["op"] for one in patches if one["path"].endswith("/command")] == ["remove"]


def test_its_autoscaler_gets_the_settings_and_finds_its_own_metrics():
    config = configuration(CHART_DEFAULTS, "runtime:1", [])

    assert (config["modelAutoscaling"]["interval"], config["modelAutoscaling"]["timeWindow"]) == ("10s", "10m")
    assert config["fixedSelfMetricAddrs"] == ["127.0.0.1:8080"]


def test_the_published_service_leads_to_the_node_on_which_it_runs():
    service, endpoints = network("172.30.0.11")

    assert endpoints["metadata"]["labels"]["kubernetes.io/service-name"] == service["metadata"]["name"]
    assert endpoints["endpoints"][0]["addresses"] == ["172.30.0.11"]
    assert endpoints["ports"] == service["spec"]["ports"]


def test_the_ratio_is_theirs_over_ours_and_a_lower_bound_where_no_pod_came():
    figures = section(Reaction(2.0), {CHART_DEFAULTS: Reaction(None), FASTEST: Reaction(3.0)}).figures
    ratios = {figure.name: (figure.value, figure.note) for figure in figures if "÷" in figure.name}

    assert ratios == {
        "KubeAI, interval 10s, window 10m ÷ Slipway": (PATIENCE / 2, "at least"),
        "KubeAI, interval 1s, window 1s ÷ Slipway": (pytest.approx(1.5), ""),
    }


def test_without_kubeai_ours_is_measured_alone():
    (figure,) = section(Reaction(2.0), {}).figures

    assert figure.value == 2.0
