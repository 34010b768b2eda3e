"""Smoke tests before traffic, and the strategies beside the canary: blue-green, recreate and rolling update."""

import pytest

from tests.builders import edited
from tests.operator.core.service.rollouts import (
    a_world,
    annotate,
    canary,
    message,
    replicas,
    roll,
    verdict,
    weight,
    weights_in_order,
)


@pytest.mark.capability("EV-4")
@pytest.mark.parametrize("strategy", ["RollingUpdate", "Canary", "BlueGreen", "Recreate"])
def test_a_wrong_answer_to_a_smoke_test_rolls_back_before_any_traffic(strategy):
    gates = {"smoke": [{"prompt": "2+2=", "mustMatch": "4"}]}
    rollout = canary(gates=gates) if strategy == "Canary" else {"strategy": strategy, "gates": gates}
    if strategy == "BlueGreen":
        rollout["rollingUpdate"] = {"maxSurge": 4}
    world = a_world(rollout=rollout)
    old, new = roll(world)
    world.fails_smoke.add(new)
    for _ in range(200):
        world.run(1)
        assert weight(world, new) == 0
    status = world.service.status
    assert (status.current_revision, status.failed_revision) == (old, new)
    assert {pod.replica.revision for pod in world.pods.values()} == {old}
    assert "smoke test 1 of 1" in message(world)
    assert "2+2" not in "".join(event.message for event in world.events) + "".join(world.log)


@pytest.mark.capability("EV-4")
@pytest.mark.parametrize("strategy", ["RollingUpdate", "Canary", "BlueGreen", "Recreate"])
def test_passed_smoke_tests_open_the_way(strategy):
    gates = {"smoke": [{"prompt": "2+2=", "mustMatch": "4"}]}
    rollout = canary(gates=gates) if strategy == "Canary" else {"strategy": strategy, "gates": gates}
    if strategy == "BlueGreen":
        rollout["rollingUpdate"] = {"maxSurge": 4}
    world = a_world(rollout=rollout)
    _, new = roll(world)
    world.run(300)
    assert world.service.status.current_revision == new
    assert verdict(world).reason == "Passed"
    assert world.event_reasons().count("CanaryStepCompleted" if strategy == "Canary" else "GatesPassed") >= 1
    assert world.service.status.canary is None


@pytest.mark.capability("EV-4")
def test_a_replica_that_does_not_answer_smoke_tests_fails_them_after_five_times():
    world = a_world(rollout=canary(gates={"smoke": [{"prompt": "2+2=", "mustMatch": "4"}]}))
    old, new = roll(world)
    world.silent_to_smoke.add(new)
    world.run(100)
    assert world.service.status.failed_revision == new
    assert "no answer 5 times" in message(world)
    assert weight(world, old) == 100


@pytest.mark.capability("EV-5")
def test_blue_green_starts_a_second_full_set_switches_at_once_and_then_drains_the_first():
    world = a_world(replicas=2, rollout={"strategy": "BlueGreen", "rollingUpdate": {"maxSurge": 2}})
    old, new = roll(world)
    weights = []
    for _ in range(150):
        world.run(1)
        weights.append(weight(world, new))
        assert len(world.pods) <= 4
        if 0 < weights.count(100) < 30:
            assert replicas(world, old) == 2, "the first set stays for a while"
    assert weights_in_order(weights) == [0, 100]
    assert {pod.replica.revision for pod in world.pods.values()} == {new}
    assert world.service.status.current_revision == new


@pytest.mark.capability("EV-5")
def test_blue_green_switches_only_when_every_replica_of_the_second_set_is_ready():
    world = a_world(replicas=2, rollout={"strategy": "BlueGreen", "rollingUpdate": {"maxSurge": 2}})
    world.gpus = 3
    old, new = roll(world)
    world.run(100)
    assert (weight(world, old), weight(world, new)) == (100, 0)
    world.gpus = 4
    world.run(20)
    assert (weight(world, old), weight(world, new)) == (0, 100)


@pytest.mark.capability("EV-5")
def test_recreate_drains_all_before_it_starts_any_and_waits_for_their_requests():
    world = a_world(replicas=2, rollout={"strategy": "Recreate"})
    old, new = roll(world)
    for pod in world.pods.values():
        pod.running = 3
    world.gpus = 2
    for _ in range(120):
        world.run(1)
        revisions = {pod.replica.revision for pod in world.pods.values()}
        assert revisions != {old, new}, "never both"
    assert {pod.replica.revision for pod in world.pods.values()} == {new}
    assert world.service.status.current_revision == new
    assert not any("was deleted with" in line for line in world.log)


@pytest.mark.capability("EV-5")
def test_without_surge_a_rolling_update_goes_one_by_one():
    world = a_world(replicas=3, rollout={"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}})
    world.gpus = 3
    _, new = roll(world)
    for _ in range(200):
        world.run(1)
        assert len(world.ready) >= 2
    assert {pod.replica.revision for pod in world.pods.values()} == {new}


@pytest.mark.capability("EV-3")
@pytest.mark.parametrize("strategy", ["RollingUpdate", "BlueGreen"])
def test_the_other_strategies_pause_and_abort_too(strategy):
    rollout = {"strategy": strategy, "rollingUpdate": {"maxSurge": 4 if strategy == "BlueGreen" else 1}}
    world = a_world(replicas=4, rollout=rollout)
    old, new = roll(world)
    world.run(3)
    world.service = edited(world.service, rollout=rollout | {"paused": True})
    world.run(60)
    held = replicas(world, new)
    world.run(60)
    assert replicas(world, new) == held < 5
    assert world.service.status.current_revision == old
    annotate(world, abort=new)
    world.run(200)
    assert verdict(world).reason == "RolledBack"
    assert world.event_reasons().count("RolloutRolledBack") == 1
    assert {pod.replica.revision for pod in world.pods.values()} == {old}
    assert world.service.status.failed_revision == new
