"""The system under test: two services under load, the targets of faults, and the primitives that faults are made of."""

import contextlib
import json
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from e2e import checks
from e2e.chaos.client import Counts
from e2e.cluster.access import ApiError
from e2e.cluster.launch import Cluster
from e2e.manifests import as_yaml, chat
from e2e.slipway import RELEASE_NAMESPACE, USER_NAMESPACE, Slipway, wait_for

FIXED, AUTO, SPARE = "fixed", "auto", "spare"  # three replicas; one to three; made and deleted by faults
REPLICAS = 3
ENGINE = "slipway_runtime.engine"  # in the command line of the engine process
TAINT = "e2e.slipway.dev/full"  # keeps new pods away; a cordoned node would be emptied by the operator
SETTLED_SECONDS = 240.0  # how long recovery may take
STEADY_SECONDS = 8.0  # how long it must stay settled


def service(name: str, **runtime: Any) -> dict[str, Any]:
    """A deterministic service on CPUs: its texts do not depend on which requests run beside them."""
    manifest = chat(name, resources={"gpu": {"count": 0}, "requests": {"cpu": "50m"}, "limits": {"cpu": "1"}})
    manifest["spec"]["runtime"] |= {"deterministic": True} | runtime
    if name != AUTO:
        del manifest["spec"]["autoscaling"]
        manifest["spec"]["replicas"] = REPLICAS if name == FIXED else 1
    return manifest


@dataclass
class Stage:
    """The installation, and the two services that are under load."""

    cluster: Cluster
    slipway: Slipway
    settings: tuple[str, ...] = ()  # of the chart, beyond its defaults
    counts: Counts = field(default_factory=Counts)  # of the load that runs
    notes: list[str] = field(default_factory=list)  # measurements of the fault that runs, for its row

    def configure(self, *settings: str) -> None:
        """Upgrade the chart to its defaults with these settings, unless it has them."""
        if settings != self.settings:
            self.slipway.install(*settings)
            self.settings = settings

    def prepare(self) -> None:
        """Apply both services, and wait until they serve."""
        for name in (FIXED, AUTO):
            self.apply(service(name))
        self.wait_settled()

    def apply(self, manifest: dict[str, Any]) -> None:
        """`kubectl apply`."""
        self.slipway.apply(as_yaml(manifest))

    # Recovery

    def wait_settled(self, timeout: float = SETTLED_SECONDS) -> float:
        """Seconds until both services have their replicas, no other pod is left, and first attempts are served.

        It must stay so for a while: a replica that was just killed still counts as ready.
        """
        began = time.monotonic()
        since: float | None = None

        def look() -> bool:
            nonlocal since
            before, since = since, None  # an exception of the next line counts as unsettled
            if self._is_settled():
                since = before or time.monotonic()
            return since is not None and time.monotonic() - since >= STEADY_SECONDS

        wait_for("both services are settled", look, timeout, every=0.25)
        return max(0.0, (since or began) - began)

    def _is_settled(self) -> bool:
        for name, wanted in ((FIXED, {REPLICAS}), (AUTO, {1, 2, 3})):
            found = self.slipway.service(name)
            status, ready = found.get("status", {}), len(checks.ready_pods(self.slipway, name))
            if status.get("observedGeneration") != found["metadata"]["generation"]:
                return False
            if ready not in wanted or status.get("readyReplicas") != ready:
                return False
            if name == FIXED and len(self.slipway.pods(name)) != REPLICAS:
                return False
            if failures := checks.first_attempts(self.slipway, name, 1):
                raise AssertionError(failures)
        return True

    def violations(self) -> list[str]:
        """Double slots and orphans, as sentences."""
        doubles = [slot for name in (FIXED, AUTO) for slot in checks.double_slots(self.slipway, name)]
        return [f"double slot {slot}" for slot in doubles] + [f"orphan {pod}" for pod in checks.orphans(self.slipway)]

    def spread(self) -> None:
        """Move pods until the fixed service, the gateway and the operator have one on each node.

        A node that was drained or lost is empty when it is back, and a fault of an empty node shows nothing.
        """
        for node in self.cluster.nodes:
            empty_for = [pods for pods in self._nodes_of_pods().values() if node not in pods.values()]
            if not empty_for:
                continue
            others = [other for other in self.cluster.nodes if other != node]
            for other in others:
                self.kubectl("taint", "node", other, f"{TAINT}:NoSchedule")
            try:
                for pods in empty_for:
                    name = sorted(pods)[-1]
                    where = USER_NAMESPACE if name.startswith(f"{FIXED}-") else RELEASE_NAMESPACE
                    self.kubectl("-n", where, "delete", "pod", "--wait=false", name)
                wait_for(f"{node} has one pod of each", lambda node=node: self._is_on(node), timeout=120)  # type: ignore[misc]
            finally:
                for other in others:
                    self.kubectl("taint", "node", other, f"{TAINT}:NoSchedule-")
            self.wait_settled()

    def _is_on(self, node: str) -> bool:
        return all(node in pods.values() for pods in self._nodes_of_pods().values())

    def _nodes_of_pods(self) -> dict[str, dict[str, str]]:
        """Pod name -> node, of the ready pods of the fixed service and of both components, without those that go."""
        found = {FIXED: checks.ready_pods(self.slipway, FIXED)}
        for component in ("gateway", "operator"):
            selector = f"app.kubernetes.io/component={component}"
            pods = self.slipway.core.list_namespaced_pod(RELEASE_NAMESPACE, label_selector=selector).items
            found[component] = [pod for pod in pods if not pod.metadata.deletion_timestamp and checks.is_ready(pod)]
        return {name: {pod.metadata.name: pod.spec.node_name for pod in pods} for name, pods in found.items()}

    # Targets

    def operators(self) -> list[str]:
        """Names of the operator's pods, the leader first."""
        leader = self.slipway.leader()
        return sorted(self._release_pods("operator"), key=lambda name: name != leader)

    def gateways(self) -> list[str]:
        """Names of the gateway's pods."""
        return self._release_pods("gateway")

    def _release_pods(self, component: str) -> list[str]:
        selector = f"app.kubernetes.io/component={component}"
        pods = self.slipway.core.list_namespaced_pod(RELEASE_NAMESPACE, label_selector=selector).items
        return sorted(pod.metadata.name for pod in pods if pod.metadata.deletion_timestamp is None)

    def replica(self) -> str:
        """The name of a ready replica of the fixed service."""
        return str(checks.ready_pods(self.slipway, FIXED)[0].metadata.name)

    def replicas(self) -> list[str]:
        """The names of all ready replicas of the fixed service."""
        return [pod.metadata.name for pod in checks.ready_pods(self.slipway, FIXED)]

    # Faults

    def kubectl(self, *arguments: str) -> str:
        """kubectl as the administrator."""
        return self.slipway.access.kubectl(*arguments)

    def kill(self, pod: str, namespace: str = USER_NAMESPACE, *, engine_only: bool = False) -> None:
        """kill -9 of a pod's processes, or of its engine process alone."""
        self.signal(pod, signal.SIGKILL, namespace, engine_only=engine_only)

    def hang(
        self, pods: Sequence[str], namespace: str = USER_NAMESPACE, *, seconds: float, engine_only: bool = False
    ) -> None:
        """Stop the processes of pods for a while, without ending them; some may be replaced meanwhile."""
        for pod in pods:
            self.signal(pod, signal.SIGSTOP, namespace, engine_only=engine_only)
        time.sleep(seconds)
        for pod in pods:
            with contextlib.suppress(ApiError, KeyError, ValueError, OSError):
                self.cluster.kill_container(namespace, pod, how=signal.SIGCONT)

    def signal(self, pod: str, how: int, namespace: str = USER_NAMESPACE, *, engine_only: bool = False) -> None:
        """Signal the processes of a pod, or its engine process alone; raises where there is none."""
        if not self.cluster.kill_container(namespace, pod, how=how, only=ENGINE if engine_only else ""):
            raise AssertionError(f"no process of {namespace}/{pod} was signalled")

    def scale(self, replicas: int) -> None:
        """Set the fixed service's replicas, and wait until they are ready."""
        manifest = service(FIXED)
        manifest["spec"]["replicas"] = replicas
        self.apply(manifest)
        wait_for(
            f"{FIXED} has {replicas} replicas",
            lambda: len(checks.ready_pods(self.slipway, FIXED)) == replicas,
            timeout=SETTLED_SECONDS,
        )

    def evict(self, pod: str) -> None:
        """Ask for the pod's eviction until its disruption budget allows it."""
        path = f"/api/v1/namespaces/{USER_NAMESPACE}/pods/{pod}/eviction"
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": USER_NAMESPACE}}
        wait_for(f"{pod} may be evicted", lambda: self.slipway.access.api("POST", path, body), timeout=120)

    def wait_blocked(self, name: str) -> None:
        """Wait until the service says why its new revision does not come up."""

        def blocked() -> str:
            conditions = self.slipway.service(name)["status"]["conditions"]
            return json.dumps([c for c in conditions if c["reason"] in ("ModelNotFound", "ImagePullFailed")])[1:-1]

        wait_for(f"{name} says what blocks it", blocked, timeout=120)
