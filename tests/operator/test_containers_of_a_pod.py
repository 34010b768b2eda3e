"""All containers of a pod are examined, and a pod in a queue has no clock; review/operator-users.md 4."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from slipway_api.conditions import find_condition
from slipway_kube.objects import Pod
from slipway_operator.core.observed import Replica
from slipway_operator.core.service.plan import plan
from slipway_operator.inputs.observer import replica
from tests.builders import T0, APod, a_pod, a_service, minutes, promised, seen

RUNNING = {"running": {"startedAt": "2026-01-01T00:00:01Z"}}
CREATING = {"waiting": {"reason": "ContainerCreating"}}
INITIALIZING = {"waiting": {"reason": "PodInitializing"}}
BACK_OFF = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 20s"}}
ENDED = {"terminated": {"exitCode": 7, "reason": "Error"}}
SCHEDULED = {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}


def container(name: str, state: dict[str, Any], **facts: Any) -> dict[str, Any]:
    return {"name": name, "state": state, **facts}


def of_pod(spec: dict[str, Any] | None = None, **status: Any) -> Replica:
    metadata = {"name": "p", "namespace": "demo", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}
    body = {"metadata": metadata, "spec": spec or {}, "status": status}
    return replica(msgspec.json.decode(msgspec.json.encode(body), type=Pod), None)


def as_replica_of(service, facts: Replica) -> APod:
    """A replica of the service with what the kubelet wrote into the pod `facts`."""
    kubelet = (
        *("held", "initializing", "is_creating", "node", "ready", "server_ready", "unready_message", "started"),
        *("container", "waiting_reason", "waiting_message", "is_terminated", "restarts", "last_exit", "unschedulable"),
        *("termination_message", "scheduled_at"),
    )
    return a_pod(service=service).but(**{name: getattr(facts, name) for name in kubelet})


def told(facts: Replica, *, after: timedelta = timedelta(0), **spec: Any) -> tuple[Any, Any]:
    service = promised(a_service(**spec), 1)
    status = plan(seen(service, as_replica_of(service, facts)), T0 + after).status
    return find_condition(status.conditions, "Ready"), find_condition(status.conditions, "Stalled")


def on_node(*containers: dict[str, Any], init: tuple[dict[str, Any], ...] = (), **more: Any) -> Replica:
    return of_pod(
        {"nodeName": "node-1"},
        conditions=[SCHEDULED, {"type": "Ready", "status": "False", "reason": "ContainersNotReady", **more}],
        containerStatuses=list(containers),
        initContainerStatuses=list(init),
    )


@pytest.mark.capability("OP-18")
@pytest.mark.parametrize("again", [BACK_OFF, RUNNING], ids=["waits", "runs"])
def test_an_init_container_that_crashes_is_named_with_its_end_also_while_it_runs_again(again):
    facts = on_node(
        container("server", INITIALIZING),
        init=(container("fetch", again, restartCount=4 if again is RUNNING else 3, lastState=ENDED),),
    )

    ready, _ = told(facts)

    assert "container fetch of chat" in ready.message
    assert "ended 4 times and is started again, last with Error (exit code 7)" in ready.message
    assert "-c fetch --previous" in ready.message


@pytest.mark.capability("OP-18")
def test_a_sidecar_that_crashes_is_named_and_the_probe_of_the_server_is_not_blamed():
    facts = on_node(
        container("server", RUNNING, ready=True, started=True),
        container("proxy", BACK_OFF, restartCount=2, lastState=ENDED),
    )

    ready, _ = told(facts)

    assert "proxy" in ready.message
    assert "exit code 7" in ready.message
    assert "probe" not in ready.message


@pytest.mark.capability("OP-18")
def test_a_crashing_init_container_is_stalled_after_three_ends():
    facts = on_node(
        container("server", INITIALIZING), init=(container("fetch", BACK_OFF, restartCount=3, lastState=ENDED),)
    )

    _, stalled = told(facts)

    assert stalled.reason == "CrashLooping"
    assert "container fetch" in stalled.message


@pytest.mark.capability("OP-18")
def test_the_image_of_another_container_is_not_told_as_the_image_of_the_runtime():
    facts = on_node(
        container("server", INITIALIZING), init=(container("fetch", {"waiting": {"reason": "ImagePullBackOff"}}),)
    )

    _, stalled = told(facts)

    assert stalled.reason == "ImagePullFailed"
    assert "the image of container fetch" in stalled.message
    assert "spec.runtime.image" not in stalled.message


@pytest.mark.capability("OP-18")
@pytest.mark.parametrize("after", [minutes(0), minutes(90)])
def test_a_pod_whose_volumes_are_missing_points_to_its_events_and_not_to_its_logs(after):
    facts = on_node(container("server", CREATING))

    ready, stalled = told(facts, after=after, rollout={"progressDeadlineSeconds": 36_000})

    assert stalled is None
    assert "has not started its containers yet" in ready.message
    assert "kubectl describe pod -n demo chat" in ready.message
    assert "kubectl logs" not in ready.message


@pytest.mark.capability("OP-18")
@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        (
            of_pod(conditions=[{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]),
            "is held in a queue by a scheduling gate",
        ),
        (of_pod(), "waits for a scheduler"),
    ],
    ids=["gated", "unseen"],
)
def test_time_in_a_queue_is_neither_start_up_nor_a_lack_of_progress(facts, sentence):
    service = promised(a_service(rollout={"progressDeadlineSeconds": 60}, runtime={"startupTimeoutSeconds": 30}), 1)
    for minute in (0, 1, 2, 600):
        pod = as_replica_of(service, facts)
        status = plan(seen(service, pod), T0 + minutes(minute)).status
        ready, stalled = (find_condition(status.conditions, type) for type in ("Ready", "Stalled"))
        assert (ready.status, stalled) == ("Unknown", None)
        assert sentence in ready.message
        assert "did not become ready" not in ready.message
        service = service.model_copy(update={"status": status})


def test_a_container_that_the_kubelet_cannot_make_is_not_called_loading():
    """No default branch asserts a cause that nobody has seen."""
    failing = {"waiting": {"reason": "RunContainerError", "message": "failed to create shim task"}}
    ready, stalled = told(on_node(container("server", failing)))

    assert stalled is None
    assert "cannot be started: failed to create shim task" in ready.message


def test_a_readiness_gate_is_not_told_as_a_failing_probe():
    facts = on_node(
        container("server", RUNNING, ready=True, started=True), reason="ReadinessGatesNotReady", message="gate x"
    )

    ready, _ = told(facts)

    assert "ReadinessGatesNotReady: gate x" in ready.message
    assert "probe" not in ready.message


def test_a_sidecar_does_not_end_the_servers_record():
    facts = of_pod(
        {"nodeName": "n"},
        conditions=[SCHEDULED, {"type": "Ready", "status": "True"}],
        containerStatuses=[
            container("server", RUNNING, ready=True),
            container("x", RUNNING, ready=True, restartCount=9),
        ],
    )

    assert (facts.container, facts.restarts) == ("", 0)


@pytest.mark.capability("OP-18")
def test_memory_that_ran_out_is_an_event_also_if_the_probe_failed_first():
    """review/containers.md 5: the first cause seen was posted, and the true one, a second later, never."""
    service = promised(a_service(), 1)
    pod = a_pod(service=service)
    failing = pod.loading().but(started=True)
    ended = pod.loading().but(restarts=1, last_exit="OOMKilled (exit code 137)")
    for now in (pod.ready(), failing):
        service = service.model_copy(update={"status": plan(seen(service, now), T0).status})

    made = plan(replace(seen(service, ended), ready_before=frozenset()), T0 + minutes(1))
    assert [one.pod for one in made.events if "OOMKilled (exit code 137)" in one.message] == [pod.replica.name]
    service = service.model_copy(update={"status": made.status})
    again = plan(replace(seen(service, ended), ready_before=frozenset()), T0 + minutes(2))
    assert not [one for one in again.events if "OOMKilled" in one.message]
