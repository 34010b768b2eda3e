"""A volume that cannot be mounted is named within seconds, in the kubelet's words; review/operator-users.md 4."""

import json
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from slipway_api.conditions import find_condition
from slipway_kube.errors import Forbidden
from slipway_kube.informer import Change
from slipway_kube.objects import Pod
from slipway_operator.core.service.plan import plan
from slipway_operator.inputs.mount_failures import PATIENCE_SECONDS, ROUND_SECONDS, MountFailures
from tests.builders import T0, a_pod, a_service, minutes, promised, seen

MISSING = 'MountVolume.SetUp failed for volume "keys" : secret "hf" not found'
SUMMARY = "Unable to attach or mount volumes: unmounted volumes=[keys]: timed out waiting for the condition"
ATTACH = 'Multi-Attach error for volume "pvc-1" Volume is already used by pod(s) chat-0'
CREATING = [{"name": "server", "state": {"waiting": {"reason": "ContainerCreating"}}}]

pytestmark = pytest.mark.capability("OP-18")


def a_pod_object(name: str = "p", *, sandbox: str = "False", containers: Any = CREATING) -> Pod:
    conditions = [{"type": "PodReadyToStartContainers", "status": sandbox}]
    body = {
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": f"uid-{name}",
            "labels": {"slipway.dev/service": "chat"},
        },
        "spec": {"nodeName": "node-1"},
        "status": {"conditions": conditions, "containerStatuses": containers},
    }
    return msgspec.json.decode(msgspec.json.encode(body), type=Pod)


def an_event(note: str, *, pod: str = "p", seconds: int = 0, reason: str = "FailedMount") -> dict[str, Any]:
    at = (T0 + timedelta(seconds=seconds)).isoformat()
    return {"reason": reason, "note": note, "regarding": {"uid": f"uid-{pod}"}, "deprecatedLastTimestamp": at}


class Events:
    """The events of the API server; answers lists, and counts them."""

    def __init__(self, *events: dict[str, Any]) -> None:
        self.events = list(events)
        self.lists: list[str] = []
        self.refuses = False

    async def get(self, path: str, params: dict[str, str]) -> bytes:
        self.lists.append(path)
        if self.refuses:
            raise Forbidden(403, "events is forbidden")
        reason = params["fieldSelector"].rpartition("reason=")[2]
        return json.dumps({"items": [one for one in self.events if one["reason"] == reason]}).encode()


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def a_reader(events: Events) -> tuple[MountFailures, Clock, list[str]]:
    clock, news = Clock(), list[str]()
    reader = MountFailures(events, on_news=lambda pod: news.append(pod.name), now=lambda: T0, monotonic=clock)
    return reader, clock, news


async def test_the_cause_of_a_failed_mount_is_known_within_ten_seconds_and_forgotten_when_it_is_over():
    reader, clock, news = a_reader(Events(an_event(MISSING), an_event(SUMMARY, seconds=9)))
    reader.saw(Change.ADDED, None, a_pod_object(), set())

    await reader.look()
    assert reader.of("uid-p") == "", "most pods have mounted their volumes by then"
    clock.seconds = PATIENCE_SECONDS + ROUND_SECONDS
    await reader.look()
    await reader.look()

    assert clock.seconds < 10
    assert reader.of("uid-p") == MISSING, "the summary names no cause"
    assert news == ["p"], "one pass for one sentence"
    reader.saw(Change.MODIFIED, None, a_pod_object(sandbox="True"), set())
    assert reader.of("uid-p") == ""


@pytest.mark.parametrize(
    "started", [a_pod_object(sandbox="True"), a_pod_object(containers=[{"name": "server", "state": {"running": {}}}])]
)
async def test_pods_whose_volumes_are_mounted_cost_no_list(started):
    events = Events()
    reader, clock, _ = a_reader(events)
    reader.saw(Change.ADDED, None, started, set())
    clock.seconds = 60

    await reader.look()

    assert events.lists == []


async def test_a_fleet_that_pulls_images_costs_two_lists_of_each_namespace_now_and_then():
    events = Events()
    reader, clock, _ = a_reader(events)
    for number in range(200):
        reader.saw(Change.ADDED, None, a_pod_object(f"p{number}"), set())
    for second in range(0, 600, int(ROUND_SECONDS)):
        clock.seconds = second
        await reader.look()

    assert len(events.lists) <= 2 * (600 / 15 + 15 / ROUND_SECONDS)


async def test_without_the_right_to_read_events_they_are_asked_for_rarely():
    events = Events()
    events.refuses = True
    reader, clock, _ = a_reader(events)
    reader.saw(Change.ADDED, None, a_pod_object(), set())
    for second in range(0, 600, int(ROUND_SECONDS)):
        clock.seconds = second
        await reader.look()

    assert 1 <= len(events.lists) <= 3


async def test_an_event_that_is_no_longer_repeated_is_not_the_cause_any_more():
    old = an_event(MISSING) | {"deprecatedLastTimestamp": "2025-12-31T23:50:00Z"}
    reader, clock, _ = a_reader(Events(old))
    reader.saw(Change.ADDED, None, a_pod_object(), set())
    clock.seconds = 60

    await reader.look()

    assert reader.of("uid-p") == ""


@pytest.mark.parametrize(
    ("sentence", "spec", "reason", "status", "remedy"),
    [
        (MISSING, {}, "MountFailed", "False", "create the Secret hf in the namespace demo"),
        ('configmap "c" not found', {}, "MountFailed", "False", "create the ConfigMap c in the namespace demo"),
        ('persistentvolumeclaim "c" not found', {}, "MountFailed", "False", "create the PersistentVolumeClaim c"),
        ("references non-existent secret key: token", {}, "MountFailed", "False", "add the key token to the Secret"),
        ("configmap references non-existent config key: a.json", {}, "MountFailed", "False", "add the key a.json"),
        (
            MISSING,
            {"model": {"credentialsSecretRef": {"name": "hf"}}},
            "CredentialsInvalid",
            "False",
            "create the Secret",
        ),
        (ATTACH, {}, "MountFailed", "Unknown", "the kubelet tries again; see kubectl describe pod -n demo chat"),
    ],
)
@pytest.mark.parametrize("after", [0, 29], ids=["starting", "overdue"])
def test_a_failed_mount_has_its_own_reason_and_remedy_and_one_event(sentence, spec, reason, status, remedy, after):
    uri = {"uri": "hf://org/model"} if spec else {}
    service = promised(a_service(**uri, **spec), 1)
    pod = a_pod(service=service).loading().but(is_creating=True, mount_failure=sentence)

    made = plan(seen(service, pod), T0 + minutes(after))
    again = plan(seen(service.model_copy(update={"status": made.status}), pod), T0 + minutes(after))

    ready, stalled = (find_condition(made.status.conditions, type) for type in ("Ready", "Stalled"))
    assert (ready.status.value, ready.reason) == (status, reason)
    assert sentence in ready.message
    assert remedy in ready.message
    assert "kubectl logs" not in ready.message, "there are none"
    if after == 0:
        assert (stalled is not None) == (status == "False")
        assert [one.message for one in made.events if one.reason.value == reason] == [ready.message]
        assert reason not in {one.reason.value for one in again.events}
