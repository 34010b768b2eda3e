"""`make e2e KUBECONFIG=…` on a cluster of somebody else, played by a kubectl that answers as told."""

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from e2e import foreign

ROOT = Path(__file__).resolve().parents[2]

KUBECTL = """#!{python}
import json, pathlib, sys, time
folder = pathlib.Path({folder!r})
words = sys.argv[3:]
with (folder / "calls").open("a") as calls:
    calls.write(" ".join(words) + "\\n")
if "apply" in words:
    (folder / "applied").write_text(sys.stdin.read())
if "wait" in words:
    time.sleep(float((folder / "seconds").read_text()))
    sys.exit(1)
if "json" in words:
    print((folder / "service.json").read_text())
"""


@pytest.fixture
def cluster(tmp_path):
    """A folder of a kubectl whose services never become ready."""
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(KUBECTL.format(python=sys.executable, folder=str(tmp_path)))
    kubectl.chmod(kubectl.stat().st_mode | stat.S_IEXEC)
    (tmp_path / "seconds").write_text("0")
    return tmp_path


def start(cluster: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"PATH": f"{cluster}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "e2e.foreign", "--kubeconfig", "k"]
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stderr=subprocess.PIPE)


def test_it_asks_for_no_gpu():
    """review/containers.md 2: on a cluster without GPUs it could never pass."""
    assert foreign.manifest()["spec"]["resources"]["gpu"]["count"] == 0


def test_a_service_that_does_not_become_ready_is_one_sentence_with_the_conditions_reason(cluster):
    condition = {"type": "Ready", "status": "Unknown", "reason": "WaitingForGPU", "message": "1 Insufficient cpu"}
    (cluster / "service.json").write_text(json.dumps({"status": {"conditions": [condition]}}))

    program = start(cluster)
    _, said = program.communicate(timeout=60)

    assert program.returncode == 1
    assert said == "make e2e KUBECONFIG=…: infsvc/slipway-e2e is not ready: WaitingForGPU: 1 Insufficient cpu\n"
    assert (cluster / "calls").read_text().splitlines()[-1] == "-n default delete infsvc slipway-e2e --ignore-not-found"


def test_ended_by_sigterm_it_removes_its_service(cluster):
    """review/containers.md 2: a timeout left the service behind."""
    (cluster / "seconds").write_text("120")
    program = start(cluster)
    calls = cluster / "calls"
    while program.poll() is None and not (calls.exists() and " wait " in calls.read_text()):
        pass

    program.send_signal(signal.SIGTERM)
    _, said = program.communicate(timeout=60)

    assert said == "make e2e KUBECONFIG=…: ended by SIGTERM.\n"
    assert calls.read_text().splitlines()[-1] == "-n default delete infsvc slipway-e2e --ignore-not-found"


def test_a_stalled_service_and_one_that_nobody_watches_say_so():
    stalled = {"type": "Stalled", "status": "True", "reason": "QuotaExceeded", "message": "pods=0"}
    ready = {"type": "Ready", "status": "False", "reason": "Loading", "message": "0 of 1"}

    assert "QuotaExceeded: pods=0" in foreign.why_not_ready({"status": {"conditions": [ready, stalled]}})
    assert "the operator does not watch this namespace" in foreign.why_not_ready({})
