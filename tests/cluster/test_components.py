"""The command lines of the components: what tests rely on is switched on."""

from pathlib import Path

import pytest
import yaml

from e2e.cluster import components
from e2e.cluster.components import Node, Service

BINARY, PKI = Path("/build/controlplane"), Path("/cluster/pki")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    folder = tmp_path / "config"
    folder.mkdir()
    return folder


def option(argv: list[str], name: str) -> str | None:
    return next((word.partition("=")[2] for word in argv if word.startswith(f"--{name}=")), None)


def test_the_api_server_authorizes_nodes_and_roles_and_checks_owners(config: Path) -> None:
    argv = components.apiserver(BINARY, PKI, config)

    assert option(argv, "authorization-mode") == "Node,RBAC"
    assert option(argv, "enable-admission-plugins") == "NodeRestriction,OwnerReferencesPermissionEnforcement"
    assert option(argv, "disable-admission-plugins") is None
    assert option(argv, "emulated-version") is None


def test_every_answered_request_is_in_the_audit_log(config: Path) -> None:
    argv = components.apiserver(BINARY, PKI, config)

    policy = yaml.safe_load(Path(option(argv, "audit-policy-file") or "").read_text())
    assert policy["rules"] == [{"level": "Metadata"}]
    assert option(argv, "audit-log-path") == f"{config.parent}/logs/audit.jsonl"


def test_anonymous_users_see_health_only(config: Path) -> None:
    argv = components.apiserver(BINARY, PKI, config)

    written = yaml.safe_load(Path(option(argv, "authentication-config") or "").read_text())
    assert [condition["path"] for condition in written["anonymous"]["conditions"]] == ["/livez", "/readyz", "/healthz"]


def test_without_controllers_pods_need_no_service_account(config: Path) -> None:
    argv = components.apiserver(BINARY, PKI, config, controllers=False)

    assert option(argv, "disable-admission-plugins") == "ServiceAccount"


def test_the_whole_control_plane_can_emulate_an_older_release(config: Path) -> None:
    for argv in (
        components.apiserver(BINARY, PKI, config, emulated_version="1.34"),
        components.controller_manager(BINARY, PKI, config, emulated_version="1.34"),
        components.scheduler(BINARY, config, emulated_version="1.34"),
    ):
        assert option(argv, "emulated-version") == "1.34"


def test_the_kubelet_leaves_the_machine_alone(config: Path) -> None:
    argv = components.kubelet(BINARY, PKI, config, Node("node-a", 1, gpus=8))

    written = yaml.safe_load(Path(option(argv, "config") or "").read_text())
    assert written["featureGates"] == {"KubeletInUserNamespace": True}
    assert (written["cgroupsPerQOS"], written["makeIPTablesUtilChains"]) == (False, False)


def test_nodes_and_their_pods_have_addresses_of_their_own() -> None:
    first, second = Node("a", 1, 8), Node("b", 2, 8)

    assert (first.ip, first.pod_range, first.pod_gateway) == ("172.30.0.11", "10.244.1.0/24", "10.244.1.1")
    assert (second.ip, second.pod_range) == ("172.30.0.12", "10.244.2.0/24")


def test_services_and_addresses_are_published_by_the_socket_they_were_given() -> None:
    argv = components.services("python", PKI, {7: Service("ns", "name", 8000), 8: ("172.30.0.1", 6443)}, api_only=False)

    assert "--publish-service=7=ns/name:8000" in argv
    assert "--publish=8=172.30.0.1:6443" in argv
