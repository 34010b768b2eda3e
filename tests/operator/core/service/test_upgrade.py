"""A newer installation offers another runtime image: which services take it, and when."""

from datetime import timedelta

import pytest

from slipway_operator.core.scaling.schedules import starts_around
from tests.builders import T0, a_service, edited
from tests.operator.core.simulated_cluster import SimulatedCluster

NEXT = "slipway/runtime:next"
WINDOW = {"schedule": "0 2 * * *", "timeZone": "Europe/Berlin", "durationSeconds": 3600}
OPENS = starts_around(WINDOW["schedule"], WINDOW["timeZone"], T0)[1]


def a_world(*, rollout=None, **runtime):
    """Two replicas of the first revision serve, then the operator is upgraded."""
    service = a_service(
        replicas=2,
        finalizers=(),
        runtime=runtime,
        rollout=rollout,
        drain={"timeoutSeconds": 30, "endpointPropagationSeconds": 2},
    )
    world = SimulatedCluster(service, load_seconds=5)
    world.reconcile()
    world.run(20)
    offer(world, NEXT)
    return world


def offer(world, image):
    """A newer operator starts, and looks at every service."""
    world.default_image = image
    world.reconcile()


def images(world):
    return {world.manifests[pod.replica.name]["spec"]["containers"][0]["image"] for pod in world.live}


def names(world):
    return {pod.replica.name for pod in world.live}


def pending(world):
    return world.service.status.pending_upgrade


def wait_until(world, moment):
    """Nothing happens until then; the pods of the simulation do not age."""
    world.now = moment
    world.run(1)


def test_by_default_an_upgrade_of_the_operator_touches_no_pod_and_is_offered_in_status():
    world = a_world()
    before = names(world)

    world.run(30)
    writes = world.writes
    world.run(60)

    assert (names(world), world.writes) == (before, writes)
    assert (pending(world).image, pending(world).from_image) == (NEXT, "slipway/runtime:test")
    assert "OnSpecChange" in pending(world).reason


def test_the_next_new_revision_takes_the_offered_image():
    world = a_world()

    world.service = edited(world.service, runtime={"maxModelLen": 1024})
    world.run(60)

    assert images(world) == {NEXT}
    assert pending(world) is None


def test_auto_rolls_the_new_image_out_as_a_revision_of_its_own():
    world = a_world(upgradePolicy="Auto")
    old = world.service.status.current_revision

    world.run(60)

    status = world.service.status
    assert images(world) == {NEXT}
    assert status.current_revision == status.update_revision != old
    assert pending(world) is None
    (started,) = [one.message for one in world.events if one.reason == "RolloutStarted"]
    assert f"runtime image {NEXT} instead of slipway/runtime:test" in started


def test_an_upgrade_that_is_done_causes_no_write():
    world = a_world(upgradePolicy="Auto")
    world.run(60)
    writes, before = world.writes, names(world)

    world.run(60)

    assert (world.writes, names(world)) == (writes, before)


def test_an_image_that_fails_its_gate_is_rolled_back_and_not_tried_again_until_a_newer_one_is_offered():
    world = a_world(upgradePolicy="Auto", rollout={"gates": {"smoke": [{"prompt": "2+2=", "mustMatch": "4"}]}})
    world.run(1)
    first, bad = world.service.status.current_revision, world.service.status.update_revision
    world.fails_smoke.add(bad)

    world.run(120)

    assert world.service.status.failed_revision == bad
    assert images(world) == {"slipway/runtime:test"}
    assert world.service.status.current_revision == first
    assert pending(world) is None, "the upgrade was tried"

    offer(world, "slipway/runtime:mended")
    world.run(120)

    assert images(world) == {"slipway/runtime:mended"}
    assert not world.service.status.failed_revision


def test_an_upgrade_waits_for_the_rollout_that_is_under_way():
    world = a_world(upgradePolicy="Auto", rollout={"paused": True})
    assert pending(world).reason == "spec.rollout.paused"

    world.service = edited(world.service, rollout={}, runtime={"upgradePolicy": "Auto", "maxModelLen": 1024})
    world.run(2)
    offer(world, "slipway/runtime:later")
    world.run(2)

    rolling = world.service.status.update_revision
    assert pending(world).reason == f"the rollout of revision {rolling} has to be complete"
    world.run(120)
    assert images(world) == {"slipway/runtime:later"}


def test_the_window_holds_the_upgrade_until_it_opens_and_lets_it_finish_after_it():
    world = a_world(upgradePolicy="Window", upgradeWindow=WINDOW)
    before = names(world)
    world.run(30)
    assert names(world) == before
    assert pending(world).not_before == OPENS
    assert world.due is not None
    assert world.due <= OPENS, "it wakes when the window opens"

    wait_until(world, OPENS + timedelta(minutes=59, seconds=58))
    world.run(60)

    assert world.now > OPENS + timedelta(hours=1)
    assert images(world) == {NEXT}
    assert pending(world) is None


def test_after_a_window_that_was_missed_the_next_one_counts():
    world = a_world(upgradePolicy="Window", upgradeWindow=WINDOW)
    before = names(world)

    wait_until(world, OPENS + timedelta(hours=1, seconds=1))
    world.run(30)

    assert names(world) == before
    assert pending(world).not_before == OPENS + timedelta(days=1)


@pytest.mark.parametrize("policy", [{"upgradePolicy": "Auto"}, {"upgradePolicy": "Window", "upgradeWindow": WINDOW}])
def test_the_policy_itself_is_no_new_revision(policy):
    world = a_world()
    before, revision = names(world), world.service.status.update_revision
    world.default_image = "slipway/runtime:test"

    world.service = edited(world.service, runtime=policy)
    world.run(30)

    assert (names(world), world.service.status.update_revision) == (before, revision)


def test_an_image_of_the_users_own_is_never_upgraded():
    world = a_world(image="mine:1")
    world.run(30)

    assert (images(world), pending(world)) == ({"mine:1"}, None)
