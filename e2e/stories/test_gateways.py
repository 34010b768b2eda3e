"""One of two gateways is killed under fifty live streams: it breaks its own connections, and no other."""

import json
from typing import Any

import openai
import pytest

from e2e import checks
from e2e.cluster.launch import Cluster
from e2e.live_streams import BROKEN_CONNECTIONS, Streams, disturbances
from e2e.manifests import as_yaml, deterministic
from e2e.slipway import RELEASE_NAMESPACE, Slipway, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

NAME = "two-gateways"
COUNT = 50
TOKENS = 200
QUESTIONS = 10


def gateways(slipway: Slipway) -> list[Any]:
    """The gateway's pods, without those that go."""
    component = "app.kubernetes.io/component=gateway"
    pods = slipway.core.list_namespaced_pod(RELEASE_NAMESPACE, label_selector=component).items
    return [pod for pod in pods if pod.metadata.deletion_timestamp is None]


def restarts(pod: Any) -> int:
    """How often the pod's server was restarted."""
    return int(sum(status.restart_count for status in pod.status.container_statuses))


def requests_of(slipway: Slipway, gateway: Any) -> set[str]:
    """The ids of the requests in a gateway's log."""
    log = slipway.core.read_namespaced_pod_log(gateway.metadata.name, RELEASE_NAMESPACE)
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    return {line["request_id"] for line in lines if line.get("message") == "request"}


@pytest.mark.capability("RD-1", "RD-4", "RG-2")
def test_a_killed_gateway_breaks_only_its_own_connections(clean: Slipway, breakable: Cluster) -> None:
    clean.apply(as_yaml(deterministic(NAME, 1)))
    clean.wait_ready(NAME, replicas=1)
    (replica,) = clean.pods(NAME)
    leaving, staying = gateways(clean)
    streams = Streams(clean.base_url, NAME, COUNT, TOKENS)
    undisturbed = streams.read()
    answered: list[str] = []

    def kill() -> None:
        assert breakable.kill_container(RELEASE_NAMESPACE, leaving.metadata.name)
        for number in range(QUESTIONS):  # the stock client as it is: it asks again where no connection can be made
            with openai.OpenAI(base_url=clean.base_url, api_key="none") as client:
                answer = client.completions.create(
                    model=NAME, prompt="Once", max_tokens=4, extra_headers={"X-Request-Id": f"after-{number}"}
                )
            answered.append(answer.id)

    disturbed = streams.read(kill, run="disturbed")
    whole = [stream for stream in disturbed if not stream.error]
    broken = [stream for stream in disturbed if stream.error]

    assert min(len(whole), len(broken)) >= COUNT // 4, "both gateways had live streams"
    assert disturbances(whole, [undisturbed[stream.number] for stream in whole]) == []
    assert {stream.error.partition(":")[0] for stream in broken} <= BROKEN_CONNECTIONS
    assert all(undisturbed[stream.number].text.startswith(stream.text) for stream in broken), "cut off, never wrong"
    mine = {stream.request_id for stream in whole}
    wait_for("the other gateway has logged its streams", lambda: mine <= requests_of(clean, staying), timeout=30)
    served = requests_of(clean, staying)
    assert {one for one in served if one.startswith("disturbed-")} == mine, "every broken stream was the killed one's"
    assert len(answered) == QUESTIONS
    assert "after-0" in served, "the only gateway that was there"

    clean.wait_ready(NAME, replicas=1)
    (still,) = clean.pods(NAME)
    assert (still.metadata.uid, restarts(still)) == (replica.metadata.uid, 0)
    was = {pod.metadata.name: restarts(pod) for pod in (leaving, staying)}
    expected = was | {leaving.metadata.name: was[leaving.metadata.name] + 1}
    wait_for(
        "the killed gateway is back, and the other one is as it was",
        lambda: {pod.metadata.name: restarts(pod) for pod in gateways(clean) if checks.is_ready(pod)} == expected,
        timeout=120,
    )
    checks.wait_serving(clean, NAME)
