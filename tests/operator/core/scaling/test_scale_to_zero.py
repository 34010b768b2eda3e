"""To zero replicas and back: single decisions on what gateways and replicas say, and stories in virtual time."""

from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipway_api.autoscaling import ScaleToZero
from slipway_api.conditions import ConditionStatus
from slipway_operator.core.health import Member, Stage
from slipway_operator.core.observed import Demand, ScalingMemory
from slipway_operator.core.scaling.autoscaling import Past, Recommendation
from slipway_operator.core.scaling.signals import Readings
from slipway_operator.core.scaling.zero import UNHEARD_AFTER, down_to_zero, remember
from slipway_operator.core.service.plan import plan
from tests.builders import T0, a_pod, a_service, edited, minutes, promised, seconds, seen
from tests.operator.core.scaling.gateways import Gateways
from tests.operator.core.scaling.test_autoscaling import pods
from tests.operator.core.simulated_cluster import SimulatedCluster

IDLE = 120
ZERO = {"minReplicas": 0, "maxReplicas": 3, "scaleToZero": {"idleSeconds": IDLE}}


def a_zero_service(**autoscaling):
    return a_service(autoscaling={**ZERO, **autoscaling})


def a_world(*, patience=600, most=1000, load_seconds=20, **autoscaling) -> tuple[SimulatedCluster, Gateways]:
    """A service that has started once, with gateways that report."""
    world = SimulatedCluster(a_zero_service(**autoscaling))
    gateways = Gateways(patience=patience, most=most).attach(world)
    world.reconcile()
    world.run(30)
    assert len(world.ready) == 1
    world.load_seconds = load_seconds
    return world, gateways


def asleep(**options) -> tuple[SimulatedCluster, Gateways]:
    """The same service after it was scaled to zero."""
    world, gateways = a_world(**options)
    world.run(IDLE + 60)
    assert (world.desired, world.pods) == (0, {})
    return world, gateways


# --- one decision ---------------------------------------------------------------------------------------------------


def idle(**facts) -> Demand:
    return Demand(**{"at": T0, "idle_since": T0 - minutes(60), **facts})


IDLE_POD = Readings(metered=pods(1))
LONG_READY = (Member(a_pod("old").ready(T0 - minutes(90)).replica, Stage.READY),)
LONG_QUIET = ScalingMemory(quiet_since=T0 - minutes(60))


def decided(demand, *, readings=IDLE_POD, memory=LONG_QUIET, members=LONG_READY) -> Recommendation:
    remembered = remember(demand, members, memory, T0)
    metrics = Recommendation(desired=1, reason="holding 1", recommended=1)
    return down_to_zero(ScaleToZero(idle_seconds=IDLE), metrics, readings, Past(current=1), remembered, T0)


@pytest.mark.capability("AS-9")
@pytest.mark.parametrize(
    ("demand", "facts", "desired"),
    [
        (idle(), {}, 0),
        (idle(idle_since=None), {}, 0),
        (idle(idle_since=T0 - seconds(IDLE)), {}, 0),
        (idle(idle_since=T0 - seconds(IDLE - 1)), {}, 1),
        (idle(open_requests=1), {}, 1),
        (idle(waiting_requests=1), {}, 1),
        (idle(complete=False), {}, 1),
        (idle(at=T0 - minutes(5)), {}, 1),
        (None, {}, 1),
        (idle(), {"memory": ScalingMemory()}, 1),
        (idle(), {"memory": ScalingMemory(quiet_since=T0 - seconds(IDLE - 1))}, 1),
        (idle(), {"readings": Readings(metered=pods(1, running=1))}, 1),
        (idle(), {"readings": Readings(metered=pods(1, waiting=1))}, 1),
        (idle(), {"readings": Readings(metered=pods(1), silent=1)}, 1),
        (idle(), {"readings": Readings(metered=pods(1), unasked=1)}, 1),
        (idle(), {"readings": Readings(), "members": ()}, 1),
        (idle(), {"members": (Member(a_pod("old").ready(T0 - seconds(60)).replica, Stage.READY),)}, 1),
    ],
    ids=[
        "idle for long enough, on all sides",
        "no gateway has seen a request since its start, and this leader none for long enough",
        "idle for exactly as long",
        "a second too short",
        "a request runs",
        "a request waits",
        "one gateway does not report",
        "the reports are old",
        "no gateway reports",
        "this leader knows nothing of the time before",
        "this leader has not watched for long enough",
        "a replica runs a request that no gateway knows of",
        "a replica has one in its queue",
        "a replica does not answer",
        "a replica was not asked yet",
        "none is ready",
        "the only replica is ready for less long",
    ],
)
def test_the_last_replica_goes_only_on_complete_evidence(demand, facts, desired):
    assert decided(demand, **facts).desired == desired


@pytest.mark.capability("AS-9")
def test_the_sentence_has_the_evidence():
    assert decided(idle()).reason == (
        "1→0: no request at the gateways since 11:00:00 UTC, 120s ago or more, and none at 1 of 1 pod"
    )


@pytest.mark.capability("AS-9")
def test_the_wait_for_idleness_has_an_end_that_the_plan_asks_for():
    answer = decided(idle(idle_since=T0 - seconds(100)))

    assert (answer.desired, answer.again_at) == (1, T0 + seconds(IDLE - 100))


@pytest.mark.capability("AS-9", "RG-7")
def test_one_waiting_request_starts_a_replica_at_once():
    """No window, no tolerance and no rate: the first pass that sees it decides."""
    service = promised(a_zero_service(), 0)
    demand = Demand(at=T0, waiting_requests=3, longest_wait=seconds(2))

    made = plan(seen(service, demand=demand), T0)

    (event,) = [one for one in made.events if one.reason == "Activated"]
    assert event.message == "0→1: 3 requests wait at the gateways, the first for 2s"
    assert made.status.desired_replicas == 1
    assert made.requeue_after == 0.0, "the pod is created in the pass after this one"


@pytest.mark.capability("AS-9")
def test_a_late_report_still_starts_a_replica():
    """Incomplete evidence ends nothing, but it is enough to begin."""
    service = promised(a_zero_service(), 0)
    demand = Demand(at=T0 - minutes(10), waiting_requests=1, complete=False)

    assert plan(seen(service, demand=demand), T0).status.desired_replicas == 1


DEMANDS = st.builds(
    Demand,
    at=st.integers(-300, 300).map(lambda age: T0 - seconds(age)),
    waiting_requests=st.sampled_from([0, 0, 0, 5]),
    open_requests=st.sampled_from([0, 0, 0, 5]),
    idle_since=st.none() | st.integers(-300, 7200).map(lambda age: T0 - seconds(age)),
    complete=st.booleans(),
)


@pytest.mark.capability("AS-9")
@settings(max_examples=300)
@given(
    demand=st.none() | DEMANDS,
    running=st.integers(0, 2),
    silent=st.integers(0, 1),
    quiet=st.none() | st.integers(-300, 7200),
)
def test_never_to_zero_with_demand_or_with_a_silent_gateway(demand, running, silent, quiet):
    memory = ScalingMemory(quiet_since=None if quiet is None else T0 - seconds(quiet))
    readings = Readings(metered=pods(1, running=running), silent=silent)

    answer = decided(demand, readings=readings, memory=memory)

    if answer.desired == 0:
        assert demand is not None
        assert demand.complete
        assert demand.waiting_requests == demand.open_requests == running == silent == 0
        assert quiet is not None
        assert quiet >= IDLE
        assert demand.idle_since is None or T0 - demand.idle_since >= seconds(IDLE)
    assert answer.again_at is None or answer.again_at > T0


# --- stories --------------------------------------------------------------------------------------------------------


@pytest.mark.capability("AS-9", "RG-7")
def test_to_zero_after_idleness_and_back_with_the_first_request():
    world, gateways = asleep()
    reasons = world.event_reasons()
    assert (reasons.count("ScaledToZero"), reasons.count("ReplicaDrained")) == (1, 1)
    ready = world.condition("Ready")
    assert (ready.status, ready.reason) == (ConditionStatus.TRUE, "ScaledToZero")
    assert world.condition("WorkloadAvailable").status is ConditionStatus.TRUE
    assert world.condition("ScalingActive").reason == "MetricsFresh"
    assert world.condition("Stalled") is None
    route = world.condition("RouteReady")
    assert (route.status, route.reason) == (ConditionStatus.TRUE, "Routed"), "the gateway holds what comes"

    gateways.send(world)
    world.tick()
    assert (world.desired, len(world.pods)) == (1, 1)
    world.run(30)
    assert (len(world.ready), gateways.waiting) == (1, [])
    assert world.event_reasons().count("Activated") == 1
    history = world.service.status.autoscaling.history
    assert [(one.from_, one.to) for one in history] == [(0, 1), (1, 0)]

    gateways.finish(world)
    finished = world.now
    while world.desired:
        world.tick()
    assert seconds(IDLE) <= world.now - finished <= seconds(IDLE + 15)


@pytest.mark.capability("AS-9")
def test_a_service_at_zero_causes_no_write_and_has_its_children():
    world, _ = asleep()
    world.writes = 0

    world.run(1800)

    assert world.writes == 0
    assert {key.split("/")[0] for key in world.applied} >= {"Service", "PodDisruptionBudget"}


@pytest.mark.capability("AS-9")
def test_several_replicas_go_to_zero_one_after_the_other():
    world, gateways = a_world(behavior={"scaleDown": {"stabilizationWindowSeconds": 3600}})
    gateways.send(world, 200)
    for pod in world.ready:
        pod.waiting = 50
    world.load = lambda world: [setattr(pod, "waiting", 20) for pod in world.ready]
    world.run(60)
    assert len(world.ready) == 3
    world.load = gateways.step
    for pod in world.ready:
        pod.waiting = 0
    gateways.finish(world)
    world.run(IDLE + 60)
    assert (world.desired, world.pods) == (0, {})
    assert world.event_reasons().count("ScaledToZero") == 1


@pytest.mark.capability("AS-9")
def test_without_gateways_it_keeps_a_replica_and_says_why():
    world = SimulatedCluster(a_zero_service())
    world.reconcile()
    world.run(IDLE * 10)

    assert len(world.ready) == 1
    active = world.condition("ScalingActive")
    assert (active.status, active.reason) == (ConditionStatus.TRUE, "MetricsStale")
    assert active.message.startswith("gateways do not report what they hold: not scaled to zero")
    assert world.event_reasons().count("MetricsStale") == 1


@pytest.mark.capability("AS-9")
def test_one_silent_gateway_keeps_the_replica_for_as_long_as_it_is_silent():
    world, gateways = a_world()
    gateways.is_partial = True
    world.run(IDLE * 5)
    assert world.desired == 1
    gateways.is_partial = False
    world.run(IDLE)
    assert world.desired == 0


@pytest.mark.capability("AS-9")
def test_at_zero_the_silence_of_all_gateways_is_told_and_ends():
    world, gateways = asleep()
    gateways.is_silent = True
    world.run(UNHEARD_AFTER.total_seconds() + 20)
    active = world.condition("ScalingActive")
    assert (active.status, active.reason, world.desired) == (ConditionStatus.FALSE, "MetricsMissing", 0)
    gateways.is_silent = False
    world.reconcile()  # as the gateways' input does when it hears of the service
    assert world.condition("ScalingActive").reason == "MetricsFresh"


@pytest.mark.capability("AS-9", "AS-2")
def test_a_new_leader_counts_idleness_from_what_it_has_seen_itself():
    world, _ = a_world()
    world.run(IDLE - 40)
    world.restart_operator()
    taken_over = world.now
    while world.desired:
        world.tick()
    assert world.now - taken_over >= seconds(IDLE)


@pytest.mark.capability("AS-9")
def test_a_new_leader_finds_a_service_at_zero_and_leaves_it_there():
    world, gateways = asleep()
    told, conditions = len(world.events), world.service.status.conditions
    gateways.is_silent = True
    world.restart_operator()
    world.run(20)  # until the gateways were asked
    gateways.is_silent = False
    world.run(600)

    assert (world.desired, world.pods) == (0, {})
    assert world.events[told:] == []
    assert world.service.status.conditions == conditions


@pytest.mark.capability("AS-9", "RG-7")
def test_requests_that_give_up_during_a_slow_start_are_told_once():
    world, gateways = asleep(patience=40, load_seconds=300)
    gateways.send(world, 12)
    world.run(100)

    (event,) = [one for one in world.events if one.reason == "ActivationTimedOut"]
    assert event.message.startswith("12 requests waited for the first replica since 12:0")
    world.run(300)
    assert world.event_reasons().count("ActivationTimedOut") == 1
    assert len(world.ready) == 1, "the start goes on: the next request is served"


@pytest.mark.capability("AS-9", "RG-7")
def test_requests_beyond_the_bounds_are_told_with_their_number_and_the_limit():
    activation = {"maxQueuedRequests": 10}
    world, gateways = asleep(most=10, load_seconds=300, scaleToZero={"idleSeconds": IDLE, "activation": activation})
    gateways.send(world, 12)
    world.run(60)
    gateways.send(world, 1)
    world.run(20)

    first, second = [one for one in world.events if one.reason == "ActivationQueueFull"]
    assert first.reason.type == "Warning"
    assert first.message == (
        "2 requests were refused while 10 wait for the first replica: each gateway holds at most 10 requests and 256Mi "
        "(scaleToZero.activation)"
    )
    assert second.message.startswith("3 requests were refused while 10 wait")

    world.run(400)
    assert len(world.ready) == 1
    assert world.event_reasons().count("ActivationQueueFull") == 2, "none once a replica is ready"


@pytest.mark.capability("AS-9", "AS-7")
def test_without_a_gpu_the_activation_says_so_and_waits():
    world, gateways = asleep()
    world.gpus = 0
    gateways.send(world)
    world.run(60)

    assert (world.desired, len(world.ready)) == (1, 0)
    assert world.condition("Ready").reason == "WaitingForGPU"
    world.gpus = 4
    world.run(60)
    assert len(world.ready) == 1


@pytest.mark.capability("AS-9")
def test_a_long_queue_at_the_gateways_does_not_count_twice_when_the_first_replica_takes_it():
    """The last report of the time without replicas says 30 wait; they are at the replica by then."""
    world, gateways = asleep(load_seconds=5)
    gateways.send(world, 30)
    stale = gateways.report(world)
    world.demand = lambda world: stale
    world.run(30)

    assert world.desired == 1


@pytest.mark.capability("AS-9", "AS-11")
def test_an_active_schedule_keeps_replicas_and_its_end_gives_them_back():
    meals = {"name": "meals", "start": "0 12,15 * * *", "durationSeconds": 3600, "minReplicas": 2}
    world = SimulatedCluster(a_zero_service(schedules=[meals]))
    Gateways().attach(world)
    world.reconcile()
    world.run(600)  # T0 is 12:00 UTC
    assert (len(world.ready), world.service.status.autoscaling.active_schedule) == (2, "meals")

    world.skip(3600 - 600 + IDLE + 120)
    assert (world.desired, world.service.status.autoscaling.active_schedule) == (0, "")
    until = T0 + timedelta(hours=3)
    while not world.desired:
        world.skip(60)
        assert world.now <= until
    assert (world.now.hour, world.desired) == (15, 2)


@pytest.mark.capability("AS-9")
def test_without_scale_to_zero_again_a_service_at_zero_gets_its_replica():
    world, _ = asleep()
    world.service = edited(world.service, autoscaling={"maxReplicas": 3})
    world.run(40)

    assert len(world.ready) == 1


@pytest.mark.capability("AS-9")
@settings(max_examples=25)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["send", "finish", "restart", "silent", "partial", "heard", "nothing"]),
            st.sampled_from([1, 5, 20, 70, 150]),
        ),
        min_size=4,
        max_size=14,
    )
)
def test_whatever_happens_no_request_is_left_waiting_and_none_is_cut(steps):
    """Laws of the simulated cluster hold; once gateways report again, whoever waits is served."""
    world, gateways = a_world(patience=10_000)
    for what, pause in steps:
        if what == "send":
            gateways.send(world, 3)
        elif what == "finish":
            gateways.finish(world)
        elif what == "restart":
            world.restart_operator()
        else:
            gateways.is_silent, gateways.is_partial = what == "silent", what == "partial"
        for _ in range(pause):
            world.tick()
            if gateways.open:
                assert world.desired >= 1, "scaled to zero with open requests"
    gateways.is_silent = gateways.is_partial = False
    world.reconcile()
    world.run(60)
    assert not gateways.waiting
