"""Random lives of a service while people edit labels: every law holds, and it comes to rest."""

import random

import pytest

from tests.builders import edited
from tests.operator.core.test_properties import assert_at_rest, calm_down, happen, live, make

pytestmark = pytest.mark.capability("OP-16")

KINDS = ("edit", "load", "kill operator", "fail", "evict", "cordon", "uncordon", "caches lag", "flap", "wait")


@pytest.mark.parametrize("replicas", [3, None], ids=["fixed", "autoscaled"])
@pytest.mark.parametrize("seed", range(4))
def test_edited_labels_among_other_faults_break_no_law(seed, replicas):
    """review/control-plane.md 5, 6"""
    chance = random.Random(seed)
    world = make(chance.choice([(1, 0), (0, 1), (2, 1)]), replicas=replicas)
    world.reconcile()
    world.run(20)
    for _ in range(25):
        live(world, chance.randint(0, 7), world.edit_label)
        happen(world, chance.choice(KINDS), chance.randint(1, 4))
        world.run(chance.choice((0, 1, 5)))
    calm_down(world)
    assert_at_rest(world)
    assert all(pod.replica.is_routed and not pod.replica.edited_labels for pod in world.pods.values())


def test_an_edited_label_alone_replaces_nothing():
    """review/control-plane.md 5, 6"""
    world = make((1, 0), replicas=2)
    world.reconcile()
    world.run(20)
    before = sorted(pod.replica.uid for pod in world.pods.values())
    for name in sorted(world.pods):
        world.edit_label(name)
    assert world.observed().replicas[0].edited_labels
    world.tick()
    world.run(5)
    assert sorted(pod.replica.uid for pod in world.live) == before
    assert all(pod.replica.is_routed for pod in world.live)
    assert world.event_reasons().count("LabelsRestored") == 2


def test_a_moved_replica_with_an_edited_label_stays_while_more_replicas_are_desired():
    """Found by a random life of an autoscaled service: it was drained, and one of two desired replicas was left."""
    world = make((1, 0), replicas=1)
    world.reconcile()
    world.run(20)
    (moved,) = world.pods
    world.cordon(world.pods[moved].replica.node)
    world.tick()
    world.service = edited(world.service, replicas=2)
    for _ in range(60):
        if moved in world.pods and world.pods[moved].is_live:
            world.edit_label(moved)
            world.due = world.now
        world.tick()
        if not world.pods[moved].is_live:
            break
    assert len(world.ready) == 2, "it drains when two others serve"
