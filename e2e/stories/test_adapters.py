"""A team serves an adapter from running replicas: loaded without a restart, reloaded after one, and taken away."""

import json
from typing import Any

import pytest

from e2e.cluster.launch import Cluster
from e2e.manifests import as_yaml, static
from e2e.slipway import USER_NAMESPACE, Slipway, wait_for
from slipway_api import names

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

ADAPTERS = "file:///opt/slipway/models/adapters"


def manifest(name: str, base: str, uri: str) -> dict[str, Any]:
    return {
        "apiVersion": names.API_VERSION,
        "kind": "LoRAAdapter",
        "metadata": {"name": name, "namespace": USER_NAMESPACE},
        "spec": {"baseRef": {"name": base}, "source": {"uri": uri}, "unload": {"drainSeconds": 5}},
    }


def status(slipway: Slipway, name: str) -> dict[str, Any]:
    found = json.loads(slipway.access.kubectl("get", "lora", name, "-n", USER_NAMESPACE, "-o", "json"))
    return dict(found.get("status") or {})


def is_loaded(slipway: Slipway, name: str, replicas: int) -> bool:
    return status(slipway, name).get("loaded") == f"{replicas}/{replicas}"


def routed(slipway: Slipway, base: str, name: str) -> set[str]:
    """The pods that the gateway may send the adapter's requests to."""
    return {
        pod.metadata.name
        for pod in slipway.pods(base)
        if name in (pod.metadata.annotations or {}).get(names.ANNOTATION_ADAPTERS, "").split(",")
    }


def said(slipway: Slipway, pod: str, model: str) -> str:
    """The pod's answer to a request for this model name."""
    path = f"/api/v1/namespaces/{USER_NAMESPACE}/pods/{pod}:{names.SERVING_PORT}/proxy/v1/completions"
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}
    answer = slipway.access.api("POST", path, body)
    return str(answer["choices"][0]["text"])


@pytest.mark.capability("ML-2", "ML-9", "OP-6")
def test_an_adapter_comes_to_three_running_replicas_survives_a_restart_changes_its_source_and_goes(
    clean: Slipway, cluster: Cluster
) -> None:
    base = static("many", 3)
    base["spec"].setdefault("runtime", {})["lora"] = {"maxAdapters": 2, "maxCPUAdapters": 4, "maxRank": 16}
    clean.apply(as_yaml(base))
    clean.wait_ready("many", replicas=3)
    pods = {pod.metadata.name for pod in clean.pods("many")}

    clean.apply(as_yaml(manifest("sailor", "many", f"{ADAPTERS}/sailor")))
    wait_for("all replicas have it", lambda: is_loaded(clean, "sailor", 3), timeout=60)
    assert {pod.metadata.name for pod in clean.pods("many")} == pods, "no restart"
    assert routed(clean, "many", "sailor") == pods
    first, second, _ = sorted(pods)
    as_sailor = said(clean, first, "sailor")
    assert as_sailor != said(clean, first, "many")
    clean.wait_condition("many", "AdaptersReady", "True")

    cluster.kill_container(USER_NAMESPACE, first)
    wait_for("it was restarted", lambda: restarts(clean, first) == 1, timeout=60)
    clean.wait_ready("many", replicas=3)
    wait_for("it answers as before", lambda: said(clean, first, "sailor") == as_sailor, timeout=60)

    clean.apply(as_yaml(manifest("sailor", "many", f"{ADAPTERS}/json")))
    wait_for(
        "the new source answers", lambda: said(clean, second, "sailor") != as_sailor and is_loaded(clean, "sailor", 3)
    )

    clean.access.kubectl("delete", "lora", "sailor", "-n", USER_NAMESPACE, "--timeout=60s")
    assert routed(clean, "many", "sailor") == set()
    expected = ("AdapterDownloaded", "AdapterLoaded", "AdapterSwapped", "AdapterUnloaded")
    clean.wait_events("sailor", *expected, kind="LoRAAdapter")


@pytest.mark.full
@pytest.mark.capability("ML-2", "ML-8")
def test_an_adapter_on_demand_is_loaded_by_its_first_request_and_makes_room_for_another(clean: Slipway) -> None:
    base = static("few", 1)
    base["spec"].setdefault("runtime", {})["lora"] = {"maxAdapters": 1, "maxCPUAdapters": 1, "maxRank": 16}
    clean.apply(as_yaml(base))
    for name in ("sailor", "json"):
        adapter = manifest(name, "few", f"{ADAPTERS}/{name}")
        adapter["spec"]["placement"] = {"mode": "OnDemand"}
        clean.apply(as_yaml(adapter))
    clean.wait_ready("few", replicas=1)
    for name in ("sailor", "json"):
        wait_for(f"{name} waits for a request", lambda name=name: ready_reason(clean, name) == "OnDemand")
        assert routed(clean, "few", name) == set()
    (pod,) = clean.pods("few")

    assert asked(clean, "sailor"), "the first request is held until the adapter is loaded"
    assert routed(clean, "few", "sailor") == {pod.metadata.name}
    assert routed(clean, "few", "json") == set(), "nobody has asked for it"
    assert asked(clean, "sailor") != asked(clean, "few")

    assert asked(clean, "json"), "its memory is full: it answers first, and room is made afterwards"
    wait_for(
        "the adapter that was idle for longer leaves",
        lambda: routed(clean, "few", "sailor") == set(),
        timeout=90,
    )
    assert routed(clean, "few", "json") == {pod.metadata.name}
    clean.wait_events("sailor", "AdapterEvicted", kind="LoRAAdapter")
    assert asked(clean, "sailor"), "and comes back with the next request"
    for name in ("sailor", "json"):
        clean.access.kubectl("delete", "lora", name, "-n", USER_NAMESPACE, "--timeout=60s")


def ready_reason(slipway: Slipway, name: str) -> str:
    conditions = status(slipway, name).get("conditions", [])
    return next((str(one["reason"]) for one in conditions if one["type"] == "Ready"), "")


def asked(slipway: Slipway, model: str) -> str:
    """What the gateway answers."""
    answer = slipway.openai().completions.create(
        model=model, prompt="Once upon a time", max_tokens=16, temperature=0, timeout=30
    )
    return str(answer.choices[0].text)


def restarts(slipway: Slipway, name: str) -> int:
    (pod,) = [pod for pod in slipway.pods("many") if pod.metadata.name == name]
    return int(pod.status.container_statuses[0].restart_count)
