"""spec.suspend and spec.restartAt."""

from dataclasses import replace

import pytest

from slipway_api.inference_service import InferenceService
from slipway_api.types import rfc3339
from tests.builders import a_service, edited, minutes
from tests.operator.core.simulated_cluster import SimulatedCluster

DRAIN = {"timeoutSeconds": 60, "endpointPropagationSeconds": 2}


def running(replicas=None, **spec):
    service = a_service(replicas=replicas, drain=DRAIN, **spec)
    world = SimulatedCluster(service)
    world.reconcile()
    world.run(60)
    world.was_cordoned = True  # a slot may have two replicas while one replaces the other
    return world


@pytest.mark.capability("PL-10")
def test_a_suspended_service_drains_every_replica_and_keeps_its_streams_until_they_end():
    world = running(3)
    for pod in world.ready:
        pod.running = 4
    world.service = edited(world.service, suspend=True)
    world.run(60)

    assert world.pods == {}
    assert "DrainTimedOut" not in world.event_reasons()
    assert world.condition("Suspended").status == "True"
    assert (world.condition("Ready").status, world.condition("Ready").reason) == ("True", "ScaledToZero")
    assert world.condition("Reconciling") is None
    assert [one.message for one in world.events if one.reason == "Suspended"] == [
        "3→0: spec.suspend is true: no replica is started, and serving replicas drain"
    ]
    assert "ScaledDown" not in world.event_reasons()
    before = world.writes
    world.run(3600)
    assert world.writes == before, "at rest"


@pytest.mark.capability("PL-10")
def test_a_resumed_service_has_its_replicas_again():
    world = running(2)
    world.service = edited(world.service, suspend=True)
    world.run(100)
    world.service = edited(world.service, suspend=False)
    world.run(60)

    assert len(world.ready) == 2
    assert world.condition("Suspended") is None
    assert world.event_reasons().count("Resumed") == 1
    assert "ScaledUp" not in world.event_reasons()


@pytest.mark.capability("PL-10")
def test_a_service_may_be_created_suspended_as_kueue_does():
    world = SimulatedCluster(a_service(replicas=2, suspend=True))
    world.reconcile()
    world.run(60)
    assert world.created == 0
    assert world.condition("Suspended").status == "True"
    world.service = edited(world.service, suspend=False)
    world.run(60)
    assert len(world.ready) == 2


@pytest.mark.capability("PL-10")
def test_the_autoscalers_history_survives_a_suspension_and_it_starts_at_its_minimum():
    world = running(autoscaling={"minReplicas": 2, "maxReplicas": 4})
    history = world.service.status.autoscaling
    world.service = edited(world.service, suspend=True)
    world.run(100)
    assert world.pods == {}
    assert world.service.status.autoscaling == history
    assert world.condition("ScalingActive") is None
    world.service = edited(world.service, suspend=False)
    world.run(60)
    assert len(world.ready) == 2


@pytest.mark.capability("PL-10")
@pytest.mark.parametrize("limits", [(1, 0), (0, 1)])
def test_restart_replaces_every_replica_within_the_surge_without_a_new_revision(limits):
    surge, unavailable = limits
    world = running(3, rollout={"rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable}})
    old = {pod.replica.uid for pod in world.ready}
    before = world.service.status.update_revision
    world.service = edited(world.service, restartAt=rfc3339(world.now))
    for _ in range(300):
        world.tick()
        assert len(world.ready) >= 3 - unavailable
        assert len(world.live) + len(world.draining) <= 3 + surge

    assert len(world.ready) == 3
    assert old.isdisjoint(pod.replica.uid for pod in world.ready)
    assert world.service.status.update_revision == before
    assert len(world.service.status.revisions) == 1
    created = world.created
    writes = world.writes
    world.run(3600)
    assert (world.created, world.writes) == (created, writes), "each is restarted once"
    assert any("spec.restartAt" in one.message for one in world.events)


@pytest.mark.capability("PL-10")
@pytest.mark.parametrize("replicas", [1, 3])
def test_a_pod_with_the_annotation_replace_is_replaced_first_and_alone(replicas):
    """review/shipping.md 15: an only replica could not be drained, because no eviction of it is ever allowed."""
    world = running(replicas, rollout={"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}})
    chosen, *others = world.ready
    staying = {pod.replica.uid for pod in others}
    chosen.replica = replace(chosen.replica, replace_requested=world.now)

    for _ in range(200):
        world.tick()
        assert len(world.ready) >= replicas

    ready = {pod.replica.uid for pod in world.ready}
    assert len(ready) == replicas
    assert ready > staying if staying else ready
    assert chosen.replica.uid not in ready
    assert any("slipway.dev/replace" in one.message for one in world.events)


@pytest.mark.capability("PL-10")
def test_a_restart_in_the_future_waits_until_then_and_survives_the_operator():
    world = running(1)
    (old,) = world.ready
    world.service = edited(world.service, restartAt=rfc3339(world.now + minutes(10)))
    world.run(590)
    assert [pod.replica.uid for pod in world.ready] == [old.replica.uid]
    world.restart_operator()
    world.run(70)
    assert [pod.replica.uid for pod in world.ready] != [old.replica.uid]


@pytest.mark.capability("PL-10")
def test_a_restart_during_a_rollout_restarts_what_the_rollout_leaves():
    world = running(2)
    world.service = edited(world.service, runtime={"maxModelLen": 100})
    world.run(25)
    moment = world.now
    world.service = edited(world.service, restartAt=rfc3339(moment))
    world.run(400)

    assert len(world.ready) == 2
    assert all(pod.replica.created_at >= moment for pod in world.ready)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("2026-05-01T12:00:00Z", "2026-05-01T12:00:00Z"),
        ("2026-05-01T12:00:00.25+02:00", "2026-05-01T10:00:00Z"),
        ("2026-02-30T12:00:00Z", None),  # the API server refuses it; an older object does no harm
    ],
)
def test_restart_at_is_a_moment_in_rfc_3339(text, expected):
    service: InferenceService = a_service(restartAt=text)
    moment = service.restart_moment

    assert (rfc3339(moment) if moment else None) == expected
