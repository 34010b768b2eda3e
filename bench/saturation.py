"""Benchmark of the operator's reaction to load: from samples over the target to the pod of the new replica.

Services are busy below their target; one after the other gets a queue, at moments that do not follow the scraper.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from bench.changes import Object, service_of
from bench.control_plane import SERVICE_SPEC, ControlPlane, a_control_plane
from bench.figures import Figure, Section, share_of
from slipway_kube.resources import INFERENCE_SERVICES

SERVICES = 12
BUSY, SATURATED = {"running": 4, "kv_usage": 0.3}, {"running": 8, "waiting": 9, "kv_usage": 0.95}
SETTLE_SECONDS = 17.0  # an idle replica is asked every 15 s: after that all are known as busy, and asked every 1.5 s


def measure(services: int = SERVICES) -> Section:
    """All figures."""
    return asyncio.run(_measure(services))


async def _measure(services: int) -> Section:
    async with a_control_plane("saturation") as plane:
        spec = dict(SERVICE_SPEC) | {"autoscaling": {"minReplicas": 1, "maxReplicas": 4}}
        whole, after_sample = await react(plane, spec, services)
    how = f"of {services} services with one busy replica each"
    return Section(
        f"Saturation: {services} busy services",
        (
            Figure("saturation → pod created, p50", share_of(whole, 0.5), "s", how, at_most=2.0),
            Figure(
                "saturation → pod created, worst", max(whole), "s", "busy replicas are asked every 1.5 s", at_most=2.0
            ),
            Figure("sample over the target → pod, p50", share_of(after_sample, 0.5), "s", "the operator's own share"),
            Figure("sample over the target → pod, worst", max(after_sample), "s"),
        ),
    )


async def react(plane: ControlPlane, spec: Mapping[str, Any], services: int) -> tuple[list[float], list[float]]:
    """Start an operator and so many services, and saturate one after the other.

    Seconds to the second pod of each: since the replica is saturated, and since it first said so.
    """
    await plane.start_operator()
    for number in range(services):
        await plane.apply(INFERENCE_SERVICES, f"chat-{number}", spec)
    await plane.all_ready(services, 1)
    for replica in plane.replicas.values():
        replica.set_load(**BUSY)
    await asyncio.sleep(SETTLE_SECONDS)
    reactions = []
    for number in range(services):
        reactions.append(await _reaction(plane, f"chat-{number}"))
        await asyncio.sleep(0.37)  # no multiple of the scraper's interval
    return [one for one, _ in reactions], [one for _, one in reactions]


async def _reaction(plane: ControlPlane, service: str) -> tuple[float, float]:
    """Seconds to the second pod: since the replica is saturated, and since it first said so."""
    (pod,) = plane.pods_of(service)
    replica, began = plane.replicas[pod], time.monotonic()
    replica.set_load(**SATURATED)

    def is_new(one: Object) -> bool:
        return service_of(one) == service and one["metadata"]["name"] != pod

    created = await plane.pods.first(is_new, since=began)
    return created - began, created - replica.told_at
