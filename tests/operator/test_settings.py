"""Settings come from the environment once, and a mistake in it is told in one sentence."""

from pathlib import Path

import pytest

from slipway_operator.settings import InvalidSettings, OperatorSettings


def test_an_empty_environment_means_the_defaults():
    settings = OperatorSettings.from_environment({})

    assert settings == OperatorSettings()
    assert settings.gateway_url == "http://slipway-gateway.slipway-system.svc.cluster.local:8000"
    assert settings.watch_namespaces == ()


def test_every_variable_reaches_its_setting():
    settings = OperatorSettings.from_environment(
        {
            "SLIPWAY_NAMESPACE": "ops",
            "POD_NAME": "slipway-operator-7f-x",
            "SLIPWAY_RUNTIME_IMAGE": "registry/runtime:1",
            "SLIPWAY_GATEWAY_URL": "https://llm.example.com/",
            "SLIPWAY_MASTER_DIR": "/secrets",
            "SLIPWAY_GATEWAY_KEY_DIR": "/gateway",
            "SLIPWAY_NETWORK_POLICY": "off",
            "SLIPWAY_CLIENT_NAMESPACES": "batch",
            "SLIPWAY_METRICS_NAMESPACES": "monitoring,",
            "SLIPWAY_WATCH_NAMESPACES": "team-a, team-b,",
            "SLIPWAY_REPLICA_ACCESS": "proxy",
            "SLIPWAY_ADMIN_PORT": "9090",
            "SLIPWAY_LOG_LEVEL": "debug",
        }
    )

    assert settings == OperatorSettings(
        namespace="ops",
        identity="slipway-operator-7f-x",
        runtime_image="registry/runtime:1",
        gateway_url="https://llm.example.com",
        master_directory=Path("/secrets"),
        gateway_key_directory=Path("/gateway"),
        network_policy=False,
        client_namespaces=("batch",),
        metrics_namespaces=("monitoring",),
        watch_namespaces=("team-a", "team-b"),
        replica_access="proxy",
        admin_port=9090,
        log_level="DEBUG",
    )


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("SLIPWAY_REPLICA_ACCESS", "tunnel"),
        ("SLIPWAY_ADMIN_PORT", "http"),
        ("SLIPWAY_LOG_LEVEL", "loud"),
        ("SLIPWAY_NETWORK_POLICY", "maybe"),
    ],
)
def test_a_mistake_names_the_variable_and_its_value(variable, value):
    with pytest.raises(InvalidSettings, match=f"(?i){variable}.*{value}"):
        OperatorSettings.from_environment({variable: value})
