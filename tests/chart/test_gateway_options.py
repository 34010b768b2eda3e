"""What the chart gives the gateway for the batch API, traces and the degrade ladder; nothing of it by default."""

from typing import Any

import pytest

from e2e.cluster.access import Access
from slipway_gateway.settings import GatewaySettings
from slipway_operator.settings import OperatorSettings
from tests.chart.test_chart import of_kind, render

pytestmark = pytest.mark.apiserver

OPTIONS = (
    "gateway.batch.existingClaim=results",
    "gateway.batch.concurrency=3",
    "gateway.tracing.otlpEndpoint=http://collector:4318",
    "gateway.tracing.ratio=0.5",
    "gateway.degrade.waiting=4",
    "gateway.kvEvents=true",
)


def gateway_pod(access: Access, *settings: str) -> dict[str, Any]:
    pod: dict[str, Any] = of_kind(render(access, *settings), "Deployment")["slipway-gateway"]["spec"]["template"][
        "spec"
    ]
    return pod


def settings_of(pod: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> GatewaySettings:
    (container,) = pod["containers"]
    for variable in container["env"]:
        if "value" in variable:
            monkeypatch.setenv(variable["name"], variable["value"])
    return GatewaySettings()


@pytest.mark.capability("API-13", "OB-10", "RD-6")
def test_the_options_of_the_chart_are_those_of_the_gateway(apiserver: Access, monkeypatch: pytest.MonkeyPatch):
    pod = gateway_pod(apiserver, *OPTIONS)
    settings = settings_of(pod, monkeypatch)
    (container,) = pod["containers"]

    assert str(settings.batch_directory) in [mount["mountPath"] for mount in container["volumeMounts"]]
    assert {"name": "batches", "persistentVolumeClaim": {"claimName": "results"}} in pod["volumes"]
    assert (settings.batch_concurrency, settings.degrade_waiting, settings.kv_events) == (3, 4, True)
    assert (settings.otlp_endpoint, settings.trace_ratio) == ("http://collector:4318", 0.5)


def operator_settings(access: Access, patch: pytest.MonkeyPatch, *settings: str) -> OperatorSettings:
    pod = of_kind(render(access, *settings), "Deployment")["slipway-operator"]["spec"]["template"]["spec"]
    for variable in pod["containers"][0]["env"]:
        if "value" in variable:
            patch.setenv(variable["name"], variable["value"])
    return OperatorSettings()


@pytest.mark.capability("OB-10")
def test_the_operator_passes_the_gateways_collector_to_replicas_unless_it_is_refused(
    apiserver: Access, monkeypatch: pytest.MonkeyPatch
):
    found = {}
    for replicas in ("true", "false"):
        with monkeypatch.context() as patch:
            found[replicas] = operator_settings(apiserver, patch, *OPTIONS, f"gateway.tracing.replicas={replicas}")

    assert (found["true"].otlp_endpoint, found["true"].trace_ratio) == ("http://collector:4318", 0.5)
    assert found["false"].otlp_endpoint == ""


@pytest.mark.capability("RD-8")
def test_the_routing_table_is_kept_where_the_container_may_write(apiserver: Access, monkeypatch: pytest.MonkeyPatch):
    pod = gateway_pod(apiserver, "gateway.snapshot.maxAgeSeconds=60")
    settings = settings_of(pod, monkeypatch)
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}

    assert "emptyDir" in volumes[mounts[str(settings.state_directory)]]
    assert settings.snapshot_max_age_seconds == 60
    assert "state" not in [
        volume["name"] for volume in gateway_pod(apiserver, "gateway.snapshot.enabled=false")["volumes"]
    ]


def test_by_default_they_are_off(apiserver: Access, monkeypatch: pytest.MonkeyPatch):
    pod = gateway_pod(apiserver)
    settings = settings_of(pod, monkeypatch)

    assert (settings.batch_directory, settings.otlp_endpoint, settings.degrade_waiting) == (None, "", 0)
    assert not settings.kv_events
    assert "batches" not in [volume["name"] for volume in pod["volumes"]]
