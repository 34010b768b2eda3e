"""Whatever happens during a canary or a blue-green rollout, in whatever order: it breaks no law, and comes to an end.

The laws hold at every pass: never above desired + maxSurge with those that drain, no ready replica asked to go that is
needed, weights make 100, nothing for a revision without ready replicas while another may serve, nothing ever again for
a revision that failed.
"""

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from slipway_api import names
from slipway_operator.core.service.plan import plan
from tests.builders import a_service, edited
from tests.operator.core.simulated_cluster import SimulatedCluster
from tests.operator.core.simulated_traffic import Behaviour, SimulatedTraffic
from tests.operator.core.test_properties import FAULTS, NUMBERS, STARTUP, calm_down, happen

LIVES = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
STEPS = [
    {"mirrorPercent": 5},
    {"setWeight": 20},
    {"pauseSeconds": 15},
    {"setWeight": 60},
    {"analyze": {}},
    {"setWeight": 100},
]
ANALYSIS = {"intervalSeconds": 5, "minRequests": 20, "failureLimit": 1}
BEHAVIOURS = (Behaviour(), Behaviour(), Behaviour(errors=0.5), Behaviour(ttft=2.0))

EVENTS = st.one_of(
    st.tuples(st.just("wait"), st.integers(1, 60)),
    st.tuples(st.just("edit"), st.integers(0, 3)),
    st.tuples(st.just("promote"), NUMBERS),
    st.tuples(st.just("abort"), NUMBERS),
    st.tuples(st.just("roll back to"), NUMBERS),
    st.tuples(st.just("forget annotations"), NUMBERS),
    st.tuples(st.just("pause"), st.integers(0, 1)),
    st.tuples(st.just("delete a record"), NUMBERS),
    st.tuples(st.just("scale"), st.integers(1, 5)),
    st.tuples(st.just("traffic"), st.sampled_from([0, 1, 30])),
    st.tuples(st.just("kill operator"), st.integers(0, 4)),
    st.tuples(st.just("lose status"), st.integers(1, 3)),
    st.tuples(st.just("caches lag"), st.integers(0, 4)),
    st.tuples(FAULTS, NUMBERS),
)


def rollout(strategy, surge, unavailable):
    limits = {"maxSurge": surge, "maxUnavailable": unavailable}
    fields = {"strategy": strategy, "rollingUpdate": limits}
    if strategy == "Canary":
        fields["canary"] = {"steps": STEPS, "analysis": ANALYSIS}
    return fields


def make(strategy, replicas, surge, unavailable):
    service = a_service(
        finalizers=(),
        replicas=replicas,
        rollout=rollout(strategy, surge, unavailable),
        drain={"timeoutSeconds": 20, "endpointPropagationSeconds": 2},
        runtime=STARTUP,
    )
    world = SimulatedCluster(service, load_seconds=4)
    world.traffic = SimulatedTraffic(30)
    world.reconcile()
    world.run(15)
    return world


def annotate(world, key, value):
    annotations = dict(world.service.metadata.annotations)
    annotations[key] = value
    world.service = world.service.model_copy(
        update={"metadata": world.service.metadata.model_copy(update={"annotations": annotations})}
    )


def live(world, kind, number):
    """One event of a life; those that are not about the rollout are the common ones."""
    status = world.service.status
    match kind:
        case "edit":
            runtime = STARTUP | ({"maxModelLen": 100 * number} if number else {})
            world.service = edited(world.service, runtime=runtime)
            world.run(1)
            revision = world.service.status.update_revision
            world.traffic.behaviours.setdefault(revision, BEHAVIOURS[number])
        case "promote":
            annotate(world, names.ANNOTATION_PROMOTE, status.update_revision)
        case "abort":
            annotate(world, names.ANNOTATION_ABORT, status.update_revision)
        case "roll back to":
            annotate(world, names.ANNOTATION_ROLLBACK_TO, status.revisions[number % len(status.revisions)].hash)
        case "forget annotations":
            forget(world)
        case "pause":
            world.service = edited(
                world.service, rollout=world.service.spec.rollout.to_json() | {"paused": bool(number)}
            )
        case "delete a record":
            world.delete_record(number)
        case "scale":
            world.service = edited(world.service, replicas=number)
        case "traffic":
            world.traffic.rate = number
        case _:
            happen(world, kind, number)
            return
    world.tick()


def forget(world):
    metadata = world.service.metadata.model_copy(update={"annotations": {}})
    world.service = world.service.model_copy(update={"metadata": metadata})


def assert_ended(world):
    """Either the spec's revision serves alone, or it has failed and the one before does."""
    status = world.service.status
    expected = status.current_revision
    assert expected == status.update_revision or status.failed_revision == status.update_revision, world.log[-30:]
    assert {pod.replica.revision for pod in world.pods.values()} == {expected}, world.log[-30:]
    assert len(world.pods) == len(world.ready) == world.desired
    assert {one.hash: one.weight for one in status.revisions if one.weight} == {expected: 100}
    assert world.condition("Reconciling") is None
    made = plan(world.observed(), world.now)
    assert made.actions == ()
    assert made.status == status, "a plan at rest writes nothing"


def end(world):
    """The faults stop, nobody holds the rollout, and there are enough requests for every verdict."""
    forget(world)
    world.service = edited(world.service, rollout=world.service.spec.rollout.to_json() | {"paused": False})
    world.traffic.rate = 60
    world.restore_records()
    calm_down(world)
    world.run(300)


@pytest.mark.capability("EV-1", "EV-2", "EV-3", "OP-7")
@LIVES
@example(replicas=1, limits=(1, 0), life=[("edit", 1), ("wait", 30), ("vanish", 0), ("wait", 10)])
@example(replicas=2, limits=(1, 0), life=[("suspend", 0), ("edit", 1)])
@example(replicas=3, limits=(1, 0), life=[("edit", 2), ("wait", 20), ("kill operator", 1), ("edit", 3), ("wait", 9)])
@given(
    replicas=st.integers(1, 4),
    limits=st.sampled_from([(1, 0), (2, 0), (1, 1)]),
    life=st.lists(EVENTS, min_size=1, max_size=10),
)
def test_no_life_of_a_canary_breaks_a_law_and_each_comes_to_an_end(replicas, limits, life):
    world = make("Canary", replicas, *limits)
    for kind, number in life:
        live(world, kind, number)
    end(world)
    assert_ended(world)


@pytest.mark.capability("EV-5", "OP-7")
@LIVES
@example(strategy="BlueGreen", replicas=2, life=[("suspend", 0), ("edit", 1)])
@given(
    strategy=st.sampled_from(["BlueGreen", "Recreate", "RollingUpdate"]),
    replicas=st.integers(1, 3),
    life=st.lists(EVENTS, min_size=1, max_size=8),
)
def test_no_life_of_another_strategy_breaks_a_law_and_each_comes_to_an_end(strategy, replicas, life):
    world = make(strategy, replicas, 5 if strategy == "BlueGreen" else 1, 0)
    for kind, number in life:
        live(world, kind, number)
    end(world)
    assert_ended(world)
