"""Golden prompts against the whole operator: read from a ConfigMap, asked of both revisions, and told to nobody."""

import json
from collections.abc import Callable

import pytest
import structlog

from slipway_kube.resources import CONFIG_MAPS, EVENTS
from tests.operator.simulated_cluster import NAMESPACE, SimulatedCluster, simulated_cluster
from tests.operator.test_smoke_tests import has_served, pods_of
from tests.operator.virtual_time import run_in_virtual_time

URI = "configmap://chat-golden/prompts.jsonl"
GOLDEN = {"golden": {"uri": URI, "maxDropPercent": "2.0", "maxDisagreementPercent": "5.0"}}
PROMPTS = [f"a-golden-prompt-{number}" for number in range(20)]
ANSWER = "an-answer-that-no-log-may-hold"


def store_prompts(cluster: SimulatedCluster) -> None:
    lines = "\n".join(json.dumps({"prompt": one, "answer": ANSWER, "maxTokens": 8}) for one in PROMPTS)
    cluster.server.put(
        CONFIG_MAPS, {"metadata": {"name": "chat-golden", "namespace": NAMESPACE}, "data": {"prompts.jsonl": lines}}
    )


async def quantized(cluster: SimulatedCluster, answers: Callable[[bool, str], str]) -> tuple[str, str]:
    """A service whose weights are quantized after it has served; `answers` gets whether the new revision is asked."""
    cluster.apply("chat", replicas=2, rollout={"gates": GOLDEN})
    cluster.start_operator()
    await cluster.until(lambda: has_served(cluster), "the first revision to serve completely")
    old = cluster.status("chat")["currentRevision"]

    def complete(pod: str) -> tuple[int, str]:
        prompt = cluster.prompted[-1][-1]["prompt"]
        return 200, answers(pod not in pods_of(cluster, old), prompt)

    cluster.completion = complete
    cluster.apply("chat", runtime={"quantization": "int8"})
    await cluster.until(lambda: cluster.status("chat")["updateRevision"] != old, "the new revision")
    return old, cluster.status("chat")["updateRevision"]


@pytest.mark.capability("QZ-2")
def test_a_quantized_revision_that_disagrees_too_much_gets_no_traffic_and_the_event_names_the_eval(tmp_path):
    def answers(is_new: bool, prompt: str) -> str:
        return "something else" if is_new and prompt in PROMPTS[:2] else ANSWER

    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            store_prompts(cluster)
            weights = set()
            with structlog.testing.capture_logs() as logs:
                old, new = await quantized(cluster, answers)

                def is_rolled_back() -> bool:
                    revisions = cluster.status("chat")["revisions"]
                    weights.update(one.get("weight", 0) for one in revisions if one["hash"] == new)
                    return bool(cluster.status("chat").get("failedRevision") == new)

                await cluster.until(is_rolled_back, "the rollback")
                await cluster.until(lambda: not pods_of(cluster, new), "the quantized replica to leave")
                await cluster.quiet(5)  # the status of the pass that sees it gone
                assert await cluster.quiet(60) == []
            assert weights == {0}
            assert cluster.status("chat")["currentRevision"] == old
            told = [
                one["note"] for one in cluster.server.objects(EVENTS, NAMESPACE) if one["reason"] == "RolloutRolledBack"
            ]
            expected = "10.0% of 20 answers differ from the stable revision's, 5% allowed"
            assert any(URI in note and expected in note for note in told), told
            assert len({pod for pod, *_ in cluster.prompted}) == 2, "one replica of each revision"
            assert {body["max_tokens"] for *_, body in cluster.prompted} == {8}
            everything = str(logs) + str(cluster.status("chat")) + str(cluster.server.objects(EVENTS, NAMESPACE))
            assert ANSWER not in everything
            assert not any(one in everything for one in PROMPTS)

    run_in_virtual_time(story())


@pytest.mark.capability("QZ-2")
def test_a_quantized_revision_that_agrees_gets_the_traffic(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            store_prompts(cluster)
            _, new = await quantized(cluster, lambda is_new, prompt: f"{ANSWER}{is_new and prompt == PROMPTS[3]}")
            await cluster.until(lambda: cluster.status("chat")["currentRevision"] == new, "the promotion")
            (passed,) = [
                one["note"] for one in cluster.server.objects(EVENTS, NAMESPACE) if one["reason"] == "GatesPassed"
            ]
            assert "100.0% of 20 stored answers after 100.0%" in passed
            assert "5.0% of 20 answers differ" in passed

    run_in_virtual_time(story())


@pytest.mark.capability("QZ-2")
def test_without_the_config_map_the_revision_is_rolled_back_and_the_message_names_it(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            _, new = await quantized(cluster, lambda _is_new, _prompt: ANSWER)
            await cluster.until(lambda: cluster.status("chat").get("failedRevision") == new, "the rollback")
            message = cluster.condition("chat", "RolloutHealthy")["message"]
            assert f"the golden prompts of {URI} got no answer 5 times: ConfigMap chat-golden does not exist" in message
            assert cluster.prompted == []

    run_in_virtual_time(story())
