"""The error budget of a service over time: what status keeps, when it is written, and what waits for it."""

from datetime import timedelta

import pytest

from slipway_api.slo import SLOPeriod, SLOStatus
from slipway_operator.core.service.status.slo import sum_periods
from tests.builders import a_service, edited
from tests.operator.core.service.rollouts import NEW, annotate, canary, until
from tests.operator.core.simulated_cluster import SimulatedCluster
from tests.operator.core.simulated_traffic import Behaviour, SimulatedTraffic

SLO = {"objectivePercent": "99", "ttftP95Seconds": "1.0", "maxErrorPercent": "5"}


def a_world(rate=10.0, slo=SLO, rollout=None, **spec):
    service = a_service(replicas=2, finalizers=(), slo=slo, rollout=rollout, **spec)
    world = SimulatedCluster(service, load_seconds=5)
    world.traffic = SimulatedTraffic(rate)
    world.reconcile()
    world.run(20)
    assert len(world.ready) == 2
    return world


def behave(world, **how):
    for revision in world.service.status.revisions:
        world.traffic.behaviours[revision.hash] = Behaviour(**how)


def rich(world, requests=100_000):
    """A day of good requests stands in status."""
    period = SLOPeriod(start_time=world.now - timedelta(days=2), requests=requests, streams=requests)
    status = world.service.status
    slo = (status.slo or SLOStatus(recorded_time=world.now)).model_copy(update={"periods": (period,)})
    world.service = world.service.model_copy(update={"status": status.model_copy(update={"slo": slo})})


def condition(world):
    return world.condition("WithinSLO")


def counted(world):
    return sum_periods(world.service.spec.slo, world.service.status.slo.periods, world.now)


@pytest.mark.capability("OB-6")
def test_the_levels_are_measured_and_stand_in_status():
    world = a_world()
    world.run(600)

    slo = world.service.status.slo
    assert condition(world).reason == "WithinLimits"
    assert 0.1 < slo.ttft_p95_seconds < 0.5
    assert slo.error_budget_remaining_percent == 100
    assert counted(world).requests >= 0.85 * 10 * 600


@pytest.mark.capability("OB-6")
def test_requests_before_the_first_start_is_complete_spend_nothing():
    world = SimulatedCluster(a_service(replicas=1, slo=SLO), load_seconds=60)
    world.traffic = SimulatedTraffic(10.0)  # 600 requests find no replica
    world.reconcile()
    world.run(180)

    assert condition(world).reason == "WithinLimits"
    assert counted(world).failed == 0


@pytest.mark.capability("OB-6")
def test_an_exhausted_budget_holds_a_rollout_and_the_promote_annotation_lets_it_through():
    world = a_world()
    behave(world, errors=0.2)
    until(world, lambda: condition(world).reason == "ErrorBudgetExhausted")
    assert "requests failed in 30 days" in condition(world).message
    old = world.service.status.current_revision

    world.service = edited(world.service, runtime=NEW)
    world.run(120)
    new = world.service.status.update_revision
    assert new != old
    assert not [pod for pod in world.live if pod.replica.revision == new], "no pod of it is made"
    waits = world.condition("Reconciling").message
    assert "paused by the exhausted error budget (ErrorRate" in waits
    assert world.condition("Stalled") is None, "to wait is no failure"

    annotate(world, promote=new)
    until(world, lambda: world.service.status.current_revision == new)


@pytest.mark.capability("OB-6")
def test_an_exhausted_budget_holds_a_canary_at_its_step_and_analysis_still_rolls_it_back():
    world = a_world(rollout=canary())
    rich(world, requests=2_000)
    world.service = edited(world.service, runtime=NEW)
    until(world, lambda: (world.service.status.canary or None) and world.service.status.canary.weight == 25)
    new = world.service.status.update_revision
    world.traffic.behaviours[new] = Behaviour(errors=0.9)
    until(world, lambda: world.service.status.failed_revision == new)

    assert world.service.status.current_revision != new


@pytest.mark.capability("OB-6")
def test_the_budget_outlives_the_operator():
    world = a_world()
    behave(world, errors=0.2)
    until(world, lambda: condition(world).reason == "ErrorBudgetExhausted")
    behave(world)
    world.run(130)
    before = counted(world)

    world.restart_operator()
    world.traffic.rate = 0.0
    world.run(300)

    assert condition(world).reason == "ErrorBudgetExhausted"
    assert counted(world) == before
    world.service = edited(world.service, runtime=NEW)
    world.run(60)
    assert "exhausted error budget" in world.condition("Reconciling").message


@pytest.mark.capability("OB-6")
def test_a_lost_status_write_loses_no_request_and_counts_none_twice():
    world = a_world(rate=2.0)
    world.run(300)
    world.lose_status_writes = True
    world.run(200)
    world.lose_status_writes = False
    world.run(400)
    world.traffic.rate = 0.0
    world.run(3700)  # what is left is written after an hour at the latest

    answered = sum(one.requests for _at, revision, one in world.traffic._answered if revision)
    assert answered - 4 <= counted(world).requests <= answered, "but for those before the first start was complete"


@pytest.mark.capability("OB-6")
def test_steady_traffic_causes_few_writes_and_none_when_it_ends():
    world = a_world(rate=2.0)
    world.run(600)
    world.writes = 0
    world.run(1800)
    assert world.writes <= 15, "the counts of a day grow by a tenth ever less often"
    world.traffic.rate = 0.0
    world.run(4000)
    world.writes = 0
    world.run(3600)
    assert world.writes == 0


def test_a_level_that_hovers_around_its_limit_does_not_flap():
    world = a_world(rate=4.0, slo={"ttftP95Seconds": "1.0"})
    rich(world)
    changes, was = 0, condition(world).reason
    for minute in range(40):
        # 4 to 7 percent of the streams are late, minute by minute.
        behave(world, ttft=0.51 if minute % 3 else 0.2)
        world.run(60)
        changes, was = changes + (condition(world).reason != was), condition(world).reason

    assert changes <= 3


@pytest.mark.capability("OB-6")
def test_without_objectives_nothing_is_said():
    world = a_world(slo=None)
    world.run(100)

    assert world.service.status.slo is None
    assert condition(world) is None


@pytest.mark.capability("OB-6")
def test_removed_objectives_take_their_status_and_their_pause_with_them():
    world = a_world()
    behave(world, errors=0.2)
    until(world, lambda: condition(world).reason == "ErrorBudgetExhausted")
    world.service = edited(world.service, slo=None, runtime=NEW)
    world.run(1)
    until(world, lambda: world.service.status.current_revision == world.service.status.update_revision)

    assert world.service.status.slo is None
    assert condition(world) is None


@pytest.mark.capability("CO-1")
def test_cost_follows_the_tokens_and_outlives_the_operator():
    price = {"gpuHourCost": "2.00"}
    world = a_world(slo=None, resources={"gpu": {"count": 1}}, budget=price)  # 10 requests/s of 11 tokens: 110 tokens/s
    world.run(1800)

    cost = world.service.status.cost
    assert (cost.gpus, cost.currency) == (2, "USD")
    assert float(cost.per_hour) == 4.0
    assert float(cost.per_million_output_tokens) == pytest.approx(4.0 / (110 * 3600) * 1e6, rel=0.1)

    world.restart_operator()
    world.traffic.rate = 0.0
    world.run(600)
    assert world.service.status.cost == cost, "what was measured last stays"
