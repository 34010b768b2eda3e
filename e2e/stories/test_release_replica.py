"""Replicas in real containers, from the wheel of a release: they answer, within limits, and during an upgrade."""

from collections.abc import Iterator
from typing import Any

import pytest

from e2e.containerd import release
from e2e.containerd.machine import Machine
from e2e.manifests import as_yaml
from e2e.slipway import RELEASE_NAMESPACE, Slipway, wait_for

pytestmark = [pytest.mark.containers, pytest.mark.timeout(900)]

LIMITS = """
from pathlib import Path
import os
for files in (("memory.max", "cpu.max"), ("memory/memory.limit_in_bytes", "cpu/cpu.cfs_quota_us")):
    found = [Path("/sys/fs/cgroup", name) for name in files]
    if all(path.exists() for path in found):
        print(*(path.read_text().split()[0] for path in found), os.environ["OMP_NUM_THREADS"])
"""


@pytest.fixture(scope="module")
def runtime(machine: Machine, released: Slipway) -> Slipway:
    """The installation, with an image for replicas."""
    if reason := release.why_no_packages():
        pytest.skip(reason)
    release.provide_runtime(machine)
    return released


@pytest.fixture(scope="module")
def chat(runtime: Slipway) -> Iterator[Slipway]:
    """The installation with one service, `chat`, that is ready; it drains and is deleted at the end."""
    runtime.apply(as_yaml(release.service("chat")))
    runtime.wait_ready("chat", replicas=1, timeout=300)
    yield runtime
    runtime.delete("chat", timeout=120)


def ask(slipway: Slipway, model: str) -> Any:
    """The answer to one question through the gateway, with 32 tokens."""
    return slipway.openai().chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Tell me a story."}], max_tokens=32, seed=7
    )


@pytest.mark.capability("REL-1", "REL-3")
def test_a_replica_in_a_restricted_container_answers_through_the_gateway(chat: Slipway) -> None:
    answer = ask(chat, "chat")
    (pod,) = chat.pods("chat")
    (status,) = pod.status.container_statuses

    assert len((answer.choices[0].message.content or "").split()) > 4
    assert answer.usage.completion_tokens == 32
    assert status.container_id.startswith("containerd://")
    assert status.restart_count == 0
    assert pod.spec.security_context.run_as_user == release.USER
    assert pod.spec.containers[0].security_context.read_only_root_filesystem


@pytest.mark.capability("REL-3")
def test_the_limits_of_a_service_are_those_of_its_container(chat: Slipway) -> None:
    (pod,) = chat.pods("chat")

    seen = chat.access.kubectl("exec", "-n", "default", pod.metadata.name, "--", "python3", "-c", LIMITS)

    assert seen.split() == [str(2 << 30), "100000", "1"]


@pytest.mark.capability("REL-3", "DD-1")
def test_an_upgrade_of_the_chart_under_load_loses_no_request(chat: Slipway) -> None:
    """kube-proxy, readiness and SIGTERM are real: gateways are replaced while clients call their ClusterIP."""

    def gateways() -> set[str]:
        selector = "app.kubernetes.io/component=gateway"
        pods = chat.core.list_namespaced_pod(RELEASE_NAMESPACE, label_selector=selector).items
        return {pod.metadata.name for pod in pods if pod.metadata.deletion_timestamp is None}

    before = gateways()
    load = chat.load("chat", concurrency=2, seconds=600, max_tokens=32)
    wait_for("streams are running", lambda: load.progress.finished >= 4)

    chat.install(*release.SETTINGS, "gateway.podAnnotations.round=second", "operator.podAnnotations.round=second")
    wait_for("the old gateways are gone", lambda: not gateways() & before, timeout=120)
    finished = load.progress.finished
    wait_for("streams are running", lambda: load.progress.finished >= finished + 4)
    report = load.stop()

    assert report.failed == 0, report.failures
    assert report.finished == report.sent


@pytest.mark.capability("REL-3")
def test_a_model_in_an_image_is_mounted_by_the_kubelet(runtime: Slipway) -> None:
    runtime.apply(as_yaml(release.service("image", f"oci://{release.MODEL_IMAGE}#{release.MODEL_FOLDER}")))
    try:
        runtime.wait_ready("image", replicas=1, timeout=300)
        (pod,) = runtime.pods("image")

        assert ask(runtime, "image").usage.completion_tokens == 32
        assert [volume.image.reference for volume in pod.spec.volumes if volume.image] == [release.MODEL_IMAGE]
    finally:
        runtime.delete("image", timeout=120)
