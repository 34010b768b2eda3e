"""Without the record of the revision that serves, no rollout opens a gate: it is held, and says how to go on.

review/control-plane.md 3: the pass after the record was deleted took the rollout for a first start and promoted it.
"""

from dataclasses import replace

import pytest

from tests.builders import edited
from tests.operator.core.service.rollouts import a_world, annotate, canary, replicas, roll, weight
from tests.operator.core.simulated_traffic import Behaviour

pytestmark = pytest.mark.capability("OP-16")

STRATEGIES = {
    "canary": canary(steps=[{"setWeight": 25}, {"pauseSeconds": 3600}, {"setWeight": 100}]),
    "rolling update": {"strategy": "RollingUpdate"},
    "blue-green": {"strategy": "BlueGreen"},
    "gates": canary(gates={"smokeTests": [{"prompt": "2+2", "expect": {"contains": "4"}}]}),
}


def lose(world, hash: str, how: str) -> None:
    """The record of a revision is deleted, or has a value that this operator does not know."""
    (name,) = [name for name, one in world.revisions.items() if one.hash == hash]
    if how == "deleted":
        del world.revisions[name]
        return
    stored = world.revisions[name]
    spec = {**stored.data["spec"], "rollout": {"strategy": "OfANewerOperator"}, "runtime": {"dtype": "fp2"}}
    world.revisions[name] = replace(stored, data={**stored.data, "spec": spec})


@pytest.mark.parametrize("how", ["deleted", "unreadable"])
@pytest.mark.parametrize("rollout", STRATEGIES.values(), ids=STRATEGIES.keys())
def test_a_rollout_holds_whatever_its_strategy(rollout, how):
    world = a_world(rollout=rollout)
    world.fails_smoke = {"any"}
    old, new = roll(world, Behaviour(errors=0.5))
    lose(world, old, how)
    world.reconcile()
    held = (weight(world, old), weight(world, new), replicas(world, old), replicas(world, new))

    world.run(300)

    assert (weight(world, old), weight(world, new), replicas(world, old), replicas(world, new)) == held
    assert world.service.status.current_revision == old
    assert "RolloutCompleted" not in world.event_reasons()
    stalled = world.condition("Stalled")
    assert (stalled.status.value, stalled.reason) == ("True", "RevisionMissing")
    fault = "is missing" if how == "deleted" else "cannot be read"
    assert f"ControllerRevision chat-{old} of the stable revision {fault}" in stalled.message
    assert world.event_reasons().count("RevisionMissing") == 1
    assert world.condition("Ready").status.value == "True", "its replicas serve"


def test_set_back_to_the_old_spec_it_stores_the_record_again_and_continues():
    world = a_world()
    before = world.service.spec
    old, new = roll(world)
    world.run(10)
    lose(world, old, "deleted")
    world.run(30)
    assert world.condition("Stalled").reason == "RevisionMissing"

    world.service = world.service.model_copy(update={"spec": before})
    world.run(120)

    assert old in {one.hash for one in world.revisions.values()}
    assert world.condition("Stalled") is None
    assert (weight(world, old), replicas(world, new)) == (100, 0)


def test_a_person_may_accept_the_new_revision_untested():
    world = a_world()
    old, new = roll(world)
    lose(world, old, "deleted")
    world.run(30)

    annotate(world, promote=new)
    world.run(120)

    assert world.service.status.current_revision == new
    assert weight(world, new) == 100
    assert world.condition("Stalled") is None


def test_a_first_start_needs_no_earlier_record():
    world = a_world(replicas=2)
    assert world.condition("Stalled") is None
    world.service = edited(world.service, replicas=3)
    world.revisions.clear()
    world.run(60)
    assert world.condition("Stalled") is None, "at rest the record of the same revision is stored again"
    assert len(world.ready) == 3
