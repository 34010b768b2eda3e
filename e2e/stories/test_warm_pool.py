"""A service takes its replica from a warm pool, beside one that is started cold."""

import json
import time
from datetime import datetime
from typing import Any

import openai
import pytest
import yaml

from e2e.slipway import EXAMPLES, USER_NAMESPACE, Slipway, wait_for
from slipway_api import names

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def pool(slipway: Slipway, name: str = "standby") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(slipway.access.kubectl("get", "wpool", name, "-o", "json"))
    return found


def ready_pods(slipway: Slipway, name: str = "standby") -> int:
    return int(pool(slipway, name).get("status", {}).get("ready") or 0)


def seconds_until_ready(service: dict[str, Any]) -> float:
    (ready,) = (one for one in service["status"]["conditions"] if one["type"] == "Ready")
    created = datetime.fromisoformat(service["metadata"]["creationTimestamp"])
    return (datetime.fromisoformat(ready["lastTransitionTime"]) - created).total_seconds()


def answers(slipway: Slipway, model: str) -> bool:
    said = slipway.openai().completions.create(model=model, prompt="Once upon a time", max_tokens=4)
    return bool(said.choices[0].text)


@pytest.mark.capability("AS-5", "ST-5")
def test_a_replica_is_claimed_from_the_pool_and_outlives_it(clean: Slipway) -> None:
    standby, warm = yaml.safe_load_all((EXAMPLES / "warm-pool.yaml").read_text())
    clean.apply(yaml.safe_dump(standby))
    wait_for("a pod that can be claimed", lambda: ready_pods(clean) == 1, timeout=120)

    cold = warm | {"metadata": {"name": "cold"}, "spec": {k: v for k, v in warm["spec"].items() if k != "warmPool"}}
    clean.apply(yaml.safe_dump(cold))
    cold_service = clean.wait_ready("cold", replicas=1)
    clean.apply(yaml.safe_dump(warm))
    warm_service = clean.wait_ready("warm", replicas=1)

    (pod,) = clean.pods("warm")
    server = pod.status.container_statuses[0]
    created = datetime.fromisoformat(warm_service["metadata"]["creationTimestamp"])
    assert pod.metadata.name == "standby-warm-0"
    assert server.restart_count == 0
    assert server.state.running.started_at < created, "its process is older than the service"
    events = clean.wait_events("warm", "WarmPodClaimed", "ReplicaReady")
    assert "ReplicaCreated" not in {event.reason for event in events}
    assert wait_for("an answer of the claimed replica", lambda: answers(clean, "warm"))
    start = wait_for("the measured start", lambda: clean.service("cold")["status"].get("performance"))["coldStart"]
    assert {"scheduleSeconds", "pullSeconds", "loadSeconds", "warmupSeconds"} <= set(start)
    assert "performance" not in clean.service("warm")["status"], "a claim tells nothing about a cold start"
    wait_for("the refill", lambda: ready_pods(clean) == 1, timeout=120)
    status = wait_for("the counted hit", lambda: (s := pool(clean)["status"])["hits"] == 1 and s)
    print(f"cold: {seconds_until_ready(cold_service):.0f} s, {start}")
    print(f"warm: {seconds_until_ready(warm_service):.0f} s, {status['claimSeconds']} from claim to ready")

    clean.access.kubectl("delete", "wpool", "standby")
    wait_for("the waiting pod is collected", lambda: "standby-warm-1" not in pod_names(clean), timeout=90)
    assert "standby-warm-0" in pod_names(clean)
    assert answers(clean, "warm")


def claim_seconds(slipway: Slipway, name: str) -> float:
    """Seconds from the claim of the service's pod until the kubelet says that it is ready."""
    (pod,) = slipway.pods(name)
    claimed = datetime.fromisoformat(pod.metadata.annotations[names.ANNOTATION_CLAIMED_AT])
    (ready,) = (one for one in pod.status.conditions if one.type == "Ready")
    # The API server rounds the transition down to whole seconds: one more is the upper bound.
    return max(0.0, (ready.last_transition_time - claimed).total_seconds()) + 1


@pytest.mark.full
@pytest.mark.capability("AS-5")
@pytest.mark.parametrize("level", ["Loaded", "Sleeping"])
def test_a_pod_that_has_the_model_is_claimed_without_a_load(clean: Slipway, level: str) -> None:
    standby, warm = yaml.safe_load_all((EXAMPLES / "warm-pool.yaml").read_text())
    standby["spec"] |= {"level": level, "models": [warm["spec"]["model"]], "runtime": warm["spec"]["runtime"]}
    clean.apply(yaml.safe_dump(standby))
    wait_for("a pod that has the model", lambda: ready_pods(clean) == 1, timeout=120)
    (waiting,) = clean.core.list_namespaced_pod(USER_NAMESPACE, label_selector=f"{names.LABEL_POOL}=standby").items
    assert not any(status.ready for status in waiting.status.container_statuses), "nothing routes to it before a claim"

    began = time.monotonic()
    clean.apply(yaml.safe_dump(warm))
    clean.wait_ready("warm", replicas=1)
    seen = time.monotonic() - began
    seconds = claim_seconds(clean, "warm")

    (pod,) = clean.pods("warm")
    assert (pod.metadata.name, pod.metadata.uid) == (waiting.metadata.name, waiting.metadata.uid)
    assert pod.status.container_statuses[0].restart_count == 0
    clean.wait_events("warm", "WarmPodClaimed", "ReplicaReady")
    assert wait_for("an answer under the name of the service", lambda: answers(clean, "warm"))
    print(f"{level}: ready at most {seconds:.1f} s after the claim, {seen:.1f} s after kubectl apply")
    delete_pool(clean, "standby")


@pytest.mark.full
@pytest.mark.capability("AS-5")
def test_a_scaled_down_replica_returns_to_the_pool_and_the_next_service_claims_it(clean: Slipway) -> None:
    standby, first = yaml.safe_load_all((EXAMPLES / "warm-pool.yaml").read_text())
    standby["metadata"]["name"] = "lent"
    standby["spec"]["refill"] = {"maxConcurrent": 1, "delaySeconds": 3600}  # what it has later has returned
    first["spec"] |= {
        "warmPool": {"name": "lent", "policy": "Require"},
        "drain": {"timeoutSeconds": 30, "endpointPropagationSeconds": 1},
    }
    clean.apply(yaml.safe_dump(standby))
    wait_for("a pod that can be claimed", lambda: ready_pods(clean, "lent") == 1, timeout=120)
    clean.apply(yaml.safe_dump(first))
    clean.wait_ready("warm", replicas=1)
    (claimed,) = clean.pods("warm")
    engine = claimed.status.container_statuses[0].container_id
    assert wait_for("an answer of the first service", lambda: answers(clean, "warm"))

    began = time.monotonic()
    clean.apply(yaml.safe_dump(first | {"spec": first["spec"] | {"replicas": 0}}))
    wait_for("the pod waits again", lambda: clean.pods("warm") == [] and ready_pods(clean, "lent") == 1, timeout=120)
    took = time.monotonic() - began
    clean.wait_events("lent", "PodReturned", kind="WarmPool")

    second = first | {"metadata": {"name": "second"}}
    clean.apply(yaml.safe_dump(second))
    clean.wait_ready("second", replicas=1)
    (again,) = clean.pods("second")
    server = again.status.container_statuses[0]
    assert (again.metadata.uid, server.container_id, server.restart_count) == (claimed.metadata.uid, engine, 0)
    assert again.metadata.labels[names.LABEL_SERVICE] == "second"
    assert wait_for("an answer of the second service", lambda: answers(clean, "second"))
    with pytest.raises(openai.APIStatusError):
        answers(clean, "warm")
    print(f"from scale-down to claimable again: {took:.1f} s, the drain's 1 s of propagation with it")
    delete_pool(clean, "lent")


def delete_pool(slipway: Slipway, name: str) -> None:
    """Delete a pool, and wait until none of its pods waits any more; claimed ones stay."""
    slipway.access.kubectl("delete", "wpool", name)
    waiting = f"{names.LABEL_POOL}={name},{names.LABEL_STATE}={names.STATE_WARM}"
    wait_for(
        "its waiting pods are collected",
        lambda: not slipway.core.list_namespaced_pod(USER_NAMESPACE, label_selector=waiting).items,
        timeout=90,
    )


def pod_names(slipway: Slipway) -> list[str]:
    return slipway.access.kubectl("get", "pods", "-o", "jsonpath={.items[*].metadata.name}").split()
