"""The status of a service follows its fallback: a service that comes or goes wakes those that name it."""

import pytest

from slipway_kube.resources import EVENTS
from tests.operator.serving_cluster import ready
from tests.operator.simulated_cluster import NAMESPACE, SimulatedCluster, simulated_cluster
from tests.operator.virtual_time import run_in_virtual_time

FALLBACK = {"fallback": {"service": "small"}}


def reason(cluster: SimulatedCluster) -> str:
    return cluster.condition("chat", "RouteReady").get("reason", "")


def warnings(cluster: SimulatedCluster) -> list[str]:
    told = [event for event in cluster.server.objects(EVENTS, NAMESPACE) if event["reason"] == "FallbackNotFound"]
    return [event["regarding"]["name"] for event in told]


@pytest.mark.capability("OP-17")
def test_a_missing_fallback_is_reported_until_it_exists_or_is_no_longer_named(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("chat", replicas=1, routing=FALLBACK)
            cluster.start_operator()
            await ready(cluster, "chat", replicas=1)
            await cluster.quiet(5)
            assert reason(cluster) == "FallbackNotFound"
            assert f"{NAMESPACE}/small does not exist" in cluster.condition("chat", "RouteReady")["message"]
            assert cluster.condition("chat", "Ready")["status"] == "True", "it serves"
            assert warnings(cluster) == ["chat"]
            assert await cluster.quiet(60) == []

            cluster.apply("small", replicas=1)
            await cluster.until(lambda: reason(cluster) == "Routed", "the fallback to be seen")
            cluster.delete("small")
            await cluster.until(lambda: reason(cluster) == "FallbackNotFound", "its end to be seen")
            cluster.apply("chat", routing={})
            await cluster.until(lambda: reason(cluster) == "Routed", "the edit to be seen")

            before = cluster.status("chat")
            cluster.apply("small", replicas=1)
            await cluster.quiet(5)
            assert cluster.status("chat") == before, "nobody names it any more"

    run_in_virtual_time(story())
