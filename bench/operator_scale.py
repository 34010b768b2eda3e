"""Benchmark of the operator: 1,000 services, 10,000 busy pods, 200 adapters, 20 warm pools, on a fake API server.

Everything of the operator is real (kopf, informers, queue, plans, scraper, sockets); the API server is the one of the
tests, in a process of its own, and one server answers for the ports of all pods, each of which has a loopback address.
"""

import argparse
import asyncio
import contextlib
import logging
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import kopf
import structlog

from bench.figures import Figure, Section, share_of
from bench.settled_fleet import NAMESPACE, PODS_OF_A_SERVICE, serve
from slipway_api import names
from slipway_kube.auth import Connection, StaticCredentials
from slipway_kube.client import Client
from slipway_kube.objects import Pod
from slipway_kube.resources import INFERENCE_SERVICES, LORA_ADAPTERS
from slipway_operator import handlers as handlers
from slipway_operator.clock import Clock
from slipway_operator.keepalive import KeptConnections
from slipway_operator.manager import Manager, exempt_caches_from_collection
from slipway_operator.metrics import OperatorMetrics
from slipway_operator.replica_client import direct
from slipway_operator.settings import OperatorSettings
from tests.operator.discovery import DiscoverableApiServer

STEADY_SECONDS = 30.0
IDLE_SECONDS = 20.0
CHANGES = 50
PATIENCE_SECONDS = 300.0


def measure(services: int = 1000, adapters: int = 200, pools: int = 20) -> Section:
    """All figures."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "current").write_text("a-key-for-the-benchmark")
        return asyncio.run(_measure(services, adapters, pools, Path(folder)))


async def _measure(services: int, adapters: int, pools: int, folder: Path) -> Section:
    changes = min(CHANGES, services // 4)
    async with _start_server(services, adapters, pools, folder) as (url, port):
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
            taking_over = asyncio.create_task(_latencies(manager, client, range(changes, 2 * changes)))
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
            at_rest = {what: count - writes[what] for what, count in _writes(metrics).items() if count != writes[what]}
            assert _loaded(manager) == adapters, "an adapter that is not loaded is not at rest"
            silent = sum(one.value for one in metrics.signal_errors.collect()[0].samples if one.name.endswith("_total"))
            latencies = await _latencies(manager, client, range(changes))
            for key in manager.caches.known():
                manager._resync_key(key)
            resyncing = await _latencies(manager, client, range(2 * changes, 3 * changes))
            idle = await _cpu_without_scraping(manager)
            stop.set()
            await operator
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    pods, written = services * PODS_OF_A_SERVICE, ", ".join(f"{what} {count:.0f}" for what, count in at_rest.items())
    during = f"in {STEADY_SECONDS:.0f} s"
    return Section(
        f"Operator: {services:,} services, {pods:,} busy pods, {adapters} adapters, {pools} warm pools",
        (
            Figure("start to synced", synced, "s", "lists, Lease, one pass of every object", at_most=10),
            Figure("its CPU", synced_cpu, "s"),
            Figure("steady CPU", steady, "cores", f"{during}, every replica busy and scraped", at_most=1),
            Figure("steady CPU, scraping off", idle, "cores", f"in {IDLE_SECONDS:.0f} s", at_most=0.05),
            Figure("age of samples, p99", share_of(ages, 0.99), "s", "of busy replicas, once a second", at_most=5),
            Figure("age of samples, worst", max(ages), "s"),
            Figure("calls that were not answered", silent, "", "since the start; a deadline is 2 s"),
            Figure("writes at rest", sum(at_rest.values()), "", written or f"{during}, without the Lease", at_most=0),
            Figure("changed spec → pod created, p50", share_of(latencies, 0.5), "s", "one after the other"),
            Figure("changed spec → pod created, p99", share_of(latencies, 0.99), "s", f"of {changes}", at_most=0.5),
            Figure("the same during a resync, p99", share_of(resyncing, 0.99), "s", "of all at once", at_most=0.5),
            Figure("the same during a takeover, p50", share_of(takeover, 0.5), "s", "beside the first passes"),
            Figure("the same during a takeover, p99", share_of(takeover, 0.99), "s", "waits for lists", at_most=0.5),
            Figure("peak memory", memory, "MiB", "of the process, with this benchmark in it", at_most=286),
        ),
    )


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
    return ((now - sample.at).total_seconds() for sample in samples if sample is not None and sample.requests)


def _passes(metrics: OperatorMetrics) -> float:
    return sum(one.value for one in metrics.reconcile_seconds.collect()[0].samples if one.name.endswith("_count"))


def _writes(metrics: OperatorMetrics) -> Counter[str]:
    """Writes so far, by verb and resource."""
    made: Counter[str] = Counter()
    for one in metrics.writes.collect()[0].samples:
        if one.name.endswith("_total") and one.labels["code"] != "skipped":
            made[f"{one.labels['verb']} {one.labels['resource']}"] += int(one.value)
    return made


def _loaded(manager: Manager) -> int:
    """How many adapters all replicas of their base have."""
    store = manager.caches.stores[LORA_ADAPTERS.kind]
    found = [store.get(key) for key in store.keys()]  # noqa: SIM118  a store is no mapping
    wanted = f"{PODS_OF_A_SERVICE}/{PODS_OF_A_SERVICE}"
    return sum(one is not None and (one.body.get("status") or {}).get("loaded") == wanted for one in found)


async def _until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110  what is waited for sets no event
            await asyncio.sleep(0.02)


@asynccontextmanager
async def _start_server(services: int, adapters: int, pools: int, folder: Path) -> Any:
    counts = ("--services", str(services), "--adapters", str(adapters), "--pools", str(pools))
    command = (sys.executable, "-m", "bench.operator_scale", "--serve", str(folder), *counts)
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
    parser.add_argument("--adapters", type=int, default=200)
    parser.add_argument("--pools", type=int, default=20)
    parser.add_argument("--serve", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    if options.serve is not None:
        allow_sockets()
        asyncio.run(serve(options.services, options.adapters, options.pools, options.serve))
        return
    from rich.console import Console

    Console(width=120).print(measure(options.services, options.adapters, options.pools).table())


if __name__ == "__main__":
    main()
