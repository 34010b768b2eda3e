"""Settings come from the environment once, and a mistake in it is told with all the others."""

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from slipway_api.inference_service import DirectAccess
from slipway_operator.core.installation import PlacementDefaults
from slipway_operator.settings import OperatorSettings, explain

VARIABLES = [str(field.validation_alias) for field in OperatorSettings.model_fields.values()]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def test_an_empty_variable_means_the_default(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "")

    settings = OperatorSettings()

    assert settings.admin_port == 8080
    assert settings.gateway_url == "http://slipway-gateway.slipway-system.svc.cluster.local:8000"
    assert settings.watch_namespaces == ()


def test_every_variable_reaches_its_setting(monkeypatch):
    environment = {
        "SLIPWAY_NAMESPACE": "ops",
        "SLIPWAY_LEASE_NAME": "slipway2-operator",
        "POD_NAME": "slipway-operator-7f-x",
        "POD_UID": "0000-1111",
        "SLIPWAY_RUNTIME_IMAGE": "registry/runtime:1",
        "SLIPWAY_TENANTS": "true",
        "SLIPWAY_GATEWAY_URL": "https://llm.example.com/",
        "SLIPWAY_CLUSTER_DOMAIN": "corp.example",
        "SLIPWAY_MASTER_DIR": "/secrets",
        "SLIPWAY_AGENT_IMAGE": "registry/agent:1",
        "SLIPWAY_GATEWAY_KEY_DIR": "/gateway",
        "SLIPWAY_GATEWAY_SELECTOR": "app=gateway",
        "SLIPWAY_NETWORK_POLICY": "off",
        "SLIPWAY_INTERNAL_TLS": "true",
        "SLIPWAY_INSTALLATION": "second",
        "SLIPWAY_ALLOWED_SERVICE_ACCOUNTS": "models, hub",
        "SLIPWAY_ALLOWED_IMAGES": "registry.example.com/models,quay.io/",
        "SLIPWAY_ALLOWED_PRIORITY_CLASSES": "batch",
        "SLIPWAY_CLIENT_NAMESPACES": "batch",
        "SLIPWAY_DIRECT_ACCESS": "GatewayOnly",
        "SLIPWAY_METRICS_NAMESPACES": "monitoring,",
        "SLIPWAY_WATCH_NAMESPACES": "team-a, team-b,",
        "SLIPWAY_PROMETHEUS_URL": "http://prometheus:9090/",
        "SLIPWAY_POD_USER": "1000:0",
        "SLIPWAY_REPLICA_ACCESS": "proxy",
        "SLIPWAY_ADMIN_PORT": "9090",
        "SLIPWAY_MODEL_CACHE_PATH": "/var/lib/slipway/models",
        "SLIPWAY_MODEL_CACHE_LIMIT": "500Gi",
        "SLIPWAY_HUB_ENDPOINTS": "https://hub.internal,https://huggingface.co",
        "SLIPWAY_REPLICA_PLACEMENT": '{"node_selector": {"pool": "gpu"}}',
        "SLIPWAY_OTLP_ENDPOINT": "http://collector:4318",
        "SLIPWAY_TRACE_RATIO": "0.5",
        "SLIPWAY_TRACE_SLOW_SECONDS": "3",
        "SLIPWAY_LOG_LEVEL": "debug",
    }
    assert set(environment) == set(VARIABLES)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)

    assert OperatorSettings() == OperatorSettings(
        namespace="ops",
        lease_name="slipway2-operator",
        identity="slipway-operator-7f-x",
        pod_uid="0000-1111",
        runtime_image="registry/runtime:1",
        agent_image="registry/agent:1",
        tenants=True,
        allowed_images=("registry.example.com/models", "quay.io/"),
        allowed_priority_classes=("batch",),
        cluster_domain="corp.example",
        gateway_url="https://llm.example.com",
        master_directory=Path("/secrets"),
        gateway_key_directory=Path("/gateway"),
        gateway_selector="app=gateway",
        network_policy=False,
        internal_tls=True,
        installation="second",
        client_namespaces=("batch",),
        direct_access=DirectAccess.GATEWAY_ONLY,
        metrics_namespaces=("monitoring",),
        watch_namespaces=("team-a", "team-b"),
        pod_user="1000:0",
        replica_access="proxy",
        model_cache_path="/var/lib/slipway/models",
        model_cache_limit="500Gi",
        hub_endpoints=("https://hub.internal", "https://huggingface.co"),
        admin_port=9090,
        placement=PlacementDefaults(node_selector={"pool": "gpu"}),
        otlp_endpoint="http://collector:4318",
        trace_ratio=0.5,
        trace_slow_seconds=3.0,
        log_level="DEBUG",
    )


def test_all_mistakes_are_told_at_once_each_with_its_variable_and_value(monkeypatch):
    mistakes = {
        "SLIPWAY_REPLICA_ACCESS": "tunnel",
        "SLIPWAY_ADMIN_PORT": "http",
        "SLIPWAY_LOG_LEVEL": "loud",
        "SLIPWAY_NETWORK_POLICY": "maybe",
    }
    for variable, value in mistakes.items():
        monkeypatch.setenv(variable, value)

    with pytest.raises(ValidationError) as caught:
        OperatorSettings()

    for variable, value in mistakes.items():
        assert re.search(rf"(?i){variable} is '{value}': ", explain(caught.value))
