"""A canary from its first replica to its promotion or its rollback, as stories in virtual time."""

import pytest

from slipway_api import names
from slipway_operator.core.actions import CreatePod, DeletePod, DrainPod
from slipway_operator.core.service.plan import plan
from tests.builders import edited
from tests.operator.core.service.rollouts import (
    a_world,
    annotate,
    canary,
    message,
    replicas,
    roll,
    until,
    weight,
    weights_in_order,
)
from tests.operator.core.simulated_traffic import Behaviour


@pytest.mark.capability("EV-1", "RG-1")
def test_a_good_canary_takes_its_steps_and_is_promoted():
    world = a_world()
    old, new = roll(world)
    weights, most, least_ready = [], 0, 4
    for _ in range(300):
        world.run(1)
        weights.append(weight(world, new))
        assert weight(world, old) + weight(world, new) == 100
        most = max(most, len(world.pods))
        least_ready = min(least_ready, len(world.ready))
    assert sorted(set(weights)) == weights_in_order(weights), "the weight never falls"
    assert {0, 25, 50, 100} <= set(weights)
    assert most <= 5, "never more than desired + maxSurge, those that drain included"
    assert least_ready >= 4
    status = world.service.status
    assert status.current_revision == status.update_revision == new
    assert (status.canary, status.failed_revision) == (None, "")
    reasons = world.event_reasons()
    assert (reasons.count("CanaryStepCompleted"), reasons.count("CanaryPromoted")) == (6, 1)
    assert reasons.count("RolloutCompleted") == 1
    assert world.condition("CanaryHealthy").reason == "Passed"
    assert world.condition("Reconciling") is None


@pytest.mark.capability("EV-1")
def test_a_canary_has_no_weight_before_it_is_ready():
    world = a_world()
    world.load_seconds = 100
    old, new = roll(world)
    world.run(95)
    assert replicas(world, new) == 1
    assert (weight(world, old), weight(world, new)) == (100, 0)
    world.run(15)
    assert weight(world, new) == 25


@pytest.mark.capability("EV-2")
@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        (Behaviour(errors=0.2), "ErrorRate 20"),
        (Behaviour(ttft=0.8), "TTFTP95"),
        (Behaviour(itl=0.1), "ITLP95"),
    ],
    ids=["errors", "first token", "between tokens"],
)
def test_a_canary_that_is_worse_is_rolled_back_and_not_tried_again(behaviour, words):
    world = a_world()
    old, new = roll(world, behaviour)
    until(world, lambda: world.service.status.failed_revision == new)

    assert (weight(world, old), weight(world, new)) == (100, 0), "in the pass that decides"
    told = [event.message for event in world.events if event.reason == "CanaryRolledBack"]
    assert len(told) == 1
    assert words in told[0]
    assert " against " in told[0]
    world.run(200)
    status = world.service.status
    assert (status.current_revision, status.update_revision, status.failed_revision) == (old, new, new)
    assert {pod.replica.revision for pod in world.pods.values()} == {old}
    assert len(world.ready) == 4
    assert world.condition("CanaryHealthy").reason == "RolledBack"
    assert world.condition("CanaryHealthy").message == told[0]
    assert world.condition("Reconciling") is None
    writes = world.writes
    world.run(600)
    assert world.writes == writes, "at rest"
    assert world.event_reasons().count("CanaryAnalysisFailed") == 2


@pytest.mark.capability("EV-2")
def test_it_is_rolled_back_within_one_interval_where_one_failure_is_enough():
    world = a_world(rate=40, rollout=canary(analysis={"failureLimit": 1}))
    _, new = roll(world, Behaviour(errors=1.0))
    until(world, lambda: weight(world, new) > 0)
    world.run(11)
    assert world.service.status.failed_revision == new


@pytest.mark.capability("EV-3")
@pytest.mark.parametrize("rate", [None, 0.1], ids=["no gateway reports", "too few requests"])
def test_too_little_traffic_holds_the_canary_and_never_promotes_it(rate):
    world = a_world(rate=rate)
    _, new = roll(world)
    world.run(120)
    assert world.condition("CanaryHealthy").reason == "Inconclusive"
    assert world.event_reasons().count("CanaryInconclusive") == 1
    writes = world.writes
    world.run(100)
    assert weight(world, new) == 25
    assert world.writes - writes <= 3, "it writes only when there are twice as many requests"
    assert world.condition("Stalled") is None
    assert "promote or abort" in message(world)


@pytest.mark.capability("EV-3")
def test_a_hold_ends_by_itself_when_traffic_comes():
    world = a_world(rate=0.1)
    _, new = roll(world)
    world.run(120)
    world.traffic.rate = 40
    world.run(200)
    assert world.service.status.current_revision == new


@pytest.mark.capability("EV-3")
def test_promote_skips_all_steps_and_abort_takes_all_traffic_back():
    world = a_world(rate=None)
    _, new = roll(world)
    world.run(60)
    annotate(world, promote="another-revision")
    world.run(10)
    assert weight(world, new) == 25, "it names another revision"
    annotate(world, promote=new)
    world.run(200)
    assert world.service.status.current_revision == new
    assert "CanaryPromoted" in world.event_reasons()

    world.service = edited(world.service, runtime={"maxModelLen": 99})
    world.run(60)
    third = world.service.status.update_revision
    assert weight(world, third) == 25
    annotate(world, promote=new, abort=third)
    world.run(1)
    assert (weight(world, new), weight(world, third)) == (100, 0)
    world.run(100)
    assert replicas(world, third) == 0
    assert world.service.status.failed_revision == third
    annotate(world)
    world.run(100)
    assert replicas(world, third) == 0, "a removed annotation does not bring it back"
    assert "abort" in message(world)


@pytest.mark.capability("EV-2", "EV-3")
def test_the_pass_that_decides_a_rollback_turns_the_traffic_back_before_a_canary_is_asked_to_go():
    world = a_world(rate=None)
    old, new = roll(world)
    world.run(60)
    annotate(world, abort=new)
    made = plan(world.observed(), world.now)
    assert not [one for one in made.actions if isinstance(one, DrainPod | DeletePod | CreatePod)]
    assert made.status.failed_revision == new
    assert {one.hash: one.weight for one in made.status.revisions} == {old: 100, new: 0}
    assert made.requeue_after == 0.0


@pytest.mark.capability("EV-1")
def test_the_last_stable_replica_serves_until_its_traffic_is_elsewhere():
    world = a_world(replicas=1, rollout=canary([{"setWeight": 100}]))
    old, new = roll(world)
    weights_while_it_serves = set()
    for _ in range(60):
        world.run(1)
        if any(pod.replica.revision == old for pod in world.ready):
            weights_while_it_serves.add(weight(world, new))
    assert weights_while_it_serves <= {0, 100}
    assert world.service.status.current_revision == new


@pytest.mark.capability("EV-3", "OP-7")
def test_paused_holds_every_step_and_resumes():
    world = a_world(rollout=canary(paused=True))
    _, new = roll(world)
    world.run(60)
    assert replicas(world, new) == 0, "it does not begin"
    world.service = edited(world.service, rollout=canary())
    world.run(10)
    assert weight(world, new) == 25
    world.service = edited(world.service, rollout=canary(paused=True, progressDeadlineSeconds=60))
    world.run(200)
    assert weight(world, new) == 25
    assert "paused by spec.rollout.paused" in world.condition("Reconciling").message
    assert world.condition("Stalled") is None
    world.service = edited(world.service, rollout=canary())
    world.run(200)
    assert world.service.status.current_revision == new


@pytest.mark.capability("OP-7", "EV-3")
@pytest.mark.parametrize("seconds", [3, 15, 40, 70, 100, 110])
def test_a_spec_that_is_set_back_goes_back_cleanly_from_any_step(seconds):
    world = a_world()
    before = world.service.spec
    old, _ = roll(world)
    world.run(seconds)
    runtime = before.to_json().get("runtime")
    world.service = edited(world.service, runtime=runtime)
    world.run(1)
    assert weight(world, old) == 100 or not world.service.status.revisions[0].ready
    world.run(200)
    status = world.service.status
    if status.current_revision == old:
        assert {pod.replica.revision for pod in world.pods.values()} == {old}
        assert len(world.ready) == 4
        assert world.condition("CanaryHealthy") is None or world.condition("CanaryHealthy").reason == "Passed"


@pytest.mark.capability("OP-13")
def test_a_stable_replica_that_is_lost_during_a_canary_is_replaced_by_one_of_the_stable_revision():
    world = a_world(rate=None)
    old, new = roll(world)
    world.run(60)
    assert (replicas(world, old), replicas(world, new)) == (3, 1)
    lost = next(pod.replica.name for pod in world.live if pod.replica.revision == old)
    world.pods.pop(lost)
    world.run(30)
    assert (replicas(world, old), replicas(world, new)) == (3, 1)
    assert len(world.ready) == 4


@pytest.mark.capability("OP-13", "EV-3")
def test_rollback_to_builds_a_stored_revision_again_and_a_stale_annotation_is_harmless():
    world = a_world(rollout={"rollingUpdate": {"maxSurge": 1}})
    first, second = roll(world)
    world.run(200)
    assert world.service.status.current_revision == second
    annotate(world, rollback_to=first)
    world.run(200)
    status = world.service.status
    assert {pod.replica.revision for pod in world.pods.values()} == {first}
    assert (status.current_revision, status.failed_revision) == (first, second)
    assert "rollback-to" in message(world)
    assert world.manifests[next(iter(world.pods))]["metadata"]["labels"][names.LABEL_REVISION] == first
    writes = world.writes
    world.run(300)
    assert world.writes == writes

    world.service = edited(world.service, runtime={"maxModelLen": 77})  # the fix, with the annotation still there
    world.run(200)
    status = world.service.status
    assert status.current_revision == status.update_revision not in (first, second)
    annotate(world)
    world.run(10)
    assert world.service.status.failed_revision == ""


@pytest.mark.capability("EV-1")
def test_a_third_revision_takes_the_canarys_place_and_the_stable_one_serves_on():
    world = a_world()
    old, second = roll(world)
    world.run(60)
    assert weight(world, second) > 0
    world.service = edited(world.service, runtime={"maxModelLen": 33})
    world.run(1)
    assert weight(world, second) == 0
    assert weight(world, old) == 100
    world.run(300)
    third = world.service.status.update_revision
    assert world.service.status.current_revision == third
    assert {pod.replica.revision for pod in world.pods.values()} == {third}


@pytest.mark.capability("OP-7")
@pytest.mark.parametrize("every", [2, 3, 7])
def test_a_new_leader_resumes_the_canary_from_any_step(every):
    world = a_world(rate=100)
    _, new = roll(world)
    for second in range(400):
        world.tick(reconcile=False)
        world.reconcile(die_after=second % 4 if second % every == 0 and second < 300 else None)
    world.run(300)
    assert world.service.status.current_revision == new
    assert len(world.ready) == 4
    reasons = world.event_reasons()
    assert reasons.count("CanaryPromoted") <= 1


@pytest.mark.capability("EV-1")
def test_mirrored_requests_come_before_any_weight():
    world = a_world(
        rollout=canary([{"mirrorPercent": 10}, {"pauseSeconds": 30}, {"setWeight": 50}, {"setWeight": 100}])
    )
    _, new = roll(world)
    world.run(20)
    status = next(one for one in world.service.status.revisions if one.hash == new)
    assert (status.mirror_percent, status.weight) == (10, 0)
    until(world, lambda: weight(world, new) == 50)
    status = next(one for one in world.service.status.revisions if one.hash == new)
    assert status.mirror_percent == 0


def test_a_changed_served_name_is_served_as_the_old_one_until_a_new_replica_gets_traffic():
    world = a_world(replicas=2, rollout={"strategy": "BlueGreen", "rollingUpdate": {"maxSurge": 2}})
    raw = world.service.spec.to_json()["model"]
    world.service = edited(world.service, model=raw | {"servedName": "better"})
    names_and_weights = set()
    for _ in range(60):
        world.run(1)
        status = world.service.status
        names_and_weights.add((status.served_name, weight(world, status.update_revision)))
    assert names_and_weights == {("chat", 0), ("better", 100)}


def test_scaled_to_zero_a_new_revision_waits_for_its_first_replica():
    world = a_world(replicas=0)
    old = world.service.status.current_revision
    world.service = edited(world.service, replicas=4)
    world.run(60)
    world.service = edited(world.service, replicas=0)
    world.run(60)
    _, new = roll(world)
    world.run(60)
    assert world.service.status.current_revision == old
    assert world.condition("Ready").reason == "ScaledToZero"
    world.service = edited(world.service, replicas=4)
    world.run(30)
    assert weight(world, new) < 100
    world.run(300)
    assert world.service.status.current_revision == new
