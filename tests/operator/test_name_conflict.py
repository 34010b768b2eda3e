"""Two claims to one name: the owner of the younger is told, and nothing of the other's is touched."""

import pytest

from slipway_kube.resources import DISRUPTION_BUDGETS, EVENTS, SERVICES
from tests.operator.serving_cluster import ready
from tests.operator.simulated_cluster import NAMESPACE, SimulatedCluster, simulated_cluster
from tests.operator.virtual_time import run_in_virtual_time

LLAMA = {"uri": "file:///models/tiny", "servedName": "llama"}


def reason(cluster: SimulatedCluster, name: str) -> str:
    return cluster.condition(name, "RouteReady").get("reason", "")


def conflicts(cluster: SimulatedCluster) -> list[dict]:
    return [event for event in cluster.server.objects(EVENTS, NAMESPACE) if event["reason"] == "NameConflict"]


@pytest.mark.capability("OP-2", "OP-6")
@pytest.mark.parametrize("how", ["deleted", "renamed"])
def test_the_younger_service_is_told_that_the_name_is_taken_until_the_older_one_gives_it_up(tmp_path, how):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("first", replicas=1, model=LLAMA)
            cluster.start_operator()
            await ready(cluster, "first", replicas=1)
            await cluster.quiet(5)
            cluster.apply("code", replicas=1, model=LLAMA)
            await ready(cluster, "code", replicas=1)
            await cluster.quiet(5)

            assert reason(cluster, "first") == "Routed"
            assert reason(cluster, "code") == "NameConflict"
            assert "first" in cluster.condition("code", "RouteReady")["message"]
            assert [event["regarding"]["name"] for event in conflicts(cluster)] == ["code"]
            assert conflicts(cluster)[0]["type"] == "Warning"
            assert await cluster.quiet(60) == []

            if how == "deleted":
                cluster.delete("first")
            else:
                cluster.apply("first", model=LLAMA | {"servedName": "other"})
            await cluster.until(lambda: reason(cluster, "code") == "Routed", "the name to be free")

            assert len(conflicts(cluster)) == 1

    run_in_virtual_time(story())


@pytest.mark.capability("OP-2")
def test_a_service_that_somebody_else_made_is_left_alone_and_named_and_the_replicas_serve_through_the_gateway(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            metadata = {"name": "chat", "namespace": NAMESPACE, "labels": {"app": "theirs"}}
            theirs = cluster.server.put(SERVICES, {"metadata": metadata, "spec": {"selector": {"app": "theirs"}}})
            cluster.apply("chat", replicas=2)
            operator = cluster.start_operator()
            await ready(cluster, replicas=2)
            await cluster.until(lambda: cluster.condition("chat", "Ready")["status"] == "True", "Ready")

            assert cluster.server.get(SERVICES, NAMESPACE, "chat") == theirs
            assert not [write for write in operator.writes if "/services/" in write]
            assert cluster.server.get(DISRUPTION_BUDGETS, NAMESPACE, "chat"), "one refusal costs nothing else"
            assert cluster.condition("chat", "Ready")["message"] == (
                "2 of 2 replicas are ready; there is a Service chat that Slipway did not make; "
                "rename it, or name the InferenceService otherwise"
            )

            before = len(operator.writes)
            await cluster.quiet(300)
            assert len(operator.writes) == before, "what is told already is not written again"

            cluster.server.delete(SERVICES, NAMESPACE, "chat")
            await cluster.until(lambda: bool(cluster.server.get(SERVICES, NAMESPACE, "chat")), "our own Service")
            await cluster.until(lambda: "Slipway" not in cluster.condition("chat", "Ready")["message"], "the end of it")

    run_in_virtual_time(story())
