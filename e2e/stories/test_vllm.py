"""An unmodified vLLM behind the gateway: adapters, schemas, tenants, a killed engine, scaling, drains, canaries, zero.

A start takes a minute or more, so the stories share one service, and each leaves it so that the next needs few starts.
"""

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from bench.peers import environments
from bench.plan import LoadReport
from e2e import checks
from e2e.canary import ANALYSIS, edit, wait_served, weights
from e2e.cluster.access import CommandError
from e2e.cluster.launch import Cluster
from e2e.live_streams import Stream, Streams
from e2e.manifests import as_yaml
from e2e.slipway import RELEASE_NAMESPACE, USER_NAMESPACE, Json, Load, Slipway, wait_for
from e2e.stories.conftest import delete_services
from e2e.vllm import ADAPTERS, ENGINE, NAME, PEER, SEATS, START_SECONDS, adapter, config_map, engine, service
from slipway_api import names

pytestmark = [
    *(pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(3600)),
    pytest.mark.capability("OP-11"),
]

IDLE_SECONDS = 60  # the least that the API allows
STEPS = [{"setWeight": 50}, {"analyze": {}}, {"setWeight": 100}]
ERRORS, SLOWNESS = ANALYSIS["metrics"]  # type: ignore[misc]
SCALING = {
    "minReplicas": 1,
    "maxReplicas": 2,
    "metrics": [{"type": "QueueDepth", "target": "2"}],
    "behavior": {
        "scaleUp": {"stabilizationWindowSeconds": 0, "maxPods": 1, "periodSeconds": 15},
        "scaleDown": {"stabilizationWindowSeconds": 20, "maxPods": 1, "periodSeconds": 15},
    },
}
BODY: Json = {"model": NAME, "prompt": "The ship", "temperature": 0}
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


class Paint(BaseModel):
    """Paints."""

    model_config = ConfigDict(extra="forbid")

    colour: Literal["red", "green"]
    count: int = Field(ge=0, le=9)


@pytest.fixture(scope="module")
def vllm(slipway: Slipway) -> Iterator[Slipway]:
    """Slipway with vLLM's Engine and the files of two adapters; the first story to run starts the service."""
    if environments.interpreter(PEER) is None:
        pytest.skip("vLLM's environment is not cached: python -m bench.peers.environments makes it")
    delete_services(slipway)
    slipway.apply(as_yaml(engine()))
    for seed, name in enumerate(ADAPTERS):
        slipway.apply(as_yaml(config_map(name, seed)))
    yield slipway
    slipway.access.kubectl("delete", "lora", "--all", "--ignore-not-found", "--wait=false")
    delete_services(slipway)
    slipway.access.kubectl("delete", "engine", ENGINE)
    slipway.access.kubectl("delete", "configmap", *(f"adapter-{name}" for name in ADAPTERS))


def serve(slipway: Slipway, replicas: int = 1, **spec: Any) -> Json:
    """Apply the service with these fields of its spec, and wait for its replicas; the manifest."""
    manifest = service(replicas=replicas, **spec)
    slipway.apply(as_yaml(manifest))
    ready(slipway, replicas)
    return manifest


def ready(slipway: Slipway, replicas: int) -> None:
    slipway.wait_ready(NAME, replicas=replicas, timeout=START_SECONDS)


def complete(slipway: Slipway, model: str = NAME) -> str:
    with slipway.openai() as client:
        answer = client.completions.create(model=model, prompt="The ship", max_tokens=12, temperature=0)
    return str(answer.choices[0].text)


def loaded(slipway: Slipway, users: int, max_tokens: int) -> Load:
    """A running load whose requests are answered."""
    load = slipway.load(NAME, concurrency=users, seconds=3000, max_tokens=max_tokens)
    wait_for("requests are answered", lambda: load.progress.finished >= users, timeout=180)
    return load


def nothing_lost(report: LoadReport) -> None:
    assert report.failed == 0, report.failures
    assert report.finished == report.sent > 0


@pytest.mark.capability("ML-2", "ML-8")
def test_adapters_of_every_mode_are_loaded_into_the_running_engine(vllm: Slipway) -> None:
    serve(vllm)
    red, green = ADAPTERS
    (pod,) = vllm.pods(NAME)
    assert [container.name for container in pod.spec.containers] == ["server", "slipway-agent"]
    base = complete(vllm)
    for placement in ({"mode": "All"}, {"mode": "Replicas", "replicas": 1}):
        vllm.apply(as_yaml(adapter(red, **placement)))
        wait_for("it is loaded", lambda: routed(vllm, red) == {pod.metadata.name}, timeout=120)
        wait_for("both gateways route it", lambda: all(complete(vllm, red) != base for _ in range(4)))
        vllm.access.kubectl("delete", "lora", red, "--timeout=120s")
        assert routed(vllm, red) == set()

    for name in (red, green):
        vllm.apply(as_yaml(adapter(name, mode="OnDemand")))
    wait_for("both wait for a request", lambda: {reason(vllm, name) for name in ADAPTERS} == {"OnDemand"}, timeout=120)
    answers = [complete(vllm, name) for name in ADAPTERS]
    assert len({base, *answers}) == 3, "the first request of each is held until its adapter is loaded"
    assert complete(vllm, red) == answers[0]
    assert checks.uids(vllm.pods(NAME)) == {pod.metadata.uid}, "no restart"
    assert restarts(vllm) == 0
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


def restarts(slipway: Slipway) -> int:
    return sum(one.restart_count for pod in slipway.pods(NAME) for one in pod.status.container_statuses or [])


@pytest.mark.capability("API-1")
def test_a_schema_and_a_tool_bind_the_answers_to_the_stock_client(vllm: Slipway) -> None:
    serve(vllm)
    question: Any = {"model": NAME, "messages": [{"role": "user", "content": "Which colour?"}], "max_tokens": 80}
    tools: Any = {"tools": [openai.pydantic_function_tool(Paint)], "parallel_tool_calls": False}
    with vllm.openai() as client:
        bound = client.chat.completions.parse(response_format=Paint, **question)
        with client.chat.completions.stream(response_format=Paint, **question) as stream:
            streamed = stream.get_final_completion()
        required = client.chat.completions.parse(tool_choice="required", **tools, **question)
        named: Any = {"type": "function", "function": {"name": "Paint"}}
        forced = client.chat.completions.parse(tool_choice=named, **tools, **question)

    assert isinstance(bound.choices[0].message.parsed, Paint)
    assert isinstance(streamed.choices[0].message.parsed, Paint)
    for answer in (required, forced):
        (call,) = answer.choices[0].message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, Paint)


def test_fields_that_vllm_does_not_have_are_refused_and_the_replica_runs_on(vllm: Slipway) -> None:
    manifest = serve(vllm)
    (pod,) = vllm.pods(NAME)
    with pytest.raises(CommandError, match=r"warmPool is only for runtime\.engine slipway"):
        vllm.apply(as_yaml(service(warmPool={"name": "sleeping"})))

    vllm.apply(as_yaml(service(runtime=manifest["spec"]["runtime"] | {"maxOutputTokens": 64})))
    stalled = vllm.wait_condition(NAME, "Stalled", "True", "InvalidSpec")
    assert "engine vllm-cpu has no flag for spec.runtime.maxOutputTokens" in stalled["message"]
    assert complete(vllm)

    serve(vllm)
    assert checks.uids(vllm.pods(NAME)) == {pod.metadata.uid}


@pytest.mark.capability("SE-1", "MT-1")
def test_a_tenant_has_its_limits_in_front_of_it(vllm: Slipway) -> None:
    serve(vllm)
    vllm.apply(as_yaml(TENANTS))
    vllm.apply(as_yaml(KEYS))
    vllm.install("gateway.tenants.configMap=slipway-tenants", "gateway.tenants.keysSecret=slipway-api-keys")
    try:
        url = f"{vllm.base_url}/completions"
        body = BODY | {"max_tokens": 4}
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
    serve(vllm)
    (pod,) = vllm.pods(NAME)
    body = BODY | {"max_tokens": 480, "stream": True, "ignore_eos": True}
    lines: list[str] = []

    def stream() -> None:
        with httpx.stream("POST", f"{vllm.base_url}/completions", json=body, timeout=120) as answer:
            lines.extend(line for line in answer.iter_lines() if line)

    with ThreadPoolExecutor(1) as clients:
        streaming = clients.submit(stream)
        wait_for("it streams", lambda: is_busy(vllm), timeout=30)
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
    assert checks.uids(vllm.pods(NAME)) == {pod.metadata.uid}, "the same pod"
    assert unready < 15, unready
    assert ended < 60, ended
    print(f"unready after {unready:.1f} s; the stream ended after {ended:.1f} s")


def is_busy(slipway: Slipway) -> bool:
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


@pytest.mark.capability("AS-1", "AS-3")
def test_waiting_requests_of_vllm_add_a_replica(vllm: Slipway) -> None:
    serve(vllm)
    vllm.apply(as_yaml(autoscaled(SCALING)))
    load = loaded(vllm, users=3 * SEATS, max_tokens=48)  # a third runs, the others wait in vLLM
    try:
        ready(vllm, 2)
    finally:
        report = load.stop()

    nothing_lost(report)
    (note,) = vllm.notes(NAME, "ScaledUp")
    assert re.match(r"1→2: QueueDepth [\d.]+ > 2", note), note


def autoscaled(scaling: Json, **spec: Any) -> Json:
    """The service with `spec.autoscaling`, which excludes a number of replicas."""
    manifest = service(autoscaling=scaling, **spec)
    del manifest["spec"]["replicas"]
    return manifest


@pytest.mark.capability("PL-1", "PL-2", "RD-1", "RD-5", "PF-7")
def test_an_eviction_and_a_node_drain_under_load_lose_no_request(vllm: Slipway, cluster: Cluster) -> None:
    serve(vllm, replicas=2)
    homes = {node: pod for pod, node in checks.nodes_of(vllm, NAME).items()}
    assert sorted(homes) == ["node-a", "node-b"], "replicas are spread over nodes"
    before = checks.uids(vllm.pods(NAME))
    evicted = next(pod for pod in vllm.pods(NAME) if pod.metadata.name == homes["node-a"])
    load = loaded(vllm, users=2, max_tokens=48)
    streams = Streams(vllm.base_url, NAME, 4, tokens=256)

    def evict() -> None:
        wait_for("the eviction is admitted", lambda: checks.evict(vllm, evicted), timeout=60)
        wait_for("it drains", lambda: evicted.metadata.uid not in checks.uids(checks.serving_pods(vllm, NAME)))

    try:
        during = streams.read(evict, run="evicted")
        wait_for("it is gone", lambda: evicted.metadata.uid not in checks.uids(vllm.pods(NAME)), timeout=120)
        ready(vllm, 2)
        vllm.access.kubectl(
            *("drain", "node-b", f"--pod-selector={names.LABEL_SERVICE}={NAME}"),
            *("--delete-emptydir-data", f"--timeout={START_SECONDS}s"),
        )
        ready(vllm, 2)
    finally:
        report = load.stop()
        vllm.access.kubectl("uncordon", "node-b")

    nothing_lost(report)
    assert [ended_whole(stream, 256) for stream in during] == [""] * 4
    assert not before & checks.uids(vllm.pods(NAME)), "both were replaced"
    assert set(checks.nodes_of(vllm, NAME).values()) == {"node-a"}
    reasons = [event.reason for event in vllm.wait_events(NAME, "ReplicaReplaced")]
    assert {"DrainTimedOut", "NodeDrainForced"}.isdisjoint(reasons)
    assert cluster.is_up("node-b"), "a drained node runs"


def ended_whole(stream: Stream, tokens: int) -> str:
    """How the stream differs from one whole answer; empty: it does not."""
    if stream.error or len(stream.ids) != 1:
        return f"stream {stream.number}: {stream.error or stream.ids}"
    is_whole = (stream.finish, stream.completion_tokens) == ("length", tokens)
    return "" if is_whole else f"stream {stream.number}: {stream.finish} after {stream.completion_tokens} tokens"


@pytest.mark.capability("AS-6", "RD-1")
def test_little_load_removes_a_replica_which_finishes_its_streams(vllm: Slipway) -> None:
    serve(vllm, replicas=2)
    load = loaded(vllm, users=2, max_tokens=96)
    try:
        vllm.apply(as_yaml(autoscaled(SCALING)))
        wait_for("one replica is left", lambda: len(vllm.pods(NAME)) == 1, timeout=240)
    finally:
        report = load.stop()

    nothing_lost(report)
    events = vllm.wait_events(NAME, "ScaledDown", "ReplicaDraining", "ReplicaDrained")
    assert "DrainTimedOut" not in {event.reason for event in events}
    assert next(event.note for event in events if event.reason == "ScaledDown").startswith("2→1: QueueDepth ")


def canary(*metrics: object) -> Json:
    """`spec.rollout`: half of the requests, then the analysis of these metrics, then all."""
    return {"strategy": "Canary", "canary": {"steps": STEPS, "analysis": ANALYSIS | {"metrics": list(metrics)}}}


@pytest.mark.capability("EV-2")
def test_a_canary_that_makes_requests_wait_is_rolled_back_and_loses_none(vllm: Slipway) -> None:
    spec = serve(vllm, rollout=canary(ERRORS, SLOWNESS))
    old = wait_served(vllm, NAME)
    # The stable replica has a seat for each user: if its own requests waited too, its P95 would hide the canary's.
    # Answers are so long that waiting for one of them is unlike the noise of a shared machine.
    load = loaded(vllm, users=SEATS, max_tokens=192)
    try:
        new = edit(vllm, spec, maxNumSeqs=1)
        wait_for("it is rolled back", lambda: vllm.service(NAME)["status"].get("failedRevision") == new, START_SECONDS)
        wait_for("the canary is gone", lambda: len(vllm.pods(NAME)) == 1, timeout=120)
    finally:
        report = load.stop()

    nothing_lost(report)
    assert new in report.revisions, "the canary has answered"
    (note,) = vllm.notes(NAME, "CanaryRolledBack")
    assert "TTFTP95" in note
    assert " against " in note
    assert weights(vllm, NAME)[old] == 100
    (pod,) = vllm.pods(NAME)
    assert pod.metadata.labels[names.LABEL_REVISION] == old


@pytest.mark.capability("AS-9", "RG-7")
def test_an_idle_vllm_goes_to_zero_and_the_first_requests_are_held_and_answered(vllm: Slipway) -> None:
    activation = {"maxQueuedRequests": 8, "maxWaitSeconds": START_SECONDS}
    scaling = {
        "minReplicas": 0,
        "maxReplicas": 1,
        "scaleToZero": {"idleSeconds": IDLE_SECONDS, "activation": activation},
    }
    serve(vllm)
    vllm.apply(as_yaml(autoscaled(scaling)))

    wait_for("no pod is left", lambda: not vllm.pods(NAME), timeout=IDLE_SECONDS + 180)
    vllm.wait_condition(NAME, "Ready", "True", "ScaledToZero")
    assert vllm.service(NAME)["status"]["desiredReplicas"] == 0
    with vllm.openai() as client:
        assert NAME in {model.id for model in client.models.list()}, "it is still there for clients"

    body = BODY | {"max_tokens": 8, "ignore_eos": True}

    def ask(stream: bool) -> httpx.Response:
        return httpx.post(f"{vllm.base_url}/completions", json=body | {"stream": stream}, timeout=START_SECONDS)

    with ThreadPoolExecutor(3) as clients:
        whole, again, stream = clients.map(ask, (False, False, True))

    assert [one.status_code for one in (whole, again, stream)] == [200] * 3, [whole.text, again.text, stream.text]
    assert whole.json()["usage"]["completion_tokens"] == 8
    assert stream.text.endswith("data: [DONE]\n\n")
    assert len(vllm.pods(NAME)) == 1, "three held requests start one replica"
    events = {event.reason: event.note for event in vllm.wait_events(NAME, "ScaledToZero", "Activated")}
    assert "no request at the gateways" in events["ScaledToZero"]
    assert events["Activated"].startswith("0→1: ")
    ready(vllm, 1)


@pytest.mark.capability("EV-1", "EV-3", "RG-1")
def test_a_canary_passes_its_analysis_and_replaces_the_old_revision_under_load(vllm: Slipway) -> None:
    spec = serve(vllm, rollout=canary(ERRORS))
    old = wait_served(vllm, NAME)
    load = loaded(vllm, users=4, max_tokens=24)
    try:
        new = edit(vllm, spec, maxNumSeqs=5)
        wait_for("it has half", lambda: {old: 50, new: 50}.items() <= weights(vllm, NAME).items(), START_SECONDS)
        wait_for("it is promoted", lambda: vllm.service(NAME)["status"]["currentRevision"] == new, START_SECONDS)
        ready(vllm, 1)
    finally:
        report = load.stop()

    nothing_lost(report)
    assert {old, new} <= set(report.revisions), "both have answered"
    vllm.wait_events(NAME, "CanaryStepCompleted", "CanaryPromoted", "RolloutCompleted")
    (pod,) = vllm.pods(NAME)
    assert pod.metadata.labels[names.LABEL_REVISION] == new
