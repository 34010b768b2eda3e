"""From a gateway's report to the operator's reaction: an idle service's replicas are asked at once."""

import asyncio

import pytest

from slipway_api import names
from slipway_api.admin_token import admin_token
from slipway_api.gateway_api import DemandReport, OutcomesReport, ServiceDemand
from slipway_kube.resources import PODS
from tests.operator.simulated_cluster import GATEWAY_KEY, NAMESPACE, simulated_cluster
from tests.operator.virtual_time import run_in_virtual_time

SYSTEM = "slipway-system"


class GatewayDouble:
    """The admin port of a gateway's pod: a long poll for demand that ends when the test changes the demand."""

    def __init__(self) -> None:
        self.version = 1
        self.services: tuple[ServiceDemand, ...] = ()
        self.refused = 0
        self._changed = asyncio.Event()

    def report(self, **demand) -> None:
        self.services = (ServiceDemand(service=f"{NAMESPACE}/chat", **demand),)
        self.version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def answer(self, replica, path: str, headers) -> tuple[int, bytes]:
        if headers[names.HEADER_ADMIN_TOKEN] != admin_token(GATEWAY_KEY, SYSTEM, replica.pod):
            self.refused += 1
            return 401, b""
        if path == names.PATH_OUTCOMES:
            return 200, OutcomesReport(boot_id="b").wire()
        if f"after={self.version}&" in path:
            try:
                async with asyncio.timeout(5):
                    await self._changed.wait()
            except TimeoutError:
                pass
        return 200, DemandReport(boot_id="b", version=self.version, services=self.services).wire()


def a_gateway_pod() -> dict:
    labels = {"app.kubernetes.io/part-of": "slipway", "app.kubernetes.io/component": "gateway"}
    running = {"name": "gateway", "ready": True, "state": {"running": {}}}
    return {
        "metadata": {"name": "slipway-gateway-x", "namespace": SYSTEM, "labels": labels},
        "spec": {"containers": [{"name": "gateway"}]},
        "status": {"phase": "Running", "podIP": "10.9.9.9", "containerStatuses": [running]},
    }


@pytest.mark.capability("AS-9")
def test_replicas_of_an_idle_service_are_asked_within_a_second_of_a_burst_and_a_fleet_at_rest_is_not_written(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            gateway = GatewayDouble()
            dial = cluster.dial

            async def dial_both(method, replica, path, headers, body):
                if replica.namespace == SYSTEM:
                    return await gateway.answer(replica, path, headers)
                return await dial(method, replica, path, headers, body)

            cluster.dial = dial_both
            cluster.server.put(PODS, a_gateway_pod())
            cluster.apply("chat", replicas=1)
            cluster.start_operator()
            await cluster.until(lambda: cluster.serving("chat"), "the replica")
            await cluster.quiet(30)
            assert await cluster.quiet(120) == [], "with a gateway that polls, a fleet at rest is not written"
            asked = len(cluster.sampled)
            await cluster.until(lambda: len(cluster.sampled) > asked, "a question at the idle interval, of 15 s")
            began, asked = cluster.time(), len(cluster.sampled)
            gateway.report(open_requests=5, idle_seconds=0.0)
            await cluster.until(lambda: len(cluster.sampled) > asked, "the question for the load")

            assert cluster.time() - began <= 1.0
            assert gateway.refused == 0

    run_in_virtual_time(story())
