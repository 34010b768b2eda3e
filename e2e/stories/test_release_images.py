"""What only real containers can show: images of a release start as the chart deploys them, limits and policies hold."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from e2e.cluster.access import CommandError
from e2e.containerd import images
from e2e.containerd.components import SANDBOX_IMAGE
from e2e.containerd.machine import NAMES, Machine
from e2e.containerd.release import USER
from e2e.manifests import as_yaml
from e2e.slipway import RELEASE_NAMESPACE, Slipway, wait_for
from slipway_api import names

pytestmark = [pytest.mark.containers, pytest.mark.timeout(900)]

HUNGRY_IMAGE, HUNGRY_MEBIBYTES, LIMIT = "localhost/slipway-e2e/hungry:1", 256, "64Mi"
LOOK = """
import os
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status") if ":\\t" in line)
print(os.getuid(), status["CapEff"].strip(), status["NoNewPrivs"].strip(), status["Seccomp"].strip())
try:
    open("/opt/slipway/app/written", "w")
except OSError as error:
    print(error.strerror)
"""
REFUSED = ("refused", "exceeded", "timeout", "unreachable")


@pytest.fixture
def apply(released: Slipway) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Applies a service, and deletes it after the test."""
    applied = []

    def apply(manifest: dict[str, Any]) -> None:
        applied.append(manifest["metadata"]["name"])
        released.apply(as_yaml(manifest))

    yield apply
    for name in applied:
        released.delete(name)


def service(name: str, image: str, **spec: Any) -> dict[str, Any]:
    """A service whose replicas run an image of the test; they need no GPU."""
    limits = {"gpu": {"count": 0}, "requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"memory": LIMIT}}
    spec = {
        "model": {"uri": "file:///opt/slipway/models/tiny"},
        "runtime": {"image": image},
        "resources": limits,
    } | spec
    return {"apiVersion": names.API_VERSION, "kind": "InferenceService", "metadata": {"name": name}, "spec": spec}


def ready_pod(slipway: Slipway, component: str) -> Any:
    selector = f"app.kubernetes.io/component={component}"
    return slipway.core.list_namespaced_pod(RELEASE_NAMESPACE, label_selector=selector).items[0]


@pytest.mark.capability("REL-3", "SE-3")
@pytest.mark.parametrize("component", ["operator", "gateway"])
def test_an_image_of_a_release_runs_restricted_as_an_arbitrary_user(released: Slipway, component: str) -> None:
    pod = ready_pod(released, component)
    (status,) = pod.status.container_statuses

    seen = released.access.kubectl("exec", "-n", RELEASE_NAMESPACE, pod.metadata.name, "--", "python3", "-c", LOOK)

    assert status.image == images.name_of(component)
    assert status.container_id.startswith("containerd://")
    assert status.restart_count == 0
    assert seen.splitlines() == [f"{USER} 0000000000000000 1 2", "Read-only file system"]


@pytest.mark.capability("REL-3", "OB-3")
def test_a_replica_that_exceeds_its_memory_is_reported_as_killed_for_it(
    machine: Machine, released: Slipway, apply: Callable[[dict[str, Any]], None]
) -> None:
    machine.import_program(HUNGRY_IMAGE, "eat", str(HUNGRY_MEBIBYTES))

    apply(service("hungry", HUNGRY_IMAGE))

    def named() -> str | None:
        told = [condition["message"] for condition in released.service("hungry")["status"]["conditions"]]
        return next((message for message in told if "OOMKilled" in message), None)

    message = wait_for("a condition names the kill", named, timeout=60)
    assert "exit code 137" in message
    assert wait_for("an event names it", lambda: any("OOMKilled" in event.note for event in released.events("hungry")))
    assert wait_for("the kubelet saw the limit", lambda: "OOMKilled" in str(released.pods("hungry")[0].status))


# Under enforced NetworkPolicies.


def stand_in(name: str, labels: dict[str, str], *ports: int, node: str = NAMES[0]) -> dict[str, Any]:
    """A pod with servers on these ports; with the label of a service, the service's NetworkPolicy applies to it."""
    containers = [
        {"name": f"port-{port}", "image": SANDBOX_IMAGE, "args": ["serve", f":{port}"]} for port in ports
    ] or [{"name": "client", "image": SANDBOX_IMAGE}]
    spec = {"containers": containers, "terminationGracePeriodSeconds": 1, "nodeName": node}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}


def run(machine: Machine, namespace: str, manifest: dict[str, Any]) -> str:
    """Start a pod, and return its address once it is Ready."""
    name = manifest["metadata"]["name"]
    machine.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(manifest))
    machine.kubectl("wait", "-n", namespace, f"pod/{name}", "--for=condition=Ready", "--timeout=60s")
    return str(machine.api("GET", f"/api/v1/namespaces/{namespace}/pods/{name}")["status"]["podIP"])


def admitted(machine: Machine, namespace: str, url: str) -> bool:
    """Whether the pod `client` of a namespace gets an HTTP answer, of whatever status."""
    try:
        machine.kubectl("exec", "-n", namespace, "client", "--", "/pod", "get", url)
    except CommandError as error:
        if any(word in error.stderr.lower() for word in REFUSED):
            return False
        raise
    return True


def becomes(machine: Machine, namespace: str, url: str, expected: bool) -> bool:
    """Whether a call is admitted or refused, as expected, once the engine has caught up with pods and policies."""
    return wait_for(f"{url} admitted={expected}", lambda: admitted(machine, namespace, url) is expected, timeout=30)


def gateway_gets(slipway: Slipway, url: str) -> str:
    """What the gateway's own pod gets from a URL."""
    code = f"import urllib.request; print(urllib.request.urlopen({url!r}, timeout=5).status)"
    name = ready_pod(slipway, "gateway").metadata.name
    return slipway.access.kubectl("exec", "-n", RELEASE_NAMESPACE, name, "--", "python3", "-c", code).strip()


@pytest.mark.capability("REL-3", "SE-2")
@pytest.mark.parametrize("node", NAMES)
def test_strangers_reach_the_gateways_serving_port_and_no_admin_port(
    machine: Machine, released: Slipway, node: str
) -> None:
    """Operator and gateway are on the first node; the stranger calls from the same node, and from the other."""
    namespace = machine.create_namespace("stranger")
    run(machine, namespace, stand_in("client", {}, node=node))
    gateway, operator = (ready_pod(released, part).status.pod_ip for part in ("gateway", "operator"))

    assert becomes(machine, namespace, f"http://{gateway}:8000/v1/models", True)
    assert becomes(machine, namespace, f"http://{gateway}:8001/metrics", False)
    assert becomes(machine, namespace, f"http://{operator}:8080/metrics", False)
    machine.kubectl("delete", "namespace", namespace, "--wait=false")


@pytest.mark.capability("REL-3", "SE-2")
@pytest.mark.parametrize("node", NAMES)
def test_the_policy_of_a_closed_service_admits_the_gateway_alone(
    machine: Machine, released: Slipway, apply: Callable[[dict[str, Any]], None], node: str
) -> None:
    """Pods with the service's label stand in for replicas: the policy is the operator's, and the engine is real.

    Gateway and stranger are on the first node; the stand-ins are on the same node, and on the other.
    """
    apply(service("closed", HUNGRY_IMAGE, replicas=0, routing={"directAccess": "GatewayOnly"}))
    apply(service("open", HUNGRY_IMAGE, replicas=0))
    namespace = machine.create_namespace("stranger")
    run(machine, namespace, stand_in("client", {}))
    ports = (names.SERVING_PORT, names.ADMIN_PORT)
    addresses = {
        name: run(machine, "default", stand_in(f"stand-in-{name}", {names.LABEL_SERVICE: name}, *ports, node=node))
        for name in ("closed", "open")
    }

    expected = {("closed", 8000): False, ("closed", 8001): False, ("open", 8000): True, ("open", 8001): False}
    for (name, port), answer in expected.items():
        assert becomes(machine, namespace, f"http://{addresses[name]}:{port}/", answer)
        assert gateway_gets(released, f"http://{addresses[name]}:{port}/") == "200"
    machine.kubectl("delete", "pod", "-n", "default", "stand-in-closed", "stand-in-open")
    machine.kubectl("delete", "namespace", namespace, "--wait=false")


@pytest.mark.capability("REL-3", "SE-2")
def test_a_namespace_whose_egress_is_closed_reaches_the_gateway_it_is_allowed(
    machine: Machine, released: Slipway
) -> None:
    """The other direction: a platform team that closes egress admits the gateway by its namespace and port."""
    namespace = machine.create_namespace("closed")
    run(machine, namespace, stand_in("client", {}))
    outside = run(machine, "default", stand_in("outside", {}, 8000))
    gateway = ready_pod(released, "gateway").status.pod_ip
    assert becomes(machine, namespace, f"http://{outside}:8000/", True)

    to = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": RELEASE_NAMESPACE}}}
    rule = {"to": [to], "ports": [{"port": 8000, "protocol": "TCP"}]}
    spec = {"podSelector": {}, "policyTypes": ["Egress"], "egress": [rule]}
    path = f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies"
    machine.api("POST", path, {"metadata": {"name": "egress"}, "spec": spec})

    assert becomes(machine, namespace, f"http://{outside}:8000/", False)
    assert becomes(machine, namespace, f"http://{gateway}:8000/v1/models", True)
    machine.kubectl("delete", "pod", "-n", "default", "outside", "--wait=false")
    machine.kubectl("delete", "namespace", namespace, "--wait=false")
