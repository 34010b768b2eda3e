"""Victims of a scale-down come back when load does, unless that is not safe."""

from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipway_operator.core.actions import CreatePod, UndrainPod
from slipway_operator.core.observed import Node
from slipway_operator.core.service.plan import plan
from tests.builders import T0, a_pod, a_service, edited, promised, seconds, seen
from tests.operator.core.scaling.gateways import Gateways
from tests.operator.core.simulated_cluster import SimulatedCluster

SERVICE = promised(a_service(replicas=2), 2)


LATELY = T0 - seconds(20)


def pods(*, drains_since=LATELY, reason="scaling down, and it serves the fewest requests (1)", **facts):
    """Two replicas of which one drains, and still runs a request."""
    victim = a_pod(service=SERVICE).slot(1).but(phase="Running", started=True, unready_since=drains_since)
    victim = victim.draining(drains_since, reason).says(running=1, draining=True)
    return a_pod(service=SERVICE).ready().streams(3), victim.but(**facts)


def actions_of(observed, kind):
    return [one for one in plan(observed, T0).actions if isinstance(one, kind)]


@pytest.mark.capability("AS-6")
def test_a_victim_that_still_runs_serves_again_instead_of_a_new_replica():
    made = plan(seen(SERVICE, *pods()), T0)

    (back,) = [one for one in made.actions if isinstance(one, UndrainPod)]
    assert back.reason == "2 replicas are wanted again"
    assert not [one for one in made.actions if isinstance(one, CreatePod)]
    assert made.requeue_after == 2.0


@pytest.mark.capability("AS-6")
@pytest.mark.parametrize(
    "facts",
    [
        {"reason": "another revision replaces it"},
        {"reason": "its node node-1 is cordoned"},
        {"reason": ""},
        {"drains_since": T0 - seconds(61)},
        {"drains_since": T0 + seconds(5)},
        {"sample": None},
        {"deleted_at": T0},
        {"phase": "Failed"},
        {"node": "cordoned"},
        {"node": "lost"},
        {"revision": "another"},
    ],
    ids=lambda facts: " ".join(f"{name}={value}" for name, value in facts.items()),
)
def test_what_cannot_safely_come_back_drains_on_and_another_is_created(facts):
    nodes = (Node(name="cordoned", cordoned=True), Node(name="lost", ready=False, not_ready_since=T0 - seconds(90)))
    observed = seen(SERVICE, *pods(**facts), nodes=(Node(name="node-1"), *nodes))

    assert actions_of(observed, UndrainPod) == []
    if facts.get("revision") != "another":  # the surge of a rollout is a matter of its own
        assert len(actions_of(observed, CreatePod)) == 1


@pytest.mark.capability("AS-6")
def test_as_many_as_are_missing_come_back_those_with_the_most_requests_first():
    service = promised(a_service(replicas=3), 3)
    victims = [
        a_pod(service=service)
        .slot(slot)
        .but(phase="Running", started=True, unready_since=T0)
        .draining(T0)
        .says(running=slot, draining=True)
        for slot in (1, 2, 3, 4)
    ]
    observed = seen(service, a_pod(service=service).ready().streams(1), *victims)

    assert [one.name[-3:] for one in actions_of(observed, UndrainPod)] == ["4-0", "3-0"]


@pytest.mark.capability("AS-6")
def test_one_that_was_asked_in_vain_is_replaced():
    world = a_fleet_of_two()
    world.service = edited(world.service, replicas=1)
    world.tick()
    (victim,) = world.draining
    victim.is_ending, victim.running = True, 9
    world.service = edited(world.service, replicas=2)

    world.run(8)
    assert len(world.pods) == 2, "it may still come back"
    world.run(6)

    assert len(world.pods) == 3, "a new one starts"
    world.run(40)
    assert len(world.ready) == 2
    assert sum("UndrainPod" in line for line in world.log) <= 12, "and it is not asked for ever"


def a_fleet_of_two(**spec) -> SimulatedCluster:
    world = SimulatedCluster(a_service(**{"replicas": 2, **spec}))
    world.reconcile()
    world.run(40)
    assert len(world.ready) == 2
    world.load = lambda world: [setattr(pod, "running", max(pod.running, 4)) for pod in world.ready]
    world.tick()
    return world


@pytest.mark.capability("AS-6")
def test_load_that_returns_finds_the_replica_and_loses_no_request():
    world = a_fleet_of_two()
    created = world.created
    world.service = edited(world.service, replicas=1)
    world.run(4)
    (victim,) = world.draining
    world.service = edited(world.service, replicas=2)
    world.run(4)

    assert len(world.ready) == 2
    assert world.draining == []
    assert victim.replica.state == "serving"
    assert world.created == created, "no replica was started for it"
    assert "ReplicaDrained" not in world.event_reasons()
    assert world.events[-1].message == f"{victim.replica.name} is ready: 2 of 2"


@pytest.mark.capability("AS-6")
def test_a_number_that_falls_again_lets_the_drain_go_on():
    world = a_fleet_of_two()
    world.lose_labels = True
    for replicas in (1, 2, 1):
        world.service = edited(world.service, replicas=replicas)
        world.run(3)
    world.load = lambda world: None
    world.lose_labels = False
    world.run(60)

    assert len(world.pods) == len(world.ready) == 1
    assert "DrainTimedOut" not in world.event_reasons()


@pytest.mark.capability("AS-6")
def test_a_crash_between_the_call_and_the_label_is_repaired_by_the_next_leader():
    world = a_fleet_of_two()
    world.service = edited(world.service, replicas=1)
    world.run(3)
    world.lose_labels = True
    world.service = edited(world.service, replicas=2)
    world.run(3)
    assert len(world.draining) == 1, "the runtime accepts, and nothing is routed to it"
    world.lose_labels = False
    world.restart_operator()
    world.run(5)

    assert len(world.ready) == 2
    assert len(world.pods) == 2


@pytest.mark.capability("AS-6", "AS-9")
def test_a_request_that_comes_while_the_last_replica_drains_gets_it_back():
    zero = {"minReplicas": 0, "maxReplicas": 2, "scaleToZero": {"idleSeconds": 60}}
    world = SimulatedCluster(a_service(autoscaling=zero), load_seconds=200)
    gateways = Gateways().attach(world)
    world.reconcile()
    while not world.draining:
        world.tick()
        assert len(world.log) < 500
    world.tick()
    gateways.send(world)
    asked = world.now
    while gateways.waiting:
        world.tick()

    assert world.now - asked <= timedelta(seconds=5), "not another 200 s of loading"
    assert world.created == 1


@pytest.mark.capability("AS-6")
@settings(max_examples=40)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from([1, 2, 3, 4, "restart", "lose labels", "keep labels", "lag", "flap"]), st.integers(1, 40)
        ),
        min_size=3,
        max_size=12,
    )
)
def test_however_the_number_swings_the_laws_hold_and_it_ends_where_it_should(steps):
    """The laws of the simulated cluster: one replica a slot, one victim at a time, no stream cut, a backoff each."""
    world = a_fleet_of_two(drain={"timeoutSeconds": 120, "endpointPropagationSeconds": 2})
    for what, pause in steps:
        if isinstance(what, int):
            world.service = edited(world.service, replicas=what)
        elif what == "restart":
            world.restart_operator()
        elif what == "lag":
            world.cache_lag = 3
        elif what == "flap":
            world.flap(sorted(world.pods)[0], 5)
        else:
            world.lose_labels = what == "lose labels"
        world.run(pause)
    world.lose_labels, world.cache_lag = False, 0
    world.load = lambda world: [setattr(pod, "running", 0) for pod in world.pods.values()]
    world.run(300)
    assert len(world.ready) == len(world.pods) == world.service.spec.replicas
    world.writes = 0
    world.run(300)
    assert world.writes == 0
