"""Whole operator processes: annotations and the disruption budget change when something changes, and only then."""

import pytest

from slipway_api import names
from slipway_kube.resources import DISRUPTION_BUDGETS, EVENTS, NODES, PODS
from tests.operator.simulated_cluster import NAMESPACE, SimulatedCluster, simulated_cluster
from tests.operator.virtual_time import run_in_virtual_time


async def serving(cluster: SimulatedCluster, replicas: int) -> None:
    await cluster.until(
        lambda: len(cluster.serving("chat")) == replicas == len(cluster.pods("chat")), f"{replicas} replicas"
    )
    await cluster.quiet(10)


def annotations(cluster: SimulatedCluster) -> dict[str, str]:
    (pod,) = cluster.pods("chat")
    return dict(pod["metadata"]["annotations"])


def taint(cluster: SimulatedCluster, *keys: str, cordoned: bool = False) -> None:
    node = cluster.server.get(NODES, "", "node-a")
    assert node is not None
    taints = [{"key": key, "effect": "NoSchedule"} for key in keys]
    cluster.server.put(NODES, node | {"spec": {"unschedulable": cordoned, "taints": taints}})


@pytest.mark.capability("PL-1")
def test_a_pod_is_protected_while_it_starts_annotated_once_when_it_is_ready_and_then_left_alone(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.start_seconds = 20.0
            cluster.apply("chat", replicas=1)
            operator = cluster.start_operator()
            await cluster.until(lambda: len(cluster.pods("chat")) == 1, "a pod")
            assert annotations(cluster)[names.ANNOTATION_SAFE_TO_EVICT] == "false"
            assert annotations(cluster)[names.ANNOTATION_DO_NOT_DISRUPT] == "true"

            await serving(cluster, 1)
            assert annotations(cluster)[names.ANNOTATION_SAFE_TO_EVICT] == "true"
            assert names.ANNOTATION_DO_NOT_DISRUPT not in annotations(cluster)
            assert annotations(cluster)[names.ANNOTATION_SERVED_NAME] == "chat", "the others stay"
            assert sum(write.startswith("PATCH") and "/pods/" in write for write in operator.writes) == 1
            assert await cluster.quiet(120) == []

    run_in_virtual_time(story())


@pytest.mark.capability("PL-2")
def test_a_drain_of_a_node_that_is_held_up_for_too_long_is_forced_once_also_by_another_leader(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("chat", replicas=1, availability={"maxNodeDrainBlockSeconds": 60})
            first = cluster.start_operator()
            await serving(cluster, 1)
            cluster.start_seconds = 10_000.0  # the replacement never gets ready
            taint(cluster, cordoned=True)
            await cluster.quiet(30)
            since = next(iter(cluster.pods("chat")))["metadata"]["annotations"][names.ANNOTATION_NODE_LEAVING_SINCE]
            first.kill()
            cluster.start_operator()
            await cluster.quiet(60)

            budget = cluster.server.get(DISRUPTION_BUDGETS, NAMESPACE, "chat")
            assert budget["spec"]["minAvailable"] == 0
            marked = [pod for pod in cluster.pods("chat") if names.ANNOTATION_NODE_DRAIN_FORCED in str(pod["metadata"])]
            assert [pod["metadata"]["annotations"][names.ANNOTATION_NODE_LEAVING_SINCE] for pod in marked] == [since]
            forced = [one for one in cluster.server.objects(EVENTS, NAMESPACE) if one["reason"] == "NodeDrainForced"]
            assert len(forced) == 1
            assert await cluster.quiet(120) == []

            taint(cluster)
            await cluster.quiet(10)
            assert cluster.server.get(DISRUPTION_BUDGETS, NAMESPACE, "chat")["spec"]["minAvailable"] == 1

    run_in_virtual_time(story())


@pytest.mark.capability("RD-5")
def test_a_disruption_budget_that_is_not_wanted_is_deleted_unless_another_made_it(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("chat", replicas=1)
            cluster.start_operator()
            await serving(cluster, 1)
            assert cluster.server.get(DISRUPTION_BUDGETS, NAMESPACE, "chat") is not None

            cluster.apply("chat", availability={"podDisruptionBudget": "None"})
            await cluster.quiet(10)
            assert cluster.server.get(DISRUPTION_BUDGETS, NAMESPACE, "chat") is None
            assert await cluster.quiet(1200) == [], "a resync looks, and deletes nothing"

            theirs = {"metadata": {"name": "chat", "namespace": NAMESPACE}, "spec": {"minAvailable": 1}}
            cluster.server.put(DISRUPTION_BUDGETS, theirs)
            await cluster.quiet(1200)
            assert cluster.server.get(DISRUPTION_BUDGETS, NAMESPACE, "chat") is not None

    run_in_virtual_time(story())


@pytest.mark.capability("PL-10")
def test_a_suspended_service_has_no_pod_and_a_resumed_one_serves_again(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("chat", replicas=2)
            cluster.start_operator()
            await serving(cluster, 2)
            cluster.apply("chat", suspend=True)
            await cluster.until(lambda: cluster.pods("chat") == [], "no pod")
            await cluster.quiet(10)
            assert cluster.condition("chat", "Suspended")["status"] == "True"
            assert await cluster.quiet(120) == []
            cluster.apply("chat", suspend=False)
            await serving(cluster, 2)
            reasons = {one["reason"] for one in cluster.server.objects(EVENTS, NAMESPACE)}
            assert {"Suspended", "Resumed"} <= reasons
            assert cluster.server.objects(PODS, NAMESPACE)

    run_in_virtual_time(story())
