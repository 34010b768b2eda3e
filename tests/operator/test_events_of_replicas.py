"""What a whole operator posts about replicas that fail, and about a change of leader: once, and with the cause."""

import pytest

from slipway_kube.resources import EVENTS, PODS
from tests.operator.simulated_cluster import NAMESPACE, SimulatedCluster, simulated_cluster
from tests.operator.virtual_time import run_in_virtual_time

AUTOSCALING = {"minReplicas": 2, "maxReplicas": 3}


def posted(cluster: SimulatedCluster, reason: str) -> list[str]:
    """The notes of all events with this reason."""
    return [event["note"] for event in cluster.server.objects(EVENTS, NAMESPACE) if event["reason"] == reason]


def warnings(cluster: SimulatedCluster) -> list[str]:
    return [event["reason"] for event in cluster.server.objects(EVENTS, NAMESPACE) if event["type"] == "Warning"]


@pytest.mark.capability("RD-9")
def test_a_server_that_is_killed_and_started_again_is_told_with_its_exit_code(tmp_path):
    """C4: after kill -9 of a replica the only event was ReplicaReady."""

    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("chat", replicas=2)
            cluster.start_operator()
            await cluster.until(lambda: cluster.status("chat").get("readyReplicas") == 2, "two replicas")
            name = cluster.serving("chat")[0]
            cluster.kubelet_works = False
            ended = {"exitCode": 137, "reason": "Error"}
            cluster.server.patch_status(
                PODS,
                NAMESPACE,
                name,
                {
                    "conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": "2026-05-01T12:00:00Z"}],
                    "containerStatuses": [
                        {"name": "server", "ready": False, "started": False, "state": {"terminated": ended}}
                    ],
                },
            )
            await cluster.until(lambda: cluster.status("chat").get("readyReplicas") == 1, "one replica")
            cluster.kubelet_works = True
            await cluster.until(lambda: cluster.status("chat").get("readyReplicas") == 2, "two replicas again")
            await cluster.quiet(60)

            (note,) = posted(cluster, "ReplicaUnhealthy")
            assert name in note
            assert "Error (exit code 137)" in note
            assert note.endswith("1 of 2 ready")

    run_in_virtual_time(story())


def test_a_change_of_leader_posts_no_warning_and_changes_no_condition(tmp_path):
    """C5: ScalingHeld and MetricsStale after nearly every change of leader."""

    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("chat", autoscaling=AUTOSCALING)
            first = cluster.start_operator()
            await cluster.until(lambda: cluster.status("chat").get("readyReplicas") == 2, "two replicas")
            await cluster.quiet(60)
            before, told = cluster.status("chat")["conditions"], warnings(cluster)
            await first.end()
            cluster.start_operator()
            await cluster.quiet(90)

            assert cluster.status("chat")["conditions"] == before
            assert warnings(cluster) == told

    run_in_virtual_time(story())
