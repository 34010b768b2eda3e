"""Benchmark of warm pools on the local cluster: from `kubectl apply` to Ready, claimed from a pool and started cold.

All of it is real: kubelets, the runtime with the embedded model, the operator. Each level of a pool is claimed a few
times, beside cold starts of the same service; what a claim is made of comes from watches.
"""

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import yaml

from bench.changes import Changes, Object, service_of
from bench.figures import Figure, Section
from e2e.cluster.launch import Cluster
from e2e.cluster.paths import cluster_folder
from e2e.slipway import EXAMPLES, USER_NAMESPACE, Slipway
from slipway_kube import auth
from slipway_kube.client import Client
from slipway_kube.errors import NotFound
from slipway_kube.resources import INFERENCE_SERVICES, PODS, WARM_POOLS, Resource

ROUNDS: Final = 3
LEVELS: Final = ("Booted", "Sleeping", "Loaded")
PATIENCE_SECONDS: Final = 180.0


@dataclass(frozen=True)
class Start:
    """When one replica was started: seconds since `kubectl apply` of its service."""

    pod: float
    """The pod is created, or claimed."""
    ready: float
    """The kubelet says that it is ready."""
    service: float
    """The service says so."""


def measure(rounds: int = ROUNDS, levels: tuple[str, ...] = LEVELS) -> Section:
    """All figures."""
    with Cluster(folder=cluster_folder("bench-warm")) as cluster:
        cluster.wait_for_nodes()
        Slipway(cluster).install()
        starts = asyncio.run(_starts(str(cluster.kubeconfig), rounds, levels))
    cold = [one.ready - one.pod for one in starts.pop("cold")]
    figures = [Figure("cold start: pod created → Ready", median(cold), "s", f"median of {rounds}: {_listed(cold)}")]
    for level, found in starts.items():
        claims = [one.ready - one.pod for one in found]
        ratio = median(cold) / median(claims)
        aim = 10.0 if level != "Booted" else None  # a booted pod still loads its model
        figures += [
            Figure(f"{level}: claim → Ready", median(claims), "s", f"median of {rounds}: {_listed(claims)}"),
            Figure(f"{level}: cold start ÷ claim", ratio, "×", at_least=aim),
            Figure(f"{level}: kubectl apply → claim", median([one.pod for one in found]), "s"),
            Figure(f"{level}: pod Ready → service Ready", median([one.service - one.ready for one in found]), "s"),
        ]
    return Section("Warm pools: a claim beside a cold start", tuple(figures))


def _listed(seconds: list[float]) -> str:
    return ", ".join(f"{one:.2f}" for one in seconds)


async def _starts(kubeconfig: str, rounds: int, levels: tuple[str, ...]) -> dict[str, list[Start]]:
    """The starts, cold and by level."""
    pool, service = yaml.safe_load_all((EXAMPLES / "warm-pool.yaml").read_text())
    cold = {key: value for key, value in service["spec"].items() if key != "warmPool"}
    starts: dict[str, list[Start]] = {}
    async with Client(auth.load(kubeconfig)) as client:
        stage = _Stage(client)
        try:
            starts["cold"] = [await stage.start(f"cold-{number}", cold) for number in range(rounds)]
            for level in levels:
                name = f"standby-{level.lower()}"
                spec = pool["spec"] | {"level": level}
                if level != "Booted":
                    spec |= {"models": [service["spec"]["model"]], "runtime": service["spec"]["runtime"]}
                await stage.put(WARM_POOLS, name, spec)
                starts[level] = []
                for number in range(rounds):
                    await stage.pool_is_ready(name)
                    warm = service["spec"] | {"warmPool": {"name": name}}
                    starts[level].append(await stage.start(f"{level.lower()}-{number}", warm, pool=name))
                await stage.remove(WARM_POOLS, name)
        finally:
            stage.end()
    return starts


class _Stage:
    """A user of the cluster who measures."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._pods, self._services = Changes(client, PODS), Changes(client, INFERENCE_SERVICES)
        self._pools = Changes(client, WARM_POOLS)
        self._tasks = [asyncio.create_task(one.run()) for one in (self._pods, self._services, self._pools)]

    def end(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def put(self, resource: Resource, name: str, spec: Mapping[str, Any]) -> None:
        metadata = {"name": name, "namespace": USER_NAMESPACE}
        body = {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": metadata, "spec": spec}
        await self._client.apply(resource.path(USER_NAMESPACE, name), body, field_manager="user")

    async def remove(self, resource: Resource, name: str) -> None:
        """Delete the object and wait until it and its pods are gone."""
        with suppress(NotFound):
            await self._client.delete(resource.path(USER_NAMESPACE, name), propagation="Foreground")
        pods, pools = self._pods.now, self._pools.now
        if resource is WARM_POOLS:  # it goes after its pods
            await self._pools.until(lambda: (USER_NAMESPACE, name) not in pools, patience=PATIENCE_SECONDS)
        else:
            await self._pods.until(lambda: name not in map(service_of, pods.values()), patience=PATIENCE_SECONDS)

    async def pool_is_ready(self, name: str) -> None:
        """Wait until a pod can be claimed."""
        pools = self._pools.now

        def is_ready() -> bool:
            return bool(((pools.get((USER_NAMESPACE, name)) or {}).get("status") or {}).get("ready"))

        await self._pools.until(is_ready, patience=PATIENCE_SECONDS)
        await asyncio.sleep(1.0)  # its start takes no more CPU

    async def start(self, name: str, spec: Mapping[str, Any], *, pool: str = "") -> Start:
        """Apply the service, wait until it is Ready, delete it; its pod must be of the pool, where one is given."""
        began = time.monotonic()
        await self.put(INFERENCE_SERVICES, name, spec)

        def is_ours(pod: Object) -> bool:
            return service_of(pod) == name

        pod = await self._pods.first(is_ours, since=began)
        ready = await self._pods.first(lambda one: is_ours(one) and _is_ready(one), since=began)
        service = await self._services.first(
            lambda one: one["metadata"]["name"] == name and _is_ready(one), since=began
        )
        (found,) = (one["metadata"]["name"] for one in self._pods.now.values() if is_ours(one))
        assert found.startswith(f"{pool or name}-"), f"{found} is not of {pool or name}"
        await self.remove(INFERENCE_SERVICES, name)
        return Start(pod - began, ready - began, service - began)


def _is_ready(one: Object) -> bool:
    conditions = (one.get("status") or {}).get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
