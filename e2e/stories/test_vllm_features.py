"""An unmodified vLLM behind the gateway: adapters, tenants, and an engine that is killed.

A start takes minutes, so the stories share one service, and follow each other in this order.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from bench.peers import environments
from e2e import checks
from e2e.cluster.launch import Cluster
from e2e.manifests import as_yaml
from e2e.slipway import RELEASE_NAMESPACE, USER_NAMESPACE, Json, Slipway, wait_for
from e2e.stories.conftest import delete_services
from e2e.vllm import ADAPTERS, ENGINE, NAME, PEER, START_SECONDS, adapter, config_map, engine, service
from slipway_api import names

pytestmark = [
    *(pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(2400)),
    pytest.mark.capability("OP-11"),
]

KEY = "sk-example-shop"
TENANTS: Json = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "slipway-tenants", "namespace": RELEASE_NAMESPACE},
    "data": {
        "tenants.yaml": json.dumps(
            {"tenants": [{"name": "shop", "keys": ["k"], "models": [NAME], "requestsPerMinute": 120, "maxTokens": 16}]}
        )
    },
}
KEYS: Json = {
    "apiVersion": "v1",
    "kind": "Secret",
    "metadata": {"name": "slipway-api-keys", "namespace": RELEASE_NAMESPACE},
    "stringData": {"k": "6dcf3fc45df0af13358e88b2b3061e410c90f0d7f95b6cdd13d6d8bc24c1908e"},
}


@pytest.fixture(scope="module")
def vllm(slipway: Slipway) -> Iterator[Slipway]:
    """Slipway with one service of vLLM, ready."""
    if environments.interpreter(PEER) is None:
        pytest.skip("vLLM's environment is not cached: python -m bench.peers.environments makes it")
    delete_services(slipway)
    slipway.apply(as_yaml(engine()))
    for seed, name in enumerate(ADAPTERS):
        slipway.apply(as_yaml(config_map(name, seed)))
    slipway.apply(as_yaml(service()))
    ready(slipway, 1)
    yield slipway
    slipway.access.kubectl("delete", "lora", "--all", "--ignore-not-found", "--wait=false")
    delete_services(slipway)
    slipway.access.kubectl("delete", "engine", ENGINE)
    slipway.access.kubectl("delete", "configmap", *(f"adapter-{name}" for name in ADAPTERS))


def ready(slipway: Slipway, replicas: int) -> None:
    slipway.wait_ready(NAME, replicas=replicas, timeout=START_SECONDS)


def complete(slipway: Slipway, model: str = NAME, max_tokens: int = 12) -> str:
    with slipway.openai() as client:
        answer = client.completions.create(model=model, prompt="The ship", max_tokens=max_tokens, temperature=0)
    return str(answer.choices[0].text)


@pytest.mark.capability("ML-2", "ML-8")
def test_adapters_of_every_mode_are_loaded_into_the_running_engine(vllm: Slipway) -> None:
    red, green = ADAPTERS
    (pod,) = vllm.pods(NAME)
    base = complete(vllm)
    for placement in ({"mode": "All"}, {"mode": "Replicas", "replicas": 1}):
        vllm.apply(as_yaml(adapter(red, **placement)))
        wait_for("it is loaded", lambda: routed(vllm, red) == {pod.metadata.name}, timeout=120)
        wait_for("both gateways have heard of it", lambda: all(complete(vllm, red) != base for _ in range(4)))
        vllm.access.kubectl("delete", "lora", red, "--timeout=120s")
        assert routed(vllm, red) == set()

    for name in (red, green):
        vllm.apply(as_yaml(adapter(name, mode="OnDemand")))
    wait_for("both wait for a request", lambda: {reason(vllm, name) for name in ADAPTERS} == {"OnDemand"}, timeout=120)
    answers = [complete(vllm, name) for name in ADAPTERS]
    assert len({base, *answers}) == 3, "the first request of each is held until its adapter is loaded"
    assert complete(vllm, red) == answers[0]
    assert {one.metadata.uid for one in vllm.pods(NAME)} == {pod.metadata.uid}, "no restart"
    assert (vllm.pods(NAME)[0].status.container_statuses or [])[0].restart_count == 0
    vllm.access.kubectl("delete", "lora", *ADAPTERS, "--timeout=120s")


def routed(slipway: Slipway, name: str) -> set[str]:
    """The pods that the gateway may send the adapter's requests to."""
    return {
        pod.metadata.name
        for pod in slipway.pods(NAME)
        if name in (pod.metadata.annotations or {}).get(names.ANNOTATION_ADAPTERS, "").split(",")
    }


def reason(slipway: Slipway, name: str) -> str:
    conditions = slipway.custom("LoRAAdapter", name).get("status", {}).get("conditions", [])
    return next((str(one["reason"]) for one in conditions if one["type"] == "Ready"), "")


@pytest.mark.capability("SE-1", "MT-1")
def test_a_tenant_has_its_limits_in_front_of_it(vllm: Slipway) -> None:
    vllm.apply(as_yaml(TENANTS))
    vllm.apply(as_yaml(KEYS))
    vllm.install("gateway.tenants.configMap=slipway-tenants", "gateway.tenants.keysSecret=slipway-api-keys")
    try:
        url = f"{vllm.base_url}/completions"
        body = {"model": NAME, "prompt": "The ship", "max_tokens": 4}
        headers = {"Authorization": f"Bearer {KEY}"}

        def served() -> httpx.Response | None:
            found = httpx.post(url, json=body, headers=headers, timeout=60)
            return found if found.status_code == 200 else None

        answer = wait_for("the key is known", served)
        assert int(answer.headers["x-ratelimit-limit-requests"]) > 0
        assert int(answer.headers["x-ratelimit-remaining-requests"]) >= 0
        assert httpx.post(url, json=body, timeout=60).status_code == 401
        assert httpx.post(url, json=body | {"max_tokens": 17}, headers=headers, timeout=60).status_code == 400

        with ThreadPoolExecutor(8) as clients:
            many = list(clients.map(lambda _: httpx.post(url, json=body, headers=headers, timeout=120), range(200)))
        statuses = {one.status_code for one in many}
        assert statuses == {200, 429}, "what is beyond the limit is refused, and nothing else"
        assert all("retry-after" in one.headers for one in many if one.status_code == 429)
    finally:
        vllm.install("gateway.tenants.configMap=", "gateway.tenants.keysSecret=")
        wait_for("the gateways are open again", lambda: complete(vllm), timeout=60)


@pytest.mark.capability("RD-4")
def test_a_killed_engine_ends_its_streams_with_an_error_is_unready_in_seconds_and_comes_back(
    vllm: Slipway, cluster: Cluster
) -> None:
    ready(vllm, 1)
    (pod,) = vllm.pods(NAME)
    body = {"model": NAME, "prompt": "The ship", "max_tokens": 480, "stream": True, "ignore_eos": True}
    lines: list[str] = []

    def stream() -> None:
        with httpx.stream("POST", f"{vllm.base_url}/completions", json=body, timeout=120) as answer:
            lines.extend(line for line in answer.iter_lines() if line)

    with ThreadPoolExecutor(1) as clients:
        streaming = clients.submit(stream)
        wait_for("it streams", lambda: busy(vllm), timeout=30)
        engines = [pid for pid in cluster.processes_of(USER_NAMESPACE, pod.metadata.name) if "EngineCore" in title(pid)]
        assert engines, "vLLM computes in a process of its own"
        killed = time.monotonic()
        for pid in engines:
            os.kill(pid, signal.SIGKILL)
        wait_for("it is unready", lambda: not checks.is_ready(vllm.pods(NAME)[0]), timeout=30, every=0.1)
        unready = time.monotonic() - killed
        streaming.result(timeout=60)
        ended = time.monotonic() - killed

    assert '"error"' in lines[-1] or '"error"' in lines[-2], lines[-3:]
    refused = httpx.post(f"{vllm.base_url}/completions", json=body | {"stream": False, "max_tokens": 4}, timeout=120)
    assert refused.status_code in (200, 502, 503), refused.text
    wait_for("it was restarted", lambda: restarts(vllm) >= 1, timeout=120)
    ready(vllm, 1)
    wait_for("it answers", lambda: complete(vllm), timeout=60)
    assert {one.metadata.uid for one in vllm.pods(NAME)} == {pod.metadata.uid}, "the same pod"
    assert unready < 15, unready
    assert ended < 60, ended
    print(f"unready after {unready:.1f} s; the stream ended after {ended:.1f} s")


def busy(slipway: Slipway) -> bool:
    """Whether the engine has started the request: its metrics show it."""
    (pod,) = slipway.pods(NAME)
    path = f"/api/v1/namespaces/{USER_NAMESPACE}/pods/{pod.metadata.name}:{names.SERVING_PORT}/proxy/metrics"
    page = slipway.access.kubectl("get", "--raw", path)
    return any(
        line.startswith("vllm:num_requests_running") and float(line.split()[-1]) > 0 for line in page.splitlines()
    )


def title(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read().replace("\0", " ")
    except OSError:
        return ""


def restarts(slipway: Slipway) -> int:
    return sum(one.restart_count for pod in slipway.pods(NAME) for one in pod.status.container_statuses or [])
