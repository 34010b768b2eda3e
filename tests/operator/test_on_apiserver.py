"""The real `slipway-operator` process with the chart's rights, against a real API server; the tests play kubelet."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from e2e.cluster.access import Access
from slipway_api import names
from tests.chart.rights import apply_rights, kubeconfig_of
from tests.operator.runtime_double import RuntimeDouble

pytestmark = pytest.mark.apiserver

CHECKOUT = Path(__file__).resolve().parents[2]
SYSTEM = "slipway-system"
POD_IP = "127.0.7.1"  # any loopback address will do for a pod that the test itself serves
SERVICE = """
apiVersion: slipway.dev/v1alpha1
kind: InferenceService
metadata: {name: chat}
spec:
  model: {uri: "file:///opt/slipway/models/tiny"}
  resources: {gpu: {count: 0}}
  replicas: 1
  drain: {timeoutSeconds: 20, endpointPropagationSeconds: 0}
"""

T = TypeVar("T")
Object = dict[str, Any]


class Operator:
    """One operator process."""

    def __init__(self, kubeconfig: Path, folder: Path, identity: str, namespace: str) -> None:
        self.identity = identity
        self.log = (folder / f"{identity}.log").open("w+")
        masters = folder / "masters"
        masters.mkdir(exist_ok=True)
        (masters / "current").write_text("a-master-for-tests")
        environment = {
            "PATH": os.environ["PATH"],
            "KUBECONFIG": str(kubeconfig),
            "SLIPWAY_NAMESPACE": SYSTEM,
            "POD_NAME": identity,
            "SLIPWAY_MASTER_DIR": str(masters),
            "SLIPWAY_GATEWAY_KEY_DIR": str(masters),
            "SLIPWAY_ADMIN_PORT": "0",
            "SLIPWAY_WATCH_NAMESPACES": namespace,  # other tests leave services in theirs
        }
        command = Path(sys.executable).with_name("slipway-operator")
        self.process = subprocess.Popen([command, "run"], env=environment, stderr=self.log, stdout=self.log)

    def lines(self) -> list[Object]:
        text = Path(self.log.name).read_text()
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def said(self, message: str) -> bool:
        return any(line["message"] == message for line in self.lines())

    def get(self, path: str) -> httpx.Response:
        port = next(line["admin_port"] for line in self.lines() if line["message"] == "operator started")
        return httpx.get(f"http://127.0.0.1:{port}{path}")

    def metric(self, name: str) -> float:
        found = re.search(rf"^{re.escape(name)} (\S+)$", self.get("/metrics").text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def end(self, how: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(how)
        return self.process.wait(15)


class Stage:
    """The API server, seen by a user and a kubelet of one namespace."""

    def __init__(self, access: Access, kubeconfig: Path, folder: Path) -> None:
        self.access = access
        self.namespace = access.create_namespace(restricted=True)
        self._kubeconfig = kubeconfig
        self._folder = folder
        self._operators: list[Operator] = []

    def start_operator(self) -> Operator:
        operator = Operator(self._kubeconfig, self._folder, f"operator-{len(self._operators)}", self.namespace)
        self._operators.append(operator)
        self.eventually(lambda: operator.said("operator started"), "an operator that started")
        return operator

    def apply(self, manifest: str) -> None:
        self.access.kubectl("apply", "-n", self.namespace, "-f", "-", stdin=manifest)

    def service(self) -> Object:
        return self._get(f"/apis/{names.API_VERSION}/namespaces/{self.namespace}/inferenceservices/chat")

    def pods(self) -> list[Object]:
        return self._get(f"/api/v1/namespaces/{self.namespace}/pods")["items"]

    def run_pod(self, pod: Object, *, ready: bool = True) -> None:
        """What the kubelet writes when a pod runs."""
        status = {
            "phase": "Running",
            "podIP": POD_IP,
            "podIPs": [{"ip": POD_IP}],
            "conditions": [{"type": "Ready", "status": str(ready), "lastTransitionTime": "2026-01-01T00:00:00Z"}],
            "containerStatuses": [
                {
                    "name": "server",
                    "ready": ready,
                    "started": True,
                    "restartCount": 0,
                    "image": "x",
                    "imageID": "x",
                    "state": {"running": {}},
                }
            ],
        }
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod['metadata']['name']}/status"
        self.access.api("PATCH", path, {"status": status})

    def condition(self, kind: str) -> Object:
        conditions = self.service().get("status", {}).get("conditions", [])
        return next((one for one in conditions if one["type"] == kind), {})

    def eventually(self, look: Callable[[], T], what: str, seconds: float = 120) -> T:
        deadline = time.monotonic() + seconds
        while not (found := look()):
            if time.monotonic() > deadline:
                logs = [Path(one.log.name).read_text()[-4000:] for one in self._operators]
                pytest.fail(f"{what} did not come about\n" + "\n".join(logs))
            time.sleep(0.1)
        return found

    def _get(self, path: str) -> Object:
        return self.access.api("GET", path)

    def end(self) -> None:
        for operator in self._operators:
            operator.end(signal.SIGKILL)
        self.access.kubectl("delete", "lease", "--all", "-n", SYSTEM)


@pytest.fixture(scope="module")
def installed(apiserver: Access, tmp_path_factory: pytest.TempPathFactory) -> tuple[Access, Path]:
    """CRD, ServiceAccount and rights from the chart, and a kubeconfig with nothing but that account's token."""
    return install(apiserver, tmp_path_factory.mktemp("operator"))


def install(access: Access, folder: Path) -> tuple[Access, Path]:
    """What the fixture `installed` has, on any API server."""
    access.serve_kinds(CHECKOUT / "crds")
    apply_rights(access, "operator", SYSTEM)
    return access, kubeconfig_of(access, "slipway-operator", SYSTEM, folder)


@contextmanager
def a_stage(installed: tuple[Access, Path], folder: Path) -> Iterator[Stage]:
    stage = Stage(*installed, folder)
    try:
        yield stage
    finally:
        stage.end()


@pytest.fixture
def stage(installed: tuple[Access, Path], tmp_path: Path) -> Iterator[Stage]:
    with a_stage(installed, tmp_path) as stage:
        yield stage


@pytest.mark.capability("OP-1", "OP-2", "SE-3", "OB-3")
async def test_the_life_of_a_service_from_apply_to_the_end_of_its_drain(stage: Stage) -> None:
    operator = stage.start_operator()
    stage.apply(SERVICE)
    [pod] = stage.eventually(stage.pods, "a pod")

    service = stage.service()
    assert re.fullmatch(r"chat-[0-9a-z]{5}-0-0", pod["metadata"]["name"])
    assert pod["metadata"]["labels"][names.LABEL_STATE] == names.STATE_SERVING
    assert pod["metadata"]["labels"][names.LABEL_MANAGED_BY] == names.MANAGED_BY
    [owner] = pod["metadata"]["ownerReferences"]
    assert owner["uid"] == service["metadata"]["uid"]
    assert owner["controller"]
    assert owner["blockOwnerDeletion"]
    assert service["metadata"]["finalizers"] == [names.FINALIZER]
    kube_service = stage.access.api("GET", f"/api/v1/namespaces/{stage.namespace}/services/chat")
    assert kube_service["spec"]["selector"] == {names.LABEL_SERVICE: "chat", names.LABEL_STATE: names.STATE_SERVING}
    stage.eventually(lambda: stage.service().get("status", {}).get("observedGeneration") == 1, "a status")

    env = {one["name"]: one.get("value", "") for one in pod["spec"]["containers"][0]["env"]}
    runtime = RuntimeDouble(digests=tuple(env[names.ENV_ADMIN_TOKEN_SHA256].split(",")), running=1)
    async with runtime.serving(POD_IP, names.ADMIN_PORT):
        stage.run_pod(pod)
        await until(lambda: stage.condition("Ready").get("status") == "True", "Ready=True")
        await until(lambda: "GET /signals" in runtime.calls, "a call for signals")
        stage.access.kubectl("delete", "infsvc", "chat", "-n", stage.namespace, "--wait=false")
        await until(lambda: bool(runtime.drains), "the drain")

        assert stage.service()["metadata"]["deletionTimestamp"], "it waits for its last request"
        [draining] = stage.pods()
        assert draining["metadata"]["labels"][names.LABEL_STATE] == names.STATE_DRAINING
        assert draining["metadata"]["annotations"][names.ANNOTATION_DRAIN_REASON]

        runtime.running = 0
        await until(lambda: not stage.pods(), "the end of the pod")
        services = f"/apis/{names.API_VERSION}/namespaces/{stage.namespace}/inferenceservices"
        await until(lambda: not stage.access.api("GET", services)["items"], "the end of the service")

    assert operator.metric("slipway_operator_reconcile_duration_seconds_count") > 3
    assert operator.metric('slipway_operator_decisions_total{reason="ReplicaCreated"}') == 1
    assert operator.metric("slipway_operator_is_leader") == 1
    events = stage.access.api("GET", f"/apis/events.k8s.io/v1/namespaces/{stage.namespace}/events")["items"]
    assert {"ReplicaCreated", "ReplicaReady", "ReplicaDraining"} <= {event["reason"] for event in events}
    assert operator.end() == 0
    assert not [line for line in operator.lines() if line.get("level") in ("error", "critical")]
    refused = [
        (event["verb"], event["requestURI"])
        for event in stage.access.audit()
        if event["user"]["username"] == f"system:serviceaccount:{SYSTEM}:slipway-operator"
        and event.get("responseStatus", {}).get("code") == 403
    ]
    assert refused == []


@pytest.mark.capability("AS-6")
async def test_a_victim_of_a_scale_down_serves_again_and_its_drain_leaves_no_trace(stage: Stage) -> None:
    stage.start_operator()
    stage.apply(SERVICE)
    [pod] = stage.eventually(stage.pods, "a pod")
    env = {one["name"]: one.get("value", "") for one in pod["spec"]["containers"][0]["env"]}
    runtime = RuntimeDouble(digests=tuple(env[names.ENV_ADMIN_TOKEN_SHA256].split(",")), running=1)
    async with runtime.serving(POD_IP, names.ADMIN_PORT):
        stage.run_pod(pod)
        await until(lambda: stage.condition("Ready").get("status") == "True", "Ready=True")
        stage.apply(SERVICE.replace("replicas: 1", "replicas: 0"))
        await until(lambda: bool(runtime.drains), "the drain")
        stage.apply(SERVICE)
        await until(lambda: stage.pods()[0]["metadata"]["labels"][names.LABEL_STATE] == "serving", "the label")

        assert not runtime.draining, "the runtime accepts before anything is routed to it"
        [back] = stage.pods()
        assert back["metadata"]["uid"] == pod["metadata"]["uid"]
        assert names.ANNOTATION_DRAIN_STARTED not in back["metadata"]["annotations"]
        assert names.ANNOTATION_DRAIN_REASON not in back["metadata"]["annotations"]
        assert names.ANNOTATION_ADMIN_NONCE in back["metadata"]["annotations"]
        await until(lambda: stage.service()["status"].get("readyReplicas") == 1, "a ready replica")
        stage.access.kubectl("delete", "infsvc", "chat", "-n", stage.namespace, "--wait=false")
        runtime.running = 0
        await until(lambda: not stage.pods(), "the end of the pod")


async def until(condition: Callable[[], Any], what: str, seconds: float = 30) -> None:
    """Wait while the servers of this very loop go on answering."""
    deadline = time.monotonic() + seconds
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline, f"{what} did not come about"
        await asyncio.sleep(0.1)


@pytest.mark.capability("OP-1")
def test_a_service_at_rest_and_one_applied_again_cause_no_write(stage: Stage) -> None:
    operator = stage.start_operator()
    stage.apply(SERVICE)
    [pod] = stage.eventually(stage.pods, "a pod")
    stage.run_pod(pod)
    stage.eventually(lambda: stage.condition("Ready").get("status") == "True", "Ready=True")
    time.sleep(2)
    children = [stage.access.kubectl("get", kind, "-n", stage.namespace, "-o", "yaml") for kind in ("pods", "services")]
    before = stage.service()["metadata"]["resourceVersion"]
    stage.apply(SERVICE)
    time.sleep(5)

    assert stage.service()["metadata"]["resourceVersion"] == before
    after = [stage.access.kubectl("get", kind, "-n", stage.namespace, "-o", "yaml") for kind in ("pods", "services")]
    assert after == children
    assert operator.process.poll() is None


@pytest.mark.capability("OP-16")
def test_children_that_people_delete_or_edit_are_back_within_seconds_with_events(stage: Stage) -> None:
    """Fault matrix "foreign children while a node drains": they came back at the resync, after up to ten minutes."""

    def kubectl(*arguments: str) -> str:
        return stage.access.kubectl(*arguments, "-n", stage.namespace)

    def found(kind: str, name: str, *, with_metadata: str) -> str:
        return kubectl("get", kind, name, "--ignore-not-found", "-o", f"jsonpath={{.metadata.{with_metadata}}}")

    def watched() -> set[str]:
        """Plurals of the kinds that are watched in the namespace."""
        references = [event["objectRef"] for event in stage.access.audit() if event["verb"] == "watch"]
        return {one["resource"] for one in references if one.get("namespace") == stage.namespace}

    operator = stage.start_operator()
    stage.apply(SERVICE)
    stage.eventually(stage.pods, "a pod")
    stage.eventually(lambda: found("netpol", "chat-replicas", with_metadata="uid"), "the children")
    uid = found("svc", "chat", with_metadata="uid")
    children = {"services", "networkpolicies", "poddisruptionbudgets"}
    stage.eventually(lambda: watched() >= children, "watches of children, which begin after the first passes", 60)
    kubectl("delete", "svc", "chat", "--wait=false")
    kubectl("label", "netpol", "chat-replicas", f"{names.LABEL_MANAGED_BY}-")
    kubectl("patch", "pdb", "chat", "--type=merge", "-p", '{"spec": {"selector": {"matchLabels": {"added": "x"}}}}')

    stage.eventually(lambda: found("svc", "chat", with_metadata="uid") not in ("", uid), "another Service", 10)
    stage.eventually(
        lambda: names.MANAGED_BY in found("netpol", "chat-replicas", with_metadata="labels"), "the label", 10
    )
    stage.eventually(lambda: "added" not in kubectl("get", "pdb", "chat", "-o", "json"), "the selector", 10)

    def told() -> set[str]:
        events = stage.access.api("GET", f"/apis/events.k8s.io/v1/namespaces/{stage.namespace}/events")["items"]
        return {event["note"].partition(" had been")[0] for event in events if event["reason"] == "ChildRestored"}

    everything = {"Service chat", "NetworkPolicy chat-replicas", "PodDisruptionBudget chat"}
    stage.eventually(lambda: told() == everything, "their events", 10)
    assert operator.process.poll() is None


@pytest.mark.capability("OP-7")
def test_after_kill_9_a_second_replica_takes_over_and_after_sigterm_at_once(stage: Stage) -> None:
    first, second = stage.start_operator(), stage.start_operator()
    stage.eventually(lambda: first.said("leading") or second.said("leading"), "a leader")
    leader, standby = (first, second) if first.said("leading") else (second, first)
    stage.eventually(lambda: standby.get("/readyz").status_code == 200, "a ready standby")

    assert standby.get("/readyz").text == "standing by\n"

    leader.end(signal.SIGKILL)
    stage.apply(SERVICE)
    stage.eventually(lambda: standby.said("leading"), "the standby to lead", seconds=20)
    stage.eventually(stage.pods, "a pod from the new leader")
    third = stage.start_operator()
    stage.eventually(lambda: third.get("/readyz").status_code == 200, "a ready standby")

    assert standby.end() == 0

    stage.eventually(lambda: third.said("leading"), "the third to lead", seconds=10)
    assert len(stage.pods()) == 1


def test_without_a_master_it_refuses_to_start_and_says_which_secret_is_missing(
    installed: tuple[Access, Path], tmp_path: Path
) -> None:
    _, kubeconfig = installed
    command = Path(sys.executable).with_name("slipway-operator")
    environment = {"PATH": os.environ["PATH"], "KUBECONFIG": str(kubeconfig), "SLIPWAY_MASTER_DIR": str(tmp_path)}
    environment["SLIPWAY_ADMIN_PORT"] = "0"

    done = subprocess.run([command], env=environment, capture_output=True, text=True, timeout=30, check=False)

    assert done.returncode == 1
    assert "mount the Secret slipway-admin-master there" in done.stderr


@pytest.mark.capability("OP-16", "SE-3")
def test_labels_that_people_remove_are_restored_with_the_rights_of_the_chart(stage: Stage) -> None:
    """review/control-plane.md 5, 6: a real watch reports a pod that leaves its selection as deleted."""
    stage.start_operator()
    stage.apply(SERVICE)
    [pod] = stage.eventually(stage.pods, "a pod")
    stage.eventually(lambda: stage.service().get("status", {}).get("observedGeneration") == 1, "a status")
    revisions = f"/apis/apps/v1/namespaces/{stage.namespace}/controllerrevisions"
    [revision] = stage.access.api("GET", revisions)["items"]

    for path, before in (
        (f"/api/v1/namespaces/{stage.namespace}/pods/{pod['metadata']['name']}", pod),
        (f"{revisions}/{revision['metadata']['name']}", revision),
    ):
        labels = before["metadata"]["labels"]
        every = [name for name in labels if name not in names.RECOMMENDED_LABELS]  # those are a convention: ADR 174
        for removed in ([names.LABEL_MANAGED_BY], [names.LABEL_SERVICE], every):
            stage.access.api("PATCH", path, {"metadata": {"labels": dict.fromkeys(removed)}})
            stage.eventually(
                lambda at=path, wanted=labels: stage.access.api("GET", at)["metadata"].get("labels") == wanted,
                f"the labels {removed} of {path}",
            )
    assert [one["metadata"]["uid"] for one in stage.pods()] == [pod["metadata"]["uid"]]
