"""Benchmark of adapters: from the end of the download to the route on three replicas; 200 adapters on 8 replicas."""

import asyncio
import time
from collections import Counter

from bench.changes import Changes, Object
from bench.control_plane import NAMESPACE, SERVICE_SPEC, ControlPlane, OperatorProcess, a_control_plane, writes_in
from bench.figures import Figure, Section, share_of
from slipway_api import names
from slipway_kube.resources import INFERENCE_SERVICES, LORA_ADAPTERS

FEW_REPLICAS, ROUNDS, DOWNLOAD_SECONDS = 3, 5, 2.0
MANY_REPLICAS, MANY_ADAPTERS = 8, 200
ROOM = {"lora": {"maxAdapters": 8, "maxCPUAdapters": 300, "maxRank": 16}}


def measure(adapters: int = MANY_ADAPTERS) -> Section:
    """All figures."""
    return asyncio.run(_measure(adapters))


async def _measure(adapters: int) -> Section:
    async with a_control_plane("adapters") as plane:
        operator = await plane.start_operator()
        resources = Changes(plane.client, LORA_ADAPTERS)
        plane.spawn(resources.run())
        few, many = ("few", FEW_REPLICAS), ("many", MANY_REPLICAS)
        for service, replicas in (few, many):
            plane.download_seconds = DOWNLOAD_SECONDS if service == "few" else 0.0
            spec = dict(SERVICE_SPEC) | {"replicas": replicas, "runtime": ROOM}
            await plane.apply(INFERENCE_SERVICES, service, spec)
            await plane.services.first(lambda one, replicas=replicas: _ready(one) == replicas)  # type: ignore[misc]
        single = [await _one(plane, f"single-{number}") for number in range(ROUNDS)]
        figures = await _many(plane, resources, operator, adapters)
    after, whole = [one for one, _ in single], [one for _, one in single]
    how = f"download of {DOWNLOAD_SECONDS:.0f} s, {ROUNDS} adapters one after the other"
    return Section(
        f"Adapters: one on {FEW_REPLICAS} replicas, {adapters} on {MANY_REPLICAS}",
        (
            Figure("download's end → routed on 3 replicas, p50", share_of(after, 0.5), "s", how, at_most=1.0),
            Figure("download's end → routed on 3 replicas, worst", max(after), "s", at_most=1.0),
            Figure("kubectl apply → routed on 3 replicas, worst", max(whole), "s", "with the download"),
            *figures,
        ),
    )


async def _one(plane: ControlPlane, name: str) -> tuple[float, float]:
    """Seconds until all replicas are routed to: since the last one's download ended, and since the adapter is there."""
    pods, began = plane.pods_of("few"), time.monotonic()
    await _apply(plane, name, "few")
    routed = max([await _routed(plane, pod, {name}, began) for pod in pods])
    downloaded = max(plane.replicas[pod].downloaded[name] for pod in pods)
    return routed - downloaded, routed - began


async def _many(plane: ControlPlane, resources: Changes, operator: OperatorProcess, count: int) -> tuple[Figure, ...]:
    """The time and the calls of many adapters at once."""
    pods, wanted = plane.pods_of("many"), {f"many-{number}" for number in range(count)}
    # Settled, or the writes of before would be counted.
    await asyncio.sleep(3)
    before = writes_in(operator.metrics())
    cpu, began = operator.cpu_seconds(), time.monotonic()
    await asyncio.gather(*(_apply(plane, name, "many") for name in wanted))
    applied = time.monotonic()
    routed = max([await _routed(plane, pod, wanted, began) for pod in pods])

    def are_loaded() -> bool:
        found = [resources.now.get((NAMESPACE, name)) or {} for name in wanted]
        return all((one.get("status") or {}).get("loaded") == f"{len(pods)}/{len(pods)}" for one in found)

    await resources.until(are_loaded)
    said = time.monotonic()
    await asyncio.sleep(5)  # what the operator writes after that belongs to it too
    cpu = operator.cpu_seconds() - cpu
    calls = Counter(call.split()[0] for pod in pods for call in plane.replicas[pod].adapters.calls)
    placements = count * len(pods)
    made = writes_in(operator.metrics()) - before
    written = ", ".join(f"{what} {number}" for what, number in made.most_common())
    return (
        Figure(
            f"{count} adapters: apply → all routed", routed - began, "s", f"{applied - began:.1f} s of them to apply"
        ),
        Figure("the same: every status says so", said - began, "s"),
        Figure("loads for each placement", calls["load"] / placements, "", f"{placements} placements", at_most=1.0),
        Figure("probes for each placement", calls["probe"] / placements, "", at_most=1.0),
        Figure("lists for each replica", calls["list"] / len(pods), "", "shared by all adapters"),
        Figure("writes for each adapter", made.total() / count, "", written),
        Figure("the operator's CPU", cpu, "s"),
    )


async def _apply(plane: ControlPlane, name: str, base: str) -> None:
    source = {"uri": f"file:///models/{name}"}
    await plane.apply(LORA_ADAPTERS, name, {"baseRef": {"name": base}, "source": source})


async def _routed(plane: ControlPlane, pod: str, adapters: set[str], since: float) -> float:
    """When the pod's annotation first named all of the adapters, so that the gateways send it their requests."""

    def is_routed(one: Object) -> bool:
        listed = one["metadata"].get("annotations", {}).get(names.ANNOTATION_ADAPTERS, "")
        return bool(one["metadata"]["name"] == pod and adapters <= set(listed.split(",")))

    return await plane.pods.first(is_routed, since=since)


def _ready(service: Object) -> int:
    return int((service.get("status") or {}).get("readyReplicas") or 0)
