"""How a new revision replaces the old one, step by step and as a story."""

import pytest

from slipway_api.rollout_spec import RollingUpdate
from slipway_operator.core.health import judge
from slipway_operator.core.observed import Node
from slipway_operator.core.service.rollout import steps as rollout
from tests.builders import T0, a_pod, a_service, edited, minutes, seconds
from tests.operator.core.simulated_cluster import SimulatedCluster

NEW = {"runtime": {"maxModelLen": 1024}}


def step(*pods, desired, surge=1, unavailable=0, nodes=(), is_stored=False, now=T0):
    by_name = {node.name: node for node in nodes}
    members = judge([pod.replica for pod in pods], by_name, startup_timeout=minutes(30), now=now)
    limits = RollingUpdate(max_surge=surge, max_unavailable=unavailable)
    revisions = rollout.Revisions(update="new", stable="old", is_stored=is_stored)
    return rollout.step(members, revisions=revisions, desired=desired, limits=limits, nodes=by_name)


def names(result):
    return [member.replica.name for member, _ in result.leaving]


def old(slot=0):
    return a_pod("old").slot(slot)


def new(slot=0):
    return a_pod("new").slot(slot)


def test_surges_one_before_it_touches_the_old_ones():
    result = step(old(0).ready(), old(1).ready(), desired=2)
    assert (result.create_up_to, names(result)) == (1, [])


def test_waits_until_the_new_one_is_ready():
    result = step(old(0).ready(), old(1).ready(), new().loading(), desired=2)
    assert (result.create_up_to, names(result)) == (1, [])


def test_then_lets_the_old_one_with_the_fewest_streams_go():
    result = step(old(0).ready().streams(3), old(1).ready().streams(1), new().ready(), desired=2)
    assert names(result) == ["chat-old-1-0"]


def test_an_old_one_that_drains_still_holds_its_gpu():
    result = step(old(0).ready(), old(1).ready().draining(), new().ready(), desired=2)
    assert result.create_up_to == 1
    assert step(old(0).ready(), new().ready(), desired=2).create_up_to == 2


def test_what_others_took_away_makes_room_at_once():
    result = step(old(0).ready(), old(1).ready().deleted(), desired=2)
    assert result.create_up_to == 2


def test_without_surge_one_goes_first():
    ready = [old(slot).ready() for slot in range(3)]
    assert step(*ready, desired=3, surge=0, unavailable=1).create_up_to == 0
    assert len(names(step(*ready, desired=3, surge=0, unavailable=1))) == 1


def test_replicas_that_never_became_ready_go_before_those_that_serve():
    result = step(old(0).ready(), old(1).loading(), new().ready(), desired=2)
    assert names(result) == ["chat-old-1-0"]


def test_a_broken_old_replica_goes_at_once_because_its_gpu_may_be_what_the_new_one_waits_for():
    result = step(old(0).cannot_pull(), new().unschedulable(), desired=1)
    assert names(result) == ["chat-old-0-0"]


def test_a_replica_that_served_and_crashes_is_not_given_up_for_a_new_one_that_does_not_serve():
    """Finding 1: what is broken leaves only as far as maxUnavailable allows, unless a new one waits for its GPU."""
    assert names(step(old(0).crashing(), old(1).ready(), new().loading(), desired=2)) == []
    assert names(step(old(0).crashing(), old(1).ready(), new().unschedulable(), desired=2)) == ["chat-old-0-0"]


def test_a_deleted_replica_that_its_node_never_ends_stops_counting():
    """Finding 4: `maxSurge: 0` does not wait for ever for a kubelet that is gone."""
    going = old(0).ready().draining().deleted()
    assert step(going, desired=1, surge=0, unavailable=1, now=T0 + seconds(59)).create_up_to == 0
    assert step(going, desired=1, surge=0, unavailable=1, now=T0 + seconds(60)).create_up_to == 1


def test_a_replica_that_drains_on_a_lost_node_stops_counting():
    """Finding 4: its GPU is of no use, however long the drain takes."""
    lost = Node(name="node-1", ready=False, not_ready_since=T0)
    drains = old(0).ready().draining()
    look = {"desired": 1, "surge": 0, "unavailable": 1, "nodes": (lost,)}
    assert step(drains, **look, now=T0 + seconds(29)).create_up_to == 0
    assert step(drains, **look, now=T0 + seconds(30)).create_up_to == 1


@pytest.mark.capability("OP-13")
@pytest.mark.parametrize(
    ("pods", "stable_up_to", "create_up_to"),
    [
        ([old(0).ready(), old(1).ready(), old(2).ready(), new().cannot_pull()], 3, 1),
        ([old(0).ready(), old(1).ready(), new().cannot_pull()], 3, 1),
        ([new().cannot_pull()], 3, 1),
        ([old(0).ready(), old(1).ready(), new().ready()], 2, 2),
        ([old(0).ready(), new(0).ready(), new(1).loading()], 2, 2),
        ([old(0).ready(), new(0).ready(), new(1).ready()], 1, 3),
        ([new(0).ready(), new(1).ready(), new(2).ready()], 0, 3),
    ],
    ids=["whole", "one lost", "all lost", "in the middle", "one lost in the middle", "nearly done", "done"],
)
def test_lost_replicas_of_the_stable_revision_are_rebuilt_where_no_new_one_serves(pods, stable_up_to, create_up_to):
    """Finding 2: and never more than desired + maxSurge in all."""
    result = step(*pods, desired=3, is_stored=True)
    assert (result.stable_up_to, result.create_up_to) == (stable_up_to, create_up_to)
    new_live = sum(one.replica.revision == "new" for one in pods)
    assert result.stable_up_to + max(new_live, result.create_up_to) <= 4


def test_a_readiness_probe_that_fails_once_rebuilds_nothing():
    blip = new(0).loading().but(started=True, unready_since=T0)
    result = step(old(0).ready(), old(1).ready(), blip, desired=3, is_stored=True)
    assert result.stable_up_to == 2


@pytest.mark.parametrize(
    ("ready", "expected"),
    [
        ({"old": 3, "new": 0}, {"old": 100, "new": 0}),
        ({"old": 2, "new": 1}, {"old": 67, "new": 33}),
        ({"old": 0, "new": 3}, {"old": 0, "new": 100}),
        ({"old": 0, "new": 0}, {"old": 100, "new": 0}),
    ],
)
def test_weights_follow_the_ready_replicas_and_make_100(ready, expected):
    pods = [a_pod(hash).slot(slot).ready() for hash, count in ready.items() for slot in range(count)]
    members = judge([pod.replica for pod in pods], {}, startup_timeout=minutes(30), now=T0)
    assert rollout.weights(members, ["old", "new"], current="old") == expected


def story(replicas=3, **spec):
    world = SimulatedCluster(a_service(replicas=replicas, **spec))
    world.reconcile()
    world.run(40)
    for pod in world.pods.values():
        pod.running = 4
    return world


@pytest.mark.capability("OP-7", "DD-1")
@pytest.mark.parametrize(("surge", "unavailable"), [(1, 0), (0, 1), (2, 1), (3, 0)])
def test_an_edited_spec_rolls_through_within_its_limits_and_drains_every_old_replica(surge, unavailable):
    world = story(rollout={"rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable}})
    first = world.service.status.current_revision
    world.service = edited(world.service, **NEW)
    for _ in range(400):
        world.tick()
        assert len(world.ready) >= 3 - unavailable
        assert len(world.pods) <= 3 + surge, "old replicas that drain count too"
        assert sum(one.weight for one in world.service.status.revisions) == 100
    status = world.service.status
    assert status.current_revision == status.update_revision != first
    assert {pod.replica.revision for pod in world.pods.values()} == {status.current_revision}
    assert len(world.ready) == 3
    reasons = world.event_reasons()
    assert (reasons.count("RolloutStarted"), reasons.count("RolloutCompleted")) == (1, 1)
    assert reasons.count("ReplicaDrained") == 3


@pytest.mark.capability("OP-7")
def test_a_killed_operator_goes_on_where_the_rollout_stood():
    world = story()
    world.service = edited(world.service, **NEW)
    for second in range(300):
        world.tick(reconcile=False)
        world.reconcile(die_after=second % 4 if second % 3 else None)
    world.run(120)
    assert {pod.replica.revision for pod in world.pods.values()} == {world.service.status.update_revision}
    assert len(world.ready) == 3


def test_a_rollout_that_gets_nowhere_is_reported_keeps_the_old_replicas_and_can_be_taken_back():
    world = story(rollout={"progressDeadlineSeconds": 120})
    before = world.service.status.current_revision
    world.image_is_broken = True
    world.service = edited(world.service, runtime={"image": "nowhere:1"})
    world.run(30)
    assert world.condition("Stalled").reason == "ImagePullFailed"
    assert world.condition("Ready").reason == "Available"
    assert len(world.ready) == 3

    world.service = edited(world.service, runtime={"maxModelLen": 999})
    world.image_is_broken = False
    world.load_seconds = 10_000
    world.run(200)
    stalled = world.condition("Stalled")
    assert stalled.reason == "ProgressDeadlineExceeded"
    assert "is loading" in stalled.message
    assert "ProgressDeadlineExceeded" in world.event_reasons()
    assert len(world.ready) == 3

    world.service = edited(world.service, runtime=None)
    world.tick()
    assert world.condition("Stalled") is None, "what is asked for now has not failed"
    world.run(60)
    assert world.condition("Stalled") is None
    assert world.service.status.current_revision == world.service.status.update_revision == before
    assert len(world.ready) == len(world.pods) == 3


def test_a_third_revision_may_overtake_the_second():
    world = story()
    world.service = edited(world.service, **NEW)
    world.run(10)
    world.service = edited(world.service, runtime={"maxModelLen": 512})
    world.run(400)
    assert {pod.replica.revision for pod in world.pods.values()} == {world.service.status.update_revision}
    assert len(world.service.status.revisions) == 3


def test_remembers_no_more_revisions_than_asked_for():
    world = story(replicas=1, rollout={"revisionHistoryLimit": 1})
    for length in (100, 200, 300):
        world.service = edited(world.service, runtime={"maxModelLen": length})
        world.run(120)
    assert len(world.service.status.revisions) == 2


CORDONED = Node(name="node-1", cordoned=True)


def a_move(*, attempt_ready=False):
    """Two old replicas, and one that replaces the second on the node that it has to leave."""
    replacement = old(1).slot(1, attempt=1).on("node-2")
    replacement = replacement.ready() if attempt_ready else replacement.loading()
    return [old(0).ready().on("node-2"), old(1).ready().on("node-1"), replacement]


@pytest.mark.capability("AS-12")
def test_a_replacement_for_a_replica_that_leaves_its_node_is_not_one_too_many():
    """It was removed "before it was ready" and started again in the next pass, as long as the rollout went on."""
    assert names(step(*a_move(), new().loading(), desired=2, nodes=[CORDONED])) == []
    serving = step(*a_move(), new(0).ready(), new(1).ready(), desired=2, nodes=[CORDONED])
    assert sorted(names(serving)) == ["chat-old-0-0", "chat-old-1-0", "chat-old-1-1"], "none is needed any more"


@pytest.mark.capability("AS-12", "EV-1")
def test_nor_is_it_beside_a_canary():
    pods = [*a_move(), new().loading()]
    nodes = {CORDONED.name: CORDONED}
    result = rollout.split_step(
        judge([pod.replica for pod in pods], nodes, startup_timeout=minutes(30), now=T0),
        revisions=rollout.Revisions(update="new", stable="old", is_stored=True),
        desired=2,
        limits=RollingUpdate(max_surge=1, max_unavailable=0),
        nodes=nodes,
        update_wanted=1,
        stable_wanted=2,
        weight=0,
        recorded={"old": 100, "new": 0},
        is_finished=False,
    )
    assert names(result) == []
