"""The installation's collector reaches the replicas of our runtime, and restarts none of them."""

from dataclasses import replace

import pytest
from pydantic import ValidationError

from slipway_operator.core.actions import CreatePod
from slipway_operator.core.installation import TraceDefaults
from slipway_operator.core.service.plan import plan
from slipway_operator.core.warm_pool.plan import plan as plan_pool
from slipway_operator.settings import OperatorSettings, explain, installation_defaults
from slipway_runtime.settings import TraceSettings
from tests.builders import DEFAULTS, T0, a_service, promised, seen
from tests.operator.core.warm_pool.pools import a_pool
from tests.operator.core.warm_pool.pools import seen as seen_pool

COLLECTOR = "http://otel-collector.observability:4318"
WITH = replace(DEFAULTS, tracing=TraceDefaults(endpoint=COLLECTOR, ratio=0.05, slow_seconds=2.5))


def environments(actions):
    """Of the server's container of each created pod: the variables with values."""
    pods = [one.manifest["spec"] for one in actions if isinstance(one, CreatePod)]
    assert pods
    return [{v["name"]: v["value"] for v in pod["containers"][0]["env"] if "value" in v} for pod in pods]


def of_service(defaults=WITH, **spec):
    service = promised(a_service(**spec), 1)
    return environments(plan(replace(seen(service), defaults=defaults), T0).actions)[0]


@pytest.mark.capability("OB-10")
def test_replicas_and_waiting_pods_read_the_collector_and_the_gateways_rule():
    pools = environments(plan_pool(replace(seen_pool(a_pool()), defaults=WITH), T0).actions)

    for variables in (of_service(), *pools):
        assert TraceSettings.of(variables) == TraceSettings(endpoint=COLLECTOR, ratio=0.05, slow_seconds=2.5)
    assert TraceSettings.of(of_service(DEFAULTS)) == TraceSettings()


def test_a_service_may_name_another_collector_or_none():
    mine = {"env": [{"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://team:4318"}]}

    assert TraceSettings.of(of_service(runtime=mine)).endpoint == "http://team:4318"
    mine["env"][0]["value"] = ""
    assert TraceSettings.of(of_service(runtime=mine)).endpoint == ""


def test_the_settings_are_the_gateways_variables_and_a_mistake_names_its_variable(monkeypatch):
    assert installation_defaults(OperatorSettings()).tracing is None
    for name, value in {"OTLP_ENDPOINT": COLLECTOR, "TRACE_RATIO": "0.05", "TRACE_SLOW_SECONDS": "2.5"}.items():
        monkeypatch.setenv(f"SLIPWAY_{name}", value)
    assert installation_defaults(OperatorSettings()).tracing == WITH.tracing

    for name, wrong in (("OTLP_ENDPOINT", "collector:4317"), ("TRACE_RATIO", "2"), ("TRACE_SLOW_SECONDS", "0")):
        with monkeypatch.context() as patch:
            patch.setenv(f"SLIPWAY_{name}", wrong)
            with pytest.raises(ValidationError) as refused:
                OperatorSettings()
        assert f"SLIPWAY_{name}" in explain(refused.value)
