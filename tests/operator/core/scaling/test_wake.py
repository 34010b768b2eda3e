"""A user wakes a service that is scaled to zero, by an annotation with a moment."""

import pytest

from slipway_api import names
from tests.builders import minutes, seconds
from tests.operator.core.scaling.test_scale_to_zero import IDLE, asleep


def wake(world, text=None):
    """kubectl slipway wake; or another text in the annotation."""
    moment = text if text is not None else world.now.isoformat()
    metadata = world.service.metadata.model_copy(update={"annotations": {names.ANNOTATION_WAKE: moment}})
    world.service = world.service.model_copy(update={"metadata": metadata})
    world.reconcile()


@pytest.mark.capability("AS-9")
def test_a_sleeping_service_starts_at_once_and_sleeps_again_after_its_idle_time():
    world, _ = asleep()
    woken_at = world.now

    wake(world)
    world.run(2)

    assert world.desired == 1
    (last, *_) = world.service.status.autoscaling.history
    assert last.reason == f"0→1: the annotation slipway.dev/wake asks for it since {woken_at:%H:%M:%S} UTC"
    assert "Activated" in {event.reason for event in world.events}
    world.run(30)
    assert len(world.ready) == 1
    world.run(IDLE + 60)
    assert world.desired == 0, "the annotation is stale"
    writes = world.writes
    world.run(600)
    assert (world.desired, world.writes) == (0, writes), "and does not wake it again"


def test_a_new_leader_in_the_middle_goes_on():
    world, _ = asleep()
    wake(world)
    world.run(2)

    world.restart_operator()
    world.run(30)

    assert len(world.ready) == 1


def test_a_moment_in_the_future_waits():
    world, _ = asleep()

    wake(world, (world.now + minutes(10)).isoformat())
    world.run(590)
    assert world.desired == 0

    world.run(20)
    assert world.desired == 1


def test_waking_a_service_that_serves_keeps_it_for_the_idle_time():
    world, gateways = asleep()
    gateways.send(world)
    world.run(40)
    gateways.finish(world)
    world.run(IDLE - 10)
    assert world.desired == 1

    wake(world)
    world.run(IDLE - 20)

    assert world.desired == 1
    world.run(60)
    assert world.desired == 0


@pytest.mark.parametrize("text", ["", "soon", "2026-13-01T00:00:00Z", "1"])
def test_what_is_no_moment_wakes_nothing(text):
    world, _ = asleep()

    wake(world, text)
    world.run(60)

    assert world.desired == 0


def test_a_moment_of_long_ago_wakes_nothing():
    world, _ = asleep()

    wake(world, (world.now - seconds(IDLE)).isoformat())
    world.run(30)

    assert world.desired == 0


def test_a_moment_without_a_zone_is_utc():
    world, _ = asleep()

    wake(world, world.now.replace(tzinfo=None).isoformat())
    world.run(2)

    assert world.desired == 1
