"""A small cluster in virtual time: API server, kubelet, garbage collector, runtimes, and real operator processes.

    async with simulated_cluster(tmp_path) as cluster:
        cluster.apply("chat", replicas=2)
        operator = cluster.start_operator()
        await cluster.until(lambda: len(cluster.serving("chat")) == 2)
        operator.kill()                         # kill -9: nothing of it runs or writes any more

Everything of the operator is real except the network, the clock and kopf, whose place a plain watch takes.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from slipway_api import internal_tls, names
from slipway_api.admin_token import token_matches
from slipway_api.runtime_api import BlockCounts, DrainStatus, ModelInfo, QueueCounts, Signals, StartupTimes, State
from slipway_kube.resources import CONFIG_MAPS, INFERENCE_SERVICES, LORA_ADAPTERS, NODES, PODS, WARM_POOLS
from slipway_operator.clock import Clock
from slipway_operator.core.observed import GatewayCount
from slipway_operator.manager import KINDS, Registration
from slipway_operator.replica_client import Address
from tests.fakes import FakeApiServer
from tests.operator.adapter_double import AdapterDouble
from tests.operator.operator_process import OperatorProcess

NAMESPACE = "team"
T0 = datetime(2026, 1, 1, tzinfo=UTC)
MASTER = b"a-master-for-tests"
GATEWAY_KEY = b"a-gateway-key-for-tests"
TICK_SECONDS = 0.25
GIVE_UP_SECONDS = 900.0

Object = dict[str, Any]


@dataclass
class Runtime:
    """What runs in one pod."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    draining: bool = False
    drained_with: list[int | None] = field(default_factory=list)
    state_at_undrain: list[str] = field(default_factory=list)  # the pod's label when it was asked to serve again
    is_ending: bool = False  # it drains for good, whatever it is asked
    model: Object | None = None  # what POST /model brought
    starting: str = ""  # Booting, NoModel or Loading, until it is ready
    ready_from: float = 0.0
    pod_uid: str = ""
    boots: int = 0
    starts: int = 0  # of the process within its container, after DELETE /model
    adapters: AdapterDouble = field(default_factory=AdapterDouble)


class SimulatedCluster:
    """The cluster around the operators."""

    def __init__(self, master_directory: Path) -> None:
        (master_directory / "current").write_bytes(MASTER)
        self.master_directory = master_directory
        self.gateways = GatewayCount(answering=1, running=1, namespace="slipway-system", selector="a=b")
        self.gateway_key_directory = master_directory / "gateway"
        self.gateway_key_directory.mkdir(exist_ok=True)
        (self.gateway_key_directory / "current").write_bytes(GATEWAY_KEY)
        self.server = FakeApiServer()
        self.server.store._now = self.now
        self.clock = Clock(now=self.now, monotonic=self.time, lease=self.time)
        self.runtimes: dict[str, Runtime] = {}
        self.start_seconds = 1.0
        self.boot_seconds = 3.0  # of a pod of a WarmPool
        self.claim_seconds = 1.0  # from POST /model to ready
        self.startup: StartupTimes | None = None  # what GET /state says; None: it is not answered
        self.refuses_models = 0  # so many POSTs of a model get no answer
        self.keeps_model: Callable[[str], bool] = lambda _pod: False  # DELETE /model of this pod gets no answer
        self.leaks: Callable[[str], bool] = lambda _pod: False  # memory of the model that this pod gave back is in use
        self.stop_seconds = 0.5
        self.kubelet_works = True
        self.write_seconds = 0.0
        self.on_write: Callable[[str], None] = lambda _what: None  # may raise, before the server has it
        self.on_written: Callable[[str], None] = lambda _what: None  # may raise: the reply is lost
        self.silent: Callable[[str], bool] = lambda _pod: False
        self.sampled: list[tuple[float, str]] = []  # when which pod answered for its signals
        self.completion: Callable[[str], tuple[int, str]] = lambda _pod: (200, "a text")
        self.prompted: list[tuple[str, str, dict[str, str], Object]] = []
        self.most_live_pods = 0
        self.processes: list[OperatorProcess] = []
        self.kinds: tuple[Registration, ...] = KINDS
        self.settings: dict[str, Any] = {}  # of operators that start from now on
        self._since: dict[str, float] = {}
        self.server.put(NODES, {"metadata": {"name": "node-a"}, "status": {"conditions": [_condition("Ready", self)]}})

    def time(self) -> float:
        return asyncio.get_running_loop().time()

    def now(self) -> datetime:
        return T0 + timedelta(seconds=self.time())

    async def until(self, condition: Callable[[], bool], what: str = "the condition") -> None:
        """Let time pass until it is so."""
        deadline = self.time() + GIVE_UP_SECONDS
        while not condition():
            assert self.time() < deadline, f"{what} did not come about: {self.describe()}"
            await asyncio.sleep(TICK_SECONDS)

    async def quiet(self, seconds: float = 30.0) -> list[str]:
        """Let time pass, and say which writes were made meanwhile."""
        before = len(self.server.requests)
        await asyncio.sleep(seconds)
        return [
            f"{request.method} {request.path}"
            for request in self.server.requests[before:]
            if request.method != "GET" and "/leases" not in request.path and "/events" not in request.path
        ]

    # --- users --------------------------------------------------------------------------------------------------------

    def apply(self, name: str, **spec: Any) -> None:
        """kubectl apply; what is not said stays as it is."""
        old = self.server.get(INFERENCE_SERVICES, NAMESPACE, name)
        base = {
            "model": {"uri": "file:///models/tiny"},
            "resources": {"gpu": {"count": 0}},
            "drain": {"timeoutSeconds": 30, "endpointPropagationSeconds": 1},
        }
        body = old or {"metadata": {"name": name, "namespace": NAMESPACE}, "spec": base}
        self.server.put(INFERENCE_SERVICES, body | {"spec": body["spec"] | spec})

    def delete(self, name: str) -> None:
        """kubectl delete."""
        self.server.delete(INFERENCE_SERVICES, NAMESPACE, name)

    def service(self, name: str) -> Object | None:
        return self.server.get(INFERENCE_SERVICES, NAMESPACE, name)

    def status(self, name: str) -> Object:
        return (self.service(name) or {}).get("status") or {}

    def condition(self, name: str, kind: str) -> Object:
        return next((one for one in self.status(name).get("conditions", []) if one["type"] == kind), {})

    # --- pods ---------------------------------------------------------------------------------------------------------

    def pods(self, name: str = "") -> list[Object]:
        """All that exist, terminating ones too."""
        pods = self.server.objects(PODS, NAMESPACE)
        return [pod for pod in pods if not name or pod["metadata"].get("labels", {}).get(names.LABEL_SERVICE) == name]

    def live(self, name: str = "") -> list[Object]:
        return [pod for pod in self.pods(name) if "deletionTimestamp" not in pod["metadata"]]

    def serving(self, name: str) -> list[str]:
        """Names of the pods that the gateway would route to."""
        return [
            pod["metadata"]["name"]
            for pod in self.live(name)
            if pod["metadata"].get("labels", {}).get(names.LABEL_STATE) == names.STATE_SERVING
            and any(
                one["type"] == "Ready" and one["status"] == "True"
                for one in pod.get("status", {}).get("conditions", [])
            )
        ]

    async def run_kubelet(self) -> None:
        """Start pods, stop pods, and collect what belongs to nobody; for ever."""
        while True:
            self.most_live_pods = max(self.most_live_pods, len(self.live()))
            if self.kubelet_works:
                for pod in self.server.objects(PODS):
                    if _is_tended(pod):
                        self._tend(pod)
                self.server.collect_garbage()
            await asyncio.sleep(TICK_SECONDS)

    def _tend(self, pod: Object) -> None:
        meta, time = pod["metadata"], self.time()
        uid, where = meta["uid"], (meta["namespace"], meta["name"])
        if "deletionTimestamp" in meta:
            if time >= self._since.setdefault(f"stop {uid}", time) + self.stop_seconds:
                self.server.finish_pod(*where)
            return
        if not pod["spec"].get("nodeName"):
            self.server.put(PODS, pod | {"spec": pod["spec"] | {"nodeName": "node-a"}})
            return
        if time < self._since.setdefault(f"start {uid}", time) + self.start_seconds:
            return
        is_empty = any(owner["kind"] == "WarmPool" for owner in meta.get("ownerReferences", []))
        runtime = self.runtimes.get(meta["name"])
        if runtime is None or runtime.pod_uid not in ("", uid):  # a name may be used again
            runtime = self.runtimes[meta["name"]] = Runtime(starting="Booting" if is_empty else "")
            if not is_empty:
                runtime.adapters.boot(self.boot_list(meta))
        runtime.pod_uid = uid
        boot = f"boot {uid} {runtime.starts}"
        if runtime.starting == "Booting" and time >= self._since.setdefault(boot, time) + self.boot_seconds:
            runtime.starting = "Standby" if "--standby" in pod["spec"]["containers"][0]["args"] else "NoModel"
        if runtime.starting == "Loading" and time >= runtime.ready_from:
            runtime.starting = ""
        is_ready = not runtime.draining and not runtime.starting
        if _shows(pod, is_ready, runtime.boots):
            return  # nothing to write; most pods of most ticks, so nothing is built for them
        status = {
            "phase": "Running",
            "podIP": f"10.0.0.{1 + len(self._since) % 250}",
            "conditions": [_condition("PodScheduled", self), _condition("Ready", self, is_true=is_ready)],
            "containerStatuses": [
                {
                    "name": "server",
                    "ready": is_ready,
                    "started": not runtime.starting or _was_started(pod, runtime.boots),
                    "state": {"running": {}},
                    "restartCount": runtime.boots,
                }
            ],
        }
        self.server.patch_status(PODS, *where, status)

    def restart_container(self, pod: str) -> None:
        """The container ends, and the kubelet starts it again: with the boot list as it is now."""
        runtime = self.runtimes[pod]
        runtime.boots += 1
        found = self.server.get(PODS, NAMESPACE, pod)
        assert found is not None
        runtime.adapters.boot(self.boot_list(found["metadata"]))

    def boot_list(self, metadata: Object) -> str:
        """The ConfigMap that the pod mounts, as the kubelet shows it."""
        owners = metadata.get("ownerReferences") or [{"name": metadata["labels"][names.LABEL_SERVICE]}]
        name = f"{owners[0]['name']}-adapters"
        found = self.server.get(CONFIG_MAPS, metadata["namespace"], name)
        return str(found["data"][names.ADAPTERS_FILE]) if found is not None else ""

    # --- runtimes -----------------------------------------------------------------------------------------------------

    async def dial(
        self, method: str, replica: Address, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> tuple[int, bytes]:
        """The admin ports of all pods."""
        await asyncio.sleep(0.001)
        if self.silent(replica.pod):
            await asyncio.Event().wait()
        pod = self.server.get(PODS, replica.namespace, replica.pod)
        if pod is None or replica.pod not in self.runtimes:
            raise ConnectionRefusedError(replica.pod)
        speaks_tls = any(one["name"] == internal_tls.VOLUME for one in pod["spec"]["volumes"])
        if replica.tls_name != (internal_tls.replicas_name(replica.namespace) if speaks_tls else ""):
            raise ConnectionResetError(f"{replica.pod} is called as {replica.tls_name or 'plain text'}")
        # Beside a foreign engine, slipway-agent has the digests.
        env = {one["name"]: one.get("value", "") for box in pod["spec"]["containers"] for one in box["env"]}
        if not token_matches(headers[names.HEADER_ADMIN_TOKEN], env[names.ENV_ADMIN_TOKEN_SHA256].split(",")):
            return 401, b""
        runtime = self.runtimes[replica.pod]
        if path == names.PATH_DRAIN:
            runtime.draining = True
            runtime.drained_with.append(msgspec.json.decode(body or b"{}").get("timeoutSeconds"))
            drain = DrainStatus(draining=True, running=runtime.running, waiting=runtime.waiting)
            return 200, drain.wire()
        if path == names.PATH_UNDRAIN:
            runtime.state_at_undrain.append(pod["metadata"]["labels"].get(names.LABEL_STATE, ""))
            runtime.draining = runtime.is_ending
            drain = DrainStatus(draining=runtime.draining, running=runtime.running, waiting=runtime.waiting)
            return 200, drain.wire()
        if path == names.PATH_MODEL and method == "DELETE":
            if self.keeps_model(replica.pod):
                raise ConnectionResetError(replica.pod)
            if runtime.model is None:
                return 200, ModelInfo().wire()
            if not runtime.draining or runtime.running + runtime.waiting:
                return 409, b"drain first"
            runtime.model, runtime.draining, runtime.adapters = None, False, AdapterDouble()
            runtime.starting = "MemoryNotFreed" if self.leaks(replica.pod) else "Booting"
            runtime.starts += 1
            return 202, ModelInfo().wire()
        if path == names.PATH_MODEL:
            if self.refuses_models:
                self.refuses_models -= 1
                raise ConnectionResetError(replica.pod)
            asked = msgspec.json.decode(body or b"{}")
            if runtime.model is not None and runtime.model != asked:
                return 409, b"another model"
            if runtime.model is None:
                runtime.model, runtime.starting, runtime.ready_from = asked, "Loading", self.time() + self.claim_seconds
            return 202, ModelInfo(uri=asked["uri"]).wire()
        if path == names.PATH_STATE and self.startup is not None:
            free = BlockCounts(total=1000, live=0, cached=0, free=1000)
            sizes = {"block_size": 16, "bytes_per_token": 1, "max_model_len": 1024, "max_num_seqs": 4}
            queue = QueueCounts(running=0, waiting=0)
            facts = {"model_name": "m", "uptime_seconds": 1.0, "blocks": free, "queue": queue, "draining": False}
            return 200, State.model_validate({**facts, **sizes, "startup": self.startup}).wire()
        boot_id = f"{pod['metadata']['uid']}-{runtime.boots}-{runtime.starts}"
        if runtime.adapters.handles(path):
            return runtime.adapters.answer(method, path, body, boot_id)
        self.sampled.append((self.time(), replica.pod))
        signals = Signals(
            boot_id=boot_id,
            kv_usage=runtime.kv_usage,
            running=runtime.running,
            waiting=runtime.waiting,
            draining=runtime.draining,
            starting=runtime.starting,
        )
        return 200, signals.wire()

    async def serving_dial(
        self, method: str, replica: Address, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> tuple[int, bytes]:
        """The serving ports of all pods: they complete every prompt with the same text, and know their adapters."""
        await asyncio.sleep(0.01)
        pod = self.server.get(PODS, replica.namespace, replica.pod)
        if pod is None or replica.pod not in self.runtimes:
            raise ConnectionRefusedError(replica.pod)
        model = msgspec.json.decode(body or b"{}").get("model")
        if model != pod["metadata"]["annotations"].get(names.ANNOTATION_SERVED_NAME):
            return self.runtimes[replica.pod].adapters.answer(method, path, body, "")
        self.prompted.append((replica.pod, path, dict(headers), msgspec.json.decode(body or b"{}")))
        status, text = self.completion(replica.pod)
        return status, msgspec.json.encode({"choices": [{"text": text}]})

    # --- operators ----------------------------------------------------------------------------------------------------

    def start_operator(
        self,
        identity: str = "",
        *,
        pod_uid: str = "",
        dies_after_writes: int | None = None,
        watch_namespaces: tuple[str, ...] = (),
    ) -> OperatorProcess:
        identity = identity or f"operator-{len(self.processes)}"
        process = OperatorProcess(
            self, identity, pod_uid=pod_uid, dies_after_writes=dies_after_writes, watch_namespaces=watch_namespaces
        )
        self.processes.append(process)
        return process

    def describe(self) -> Object:
        """What a person would look at first."""
        return {
            "pods": [
                (pod["metadata"]["name"], pod.get("status", {}).get("phase"), pod["metadata"]["labels"])
                for pod in self.pods()
            ],
            "services": [one.get("status") for one in self.server.objects(INFERENCE_SERVICES)],
            "adapters": [one.get("status") for one in self.server.objects(LORA_ADAPTERS)],
            "pools": [(one["spec"], one.get("status")) for one in self.server.objects(WARM_POOLS)],
            "lost": [process.lost for process in self.processes],
        }


@asynccontextmanager
async def simulated_cluster(master_directory: Path) -> AsyncIterator[SimulatedCluster]:
    """A cluster for as long as the block lasts."""
    cluster = SimulatedCluster(master_directory)
    kubelet = asyncio.create_task(cluster.run_kubelet())
    try:
        yield cluster
        assert not kubelet.done(), kubelet
    finally:
        for process in cluster.processes:
            await process.end()
        kubelet.cancel()
        await asyncio.gather(kubelet, return_exceptions=True)


def _is_tended(pod: Object) -> bool:
    """Replicas and pods of pools, whatever has become of their labels; a pod that pulls is not simulated."""
    meta = pod["metadata"]
    if names.ANNOTATION_PRE_PULL_DIGEST in meta.get("annotations", {}):
        return False
    is_owned = any(owner["kind"] in ("InferenceService", "WarmPool") for owner in meta.get("ownerReferences", []))
    return is_owned or bool({names.LABEL_SERVICE, names.LABEL_POOL} & set(meta.get("labels", {})))


def _shows(pod: Object, is_ready: bool, boots: int) -> bool:
    """Whether its status has these two conditions, and one container that was started as often."""
    status = pod.get("status", {})
    conditions = [(one["type"], one["status"]) for one in status.get("conditions", [])]
    restarts = [one.get("restartCount") for one in status.get("containerStatuses", [])]
    return conditions == [("PodScheduled", "True"), ("Ready", str(is_ready))] and restarts == [boots]


def _was_started(pod: Object, boots: int) -> bool:
    """As the kubelet has it: a container that was ready once counts as started until it is restarted."""
    servers = pod.get("status", {}).get("containerStatuses", [])
    return any(one.get("started") and one.get("restartCount") == boots for one in servers)


def _condition(kind: str, cluster: SimulatedCluster, *, is_true: bool = True) -> Object:
    try:
        now = cluster.now()
    except RuntimeError:
        now = T0
    return {"type": kind, "status": str(is_true), "lastTransitionTime": now.strftime("%Y-%m-%dT%H:%M:%SZ")}
