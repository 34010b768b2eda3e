"""A rolling update that keeps the fleet's prefix caches warm: one cold replica at a time."""

from datetime import timedelta

import pytest

from tests.builders import a_service, edited
from tests.operator.core.simulated_cluster import SimulatedCluster

WARM_SECONDS = 60  # after which a replica's cache is full
STEADY = 0.8  # hit rate of a warm replica


def a_world(replicas, min_ready_seconds, **limits):
    rolling = {"maxSurge": 1, "maxUnavailable": 0, "minReadySeconds": min_ready_seconds} | limits
    service = a_service(
        replicas=replicas,
        finalizers=(),
        rollout={"rollingUpdate": rolling},
        drain={"timeoutSeconds": 30, "endpointPropagationSeconds": 2},
    )
    world = SimulatedCluster(service, load_seconds=5)
    world.reconcile()
    world.run(20 + WARM_SECONDS)
    return world


def hit_rate(world):
    """Of the ready replicas; a cache fills evenly from the moment at which its replica is ready."""
    ages = [(world.now - pod.replica.ready_since).total_seconds() for pod in world.ready]
    return sum(STEADY * min(1.0, age / WARM_SECONDS) for age in ages) / len(ages)


def roll(world, limit=900):
    """Roll a change out; returns the lowest hit rate, and how many seconds it took."""
    old = world.service.status.current_revision
    world.service = edited(world.service, runtime={"maxModelLen": 1024})
    lowest, started = 1.0, world.now
    while world.service.status.current_revision == old:
        world.run(1)
        lowest = min(lowest, hit_rate(world))
        assert world.now < started + timedelta(seconds=limit), world.log[-10:]
    return lowest, (world.now - started).total_seconds()


@pytest.mark.capability("PF-18", "KV-10")
@pytest.mark.parametrize("replicas", [2, 4, 6])
def test_the_hit_rate_stays_above_that_of_the_fleet_without_one_replica(replicas):
    # One of four is cold, beside three warm old ones and the one to be replaced: never below 3/4 of the rate.
    floor = STEADY * (replicas - 1) / replicas

    lowest, _ = roll(a_world(replicas, WARM_SECONDS))

    assert lowest >= floor


@pytest.mark.capability("PF-18")
def test_without_the_field_the_same_rollout_falls_below_that_floor():
    lowest, seconds = roll(a_world(4, 0))

    assert lowest < STEADY / 2
    assert seconds < 4 * WARM_SECONDS


def test_it_takes_the_time_of_every_replica_and_then_rests():
    world = a_world(3, WARM_SECONDS)

    _, seconds = roll(world)

    assert seconds >= 3 * WARM_SECONDS
    world.run(120)
    writes = world.writes
    world.run(300)
    assert world.writes == writes


def test_an_old_replica_that_does_not_serve_leaves_at_once():
    world = a_world(3, 600)
    world.service = edited(world.service, runtime={"maxModelLen": 1024})
    world.run(30)
    broken = next(
        pod.replica.name for pod in world.live if pod.replica.revision == world.service.status.current_revision
    )

    world.crash_loop(broken, 8)
    world.run(30)

    assert broken not in {pod.replica.name for pod in world.live}
