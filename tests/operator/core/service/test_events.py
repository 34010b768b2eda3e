"""Events of a service's replicas: each failure is told once, with its cause and the number that is left."""

import pytest

from slipway_operator.core.actions import Event
from slipway_operator.core.observed import Node
from slipway_operator.core.service.plan import plan
from tests.builders import T0, APod, a_pod, a_service, edited, minutes, promised, seconds, seen
from tests.operator.core.simulated_cluster import SimulatedCluster

KILLED = "Error (exit code 137)"
NODE = Node(name="node-1", ready=False, not_ready_since=T0 - minutes(1))


class Watched:
    """A service of three ready replicas under one leader, pass by pass."""

    def __init__(self) -> None:
        self.service = promised(a_service(replicas=3), 3)
        self.pods = [a_pod(service=self.service).slot(slot).ready() for slot in range(3)]
        self.ready_before: frozenset[str] | None = None
        self.now = T0
        self.look(*self.pods)

    def look(self, *pods: APod, nodes: tuple[Node, ...] = ()) -> list[Event]:
        """One pass; the events of replicas that it posts."""
        made = plan(seen(self.service, *pods, nodes=nodes, ready_before=self.ready_before), self.now)
        self.service = self.service.model_copy(update={"status": made.status})
        self.ready_before = made.ready
        self.now += seconds(5)
        return [event for event in made.events if event.reason.startswith("Replica")]


def test_a_server_that_is_killed_is_told_once_with_its_exit_code_and_the_number_left():
    """C4: after kill -9 the only event was ReplicaReady."""
    watched = Watched()
    killed, *others = watched.pods
    ended = killed.loading().but(is_terminated=True, last_exit=KILLED)
    again = killed.loading().but(restarts=1, last_exit=KILLED)

    (event,) = watched.look(ended, *others)
    silence = watched.look(again, *others)
    (ready,) = watched.look(again.ready(), *others)

    name = killed.replica.name
    assert (event.reason, event.reason.type, event.pod) == ("ReplicaUnhealthy", "Warning", name)
    assert event.message.startswith(f"{name} ended 1 time and is started again, last with {KILLED}")
    assert event.message.endswith("2 of 3 ready")
    assert silence == []
    assert (ready.reason, ready.message) == ("ReplicaReady", f"{name} is ready: 3 of 3")


@pytest.mark.parametrize(
    ("facts", "nodes", "cause"),
    [
        ({"started": True}, (), "is not ready any more: its readiness probe fails"),
        ({"started": True}, (Node(name="node-1", ready=False, not_ready_since=T0),), "node node-1 does"),
        ({}, (NODE,), "node node-1 of"),
        ({"phase": "Failed", "phase_reason": "Evicted"}, (), "has ended: Evicted"),
    ],
    ids=["a hung server", "a node that fell silent", "a lost node", "an eviction"],
)
def test_each_way_to_fail_is_told_with_its_cause(facts, nodes, cause):
    """C4: a replica that hung for 330 s had no event at all."""
    watched = Watched()
    failed, *others = watched.pods
    others = [pod.on("node-2") for pod in others]

    events = watched.look(failed.loading().but(**facts), *others, nodes=nodes)

    unhealthy = [event for event in events if event.reason == "ReplicaUnhealthy"]
    assert [event.pod for event in unhealthy] == [failed.replica.name]
    assert cause in unhealthy[0].message
    again = watched.look(failed.loading().but(**facts), *others, nodes=nodes)
    assert "ReplicaUnhealthy" not in [event.reason for event in again]


def test_a_pod_that_is_removed_by_force_is_told():
    watched = Watched()
    gone, *others = watched.pods

    events = watched.look(*others)

    assert f"{gone.replica.name} is gone: its pod was deleted; 2 of 3 ready" in [event.message for event in events]


def test_a_failure_is_told_although_another_replica_becomes_ready_at_the_same_moment():
    """C4: counts alone would have been equal, 2 of 3 before and after."""
    watched = Watched()
    first, second, third = watched.pods
    watched.look(first.unready(since=watched.now), second, third)

    events = watched.look(first, second.unready(since=watched.now), third)

    assert [(event.reason, event.pod) for event in events] == [
        ("ReplicaUnhealthy", second.replica.name),
        ("ReplicaReady", first.replica.name),
    ]


def test_a_replica_that_was_asked_to_go_is_not_called_unhealthy():
    world = SimulatedCluster(a_service(replicas=3))
    world.reconcile()
    world.run(40)
    world.service = edited(world.service, replicas=1)
    world.run(60)
    world.end(next(iter(world.pods)))  # kubectl delete pod
    world.run(60)

    assert len(world.ready) == 1
    assert "ReplicaUnhealthy" not in world.event_reasons()


def test_a_new_leader_tells_nothing_of_what_was_so_before_it_led():
    watched = Watched()
    failed, *others = watched.pods
    watched.look(failed.loading().but(started=True), *others)
    watched.ready_before = None

    assert watched.look(failed.loading().but(started=True), *others) == []


def test_a_replacement_is_told_with_its_attempt_the_failures_and_the_cause():
    """C4: ReplicaReplaced says why and how often."""
    watched = Watched()
    failed, *others = watched.pods

    events = watched.look(failed.failed("").but(last_exit=KILLED), *others)

    (replaced,) = [event for event in events if event.reason == "ReplicaReplaced"]
    ended = f"{failed.replica.name} has ended ({KILLED})"
    assert replaced.message == f"slot 0 gets a new replica in 10s (attempt 1, failures in a row: 1): {ended}"
