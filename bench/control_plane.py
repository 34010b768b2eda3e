"""The local control plane with simulated nodes, for benchmarks of the operator: etcd and the API server are real.

So are the operator's processes, with the rights of the chart. Nothing runs pods: a simulated kubelet in this process
binds each pod to a node, says that it is ready, and opens its ports on a loopback address of its own.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec

from bench.changes import PATIENCE_SECONDS, Changes, Object, service_of
from bench.fake_replicas import FakeReplica, listen
from e2e.cluster.launch import Cluster
from e2e.cluster.paths import CHECKOUT, cluster_folder
from slipway_api import names
from slipway_kube import auth
from slipway_kube.client import Client
from slipway_kube.errors import Conflict, NotFound
from slipway_kube.resources import INFERENCE_SERVICES, LEASES, NODES, PODS, Resource

SYSTEM: Final = "slipway-system"
NAMESPACE: Final = "bench"
NODE_COUNT: Final = 4
SERVICE_SPEC: Final[Mapping[str, Any]] = {
    "model": {"uri": "file:///opt/slipway/models/tiny"},
    "resources": {"gpu": {"count": 0}},
    "drain": {"timeoutSeconds": 20, "endpointPropagationSeconds": 0},
}


class OperatorProcess:
    """One operator process."""

    def __init__(self, identity: str, environment: Mapping[str, str], log: Path) -> None:
        self.identity = identity
        self.log = log
        command = [Path(sys.executable).with_name("slipway-operator"), "run"]
        with log.open("w") as file:
            self.process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)

    async def is_ready(self) -> None:
        """Wait until its caches are filled: it leads, or stands by."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not self._answers("/readyz"):
                if self.process.poll() is not None:
                    raise RuntimeError(f"{self.identity} ended: {self.log.read_text()[-2000:]}")
                await asyncio.sleep(0.1)

    def metrics(self) -> str:
        """Its metrics as text."""
        return self._get("/metrics").text

    def cpu_seconds(self) -> float:
        """CPU time of the process so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(int(field) for field in fields[11:13]) / os.sysconf("SC_CLK_TCK")

    def end(self, how: int = signal.SIGTERM) -> None:
        """Send the signal; returns at once."""
        if self.process.poll() is None:
            self.process.send_signal(how)

    def _answers(self, path: str) -> bool:
        try:
            return self._get(path).status_code == 200
        except (httpx.HTTPError, LookupError):
            return False

    def _get(self, path: str) -> httpx.Response:
        found = re.search(r'"admin_port": ?(\d+)', self.log.read_text())
        if found is None:
            raise LookupError(f"{self.identity} has not said its port yet")
        return httpx.get(f"http://127.0.0.1:{found[1]}{path}")


class ControlPlane:
    """The API server as the benchmark's user and kubelet see it, and the operators that run on it."""

    def __init__(self, client: Client, kubeconfig: Path, folder: Path) -> None:
        self.client = client
        self.pods = Changes(client, PODS)
        self.services = Changes(client, INFERENCE_SERVICES)
        self.operators: dict[str, OperatorProcess] = {}
        self.replicas: dict[str, FakeReplica] = {}
        """By pod."""
        self.download_seconds = 0.0
        """Of each adapter, by replicas that start from now on."""
        self._kubeconfig = kubeconfig
        self._folder = folder
        self._numbers = count()
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.pods.on_change.append(self._tend)

    def spawn(self, work: Any) -> None:
        """Run a coroutine beside the benchmark, until its end."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def start_operator(self) -> OperatorProcess:
        """One more operator process, with full caches."""
        identity = f"operator-{len(self.operators)}"
        keys = self._folder / "keys"
        keys.mkdir(exist_ok=True)
        (keys / "current").write_text("a-key-for-the-benchmark")
        environment = {
            "PATH": os.environ["PATH"],
            "KUBECONFIG": str(self._kubeconfig),
            "SLIPWAY_NAMESPACE": SYSTEM,
            "POD_NAME": identity,
            "SLIPWAY_MASTER_DIR": str(keys),
            "SLIPWAY_GATEWAY_KEY_DIR": str(keys),
            "SLIPWAY_HUB_ENDPOINTS": "off",
            "SLIPWAY_AGENT_IMAGE": "slipway/agent:0.1.0",  # nothing pulls it
            "SLIPWAY_ADMIN_PORT": "0",
        }
        operator = OperatorProcess(identity, environment, self._folder / f"{identity}.log")
        self.operators[identity] = operator
        await operator.is_ready()
        return operator

    async def leader(self) -> OperatorProcess:
        """The operator that holds the Lease; waits until one does."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                with suppress(NotFound):
                    lease = msgspec.json.decode(await self.client.get(LEASES.path(SYSTEM, "slipway-operator")))
                    holder = (lease["spec"].get("holderIdentity") or "").rpartition("_")[0]
                    if holder in self.operators and self.operators[holder].process.poll() is None:
                        return self.operators[holder]
                await asyncio.sleep(0.1)

    async def apply(self, resource: Resource, name: str, spec: Mapping[str, Any]) -> None:
        """Create an object in the benchmark's namespace."""
        body = {"metadata": {"name": name, "namespace": NAMESPACE}, "spec": spec}
        await self.client.apply(resource.path(NAMESPACE, name), typed(resource, body), field_manager="user")

    async def change(self, resource: Resource, name: str, spec: Mapping[str, Any]) -> None:
        """Merge into an object's spec."""
        await self.client.merge_patch(resource.path(NAMESPACE, name), {"spec": spec})

    async def all_ready(self, services: int, replicas: int) -> None:
        """Wait until so many services have so many ready replicas each."""

        def ready() -> int:
            return sum((one.get("status") or {}).get("readyReplicas") == replicas for one in self.services.now.values())

        await self.services.until(lambda: ready() == services)

    def pods_of(self, service: str) -> list[str]:
        """The names of a service's pods."""
        return [name for (_, name), pod in self.pods.now.items() if service_of(pod) == service]

    def end(self) -> None:
        """Kill the operators, close the replicas' ports."""
        for operator in self.operators.values():
            operator.end(signal.SIGKILL)
            operator.process.wait()
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()

    # --- the kubelet --------------------------------------------------------------------------------------------------

    def _tend(self, kind: str, pod: Object) -> None:
        name = pod["metadata"]["name"]
        if kind == "DELETED":
            self.replicas.pop(name, None)
        elif "deletionTimestamp" in pod["metadata"]:
            self.spawn(self._remove(pod))
        elif name not in self.replicas:
            self.replicas[name] = FakeReplica(boot_id=pod["metadata"]["uid"], download_seconds=self.download_seconds)
            self.spawn(self._run(pod, self.replicas[name]))

    async def open_ports(self, _pod: Object, replica: FakeReplica, ip: str) -> None:
        """Serve the ports of a pod at its address."""
        for port in (names.ADMIN_PORT, names.SERVING_PORT):
            self._servers.append(await listen(lambda _address: replica, ip, port))

    async def _run(self, pod: Object, replica: FakeReplica) -> None:
        number = next(self._numbers)
        ip, path = f"127.20.{number // 250}.{1 + number % 250}", PODS.path(NAMESPACE, pod["metadata"]["name"])
        await self.open_ports(pod, replica, ip)
        node = {"apiVersion": "v1", "kind": "Node", "name": f"node-{number % NODE_COUNT}"}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod["metadata"]["name"]}, "target": node}
        with suppress(NotFound, Conflict):
            await self.client.create(f"{path}/binding", binding)
            await self.client.merge_patch(f"{path}/status", {"status": running_status(ip)})

    async def _remove(self, pod: Object) -> None:
        meta = pod["metadata"]
        with suppress(NotFound, Conflict):
            await self.client.delete(PODS.path(NAMESPACE, meta["name"]), uid=meta["uid"], grace_seconds=0)


@asynccontextmanager
async def a_control_plane(
    name: str, make: Callable[[Client, Path, Path], ControlPlane] = ControlPlane
) -> AsyncIterator[ControlPlane]:
    """A control plane with Slipway's kinds, rights and namespaces, and no operator yet."""
    async with AsyncExitStack() as stack:
        cluster = stack.enter_context(Cluster(light=True, folder=cluster_folder(f"bench-{name}")))
        kubeconfig = await asyncio.to_thread(_install, cluster)
        client = await stack.enter_async_context(Client(auth.load(str(cluster.kubeconfig))))
        plane = make(client, kubeconfig, cluster.folder)
        stack.callback(plane.end)
        for number in range(NODE_COUNT):
            node = {"metadata": {"name": f"node-{number}"}}
            await client.create(NODES.path(), typed(NODES, node))
            ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}
            await client.merge_patch(f"{NODES.path(name=f'node-{number}')}/status", {"status": {"conditions": [ready]}})
        plane.spawn(plane.pods.run())
        plane.spawn(plane.services.run())
        yield plane


def _install(cluster: Cluster) -> Path:
    """CRDs, namespaces, and the operator's account with the chart's rights; returns the account's kubeconfig."""
    cluster.serve_kinds(CHECKOUT / "crds")
    for name in (SYSTEM, NAMESPACE):
        cluster.api("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    rights = cluster.helm(
        "template", "slipway", CHECKOUT / "charts/slipway", "-n", SYSTEM, "-s", "templates/operator-rbac.yaml"
    )
    cluster.kubectl("apply", "-n", SYSTEM, "-f", "-", stdin=rights)
    token = cluster.kubectl("create", "token", "slipway-operator", "-n", SYSTEM).strip()
    server = {"server": cluster.url, "certificate-authority": str(cluster.folder / "pki" / "ca.crt")}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "x",
        "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
        "clusters": [{"name": "x", "cluster": server}],
        "users": [{"name": "x", "user": {"token": token}}],
    }
    path = cluster.folder / "operator.kubeconfig"
    path.write_text(json.dumps(config))
    return path


def writes_in(metrics: str) -> Counter[str]:
    """The writes that an operator's metrics count, by verb and resource."""
    made: Counter[str] = Counter()
    for labels, value in re.findall(r"^slipway_operator_writes_total\{(.*)\} (\S+)$", metrics, re.MULTILINE):
        found = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if found["code"] != "skipped":
            made[f"{found['verb']} {found['resource']}"] += int(float(value))
    return made


def typed(resource: Resource, body: Object) -> Object:
    """The object with its kind."""
    return {"apiVersion": resource.api_version, "kind": resource.kind} | body


def running_status(ip: str) -> Object:
    """The status of a ready pod, as its kubelet writes it."""
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {
        "phase": "Running",
        "podIP": ip,
        "podIPs": [{"ip": ip}],
        "conditions": [
            {"type": kind, "status": "True", "lastTransitionTime": since} for kind in ("PodScheduled", "Ready")
        ],
        "containerStatuses": [
            {
                "name": names.SERVER_CONTAINER,
                "ready": True,
                "started": True,
                "restartCount": 0,
                "image": "x",
                "imageID": "x",
                "state": {"running": {"startedAt": since}},
            }
        ],
    }
