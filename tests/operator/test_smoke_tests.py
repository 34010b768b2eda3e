"""Smoke tests against the whole operator: the real calls, results that reach the next pass, and nothing in the logs."""

import pytest
import structlog

from slipway_api import names
from slipway_api.admin_token import serving_token
from tests.operator.simulated_cluster import GATEWAY_KEY, NAMESPACE, SimulatedCluster, simulated_cluster
from tests.operator.virtual_time import run_in_virtual_time

PROMPT, EXPECTED = "a-prompt-that-no-log-may-hold", "forty-two"
GATES = {"smoke": [{"prompt": PROMPT, "mustMatch": EXPECTED}]}
CANARY = {"strategy": "Canary", "canary": {"steps": [{"setWeight": 50}, {"setWeight": 100}]}, "gates": GATES}


async def rolled(cluster: SimulatedCluster, **spec: object) -> tuple[str, str]:
    """A service that serves, and whose spec was then changed: the hashes of both revisions."""
    cluster.apply("chat", replicas=2, rollout=CANARY, **spec)
    cluster.start_operator()
    await cluster.until(lambda: has_served(cluster), "the first revision to serve completely")
    old = cluster.status("chat")["currentRevision"]
    cluster.apply("chat", runtime={"maxNumSeqs": 8})
    await cluster.until(lambda: cluster.status("chat")["updateRevision"] != old, "the new revision")
    return old, cluster.status("chat")["updateRevision"]


def has_served(cluster: SimulatedCluster) -> bool:
    return any(one.get("served") for one in cluster.status("chat").get("revisions", []))


def pods_of(cluster: SimulatedCluster, revision: str) -> list[str]:
    return [
        pod["metadata"]["name"]
        for pod in cluster.pods("chat")
        if pod["metadata"]["labels"][names.LABEL_REVISION] == revision
    ]


@pytest.mark.capability("EV-4", "PF-22")
def test_a_wrong_answer_rolls_back_before_any_traffic_and_is_asked_once(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            with structlog.testing.capture_logs() as logs:
                old, new = await rolled(cluster)
                await cluster.until(lambda: cluster.status("chat").get("failedRevision") == new, "the rollback")
                await cluster.until(lambda: not pods_of(cluster, new), "the canary to leave")
                await cluster.quiet(5)  # the status of the pass that sees it gone
                assert await cluster.quiet(60) == []
            asked = {pod for pod, *_ in cluster.prompted}
            (path, _, body), *more = [one[1:] for one in cluster.prompted]
            assert len(asked) == 1
            assert not more
            assert (path, body["prompt"], body["temperature"]) == ("/v1/completions", PROMPT, 0)
            weights = {one["hash"]: one.get("weight", 0) for one in cluster.status("chat")["revisions"]}
            assert weights == {old: 100, new: 0}
            assert "smoke test 1 of 1" in cluster.condition("chat", "CanaryHealthy")["message"]
            told = str(logs) + str(cluster.server.requests) + str(cluster.status("chat"))
            assert "smoke test" in told
            assert EXPECTED not in str(logs) + str(cluster.status("chat"))
            assert PROMPT not in str(logs) + str(cluster.status("chat"))

    run_in_virtual_time(story())


@pytest.mark.capability("EV-4", "PF-22")
def test_a_right_answer_opens_the_way_and_a_closed_replica_is_shown_its_token(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.completion = lambda _pod: (200, f"it is {EXPECTED}, surely")
            _, new = await rolled(cluster, routing={"directAccess": "GatewayOnly"})
            await cluster.until(lambda: cluster.status("chat")["currentRevision"] == new, "the promotion")
            tokens = {headers.get(names.HEADER_SERVING_TOKEN) for _, _, headers, _ in cluster.prompted}
            assert tokens == {serving_token(GATEWAY_KEY, NAMESPACE, "chat")}

    run_in_virtual_time(story())


@pytest.mark.capability("EV-4")
def test_a_new_leader_asks_again_and_one_that_does_not_answer_fails(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.completion = lambda _pod: (503, "")
            old, new = await rolled(cluster)
            await cluster.until(lambda: len(cluster.prompted) >= 2, "two tries")
            cluster.processes[0].kill()
            cluster.start_operator()
            await cluster.until(lambda: cluster.status("chat").get("failedRevision") == new, "the rollback")
            assert "no answer 5 times: HTTP 503" in cluster.condition("chat", "CanaryHealthy")["message"]
            assert cluster.status("chat")["currentRevision"] == old
            assert len(cluster.prompted) <= 9

    run_in_virtual_time(story())
