"""A write that the API server refuses again and again stops nothing that does not depend on it.

review/control-plane.md 4: a full quota kept a node from being emptied, and a foreign Service kept pods protected.
"""

import pytest

from slipway_api import names
from slipway_kube.resources import DISRUPTION_BUDGETS, EVENTS, NODES, SERVICES
from tests.operator.serving_cluster import ready
from tests.operator.simulated_cluster import NAMESPACE, simulated_cluster
from tests.operator.virtual_time import run_in_virtual_time

pytestmark = pytest.mark.capability("OP-16")


def min_available(cluster):
    return cluster.server.get(DISRUPTION_BUDGETS, NAMESPACE, "chat")["spec"]["minAvailable"]


@pytest.mark.parametrize("budget_is_refused", [False, True])
def test_with_a_full_quota_a_node_is_emptied_and_the_event_is_posted_only_if_that_is_true(tmp_path, budget_is_refused):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("chat", replicas=1, availability={"maxNodeDrainBlockSeconds": 60})
            cluster.start_operator()
            await ready(cluster, replicas=1)
            cluster.server.fail(method="POST", path=r"/pods$", status=403, message="exceeded quota: gpus", times=10_000)
            if budget_is_refused:
                cluster.server.fail(method="PATCH", path="/poddisruptionbudgets/", status=403, times=10_000)
            node = cluster.server.get(NODES, "", "node-a")
            cluster.server.put(NODES, node | {"spec": {"unschedulable": True}})
            await cluster.quiet(150)

            posted = [one for one in cluster.server.objects(EVENTS, NAMESPACE) if one["reason"] == "NodeDrainForced"]
            assert min_available(cluster) == (1 if budget_is_refused else 0)
            assert len(posted) == (0 if budget_is_refused else 1)
            assert cluster.condition("chat", "Ready")["status"] == "True"
            assert "exceeded quota" in cluster.condition("chat", "Ready")["message"]

            cluster.server.delete(SERVICES, NAMESPACE, "chat")
            await cluster.until(lambda: bool(cluster.server.objects(SERVICES, NAMESPACE)), "the Service to come back")

    run_in_virtual_time(story())


def test_a_foreign_service_in_the_way_keeps_no_pod_protected(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            foreign = {"metadata": {"name": "chat", "namespace": NAMESPACE, "labels": {"app": "other"}}, "spec": {}}
            cluster.server.put(SERVICES, foreign)
            cluster.apply("chat", replicas=1)
            cluster.start_operator()
            await cluster.until(lambda: len(cluster.serving("chat")) == 1, "the replica")
            await cluster.quiet(10)

            [pod] = cluster.live("chat")
            assert pod["metadata"]["annotations"][names.ANNOTATION_SAFE_TO_EVICT] == "true"
            assert cluster.condition("chat", "Stalled")["reason"] == "NameConflict"
            assert cluster.server.get(SERVICES, NAMESPACE, "chat")["metadata"]["labels"] == {"app": "other"}

    run_in_virtual_time(story())
