"""An unmodified vLLM through the life of a fleet: canaries, scale to zero and back, eviction, node drain.

A start takes minutes, so the stories share one service, and follow each other in this order.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from bench.peers import environments
from bench.plan import LoadReport
from e2e import checks
from e2e.canary import ANALYSIS, edit, wait_served, weights
from e2e.cluster.launch import Cluster
from e2e.live_streams import Stream, Streams
from e2e.manifests import as_yaml
from e2e.slipway import Json, Load, Slipway, wait_for
from e2e.stories.conftest import delete_services
from e2e.vllm import ENGINE, NAME, PEER, START_SECONDS, engine, plain_service
from slipway_api import names

pytestmark = [
    *(pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(3600)),
    pytest.mark.capability("OP-11"),
]

IDLE_SECONDS = 60  # the least that the API allows
STEPS = [{"setWeight": 50}, {"analyze": {}}, {"setWeight": 100}]
ERRORS, SLOWNESS = ANALYSIS["metrics"]  # type: ignore[misc]


def canary(*metrics: object) -> Json:
    """`spec.rollout`: half of the requests, then the analysis of these metrics, then all."""
    return {"strategy": "Canary", "canary": {"steps": STEPS, "analysis": ANALYSIS | {"metrics": list(metrics)}}}


@pytest.fixture(scope="module")
def vllm(slipway: Slipway) -> Iterator[Slipway]:
    """Slipway with one service of vLLM."""
    if environments.interpreter(PEER) is None:
        pytest.skip("vLLM's environment is not cached: python -m bench.peers.environments makes it")
    delete_services(slipway)
    slipway.apply(as_yaml(engine()))
    yield slipway
    delete_services(slipway)
    slipway.access.kubectl("delete", "engine", ENGINE)


def ready(slipway: Slipway, replicas: int) -> None:
    slipway.wait_ready(NAME, replicas=replicas, timeout=START_SECONDS)


def loaded(slipway: Slipway, users: int, max_tokens: int) -> Load:
    """A load that runs, with answers."""
    load = slipway.load(NAME, concurrency=users, seconds=3000, max_tokens=max_tokens)
    wait_for("requests are answered", lambda: load.progress.finished >= users, timeout=180)
    return load


def nothing_lost(report: LoadReport) -> None:
    assert report.failed == 0, report.failures
    assert report.finished == report.sent > 0


@pytest.mark.capability("EV-1", "EV-3", "RG-1")
def test_a_canary_passes_its_analysis_and_replaces_the_old_revision_under_load(vllm: Slipway) -> None:
    spec = plain_service(rollout=canary(ERRORS))
    vllm.apply(as_yaml(spec))
    ready(vllm, 1)
    old = wait_served(vllm, NAME)
    load = loaded(vllm, users=4, max_tokens=24)
    try:
        new = edit(vllm, spec, maxNumSeqs=5)
        wait_for("it has half", lambda: weights(vllm, NAME) == {old: 50, new: 50}, START_SECONDS)
        wait_for("it is promoted", lambda: vllm.service(NAME)["status"]["currentRevision"] == new, START_SECONDS)
        ready(vllm, 1)
    finally:
        report = load.stop()

    nothing_lost(report)
    assert {old, new} <= set(report.revisions), "both have answered"
    vllm.wait_events(NAME, "CanaryStepCompleted", "CanaryPromoted", "RolloutCompleted")
    (pod,) = vllm.pods(NAME)
    assert pod.metadata.labels[names.LABEL_REVISION] == new


@pytest.mark.capability("EV-2")
def test_a_canary_that_makes_requests_wait_is_rolled_back_and_loses_none(vllm: Slipway) -> None:
    spec = plain_service(rollout=canary(ERRORS, SLOWNESS))
    spec["spec"]["runtime"]["maxNumSeqs"] = 5
    vllm.apply(as_yaml(spec))
    ready(vllm, 1)
    old = vllm.service(NAME)["status"]["currentRevision"]
    # Answers so long that waiting for one of them is unlike the noise of a shared machine.
    load = loaded(vllm, users=8, max_tokens=128)
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
    spec = plain_service(autoscaling=scaling, rollout=canary(ERRORS))
    spec["spec"]["runtime"]["maxNumSeqs"] = 5  # the revision that serves
    del spec["spec"]["replicas"]
    vllm.apply(as_yaml(spec))

    wait_for("no pod is left", lambda: not vllm.pods(NAME), timeout=IDLE_SECONDS + 180)
    vllm.wait_condition(NAME, "Ready", "True", "ScaledToZero")
    assert vllm.service(NAME)["status"]["desiredReplicas"] == 0
    with vllm.openai() as client:
        assert NAME in {model.id for model in client.models.list()}, "it is still there for clients"

    body = {"model": NAME, "prompt": "The ship", "max_tokens": 8, "ignore_eos": True, "temperature": 0}

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


@pytest.mark.capability("PL-1", "PL-2", "RD-1", "RD-5", "PF-7")
def test_an_eviction_and_a_node_drain_under_load_lose_no_request(vllm: Slipway, cluster: Cluster) -> None:
    spec = plain_service(replicas=2, rollout=canary(ERRORS))
    spec["spec"]["runtime"]["maxNumSeqs"] = 5  # the revision that serves
    vllm.apply(as_yaml(spec))
    ready(vllm, 2)
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
