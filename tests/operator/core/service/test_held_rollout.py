"""A record of a revision that is missing or unreadable holds the rollout: it is never taken for a first start."""

from dataclasses import replace

import pytest

from slipway_api import names
from tests.builders import edited
from tests.operator.core.service.rollouts import a_world, annotate, canary, roll
from tests.operator.core.simulated_traffic import Behaviour

GATED = {"gates": {"smoke": [{"prompt": "1+1=", "mustMatch": "2"}]}}
ROLLOUTS = {
    "canary": canary(),
    "canary behind gates": canary(**GATED),
    "blue-green behind gates": {"strategy": "BlueGreen", "rollingUpdate": {"maxSurge": 4}} | GATED,
    "rolling update": {},
    "rolling update behind gates": GATED,
    "recreate": {"strategy": "Recreate"},
    "recreate behind gates": {"strategy": "Recreate"} | GATED,
}


def delete(world, hash):
    """`kubectl delete controllerrevision chat-HASH`."""
    world.revisions = {name: one for name, one in world.revisions.items() if one.hash != hash}
    world.due = world.now


def write_unknown_value(world, hash):
    """An older operator reads a record with a value of an enum that it does not know."""
    for name, one in world.revisions.items():
        if one.hash == hash:
            spec = {**one.data["spec"], "routing": {"directAccess": "FromTheFuture"}}
            world.revisions[name] = replace(one, data={**one.data, "spec": spec})
    world.due = world.now


def shown(world):
    weights = {one.hash: one.weight for one in world.service.status.revisions if one.weight}
    pods = {pod.replica.uid for pod in world.live}
    return weights, pods, world.service.status.current_revision


# review/control-plane.md 3: a canary, and a revision that fails its gates, was promoted without a verdict.
@pytest.mark.capability("OP-16")
@pytest.mark.parametrize("lose", [delete, write_unknown_value])
@pytest.mark.parametrize("name", ROLLOUTS)
def test_without_the_record_of_the_stable_revision_the_rollout_is_held_where_it_is(name, lose):
    world = a_world(replicas=4, rollout=ROLLOUTS[name])
    world.fails_smoke = {"all"}
    old, new = roll(world, Behaviour(errors=0.5))
    world.silent_to_smoke = {new}
    world.run(4 if "recreate" not in name else 0)
    lose(world, old)
    world.tick()
    before = shown(world)

    world.run(600)

    assert shown(world) == before
    assert before[2] == old, "the old revision is the current one until the new one has served completely"
    stalled = world.condition("Stalled")
    assert stalled.reason == "RevisionMissing"
    assert f"ControllerRevision chat-{old}" in stalled.message
    assert f"slipway.dev/promote={new}" in stalled.message
    assert "RolloutCompleted" not in world.event_reasons()
    assert world.event_reasons().count("RevisionMissing") == 1


@pytest.mark.capability("OP-16")
def test_a_failed_canary_keeps_no_traffic_without_the_record_of_the_stable_revision():  # review/control-plane.md 3
    world = a_world(replicas=4)
    old, new = roll(world, Behaviour(errors=0.5))
    world.run(12)
    delete(world, old)
    annotate(world, abort=new)
    world.run(60)
    assert {one.hash: one.weight for one in world.service.status.revisions if one.weight} == {old: 100}
    assert world.service.status.failed_revision == new


@pytest.mark.capability("OP-16")
def test_a_rollback_that_is_over_stays_without_the_record_of_its_revision():  # review/control-plane.md 3: a sibling
    world = a_world(replicas=2, rollout={})
    old, _ = roll(world)
    world.run(90)
    annotate(world, rollback_to=old)
    world.run(120)
    assert world.service.status.current_revision == old
    delete(world, old)
    world.run(300)
    assert {pod.replica.revision for pod in world.live} == {old}
    assert world.condition("Stalled").reason == "RevisionMissing"


@pytest.mark.capability("OP-16")
def test_each_remedy_that_the_sentence_names_ends_the_hold():
    def held():
        world = a_world(replicas=2)
        old, new = roll(world)
        world.run(12)
        record = next(one for one in world.revisions.values() if one.hash == old)
        delete(world, old)
        world.run(30)
        assert world.condition("Stalled").reason == "RevisionMissing"
        return world, old, new, record

    world, old, new, record = held()
    world.revisions[record.name], world.due = record, world.now
    world.run(200)
    assert world.service.status.current_revision == new

    world, old, new, _ = held()
    world.service = edited(world.service, runtime=None)
    world.run(120)
    assert {pod.replica.revision for pod in world.live} == {old}
    assert any(one.hash == old for one in world.revisions.values()), "it is stored again"

    world, old, new, _ = held()
    annotate(world, promote=new)
    world.run(120)
    assert {pod.replica.revision for pod in world.live} == {new}
    assert world.condition("Stalled") is None


@pytest.mark.capability("OP-16")
def test_at_rest_a_deleted_record_is_stored_again_and_an_unreadable_one_is_reported():
    world = a_world(replicas=2)
    hash = world.service.status.current_revision
    delete(world, hash)
    world.run(5)
    assert [one.hash for one in world.revisions.values()] == [hash]
    assert world.condition("Stalled") is None

    write_unknown_value(world, hash)
    world.run(5)
    stalled = world.condition("Stalled")
    assert stalled.reason == "RevisionMissing"
    assert "spec.routing.directAccess" in stalled.message
    assert len(world.ready) == 2
    delete(world, hash)
    world.run(5)
    assert world.condition("Stalled") is None, "deleted, it is stored again from the spec"


@pytest.mark.capability("OP-16")
def test_a_held_service_that_is_suspended_drains_and_one_without_requests_does_not():
    world = a_world(replicas=2)
    old, _ = roll(world)
    world.run(12)
    delete(world, old)
    world.run(10)
    held = set(world.pods)
    world.service = edited(world.service, replicas=None, autoscaling={"minReplicas": 0, "maxReplicas": 2})
    world.run(900)
    assert set(world.pods) >= {name for name in held if old[:5] in name}
    world.service = edited(world.service, suspend=True)
    world.run(120)
    assert not world.pods


@pytest.mark.capability("OP-16")
def test_a_first_start_that_never_served_is_still_replaced_by_a_corrected_spec():
    world = a_world(replicas=1, rollout={}, rate=0)
    broken = world.service.status.current_revision
    listed = [one.model_copy(update={"served": False}) for one in world.service.status.revisions]
    status = world.service.status.model_copy(update={"revisions": tuple(listed)})
    world.service = world.service.model_copy(update={"status": status})
    _, new = roll(world)
    delete(world, broken)
    world.run(90)
    assert {pod.replica.revision for pod in world.live} == {new}
    assert names.FINALIZER in world.service.metadata.finalizers
