"""Where credentials come from, and that they do not grow old."""

import ssl

import pytest
import yaml

from slipway_kube import auth
from slipway_kube.errors import NoCredentials


def a_kubeconfig(folder, **user):
    path = folder / "config"
    path.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "here",
                "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
                "clusters": [
                    {"name": "c", "cluster": {"server": "https://10.0.0.1:6443/", "insecure-skip-tls-verify": True}}
                ],
                "users": [{"name": "u", "user": user}],
            }
        )
    )
    return str(path)


async def test_a_kubeconfig_gives_server_token_and_tls(tmp_path):
    connection = auth.load(a_kubeconfig(tmp_path, token="s3cret"))

    assert connection.server == "https://10.0.0.1:6443"
    assert await connection.credentials.headers() == {"Authorization": "Bearer s3cret"}
    assert connection.tls is not None
    assert connection.tls.verify_mode is ssl.CERT_NONE  # as that kubeconfig says


async def test_inside_a_pod_the_service_account_is_used(tmp_path, monkeypatch):
    from kubernetes.config import incluster_config

    token, certificate = tmp_path / "token", tmp_path / "ca.crt"
    token.write_text("first\n")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(certificate))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.setattr(auth, "_tls", lambda configuration: None)
    certificate.write_text("not read in this test")

    connection = auth.load()

    assert connection.server == "https://[fd00::1]:443"
    assert (await connection.credentials.headers())["Authorization"].split() == ["bearer", "first"]
    token.write_text("second")
    connection.credentials.forget()
    assert (await connection.credentials.headers())["Authorization"].split() == ["bearer", "second"]


async def test_without_either_it_says_so(tmp_path, monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(NoCredentials):
        auth.load(str(tmp_path / "nothing-here"))


async def test_headers_are_asked_for_once_a_minute():
    now, asked = 0.0, []

    def load() -> dict[str, str]:
        asked.append(now)
        return {"Authorization": f"Bearer {len(asked)}"}

    credentials = auth.RefreshingCredentials(load, clock=lambda: now)
    for now in (0.0, 30.0, 59.0, 61.0, 90.0):  # noqa: B007  the clock above reads it
        headers = await credentials.headers()
    assert asked == [0.0, 61.0]
    assert headers == {"Authorization": "Bearer 2"}


async def test_a_source_that_fails_once_leaves_the_old_token_in_use():
    now, broken = 0.0, False

    def load() -> dict[str, str]:
        if broken:
            raise OSError("the file is being replaced")
        return {"Authorization": "Bearer good"}

    credentials = auth.RefreshingCredentials(load, clock=lambda: now)
    await credentials.headers()
    now, broken = 100.0, True
    assert await credentials.headers() == {"Authorization": "Bearer good"}
