"""A replica in a real container, from the wheel of a release, answers through the gateway."""

import pytest

from e2e.containerd import release
from e2e.containerd.machine import Machine
from e2e.manifests import as_yaml
from e2e.slipway import Slipway
from slipway_api import names

pytestmark = [pytest.mark.containers, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def runtime(machine: Machine, released: Slipway) -> Slipway:
    """The installation, with an image for replicas."""
    if reason := release.why_no_packages():
        pytest.skip(reason)
    release.provide_runtime(machine)
    return released


@pytest.mark.capability("REL-1", "REL-3")
def test_a_replica_in_a_container_answers_through_the_gateway_and_drains_when_it_is_deleted(runtime: Slipway) -> None:
    spec = {"model": {"uri": "file:///opt/slipway/models/tiny"}, **release.replica_overlay()}
    manifest = {"apiVersion": names.API_VERSION, "kind": "InferenceService", "metadata": {"name": "chat"}, "spec": spec}

    runtime.apply(as_yaml(manifest))
    runtime.wait_ready("chat", replicas=1, timeout=300)
    (pod,) = runtime.pods("chat")
    (status,) = pod.status.container_statuses
    answer = runtime.openai().chat.completions.create(
        model="chat", messages=[{"role": "user", "content": "Tell me a story."}], max_tokens=32, seed=7
    )
    runtime.delete("chat", timeout=120)

    assert status.container_id.startswith("containerd://")
    assert status.restart_count == 0
    assert pod.spec.security_context.run_as_user == release.USER
    assert pod.spec.containers[0].security_context.read_only_root_filesystem
    assert len((answer.choices[0].message.content or "").split()) > 4
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 32
