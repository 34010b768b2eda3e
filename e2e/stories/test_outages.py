"""The control plane fails: running replicas serve on, restarted parts report not ready, and changes follow later."""

import http.client
import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

import pytest

from e2e import checks
from e2e.cluster.launch import Cluster
from e2e.manifests import STAYS_FIVE_MINUTES, as_yaml, static
from e2e.slipway import RELEASE_NAMESPACE, Slipway, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

AWAY_SECONDS = 20
SNAPSHOT = "var/lib/slipway/state/routes.jsonl"  # in a gateway's container
QUESTION = json.dumps({"model": "known", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}).encode()


@pytest.mark.full
@pytest.mark.capability("OP-7", "RG-2")
def test_clients_are_served_while_etcd_is_away_and_changes_follow(clean: Slipway, breakable: Cluster) -> None:
    template = {"spec": {"tolerations": STAYS_FIVE_MINUTES}}
    clean.apply(as_yaml(static("kept", 1, template=template)))
    clean.wait_ready("kept", replicas=1)
    (before,) = checks.uids(clean.pods("kept"))
    load = clean.load("kept", concurrency=2, seconds=120, max_tokens=32)

    with clean.etcd_away(breakable):
        time.sleep(AWAY_SECONDS)
        report = load.stop()  # before it is back: every node counts as lost until its lease is renewed

    assert report.failed == 0, report.failures
    assert report.finished == report.sent > 0
    checks.wait_serving(clean, "kept")
    clean.apply(as_yaml(static("kept", 2, template=template)))
    clean.wait_ready("kept", replicas=2)
    assert before in checks.uids(clean.pods("kept"))


@pytest.mark.full
@pytest.mark.capability("OP-7", "RG-2")
def test_streams_run_on_while_the_api_server_is_away_and_a_dead_replica_is_avoided(
    clean: Slipway, breakable: Cluster
) -> None:
    clean.apply(as_yaml(static("alone", 2)))
    clean.wait_ready("alone", replicas=2)
    victim = clean.pods("alone")[0]
    processes = breakable.processes_of("default", victim.metadata.name)

    with clean.api_server_away(breakable):
        for process in processes:
            os.kill(process, signal.SIGSTOP)  # it answers nothing, and its readiness cannot change
        try:
            time.sleep(2)
            for process in processes:
                os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            pass  # the first one takes the others along
        checks.wait_serving(clean, "alone", timeout=60)

    clean.wait_ready("alone", replicas=2, timeout=180)
    assert checks.orphans(clean) == []


@pytest.mark.capability("OP-7", "RG-2")
def test_gateways_restarted_while_the_api_server_is_away_serve_as_before_and_never_say_404(
    clean: Slipway, breakable: Cluster
) -> None:
    """Chaos finding C1: a gateway without a list of services denies none; it routes as its last process did."""
    clean.apply(as_yaml(static("known", 1)))
    clean.wait_ready("known", replicas=1)
    checks.wait_serving(clean, "known")
    gateways = clean.core.list_namespaced_pod(
        RELEASE_NAMESPACE, label_selector="app.kubernetes.io/component=gateway"
    ).items
    processes = [p for pod in gateways for p in breakable.processes_of(RELEASE_NAMESPACE, pod.metadata.name)]
    (replica,) = clean.pods("known")
    wait_for(
        "the snapshots of all gateways, written once a second, have the replica",
        lambda: all(replica.metadata.name in snapshot_of(process) for process in processes),
    )
    answers: Counter[tuple[str, int]] = Counter()

    with clean.api_server_away(breakable):
        for process in processes:
            os.kill(process, signal.SIGKILL)
        until = time.monotonic() + AWAY_SECONDS
        while time.monotonic() < until or not answers:
            assert time.monotonic() < until + 120, "no gateway came back"
            for path, body in (("models", None), ("chat/completions", QUESTION)):
                status, said = ask(f"{clean.base_url}/{path}", body)
                if status:
                    answers[path, status] += 1
                if status == 200:
                    assert "known" in said, "an empty list denies the model too"
            time.sleep(0.2)

    assert set(answers) == {("models", 200), ("chat/completions", 200)}, answers
    checks.wait_serving(clean, "known")


def snapshot_of(process: int) -> str:
    """The routing table that a gateway's process keeps in its file."""
    container = Path("/proc") / str(process) / "root"
    return (container / SNAPSHOT).read_text()


def ask(url: str, body: bytes | None) -> tuple[int, str]:
    """Status and body of an answer; status 0 where there was none."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, ""
    except (OSError, http.client.HTTPException):
        return 0, ""
