"""Random lives of a service while the API server refuses writes of some kinds: other lanes go on, and it comes to rest.

review/control-plane.md 4; issue 26, OP-16. At every pass `laws.check_refusals_change_no_other_decision` holds.
"""

import random

import pytest

from tests.builders import edited
from tests.operator.core.test_properties import assert_at_rest, calm_down, happen, live, make

pytestmark = pytest.mark.capability("OP-16")

WRITES = ("CreatePod", "ApplyChild", "CreateRevision", "DeleteRevision", "DeletePod", "DrainPod", "AnnotatePod")
OTHERS = ("AddFinalizer", "RestoreLabels")
REASONS = ("Forbidden", "Invalid", "NameConflict", "InternalError", "TooManyRequests", "429", "418")
KINDS = (
    "edit",
    "scale",
    "load",
    "kill operator",
    "fail",
    "evict",
    "cordon",
    "uncordon",
    "caches lag",
    "flap",
    "wait",
    "lose node",
)


@pytest.mark.parametrize("is_autoscaled", [False, True], ids=["fixed", "autoscaled"])
@pytest.mark.parametrize("seed", [0, 1, 3, 6, 15, 37, 286, 309, 440])
def test_refused_writes_among_other_faults_break_no_law(seed, is_autoscaled):
    chance = random.Random(seed)
    limits, replicas = chance.choice([(1, 0), (0, 1), (2, 1)]), chance.choice([1, 2, 3])
    world = make(limits, replicas=None if is_autoscaled else replicas)
    world.reconcile()
    for _ in range(25):
        world.refused = {one: chance.choice(REASONS) for one in (*WRITES, *OTHERS) if chance.random() < 0.25}
        happen(world, chance.choice(KINDS), chance.randint(1, 4))
        live(world, chance.randint(0, 7), world.edit_label)
        world.run(chance.choice((0, 3, 30)))
    world.refused = {}
    calm_down(world)
    assert_at_rest(world)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("reason", ["Forbidden", "418"])
def test_while_one_kind_of_write_is_refused_it_is_reported_and_nothing_else_waits(write, reason):
    """A rollout with one write refused for ten minutes; then it ends as if nothing had been."""
    world = make((1, 0), replicas=2)
    world.reconcile()
    world.run(30)
    world.refused = {write: reason}
    happen(world, "edit", 3)
    happen(world, "fail", 0)
    world.run(600)

    assert len(world.live) <= 3
    assert write == "CreatePod" or world.ready, "a refusal takes no replica away"
    if world.failures:
        told = [one.message for one in world.service.status.conditions]
        assert any("the API server refuses it" in sentence for sentence in told)
    assert not [event for event in world.events if event.reason.value == "ReplicaDraining" and write == "DrainPod"]

    world.refused = {}
    calm_down(world)
    assert_at_rest(world)


def test_a_rollout_that_starts_while_a_replica_is_moved_starts_no_second_one_of_the_old_revision():
    """Found by seed 15 above: the two replicas of the slot counted as two, so a third one was created."""
    world = make((1, 0), replicas=1)
    world.reconcile()
    world.run(20)
    world.refused = {"DrainPod": "Forbidden"}
    world.cordon(next(iter(world.pods.values())).replica.node)
    world.run(20)
    assert len(world.ready) == 2, "both serve until the old one may drain"
    world.refused = {}

    happen(world, "edit", 3)
    world.run(60)

    assert world.created == 3


@pytest.mark.parametrize("refused", [{}, {"DrainPod": "Forbidden"}, {"DeletePod": "Forbidden"}], ids=str)
@pytest.mark.parametrize("before", [2, 4])
def test_a_replica_is_moved_when_the_surplus_of_a_scale_down_has_left(before, refused):
    """Found by seed 3 above, autoscaled: a surplus replica could not be deleted, and another slot had two."""
    world = make((1, 0), replicas=before)
    world.reconcile()
    world.run(20)
    world.refused = refused
    for node in world.nodes:
        world.cordon(node)
    world.service = edited(world.service, replicas=1)
    for _ in range(60):
        world.tick()  # at each creation: no more live replicas than desired and surge allow
    assert len(world.live) == (before if "DrainPod" in refused else 2)

    world.refused = {}
    calm_down(world)
    assert_at_rest(world)


def test_a_slot_whose_replicas_are_lost_one_after_another_gets_a_third():
    """Found by seed 3 above, autoscaled: the law counted replicas on nodes that do not answer."""
    world = make((1, 0), replicas=1)
    world.reconcile()
    world.run(20)
    for _ in range(2):
        node = next(pod.replica.node for pod in world.live if world.nodes[pod.replica.node].ready)
        world.lose_node(node)
        world.run(34)  # NODE_LOST, and too short for the next replica to be ready
    (third,) = (one for one in world.live if world.nodes[one.replica.node].ready)
    assert len(world.live) == 3
    assert third.replica.attempt == 2


def test_an_attempt_that_was_recorded_and_not_needed_hides_no_later_failure():
    """Found by seed 440 above: the failure was not counted, and the slot got its next replica without a pause."""
    world = make((1, 0), replicas=1)
    world.reconcile()
    world.run(20)
    happen(world, "fail", 0)
    world.run(40)  # a first failure, so that the status remembers the slot
    ((name, pod),) = world.pods.items()
    world.refused = {"CreatePod": "Forbidden"}
    world.cordon(pod.replica.node)
    world.run(30)
    (recorded,) = world.service.status.attempts
    assert recorded.attempt > pod.replica.attempt, "the next attempt is recorded, and its pod refused"
    world.refused = {}
    world.cordon(pod.replica.node, cordoned=False)
    world.tick()
    before = world.created

    world.fail(name)
    world.run(5)

    (counted,) = world.service.status.attempts
    assert counted.failures == recorded.failures + 1
    assert world.created == before, "no pod within the backoff"
    calm_down(world)
    assert_at_rest(world)
