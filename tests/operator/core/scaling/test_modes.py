"""What each mode does with the autoscaler's recommendation: follow it, say it, or leave the number alone."""

import pytest

from slipway_api.words import count
from slipway_operator.core.actions import SetReplicas
from slipway_operator.core.service.plan import plan
from tests.builders import T0, a_service, edited, promised, seen
from tests.operator.core.scaling.test_scaling_stories import shared
from tests.operator.core.simulated_cluster import SimulatedCluster


def a_world(**spec) -> SimulatedCluster:
    world = SimulatedCluster(a_service(**spec))
    world.reconcile()
    world.run(40)
    return world


def told(world: SimulatedCluster) -> tuple[str, str, str]:
    condition = world.condition("ScalingActive")
    return condition.status.value, condition.reason, condition.message


@pytest.mark.capability("AS-10")
@pytest.mark.parametrize(("replicas", "held"), [(2, 2), (None, 1)], ids=["spec.replicas", "the present number"])
def test_advisory_says_what_it_would_do_and_changes_nothing(replicas, held):
    world = a_world(replicas=replicas, autoscaling={"mode": "Advisory", "maxReplicas": 5})
    assert told(world) == ("True", "Advisory", f"Slipway would keep {count(held, 'replica')}; it only advises")
    world.run(30)  # values are written once a minute

    world.load = shared(kv=3.6, running=9, waiting=9)
    world.run(120)

    assert (world.desired, len(world.ready)) == (held, held)
    advice = [one.message for one in world.events if one.reason == "Advice"]
    assert len(advice) == 1
    assert advice[0].startswith(f"Slipway would set {held + 2} replicas instead of {held}; it only advises: ")
    assert "QueueDepth" in advice[0]
    assert told(world)[2] == advice[0]
    assert world.service.status.autoscaling.recommended_replicas == held + 2
    assert "ScaledUp" not in world.event_reasons()
    assert not world.service.status.autoscaling.history


@pytest.mark.capability("AS-10")
def test_advice_that_hovers_is_written_once_a_minute_at_most():
    world = a_world(replicas=2, autoscaling={"mode": "Advisory", "maxReplicas": 5})
    world.run(60)
    world.writes = 0

    def wobbling(world):
        shared(kv=1.9 if world.now.second % 4 < 2 else 1.2, running=9)(world)

    world.load = wobbling
    world.run(600)

    assert world.writes <= 10
    assert world.event_reasons().count("Advice") <= 10


@pytest.mark.capability("AS-10")
def test_the_advice_is_followed_once_the_mode_is_active():
    world = a_world(autoscaling={"mode": "Advisory", "maxReplicas": 3})
    world.load = shared(kv=2.4, running=9, waiting=9)
    world.run(90)
    assert world.desired == 1

    world.service = edited(world.service, autoscaling={"maxReplicas": 3})
    world.run(60)

    assert len(world.ready) == 3
    assert told(world)[1] in ("MetricsFresh", "LimitedByMax")


@pytest.mark.capability("AS-10")
def test_paused_keeps_the_present_number_whatever_the_load():
    world = a_world(autoscaling={"maxReplicas": 5})
    world.load = shared(kv=2.2, running=9, waiting=6)
    world.run(60)
    assert world.desired == 3
    history = world.service.status.autoscaling.history

    world.service = edited(world.service, autoscaling={"mode": "Paused", "maxReplicas": 2})
    world.load = shared()
    world.run(1200)

    assert len(world.ready) == 3
    assert told(world) == ("False", "Paused", "autoscaling.mode is Paused: 3 stay")
    assert world.service.status.autoscaling.history == history, "what was decided is still known when it goes on"
    world.service = edited(world.service, autoscaling={"maxReplicas": 5})
    world.run(30)
    assert world.desired == 3, "a whole window passes first"
    world.run(1200)
    assert world.desired == 1


@pytest.mark.capability("AS-10")
def test_a_service_that_begins_paused_has_its_first_replicas():
    assert len(a_world(autoscaling={"mode": "Paused", "minReplicas": 2, "maxReplicas": 5}).ready) == 2


@pytest.mark.capability("AS-10")
def test_external_mode_is_the_number_in_the_spec():
    world = a_world(replicas=3, autoscaling={"mode": "External", "maxReplicas": 5})
    world.load = shared(kv=2.9, running=9, waiting=60)
    world.run(60)

    assert len(world.ready) == 3
    assert told(world) == ("True", "External", "spec.replicas decides, written through /scale")


@pytest.mark.capability("AS-10")
@pytest.mark.parametrize(("suspend", "writes"), [(False, [2]), (True, [])])
def test_external_mode_without_replicas_starts_with_the_present_number_and_has_it_written_once(suspend, writes):
    """review/operator-users.md 5: an HPA cannot read a scale without spec.replicas."""
    service = a_service(suspend=suspend, autoscaling={"mode": "External", "minReplicas": 2, "maxReplicas": 5})
    planned = plan(seen(service), T0)

    assert [one.replicas for one in planned.actions if isinstance(one, SetReplicas)] == writes
    assert planned.status.desired_replicas == (0 if suspend else 2)
    written = edited(service, suspend=False, replicas=3)
    assert not any(isinstance(one, SetReplicas) for one in plan(seen(written), T0).actions)


@pytest.mark.capability("AS-10")
@pytest.mark.parametrize("mode", ["Active", "Advisory", "Paused", None])
def test_in_no_other_mode_does_the_operator_write_the_spec(mode):
    scaling = {"autoscaling": {"mode": mode, "maxReplicas": 5}} if mode else {}
    assert not any(isinstance(one, SetReplicas) for one in plan(seen(a_service(**scaling)), T0).actions)


TWO_GPUS = {"resources": {"gpu": {"count": 2}}, "runtime": {"tensorParallelSize": 2}}


@pytest.mark.capability("AS-7")
def test_the_budget_ends_growth_and_says_so_once():
    world = a_world(**TWO_GPUS, budget={"maxGPUs": 5}, autoscaling={"maxReplicas": 10})
    world.load = shared(kv=9, running=9, waiting=90)
    world.run(300)

    assert len(world.ready) == 2
    assert told(world)[1] == "LimitedByBudget"
    assert world.event_reasons().count("BudgetExceeded") == 1
    assert world.service.status.autoscaling.limited_by == "LimitedByBudget"


@pytest.mark.capability("AS-7")
def test_a_smaller_budget_holds_at_once_also_against_min_replicas():
    world = a_world(**TWO_GPUS, autoscaling={"minReplicas": 3, "maxReplicas": 10})
    assert len(world.ready) == 3

    world.service = edited(world.service, budget={"maxGPUs": 4})
    world.run(60)

    assert len(world.ready) == 2
    (event,) = [one for one in world.events if one.reason == "ScaledDown"]
    assert event.message == "3→2: minReplicas 3, a budget of 4 GPUs for 2 replicas, and it was 3"


@pytest.mark.capability("AS-7")
def test_what_others_write_through_scale_is_followed_as_far_as_the_budget_allows():
    world = a_world(**TWO_GPUS, budget={"maxGPUs": 4}, replicas=7, autoscaling={"mode": "External", "maxReplicas": 9})

    assert len(world.ready) == 2
    message = "spec.replicas is 7; a budget of 4 GPUs, 2 for each replica, allows 2"
    assert told(world) == ("True", "LimitedByBudget", message)
    assert world.event_reasons().count("BudgetExceeded") == 1


@pytest.mark.capability("AS-7")
def test_a_replica_without_gpus_costs_no_budget():
    cpu = {"resources": {"gpu": {"count": 0}}}
    assert len(a_world(**cpu, budget={"maxGPUs": 1}, autoscaling={"minReplicas": 3, "maxReplicas": 5}).ready) == 3


@pytest.mark.capability("AS-10")
def test_a_change_of_mode_alone_changes_no_pod():
    service = promised(a_service(replicas=2, autoscaling={"mode": "Advisory", "maxReplicas": 5}), 2)
    for mode in ("External", "Paused", "Active"):
        fields = {"mode": mode, "maxReplicas": 5}
        service = edited(service, replicas=2 if mode == "External" else None, autoscaling=fields)
        assert plan(seen(service), T0).status.desired_replicas == 2
