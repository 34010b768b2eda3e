"""The verbs against a real API server, as a user runs them: by the plugin's command and a kubeconfig."""

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.access import Access

pytestmark = pytest.mark.apiserver
CRDS = Path(__file__).resolve().parents[2] / "crds"
NAMESPACE = "cli-tests"
STABLE, UPDATE = "stable1234", "update5678"
SERVICE: dict[str, Any] = {
    "apiVersion": "slipway.dev/v1alpha1",
    "kind": "InferenceService",
    "metadata": {"name": "chat", "namespace": NAMESPACE, "finalizers": ["slipway.dev/drain", "example.com/theirs"]},
    "spec": {"model": {"uri": "hf://org/model@1"}},
}
ROLLING = {
    "observedGeneration": 1,
    "desiredReplicas": 2,
    "readyReplicas": 2,
    "currentRevision": STABLE,
    "updateRevision": UPDATE,
    "revisions": [
        {"name": "chat-updat", "hash": UPDATE, "weight": 10, "ready": 1},
        {"name": "chat-stabl", "hash": STABLE, "weight": 90, "ready": 1, "served": True},
    ],
    "conditions": [
        {
            "type": "Ready",
            "status": "True",
            "reason": "Available",
            "message": "2 of 2 replicas are ready",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
    ],
}


@pytest.fixture(scope="module")
def namespace(apiserver: Access) -> Iterator[Access]:
    apiserver.serve_kinds(CRDS)
    apiserver.kubectl("create", "namespace", NAMESPACE)
    yield apiserver
    apiserver.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


@pytest.fixture
def api(namespace: Access) -> Iterator[Access]:
    apiserver = namespace
    apiserver.kubectl("apply", "-f", "-", stdin=json.dumps(SERVICE))
    status = json.dumps({"status": ROLLING})
    apiserver.kubectl("patch", "infsvc", "chat", "-n", NAMESPACE, "--subresource=status", "--type=merge", "-p", status)
    yield apiserver
    released = json.dumps({"metadata": {"finalizers": []}})
    apiserver.kubectl("patch", "infsvc", "chat", "-n", NAMESPACE, "--type=merge", "-p", released)
    apiserver.kubectl("delete", "infsvc", "chat", "-n", NAMESPACE)


def run(api: Access, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from slipway_cli.main import main; main()", *arguments]
    environment = os.environ | {"KUBECONFIG": str(api.kubeconfig)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def annotations(api: Access) -> dict[str, str]:
    body = json.loads(api.kubectl("get", "infsvc", "chat", "-n", NAMESPACE, "-o", "json"))
    return body["metadata"].get("annotations", {})


@pytest.mark.capability("OP-7")
def test_a_user_sees_steers_and_bundles_a_service(api, tmp_path):
    shown = json.loads(run(api, "status", "chat", "-n", NAMESPACE, "-o", "json").stdout)
    assert [(one["role"], one["weight"]) for one in shown["revisions"]] == [("update", 10), ("stable", 90)]
    assert "2 of 2 ready" in run(api, "status", "chat", "-n", NAMESPACE).stdout

    for verb, annotation, revision in (("promote", "promote", UPDATE), ("abort", "abort", UPDATE)):
        assert run(api, verb, "chat", "-n", NAMESPACE).returncode == 0
        assert annotations(api)[f"slipway.dev/{annotation}"] == revision
    assert run(api, "rollback", "chat", "--to", "stab", "-n", NAMESPACE).returncode == 0
    assert annotations(api)["slipway.dev/rollback-to"] == STABLE
    unknown = run(api, "rollback", "chat", "--to", "zzz", "-n", NAMESPACE)
    assert (unknown.returncode, unknown.stderr) == (1, "error: 0 revisions of chat start with zzz, not one\n")

    bundle = tmp_path / "bundle.tar.gz"
    assert run(api, "bundle", str(bundle), "-n", NAMESPACE).returncode == 0
    with tarfile.open(bundle) as archive:
        names = {member.name.removeprefix("slipway-bundle/") for member in archive.getmembers()}
    assert {"inferenceservices.json", "pods.json", "events.json", "versions.json"} <= names


def test_wake_writes_the_moment_where_the_service_can_be_at_zero(api):
    refused = run(api, "wake", "chat", "-n", NAMESPACE)
    assert (refused.returncode, refused.stderr) == (
        1,
        "error: chat never scales to zero: it has no spec.autoscaling.scaleToZero\n",
    )
    scaling = {"minReplicas": 0, "maxReplicas": 2, "scaleToZero": {"idleSeconds": 600}}
    change = json.dumps({"spec": {"autoscaling": scaling}})
    api.kubectl("patch", "infsvc", "chat", "-n", NAMESPACE, "--type=merge", "-p", change)
    before = datetime.now(UTC)

    assert run(api, "wake", "chat", "-n", NAMESPACE).returncode == 0

    moment = datetime.fromisoformat(annotations(api)["slipway.dev/wake"])
    assert abs((moment - before).total_seconds()) < 60


@pytest.mark.capability("PL-5")
def test_cleanup_releases_what_a_gone_operator_holds_and_leaves_other_finalizers(api):
    listed = run(api, "cleanup")
    assert f"held: InferenceService {NAMESPACE}/chat" in listed.stdout

    assert run(api, "cleanup", "--yes").returncode == 0

    body = json.loads(api.kubectl("get", "infsvc", "chat", "-n", NAMESPACE, "-o", "json"))
    assert body["metadata"]["finalizers"] == ["example.com/theirs"]
    assert f"{NAMESPACE}/chat" not in run(api, "cleanup").stdout


def test_what_does_not_work_is_one_sentence(api):
    missing = run(api, "status", "nothing", "-n", NAMESPACE)
    not_a_replica = run(api, "drain", "chat", "no-such-pod", "-n", NAMESPACE)

    assert missing.returncode == 1
    assert missing.stderr == (
        f'error: InferenceService {NAMESPACE}/nothing: inferenceservices.slipway.dev "nothing" not found\n'
    )
    assert not_a_replica.stderr == "error: no-such-pod is not a replica of chat\n"


@pytest.mark.capability("OP-15", "OP-7")
def test_a_service_that_inherits_is_shown_planned_and_paused_without_losing_its_inheritance(api, tmp_path):
    template = {"apiVersion": "slipway.dev/v1alpha1", "kind": "ServiceTemplate", "metadata": {"name": "cli-gold"}}
    api.kubectl("apply", "-f", "-", stdin=json.dumps(template | {"spec": {"rollout": {"strategy": "Recreate"}}}))
    references = [{"name": "cli-gold"}]
    change = json.dumps({"spec": {"baseRefs": references}})
    api.kubectl("patch", "infsvc", "chat", "-n", NAMESPACE, "--type=merge", "-p", change)
    used = [{"name": "cli-gold", "generation": 1, "blocks": ["rollout"]}]
    status = json.dumps({"status": {"templates": used, "inherited": {"rollout": {"strategy": "Recreate"}}}})
    api.kubectl("patch", "infsvc", "chat", "-n", NAMESPACE, "--subresource=status", "--type=merge", "-p", status)

    assert "from ServiceTemplate cli-gold (generation 1): rollout" in run(api, "status", "chat", "-n", NAMESPACE).stdout
    assert run(api, "pause", "chat", "-n", NAMESPACE).returncode == 0
    assert annotations(api)["slipway.dev/pause"] == "true"
    assert run(api, "pause", "chat", "--resume", "-n", NAMESPACE).returncode == 0
    assert "slipway.dev/pause" not in annotations(api)
    body = json.loads(api.kubectl("get", "infsvc", "chat", "-n", NAMESPACE, "-o", "json"))
    assert "rollout" not in body["spec"], "it would no longer be inherited"

    manifest = tmp_path / "chat.yaml"
    manifest.write_text(json.dumps(SERVICE | {"spec": {**SERVICE["spec"], "baseRefs": references}}))
    planned = json.loads(run(api, "plan", "-f", str(manifest), "--from-cluster", "-o", "json").stdout)
    assert planned["blocks"]["rollout"]["from"] == "ServiceTemplate cli-gold"
    assert planned["blocks"]["rollout"]["value"]["strategy"] == "Recreate"

    own = json.dumps({"spec": {"rollout": {"strategy": "RollingUpdate"}}})
    api.kubectl("patch", "infsvc", "chat", "-n", NAMESPACE, "--type=merge", "-p", own)
    assert run(api, "pause", "chat", "-n", NAMESPACE).returncode == 0
    body = json.loads(api.kubectl("get", "infsvc", "chat", "-n", NAMESPACE, "-o", "json"))
    assert body["spec"]["rollout"]["paused"] is True
    api.kubectl("delete", "svctpl", "cli-gold")
