"""Settings: where they come from, and that every mistake is named at once."""

from pathlib import Path

import pytest

from slipway_gateway.settings import GatewaySettings, SettingsError, read_settings


def test_the_command_line_wins_over_the_environment_and_an_empty_variable_is_absent(monkeypatch):
    monkeypatch.setenv("SLIPWAY_PORT", "9000")
    monkeypatch.setenv("SLIPWAY_ADMIN_PORT", "9001")
    monkeypatch.setenv("SLIPWAY_HEADER_SECONDS", "3")
    monkeypatch.setenv("SLIPWAY_BODY_SECONDS", "")
    monkeypatch.setenv("SLIPWAY_WATCH_NAMESPACES", "a, b,")
    monkeypatch.setenv("POD_NAME", "gateway-0")
    settings = read_settings(["--port", "8500"])

    assert (settings.port, settings.admin_port, settings.pod_name) == (8500, 9001, "gateway-0")
    assert settings.watch_namespaces == ("a", "b")
    assert (settings.connection_limits.header_seconds, settings.body_seconds) == (3.0, 60.0)
    assert (settings.bind, settings.propagation_seconds) == ("::", 5.0)


def test_static_routes_listen_on_this_machine_and_wait_for_no_load_balancer():
    settings = read_settings(["--static", "a=http://x:1,a=http://y:2"])

    assert settings.static == (("a", "http://x:1"), ("a", "http://y:2"))
    assert (settings.bind, settings.propagation_seconds) == ("127.0.0.1", 0.0)


def test_every_mistake_is_named_at_once(monkeypatch):
    monkeypatch.setenv("SLIPWAY_HEADER_SECONDS", "-1")
    monkeypatch.setenv("SLIPWAY_MAX_CONNECTIONS", "many")
    with pytest.raises(SettingsError) as error:
        read_settings(["--static", "nonsense"])

    for name, value in (("HEADER_SECONDS", "-1"), ("MAX_CONNECTIONS", "many"), ("STATIC", "nonsense")):
        assert f"SLIPWAY_{name} is '{value}': " in str(error.value)


def test_credentials_in_a_static_url_are_refused():
    with pytest.raises(SettingsError, match="the URL of 'a' must have no user name or password"):
        read_settings(["--static", "a=http://user:word@x:1"])


def test_a_number_that_helm_rendered_as_a_float_is_refused_with_variable_and_value(monkeypatch):
    """review/operator-users.md 7: the message named neither."""
    monkeypatch.setenv("SLIPWAY_MAX_TOKENS", "1e+06")

    with pytest.raises(SettingsError, match=r"^SLIPWAY_MAX_TOKENS is '1e\+06': input should be a valid integer"):
        read_settings([])


def test_settings_that_belong_together_are_named_together(monkeypatch):
    monkeypatch.setenv("SLIPWAY_TENANTS_FILE", "/tenants.yaml")

    with pytest.raises(SettingsError, match="SLIPWAY_TENANTS_FILE and SLIPWAY_KEYS_DIRECTORY belong together"):
        read_settings([])


def test_the_documentation_names_every_variable():
    text = (Path(__file__).resolve().parents[2] / "docs" / "gateway.md").read_text()
    others = {"pod_name": "POD_NAME", "key_directory": "SLIPWAY_GATEWAY_KEY_DIR"}

    for name in GatewaySettings.model_fields:
        assert f"`{others.get(name, f'SLIPWAY_{name.upper()}')}`" in text
