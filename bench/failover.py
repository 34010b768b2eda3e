"""Benchmark of leader election: from the signal to the leader until the other operator acts on a changed service."""

import asyncio
import signal
import time

from bench.changes import Object, service_of
from bench.control_plane import SERVICE_SPEC, ControlPlane, a_control_plane
from bench.figures import Figure, Section
from slipway_kube.resources import INFERENCE_SERVICES

SERVICES, ROUNDS = 100, 3


def measure(services: int = SERVICES, rounds: int = ROUNDS) -> Section:
    """All figures."""
    return asyncio.run(_measure(services, rounds))


async def _measure(services: int, rounds: int) -> Section:
    async with a_control_plane("failover") as plane:
        await plane.start_operator()
        for number in range(services):
            await plane.apply(INFERENCE_SERVICES, f"chat-{number}", dict(SERVICE_SPEC) | {"replicas": 1})
        await plane.all_ready(services, 1)
        await plane.start_operator()
        times: dict[int, list[float]] = {signal.SIGTERM: [], signal.SIGKILL: []}
        for number in range(rounds):
            for index, how in enumerate(times):
                times[how].append(await _fail_over(plane, how, f"chat-{2 * number + index}"))
                await plane.start_operator()
    note = f"worst of {rounds}, {services} services, two operators"
    return Section(
        f"Fail-over: {services} services",
        (
            Figure("clean stop → the other one creates a pod", max(times[signal.SIGTERM]), "s", note, at_most=2.0),
            Figure("kill -9 → the other one creates a pod", max(times[signal.SIGKILL]), "s", note, at_most=15.0),
        ),
    )


async def _fail_over(plane: ControlPlane, how: int, service: str) -> float:
    """Seconds from the signal until the pod of a service that was changed right after it."""
    leader = await plane.leader()
    before = plane.pods_of(service)
    began = time.monotonic()
    leader.end(how)
    if how == signal.SIGTERM:
        await asyncio.to_thread(leader.process.wait)  # or it acts on the change itself
    await plane.change(INFERENCE_SERVICES, service, {"replicas": 2})

    def is_new(one: Object) -> bool:
        return service_of(one) == service and one["metadata"]["name"] not in before

    return await plane.pods.first(is_new, since=began) - began
