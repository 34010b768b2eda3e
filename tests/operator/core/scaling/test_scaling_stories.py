"""A whole service that scales by its load, in virtual time: decision, pods, drain and what status tells of it."""

import pytest

from slipway_api.conditions import ConditionStatus
from slipway_operator.core.observed import Failure
from tests.builders import a_service, edited, minutes
from tests.operator.core.simulated_cluster import SimulatedCluster

DEMO = {
    "maxReplicas": 3,
    "behavior": {"scaleDown": {"stabilizationWindowSeconds": 20, "maxPods": 1, "periodSeconds": 10}},
}


def shared(*, kv=0.0, running=0, waiting=0):
    """Load that is spread over whoever is ready; a draining replica keeps only what it has."""

    def load(world):
        takers = world.ready
        for position, pod in enumerate(takers):
            pod.kv = min(1.0, kv / len(takers))
            pod.running = running // len(takers) + (position < running % len(takers))
            pod.waiting = waiting // len(takers)

    return load


def fleet(**autoscaling):
    world = SimulatedCluster(a_service(autoscaling={**DEMO, **autoscaling}))
    world.reconcile()
    world.run(30)
    assert len(world.ready) == 1
    return world


@pytest.mark.capability("AS-1", "AS-6")
def test_scales_out_under_load_and_back_in_with_a_drain():
    world = fleet()
    world.load = shared(kv=2.2, running=12, waiting=6)
    world.run(60)
    assert len(world.ready) == 3
    world.load = shared(running=2)
    world.run(120)
    assert len(world.ready) == len(world.pods) == 1
    reasons = world.event_reasons()
    assert (reasons.count("ScaledDown"), reasons.count("ReplicaDraining"), reasons.count("ReplicaDrained")) == (2, 2, 2)
    assert "DrainTimedOut" not in reasons
    scaled_up = next(event for event in world.events if event.reason == "ScaledUp")
    assert scaled_up.message.startswith("1→3: ")
    assert "QueueDepth 6.00 > 2.00 (1/1 pod" in scaled_up.message

    history = world.service.status.autoscaling.history
    assert [(change.from_, change.to) for change in history] == [(2, 1), (3, 2), (1, 3)]
    assert history[-1].reason == scaled_up.message
    assert world.condition("ScalingActive").message == history[0].reason


@pytest.mark.capability("AS-6")
def test_the_replica_with_the_fewest_streams_is_the_one_to_go():
    world = fleet()
    world.load = shared(kv=2.2, waiting=6)
    world.run(60)
    quiet = sorted(world.pods)[0]

    def load(world):
        for name, pod in world.pods.items():
            if pod.is_live:
                pod.kv, pod.waiting, pod.running = 0.5, 0, 1 if name == quiet else 5

    world.load = load
    while not any(pod.drains for pod in world.pods.values()):
        world.tick()
    (victim,) = [name for name, pod in world.pods.items() if pod.drains]
    assert victim == quiet


@pytest.mark.capability("AS-3")
def test_slow_replicas_are_waited_for():
    world = fleet(maxReplicas=10)
    world.load_seconds = 300
    world.load = shared(kv=1.5)
    world.run(200)
    assert world.desired == 2
    assert world.event_reasons().count("ScaledUp") == 1


@pytest.mark.capability("AS-4")
def test_a_metrics_outage_holds_the_number_and_says_so_and_ends_by_itself():
    world = fleet()
    world.load = shared(kv=2.2, running=3)
    world.run(60)
    assert world.desired == 3
    for pod in world.pods.values():
        pod.answers = False
    world.load = shared()
    world.run(600)
    active = world.condition("ScalingActive")
    assert (active.status, active.reason) == (ConditionStatus.FALSE, "MetricsMissing")
    assert world.desired == 3
    assert world.event_reasons().count("ScalingHeld") == 1
    for pod in world.pods.values():
        pod.answers = True
    world.run(20)
    assert world.condition("ScalingActive").status is ConditionStatus.TRUE


@pytest.mark.capability("AS-4")
def test_one_silent_replica_is_told_and_stops_nothing():
    world = fleet()
    world.load = shared(kv=2.2, waiting=6)
    world.run(60)
    next(iter(world.pods.values())).answers = False
    world.run(40)
    active = world.condition("ScalingActive")
    assert active.reason in ("MetricsStale", "LimitedByMax")
    world.load = shared()
    world.run(120)
    assert world.desired < 3


def test_without_free_gpus_it_stops_asking_for_more():
    world = SimulatedCluster(a_service(autoscaling={"maxReplicas": 10}), gpus=2)
    world.reconcile()
    world.run(30)
    world.load = shared(kv=9, waiting=200)
    world.run(120)
    assert world.desired == 3
    assert len(world.pods) == 3
    assert world.condition("ScalingActive").reason == "LimitedByCapacity"
    assert "Insufficient nvidia.com/gpu" in world.condition("ScalingActive").message
    assert world.condition("Ready").reason == "Degraded"


@pytest.mark.capability("AS-2")
def test_a_new_operator_every_minute_neither_flaps_nor_gives_up_early():
    world = fleet(behavior={"scaleDown": {"stabilizationWindowSeconds": 90, "maxPods": 1, "periodSeconds": 10}})
    world.load = shared(kv=2.2, waiting=6)
    world.run(60)
    world.load = shared()
    for _ in range(5):
        world.run(60)
        world.restart_operator()
    assert world.desired == 3
    world.run(200)
    assert world.desired == 1


@pytest.mark.capability("AS-4")
@pytest.mark.parametrize("first_answer", [1, 5, 9])
def test_a_change_of_leader_causes_no_warning_and_no_change_of_a_condition(first_answer):
    """C5: the new leader called replicas silent that it had not asked yet: ScalingHeld, MetricsStale."""
    world = fleet()
    world.load = shared(kv=1.2, running=4)
    world.run(60)
    told, conditions = len(world.events), world.service.status.conditions
    for _ in range(3):
        world.restart_operator()
        for pod in world.pods.values():
            pod.answers = False
        world.reconcile()
        world.run(first_answer)
        for pod in world.pods.values():
            pod.answers = True
        world.run(30)
    assert [event.reason for event in world.events[told:]] == []
    assert world.service.status.conditions == conditions


@pytest.mark.capability("AS-4")
def test_replicas_that_never_answer_the_new_leader_are_called_silent_after_a_while():
    """C5: the patience ends; a replica that had the time to answer is silent."""
    world = fleet()
    world.restart_operator()
    for pod in world.pods.values():
        pod.answers = False
    world.run(30)
    assert world.condition("ScalingActive").reason == "MetricsMissing"
    assert world.event_reasons().count("ScalingHeld") == 1


@pytest.mark.capability("AS-2")
def test_after_a_fail_over_one_whole_window_passes_before_a_scale_down():
    """The number in status counts as recommended now, however long the load has been low."""
    world = fleet(behavior={"scaleDown": {"stabilizationWindowSeconds": 90, "maxPods": 1, "periodSeconds": 10}})
    world.load = shared(kv=2.2, waiting=6)
    world.run(60)
    world.load = shared()
    world.run(80)
    history = world.service.status.autoscaling.history
    world.restart_operator()
    taken_over = world.now
    while world.desired == 3:
        world.tick()
    waited = (world.now - taken_over).total_seconds()
    assert 90 <= waited <= 100
    assert world.service.status.autoscaling.history[1:] == history, "what was decided before is known to the new one"


def test_external_mode_follows_the_number_that_others_write():
    world = SimulatedCluster(a_service(replicas=2, autoscaling={"mode": "External", "maxReplicas": 5}))
    world.reconcile()
    world.run(30)
    assert len(world.ready) == 2
    assert world.condition("ScalingActive").reason == "External"
    world.service = edited(world.service, replicas=4)
    world.run(40)
    assert len(world.ready) == 4


@pytest.mark.capability("AS-1")
def test_scaling_and_rolling_out_at_once_end_where_both_want():
    world = fleet()
    world.load = shared(kv=2.2, waiting=6)
    world.run(10)
    world.service = edited(world.service, runtime={"maxModelLen": 100})
    world.run(300)
    assert len(world.ready) == 3
    assert {pod.replica.revision for pod in world.pods.values()} == {world.service.status.update_revision}


def test_steady_load_causes_a_write_a_minute_at_most():
    world = fleet()
    world.load = shared(kv=1.2, running=5)
    world.run(120)
    world.writes = 0

    def wobbling(world):
        shared(kv=1.2 + 0.4 * (world.now.second % 2), running=5)(world)

    world.load = wobbling
    world.run(minutes(10).total_seconds())
    assert world.desired == 2
    assert world.writes <= 10


@pytest.mark.capability("AS-7")
def test_a_quota_ends_growth_says_so_and_growth_goes_on_when_it_is_raised():
    """A refused pod is the same as one without a node: no further one is asked for until it is placed."""
    world = SimulatedCluster(a_service(autoscaling={"maxReplicas": 10}))
    quota = 2

    def refuse(world):
        missing = world.desired > quota and len(world.live) <= quota
        message = 'pods "chat" is forbidden: exceeded quota: gpus, requested: 1, used: 2, limited: 2'
        refusal = Failure(action="CreatePod chat", reason="Forbidden", message=message, at=world.now)
        world.failures = (refusal,) if missing else ()

    def admits_pod(world):
        if len(world.live) < quota:
            return True
        refuse(world)
        return False

    world.admits_pod = admits_pod
    world.reconcile()
    world.run(30)
    world.load = lambda world: (shared(kv=9, waiting=200)(world), refuse(world))
    world.run(300)

    assert (world.desired, len(world.pods)) == (3, 2)
    active = world.condition("ScalingActive")
    assert active.reason == "LimitedByCapacity"
    assert "exceeded quota" in active.message
    assert world.event_reasons().count("ScalingLimited") == 1
    quota = 20
    world.run(200)
    assert len(world.ready) > 3


@pytest.mark.capability("AS-7")
def test_a_restart_of_the_operator_without_free_gpus_asks_for_no_more():
    world = SimulatedCluster(a_service(autoscaling={"maxReplicas": 10}), gpus=2)
    world.reconcile()
    world.run(30)
    world.load = shared(kv=9, waiting=200)
    for _ in range(5):
        world.run(120)
        world.restart_operator()
    assert (world.desired, len(world.pods)) == (3, 3)


@pytest.mark.capability("AS-7")
def test_growth_goes_on_when_there_is_room_again():
    world = SimulatedCluster(a_service(autoscaling={"maxReplicas": 5}), gpus=2)
    world.reconcile()
    world.run(30)
    world.load = shared(kv=9, waiting=200)
    world.run(120)
    assert world.desired == 3
    world.gpus = 10
    world.run(200)
    assert len(world.ready) == 5
    assert world.condition("ScalingActive").reason == "LimitedByMax"


@pytest.mark.capability("AS-1")
def test_running_requests_are_a_metric_for_those_who_know_what_a_replica_can_do():
    world = fleet(metrics=[{"type": "RunningRequests", "target": "10"}])
    world.load = shared(running=28)
    world.run(90)
    assert len(world.ready) == 3
    assert world.service.status.autoscaling.history[0].reason.startswith("1→3: RunningRequests 28.00 > 10.00 (1/1 pod")
    world.load = shared(running=8)
    world.run(200)
    assert len(world.ready) == 1


@pytest.mark.capability("AS-11")
def test_a_schedule_raises_the_number_at_its_start_and_gives_it_back_by_the_rules():
    """Up at once, because the hour is known; down with the window and the rates of every scale-down."""
    peak = {"name": "peak", "timeZone": "UTC", "start": "30 12 * * *", "durationSeconds": 1800, "minReplicas": 3}
    world = fleet(schedules=[peak])
    world.skip(29 * 60 + 20)
    assert world.desired == 1
    world.run(20)
    assert world.desired == 3
    (event,) = [one for one in world.events if one.reason == "ScaledUp"]
    assert event.message == "1→3: minReplicas 3 of schedule peak, maxReplicas 3, and it was 1"
    assert world.service.status.autoscaling.active_schedule == "peak"
    world.skip(29 * 60)
    assert len(world.ready) == 3
    ends = world.now
    while world.desired > 1:
        world.tick()
    # 50 s until the end, the window of 20 s since the last pass before it (15 s at most), and 10 s between two steps.
    assert 50 + 20 - 15 + 10 <= (world.now - ends).total_seconds() <= 120
    assert world.event_reasons().count("ScaledDown") == 2
    assert world.service.status.autoscaling.active_schedule == ""


@pytest.mark.capability("AS-11")
def test_a_new_leader_in_the_middle_of_a_schedule_changes_nothing():
    noon = {"name": "noon", "start": "0 12 * * *", "durationSeconds": 3600, "minReplicas": 2}
    world = SimulatedCluster(a_service(autoscaling={"maxReplicas": 5, "schedules": [noon]}))
    world.reconcile()
    world.run(60)
    status = world.service.status
    for _ in range(3):
        world.restart_operator()
        world.run(60)
    assert world.service.status == status
