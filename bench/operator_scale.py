"""Benchmark of the operator: 1,000 services and 10,000 busy pods, on a fake API server in a process of its own.

Everything of the operator is real (kopf, informers, queue, plans, scraper, sockets); the API server is the one of the
tests, and one server answers for the admin ports of all pods, each of which has a loopback address of its own.
"""

import argparse
import asyncio
import contextlib
import logging
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import kopf
import msgspec
import structlog

from bench.figures import Figure, Section
from slipway_api import names
from slipway_api.inference_service import InferenceService
from slipway_api.runtime_api import BlockCounts, QueueCounts, Signals, State
from slipway_kube.auth import Connection, StaticCredentials
from slipway_kube.client import Client
from slipway_kube.objects import Pod
from slipway_kube.resources import (
    CONTROLLER_REVISIONS,
    DISRUPTION_BUDGETS,
    INFERENCE_SERVICES,
    NETWORK_POLICIES,
    NODES,
    PODS,
    SERVICES,
)
from slipway_operator import handlers as handlers
from slipway_operator.clock import Clock
from slipway_operator.controller.children import with_digest
from slipway_operator.core.actions import AddFinalizer, AnnotatePod, ApplyChild, CreatePod, CreateRevision
from slipway_operator.core.observed import Defaults, Network, Observed, StoredRevision
from slipway_operator.core.service.plan import plan
from slipway_operator.inputs.observer import replica
from slipway_operator.inputs.revisions import ControllerRevision, revision_facts
from slipway_operator.keepalive import KeptConnections
from slipway_operator.manager import Manager, exempt_caches_from_collection
from slipway_operator.masters import GatewayKeys, Masters
from slipway_operator.metrics import OperatorMetrics
from slipway_operator.replica_client import direct
from slipway_operator.settings import OperatorSettings
from tests.operator.discovery import DiscoverableApiServer

NAMESPACE = "team"
PODS_OF_A_SERVICE = 10
NODES_OF_EIGHT = 8
STEADY_SECONDS = 30.0
IDLE_SECONDS = 20.0
CHANGES = 50
PATIENCE_SECONDS = 300.0

Object = dict[str, Any]


def measure(services: int = 1000) -> Section:
    """All figures."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "current").write_text("a-key-for-the-benchmark")
        return asyncio.run(_measure(services, Path(folder)))


# --- the other side, in a process of its own ------------------------------------------------------------------------


def settle(server: DiscoverableApiServer, number: int, masters: Masters, gateway_keys: GatewayKeys) -> None:
    """Put one service that is as it should be: what the operator would come to, by its own plan."""
    name, now = f"chat-{number}", datetime.now(UTC)
    spec = {
        "model": {"uri": "file:///models/tiny"},
        "resources": {"gpu": {"count": 0}},
        "replicas": PODS_OF_A_SERVICE,
    }
    body = server.put(INFERENCE_SERVICES, {"metadata": {"name": name, "namespace": NAMESPACE}, "spec": spec})
    pods: dict[str, Object] = {}
    applied: dict[str, str] = {}
    revisions: list[StoredRevision] = []
    for _ in range(12):
        service = InferenceService.model_validate(body)
        replicas = tuple(
            replica(msgspec.json.decode(msgspec.json.encode(pod), type=Pod), None) for pod in pods.values()
        )
        observed = Observed(
            service=service,
            replicas=replicas,
            applied=applied,
            revisions=tuple(revisions),
            defaults=Defaults(
                runtime_image="slipway/runtime:0.1.0",
                gateway_url="http://gateway",
                network=Network(release_namespace="slipway-system"),
            ),
            token_digests=masters.digests,
            serving_digests=gateway_keys.digests,
            nonce_seed=b"of the benchmark",
        )
        decided = plan(observed, now)
        for action in decided.actions:
            match action:
                case AddFinalizer(finalizer=finalizer):
                    body = body | {"metadata": body["metadata"] | {"finalizers": [finalizer]}}
                case ApplyChild():
                    kinds = {kind.kind: kind for kind in (SERVICES, DISRUPTION_BUDGETS, NETWORK_POLICIES)}
                    server.put(kinds[action.manifest["kind"]], with_digest(action))
                    applied[action.key] = action.digest
                case CreateRevision():
                    stored = server.put(CONTROLLER_REVISIONS, action.manifest)
                    raw = msgspec.json.encode(stored)
                    revisions.append(revision_facts(msgspec.json.decode(raw, type=ControllerRevision)))
                case AnnotatePod():
                    meta = pods[action.name]["metadata"]
                    merged = meta.get("annotations", {}) | action.annotations
                    annotations = {name: value for name, value in merged.items() if value is not None}
                    pods[action.name] = server.put(
                        PODS, pods[action.name] | {"metadata": meta | {"annotations": annotations}}
                    )
                case CreatePod():
                    pods[action.name] = server.put(PODS, running(action.manifest, number, len(pods)))
        assert decided.status is not None
        before, body = body, body | {"status": decided.status.to_json()}
        body = server.put(INFERENCE_SERVICES, dict(body))
        if not decided.actions and before.get("status") == body["status"]:
            return
    raise AssertionError(f"{name} does not settle")


def running(manifest: Object, number: int, slot: int) -> Object:
    """The pod as a kubelet would have it a while after."""
    index = number * PODS_OF_A_SERVICE + slot
    since = "2026-01-01T00:00:00Z"
    conditions = [{"type": kind, "status": "True", "lastTransitionTime": since} for kind in ("PodScheduled", "Ready")]
    server = {"name": "server", "ready": True, "started": True, "restartCount": 0, "state": {"running": {}}}
    status = {"phase": "Running", "podIP": address(index), "conditions": conditions, "containerStatuses": [server]}
    spec = manifest["spec"] | {"nodeName": f"node-{index // NODES_OF_EIGHT}"}
    return manifest | {"spec": spec, "status": status}


def address(index: int) -> str:
    """A loopback address of the pod's own."""
    return f"127.1.{index // 250}.{1 + index % 250}"


class AdminPort(asyncio.Protocol):
    """Answers every request for signals and state alike, with as little work as can be."""

    @staticmethod
    def _reply(body: bytes) -> bytes:
        return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(STATE_REPLY if b" /state " in data else SIGNALS_REPLY)


SIGNALS_REPLY = AdminPort._reply(Signals(boot_id="boot", kv_usage=0.4, running=3, waiting=0, admitted=10).wire())
STATE_REPLY = AdminPort._reply(
    State(
        boot_id="boot",
        model_name="chat",
        uptime_seconds=1.0,
        block_size=16,
        bytes_per_token=4096,
        max_model_len=4096,
        max_num_seqs=64,
        blocks=BlockCounts(total=1000, live=0, cached=0, free=1000),
        queue=QueueCounts(running=3, waiting=0),
        draining=False,
    ).wire()
)


async def serve(services: int, folder: Path) -> None:
    """The API server with everything in it, and the admin ports; serves until its input ends."""
    masters, gateway_keys = Masters(folder), GatewayKeys(folder)
    async with DiscoverableApiServer() as server:
        for number in range(services * PODS_OF_A_SERVICE // NODES_OF_EIGHT + 1):
            ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
            server.put(NODES, {"metadata": {"name": f"node-{number}"}, "status": {"conditions": [ready]}})
        for number in range(services):
            settle(server, number, masters, gateway_keys)
        server.store.history.clear()
        ports = await asyncio.get_running_loop().create_server(AdminPort, "0.0.0.0", 0, backlog=4096)
        print(server.url, ports.sockets[0].getsockname()[1], flush=True)
        await asyncio.to_thread(sys.stdin.read)  # ends with the process that started this one


# --- the operator, in this process ----------------------------------------------------------------------------------


async def _measure(services: int, folder: Path) -> Section:
    async with _start_server(services, folder) as (url, port):
        allow_sockets()
        connection = Connection(url, StaticCredentials())
        metrics, connections, stop = OperatorMetrics(), KeptConnections(), asyncio.Event()
        async with Client(connection) as client:
            settings = OperatorSettings(
                master_directory=folder, gateway_key_directory=folder, gateway_url="http://gateway"
            )
            # The Lease is in another API server and never expires: a slow machine must not end the measurement.
            lease_client, clock = DiscoverableApiServer().client(), Clock(lease=lambda: 0.0)
            dial, synced_event = direct(connections, port=port), asyncio.Event()
            manager = Manager(
                settings,
                client,
                lease_client,
                dial,
                metrics,
                serving_dial=dial,
                on_synced=synced_event.set,
                clock=clock,
            )
            started, cpu = time.monotonic(), time.process_time()
            operator = asyncio.create_task(
                kopf.operator(
                    memo=kopf.Memo(manager=manager, connect=lambda: connection),
                    standalone=True,
                    clusterwide=True,
                    stop_flag=stop,
                )
            )
            await _until(lambda: manager.ready() == (True, "leading"))
            taking_over = asyncio.create_task(_latencies(manager, client, range(CHANGES, 2 * CHANGES)))
            await synced_event.wait()
            assert _passes(metrics) >= services
            synced, synced_cpu = time.monotonic() - started, time.process_time() - cpu
            takeover = await taking_over
            exempt_caches_from_collection()
            await asyncio.sleep(STEADY_SECONDS / 2)  # all capacities read, all first statuses written
            writes, cpu, wall = _writes(metrics), time.process_time(), time.monotonic()
            ages: list[float] = []
            for _ in range(int(STEADY_SECONDS)):
                await asyncio.sleep(1)
                ages += _ages(manager)
            steady = (time.process_time() - cpu) / (time.monotonic() - wall)
            at_rest = _writes(metrics) - writes
            silent = sum(one.value for one in metrics.signal_errors.collect()[0].samples if one.name.endswith("_total"))
            latencies = await _latencies(manager, client, range(CHANGES))
            for key in manager.caches.known():
                manager._resync_key(key)
            resyncing = await _latencies(manager, client, range(2 * CHANGES, 3 * CHANGES))
            idle = await _cpu_without_scraping(manager)
            stop.set()
            await operator
    ages.sort()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    pods = services * PODS_OF_A_SERVICE
    return Section(
        f"Operator: {services:,} services, {pods:,} busy pods",
        (
            Figure("start to synced", synced, "s", "lists, Lease, one pass of every service; aim 10"),
            Figure("its CPU", synced_cpu, "s"),
            Figure(
                "steady CPU",
                steady,
                "cores",
                f"{STEADY_SECONDS:.0f} s, every pod busy and scraped; aim 1",
            ),
            Figure("steady CPU, scraping off", idle, "cores", f"{IDLE_SECONDS:.0f} s; aim 0.05"),
            Figure("age of samples, p99", ages[int(len(ages) * 0.99)], "s", "when looked at, once a second"),
            Figure("age of samples, worst", ages[-1], "s"),
            Figure("calls that were not answered", silent, "", "since the start; a deadline is 2 s"),
            Figure("writes at rest", at_rest, "", f"in those {STEADY_SECONDS:.0f} s; Lease renewals are not counted"),
            Figure("changed spec → pod created, p50", _share(latencies, 0.5), "s", "one after the other"),
            Figure("changed spec → pod created, p99", _share(latencies, 0.99), "s", f"of {CHANGES}; aim 0.5"),
            Figure("the same during a resync, p99", _share(resyncing, 0.99), "s", "of all objects at once; aim 0.5"),
            Figure("the same during a takeover, p50", _share(takeover, 0.5), "s", "beside the first pass of each"),
            Figure("the same during a takeover, p99", _share(takeover, 0.99), "s", "the first wait for lists; aim 0.5"),
            Figure("peak memory", memory, "MiB", "of the process, with this benchmark in it; aim 286"),
        ),
    )


def _share(values: list[float], share: float) -> float:
    """The value that so large a share of the values does not exceed."""
    return sorted(values)[int(len(values) * share)]


async def _latencies(manager: Manager, client: Client, numbers: range) -> list[float]:
    """From the reply to a changed spec to the new pod in the operator's own cache, one service after the other."""
    latencies = []
    for number in numbers:
        name = f"chat-{number}"
        path = INFERENCE_SERVICES.path(NAMESPACE, name)
        came: asyncio.Future[float] = asyncio.get_running_loop().create_future()

        def saw(_change: object, old: Pod | None, new: Pod | None, name: str = name, came: Any = came) -> None:
            is_ours = old is None and new is not None and new.labels.get(names.LABEL_SERVICE) == name
            if is_ours and not came.done():
                came.set_result(time.monotonic())

        manager.caches.pod_informer.on_change(saw)
        begun = time.monotonic()
        await client.merge_patch(path, {"spec": {"replicas": PODS_OF_A_SERVICE + 1}})
        latencies.append(await asyncio.wait_for(came, PATIENCE_SECONDS) - begun)
    return latencies


async def _cpu_without_scraping(manager: Manager) -> float:
    """Cores that the operator uses while no replica is asked for its signals."""
    for uid in list(manager._scraper._targets):
        manager._scraper.forget(uid)
    await asyncio.sleep(IDLE_SECONDS / 4)  # calls under way end
    cpu, wall = time.process_time(), time.monotonic()
    await asyncio.sleep(IDLE_SECONDS)
    return (time.process_time() - cpu) / (time.monotonic() - wall)


def _ages(manager: Manager) -> Iterator[float]:
    now = datetime.now(UTC)
    samples = (manager._scraper.sample(uid) for uid in list(manager._scraper._targets))
    return ((now - sample.at).total_seconds() for sample in samples if sample is not None)


def _passes(metrics: OperatorMetrics) -> float:
    return sum(one.value for one in metrics.reconcile_seconds.collect()[0].samples if one.name.endswith("_count"))


def _writes(metrics: OperatorMetrics) -> float:
    return sum(
        one.value
        for one in metrics.writes.collect()[0].samples
        if one.name.endswith("_total") and one.labels["code"] != "skipped"
    )


async def _until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110  what is waited for sets no event
            await asyncio.sleep(0.02)


@asynccontextmanager
async def _start_server(services: int, folder: Path) -> Any:
    command = (sys.executable, "-m", "bench.operator_scale", "--serve", str(services), "--folder", str(folder))
    process = await asyncio.create_subprocess_exec(*command, stdin=-1, stdout=-1)  # pipes
    try:
        assert process.stdout is not None
        url, port = (await process.stdout.readline()).decode().split()
        yield url, int(port)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def allow_sockets() -> None:
    """As many open files as this process may have: each busy pod keeps one connection."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main() -> None:
    """Measure and print; `--serve` is the other side."""
    parser = argparse.ArgumentParser(prog="python -m bench.operator_scale", description=__doc__)
    parser.add_argument("--services", type=int, default=1000)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    if options.serve is not None:
        allow_sockets()
        asyncio.run(serve(options.serve, options.folder))
        return
    from rich.console import Console

    Console(width=120).print(measure(options.services).table())


if __name__ == "__main__":
    main()
