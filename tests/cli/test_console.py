"""`kubectl slipway console` forwards a gateway's admin port with kubectl, and names the address with its token."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from slipway_api import internal_tls
from slipway_cli.cluster import Cluster, ClusterError
from slipway_cli.console import forwarded_console

pytestmark = pytest.mark.timeout(60)


class Installation(Cluster):
    """A cluster with these pods in the namespace of the release."""

    def __init__(self, *pods: dict[str, Any]) -> None:
        self._pods = list(pods)

    def installation_pods(self, namespace: str) -> list[dict[str, Any]]:
        return self._pods

    def gateway_token(self, pod: Any) -> str:
        return f"token-of-{pod['metadata']['name']}"


def a_gateway_pod(name: str, *, ready: bool) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "ns", "labels": {"app.kubernetes.io/component": "gateway"}},
        "spec": {},
        "status": {"conditions": [{"type": "Ready", "status": "True" if ready else "False"}]},
    }


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a program named kubectl first on the PATH: it writes its arguments and its pid, then runs this script."""

    def install(script: str) -> Path:
        program = tmp_path / "kubectl"
        program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\necho $$ > {tmp_path}/pid\n{script}\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return tmp_path

    return install


@pytest.mark.capability("UX-1")
def test_the_address_has_the_forwarded_port_and_the_token_behind_the_hash(kubectl):
    folder = kubectl("echo 'Forwarding from 127.0.0.1:43210 -> 8001'\nexec sleep 60")
    cluster = Installation(a_gateway_pod("gateway-a", ready=False), a_gateway_pod("gateway-b", ready=True))

    with forwarded_console(cluster, "ns", context="prod") as url:
        assert url == "http://127.0.0.1:43210/console#token=token-of-gateway-b"
        arguments = (folder / "arguments").read_text()
        process = int((folder / "pid").read_text())

    expected = "port-forward --address 127.0.0.1 --namespace ns --context prod pod/gateway-b :8001"
    assert arguments.strip() == expected
    assert "token" not in arguments
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


@pytest.mark.capability("SE-10", "UX-1")
def test_a_port_that_speaks_tls_has_an_address_of_https(kubectl):
    kubectl("echo 'Forwarding from 127.0.0.1:43210 -> 8001'\nexec sleep 60")
    pod = a_gateway_pod("gateway-a", ready=True) | {"spec": {"volumes": [{"name": internal_tls.VOLUME}]}}

    with forwarded_console(Installation(pod), "ns") as url:
        assert url == "https://127.0.0.1:43210/console#token=token-of-gateway-a"


@pytest.mark.capability("UX-1")
def test_a_failed_forward_is_one_sentence(kubectl):
    kubectl("echo 'error: pods \"gateway-a\" is forbidden' >&2\nexit 1")

    with pytest.raises(ClusterError) as refused, forwarded_console(Installation(a_gateway_pod("a", ready=True)), "ns"):
        pass

    assert str(refused.value) == 'kubectl port-forward to ns/a failed: error: pods "gateway-a" is forbidden'


@pytest.mark.parametrize(
    ("pods", "message"),
    [
        ((), "the namespace ns has no gateway. Name the namespace of the installation with --release-namespace."),
        ((a_gateway_pod("a", ready=False),), "no gateway in ns is ready. Run kubectl describe pods -n ns."),
    ],
)
def test_without_a_ready_gateway_the_remedy_is_named(pods, message):
    with pytest.raises(ClusterError) as refused, forwarded_console(Installation(*pods), "ns"):
        pass
    assert str(refused.value) == message


@pytest.mark.capability("UX-1")
def test_without_kubectl_the_remedy_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError) as refused, forwarded_console(Installation(a_gateway_pod("a", ready=True)), "ns"):
        pass

    assert str(refused.value) == "kubectl is not on the PATH. Install it, or add its folder to the PATH."


@pytest.mark.capability("UX-1")
def test_a_forward_that_writes_much_is_read(kubectl):
    """kubectl writes a line for each connection: a pipe that nobody reads holds 64 KiB and then stops it."""
    folder = kubectl(
        "echo 'Forwarding from 127.0.0.1:43210 -> 8001'\n"
        "for i in $(seq 5000); do echo 'Handling connection for 43210'; done\n"
        'touch "${0%/*}/done"\nexec sleep 60'
    )

    with forwarded_console(Installation(a_gateway_pod("gateway-a", ready=True)), "ns"):
        while not (folder / "done").exists():
            time.sleep(0.02)
