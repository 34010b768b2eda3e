"""Helpers of the local cluster's tests: pods by name, and waiting for conditions."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from e2e.cluster.access import ApiError
from e2e.cluster.launch import Cluster

T = TypeVar("T")
PYTHON, SH = "localhost/python:3.11", "localhost/sh:1"
RESTRICTED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
SERVER = """
import http.server, os, signal, sys, time

class Hello(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"{os.environ['POD_NAME']} {os.environ.get('NVIDIA_VISIBLE_DEVICES', '')}".encode())

def drain(*_):
    print("SIGTERM", flush=True)
    time.sleep(0.5)
    print("drained", flush=True)
    os._exit(0)

signal.signal(signal.SIGTERM, drain)
print("serving as uid", os.getuid(), flush=True)
http.server.ThreadingHTTPServer(("0.0.0.0", 8000), Hello).serve_forever()
"""


def wait_until(condition: Callable[[], T | None], limit: float = 60) -> T:
    """The condition's value as soon as it is true."""
    deadline = time.monotonic() + limit
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not true within {limit} s"
        time.sleep(0.1)
    return value


def container(name: str = "main", image: str = SH, args: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    return {"name": name, "image": image, "args": list(args), "securityContext": RESTRICTED, **more}


def pod(name: str, *containers: dict[str, Any], labels: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
    security = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    spec = {"containers": list(containers), "securityContext": security, "terminationGracePeriodSeconds": 1, **more}
    return {"metadata": {"name": name, "labels": labels or {}}, "spec": spec}


def server(name: str, gpus: int = 2, **more: Any) -> dict[str, Any]:
    """A pod that answers HTTP on port 8000 with its name and its GPUs, and drains for half a second on SIGTERM."""
    probe = {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 1}
    serve = container(
        "server",
        PYTHON,
        ("-c", SERVER),
        env=[{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
        ports=[{"name": "http", "containerPort": 8000}],
        resources={"limits": {"nvidia.com/gpu": str(gpus)}},
        startupProbe=probe | {"failureThreshold": 30},
        readinessProbe=probe,
        livenessProbe={"exec": {"command": ["true"]}, "periodSeconds": 5},
        lifecycle={"preStop": {"exec": {"command": ["sh", "-c", "echo preStop > /proc/1/fd/1; sleep 1"]}}},
    )
    return pod(name, serve, labels={"app": "server"}, terminationGracePeriodSeconds=20, **more)


@dataclass
class Pods:
    """The pods of one namespace, which is made for a test."""

    cluster: Cluster
    namespace: str = field(default="")

    def __post_init__(self) -> None:
        self.namespace = self.namespace or self.cluster.create_namespace("story", restricted=True)
        account = f"/api/v1/namespaces/{self.namespace}/serviceaccounts/default"
        wait_until(lambda: self._found(account))  # pods are refused before it is there

    def _found(self, path: str) -> dict[str, Any] | None:
        try:
            return self.cluster.api("GET", path)
        except ApiError as error:
            if error.code == 404:
                return None
            raise

    def create(self, manifest: dict[str, Any]) -> None:
        self.cluster.api("POST", f"/api/v1/namespaces/{self.namespace}/pods", manifest)

    def find(self, name: str) -> dict[str, Any] | None:
        return self._found(f"/api/v1/namespaces/{self.namespace}/pods/{name}")

    def status(self, name: str) -> dict[str, Any]:
        found = self.find(name)
        assert found is not None, f"no pod {name}"
        return dict(found["status"])

    def state(self, name: str) -> dict[str, Any]:
        """The first container's state."""
        statuses = self.status(name).get("containerStatuses") or [{"state": {}}]
        return dict(statuses[0]["state"])

    def waiting(self, name: str) -> str:
        return str(self.state(name).get("waiting", {}).get("reason", ""))

    def delete(self, name: str) -> None:
        self.cluster.api("DELETE", f"/api/v1/namespaces/{self.namespace}/pods/{name}")

    def ready(self, name: str) -> dict[str, Any]:
        """The pod's status, once it is Ready."""
        return wait_until(lambda: status if is_ready(status := self.status(name)) else None)

    def ended(self, name: str) -> str:
        """The pod's phase, once all its containers have ended."""
        return wait_until(lambda: phase if (phase := self.status(name)["phase"]) in ("Succeeded", "Failed") else None)

    def gone(self, name: str) -> None:
        wait_until(lambda: self.find(name) is None)

    def log(self, name: str, *args: str) -> str:
        return self.cluster.kubectl("logs", "-n", self.namespace, name, *args)

    def exec(self, name: str, *argv: str) -> str:
        return self.cluster.kubectl("exec", "-n", self.namespace, name, "--", *argv)

    def expose(self, name: str) -> str:
        """Make a Service for the pods of `server`; return its ClusterIP."""
        spec = {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": "http"}]}
        manifest = {"metadata": {"name": name}, "spec": spec}
        made = self.cluster.api("POST", f"/api/v1/namespaces/{self.namespace}/services", manifest)
        return str(made["spec"]["clusterIP"])

    def endpoints(self, service: str) -> list[str]:
        """IPs of a Service's ready endpoints."""
        path = f"/apis/discovery.k8s.io/v1/namespaces/{self.namespace}/endpointslices"
        slices = self.cluster.api("GET", f"{path}?labelSelector=kubernetes.io/service-name={service}")["items"]
        found = [endpoint for piece in slices for endpoint in piece.get("endpoints") or []]
        return sorted(endpoint["addresses"][0] for endpoint in found if endpoint["conditions"]["ready"])

    def remove(self) -> None:
        self.cluster.api("DELETE", f"/api/v1/namespaces/{self.namespace}")


def is_ready(status: dict[str, Any]) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", []))


def node_status(cluster: Cluster, name: str) -> dict[str, Any]:
    return dict(cluster.api("GET", f"/api/v1/nodes/{name}")["status"])


def is_up(cluster: Cluster, name: str) -> bool:
    """The node is Ready, with its GPUs."""
    status = node_status(cluster, name)
    return is_ready(status) and status["allocatable"].get("nvidia.com/gpu") == "8"
