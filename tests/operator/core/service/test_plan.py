"""Stories of whole services, in virtual time."""

import pytest

from slipway_api.conditions import ConditionStatus
from slipway_operator.core.actions import AddFinalizer, ApplyChild, CreatePod
from slipway_operator.core.service.plan import plan
from tests.builders import a_service, edited, seen
from tests.operator.core.simulated_cluster import T0, SimulatedCluster

pytestmark = pytest.mark.capability("OP-2")


def running(replicas=2, **spec):
    """A service whose replicas are all ready."""
    world = SimulatedCluster(a_service(replicas=replicas, **spec))
    world.reconcile()
    return world.run(40)


def test_first_pass_claims_the_service_and_promises_before_it_creates():
    made = plan(seen(a_service(finalizers=())), T0)

    assert isinstance(made.actions[0], AddFinalizer)
    assert not [action for action in made.actions if isinstance(action, CreatePod)]
    assert made.status.desired_replicas == 1
    assert made.status.revisions[0].image == "slipway/runtime:test"
    assert made.requeue_after == 0.0


def test_children_are_pods_a_service_and_a_disruption_budget_owned_by_the_service():
    world = SimulatedCluster(a_service())
    world.reconcile()

    assert set(world.applied) == {"Service/chat", "PodDisruptionBudget/chat"}
    assert [name.rsplit("-", 2)[1:] for name in world.pods] == [["0", "0"]]
    manifests = [a.manifest for a in plan(seen(a_service()), T0).actions if isinstance(a, ApplyChild)]
    assert all(manifest["metadata"]["ownerReferences"][0]["controller"] for manifest in manifests)


def test_says_loading_and_then_available():
    world = SimulatedCluster(a_service(replicas=2))
    world.reconcile()
    ready = world.condition("Ready")
    assert (ready.status, ready.reason) == (ConditionStatus.UNKNOWN, "Loading")
    assert world.condition("Reconciling") is not None

    world.run(40)
    ready = world.condition("Ready")
    assert (ready.status, ready.reason, ready.message) == (
        ConditionStatus.TRUE,
        "Available",
        "2 of 2 replicas are ready",
    )
    assert world.condition("Reconciling") is None
    assert world.condition("Stalled") is None
    status = world.service.status
    assert (status.replicas, status.ready_replicas, status.updated_replicas) == (2, 2, 2)
    assert status.url == "http://gateway:8000/v1"
    assert [revision.weight for revision in status.revisions] == [100]
    assert world.event_reasons() == ["ReplicaCreated"] * 2 + ["ReplicaReady"] * 2


@pytest.mark.capability("OP-7")
def test_a_fleet_at_rest_causes_no_write_and_a_new_operator_changes_nothing():
    world = running(3)
    world.writes = 0
    world.run(600)
    assert world.writes == 0

    before = {pod.replica.uid for pod in world.pods.values()}
    world.restart_operator()
    world.run(60)
    assert {pod.replica.uid for pod in world.pods.values()} == before
    assert world.writes == 2  # it applies the two other children once, to be sure


def test_a_dead_replica_is_replaced_at_its_slot_by_the_next_attempt():
    world = running(2)
    world.fail(next(name for name in world.pods if name.endswith("-1-0")), reason="Evicted")
    world.run(13)  # after the first backoff

    assert sorted(name.rsplit("-", 2)[1:] for name in world.pods)[-1] == ["1", "1"]
    assert "ReplicaReplaced" in world.event_reasons()
    world.run(60)
    assert len(world.ready) == len(world.pods) == 2


def test_a_replica_that_keeps_failing_rests_longer_each_time():
    world = running(1)
    created = []
    for _ in range(5):
        (pod,) = world.pods.values()
        world.fail(pod.replica.name)
        failed_at = world.now
        name = pod.replica.name
        while not [one for one in world.live if one.replica.name != name]:
            world.tick()
        created.append((world.now - failed_at).total_seconds())
        world.run(5)
    assert [round(pause, -1) for pause in created] == [10, 20, 40, 80, 160]


def test_failures_are_forgiven_after_ten_good_minutes():
    world = running(1)
    (name,) = world.pods
    world.fail(name)
    world.run(60)
    assert world.service.status.attempts[0].failures == 1
    world.run(700)
    assert world.service.status.attempts == ()
    assert len(world.ready) == 1


def test_a_crash_looping_replica_gets_another_try_elsewhere_and_the_service_says_why_it_is_stalled():
    world = SimulatedCluster(a_service())
    world.reconcile()
    world.run(3)
    (name,) = world.pods
    world.crash_loop(name, restarts=4)
    world.run(2)
    stalled = world.condition("Stalled")
    assert stalled.reason == "CrashLooping"
    assert f"kubectl logs -n demo {name} --previous" in stalled.message
    assert world.condition("Ready").reason == "CrashLooping"
    assert world.condition("Ready").status is ConditionStatus.FALSE

    world.crash_loop(name, restarts=5)
    world.run(60)
    (successor,) = world.pods
    assert successor.endswith("-0-1")
    assert world.condition("Ready").reason == "Available"
    assert world.condition("Stalled") is None


@pytest.mark.capability("OP-6")
def test_a_model_that_is_not_there_is_named_from_the_first_crash_on_until_a_replica_serves():
    world = SimulatedCluster(a_service())
    world.reconcile()
    world.run(3)
    (name,) = world.pods
    world.crash_loop(
        name, restarts=1, termination_message="ModelNotFound: file:///nowhere: there is no directory /nowhere"
    )
    world.run(2)
    stalled = world.condition("Stalled")
    assert (stalled.reason, stalled.message) == (
        "ModelNotFound",
        "the model cannot be found: file:///nowhere: there is no directory /nowhere; check spec.model.uri",
    )
    assert (world.condition("Ready").status, world.condition("Ready").reason) == (
        ConditionStatus.FALSE,
        "ModelNotFound",
    )

    world.crash_loop(
        name, restarts=5, termination_message="ModelNotFound: file:///nowhere: there is no directory /nowhere"
    )
    while name in world.pods or not world.pods:
        world.run(1)
        assert world.condition("Stalled") == stalled, "its successor has not looked yet"
    assert world.event_reasons().count("ModelNotFound") == 1

    world.run(60)
    assert world.condition("Ready").reason == "Available"
    assert world.condition("Stalled") is None


@pytest.mark.parametrize("change", [{"model": {"uri": "file:///models/other"}}, {"replicas": 0}])
def test_a_model_that_is_not_there_is_forgotten_when_it_is_not_asked_for_any_more(change):
    world = SimulatedCluster(a_service())
    world.reconcile()
    world.run(3)
    (name,) = world.pods
    world.crash_loop(
        name, restarts=1, termination_message="ModelNotFound: file:///nowhere: there is no directory /nowhere"
    )
    world.run(2)
    world.service = edited(world.service, **change)
    world.run(60)

    assert world.condition("Stalled") is None
    assert world.condition("Ready").status is ConditionStatus.TRUE


def test_an_image_that_cannot_be_pulled_is_for_a_person_to_fix():
    world = SimulatedCluster(a_service(runtime={"image": "nowhere/runtime:1"}))
    world.image_is_broken = True
    world.reconcile()
    world.run(5)

    assert world.condition("Stalled").reason == "ImagePullFailed"
    assert "nowhere/runtime:1" in world.condition("Stalled").message
    assert len(world.pods) == 1


def test_without_a_free_gpu_the_service_waits_and_says_for_what():
    world = SimulatedCluster(a_service(replicas=2), gpus=0)
    world.reconcile()
    world.run(5)
    ready = world.condition("Ready")
    assert (ready.status, ready.reason) == (ConditionStatus.UNKNOWN, "WaitingForGPU")
    assert "Insufficient nvidia.com/gpu" in ready.message
    assert "WaitingForGPU" in world.event_reasons()
    assert len(world.pods) == 2


def test_replaces_what_a_lost_node_took_and_lets_the_old_replica_go_once_the_new_one_serves():
    world = running(2)
    lost = world.pods[next(iter(world.pods))].replica.node
    world.lose_node(lost)
    world.run(29)
    assert len(world.pods) == 2
    world.run(60)
    assert len(world.ready) == 2
    world.run(400)  # it cannot be asked to drain: its timeout passes, then it is deleted, and hangs
    hanging = [pod for pod in world.pods.values() if pod.hangs]
    assert len(hanging) == 1
    assert hanging[0].replica.deleted_at is not None
    world.recover_node(lost)
    world.run(5)
    assert len(world.pods) == 2


def test_a_node_that_comes_back_in_time_keeps_its_replica():
    world = running(2)
    node = world.pods[next(iter(world.pods))].replica.node
    world.lose_node(node)
    world.run(20)
    world.recover_node(node)
    world.run(60)
    assert world.service.status.attempts == ()
    assert len(world.ready) == len(world.pods) == 2


def test_a_cordoned_node_is_emptied_by_surge_then_drain():
    world = running(2)
    name, pod = next(iter(world.pods.items()))
    world.cordon(pod.replica.node)
    for _ in range(80):
        world.tick()
        assert len(world.ready) >= 2 or world.pods[name].drains
        assert len(world.live) <= 3
    assert name not in world.pods
    assert len(world.ready) == len(world.pods) == 2
    assert not [one for one in world.pods.values() if one.replica.node == pod.replica.node]


def test_a_foreign_pod_with_our_name_makes_us_take_the_next_one():
    service = a_service()
    world = SimulatedCluster(service)
    world.reconcile()
    (name, pod), *_ = world.pods.items()
    from dataclasses import replace

    stranger = replace(pod.replica, owner_uid="somebody-else")
    world = SimulatedCluster(service)
    world.pods[name] = type(pod)(stranger, loads_for=0)
    world.reconcile()
    assert sorted(world.pods) == [name, name[:-1] + "1"]
    assert world.event_reasons().count("NameConflict") == 1


def test_deleting_the_service_drains_every_replica_before_it_goes():
    world = running(2)
    for pod in world.pods.values():
        pod.running = 5
    world.ask_for_deletion()
    world.reconcile()
    assert all(pod.drains for pod in world.pods.values())
    assert world.service is not None
    for _ in range(60):
        world.tick()
    assert world.service is None
    assert world.pods == {}


def test_a_deletion_does_not_hang_on_a_dead_node():
    world = running(2, drain={"timeoutSeconds": 60})
    world.lose_node(next(iter(world.pods.values())).replica.node)
    world.ask_for_deletion()
    world.run(60 + 30 + 60 + 5)
    assert world.service is None


def test_scaling_to_a_fixed_number_up_and_down():
    world = running(1)
    world.service = edited(world.service, replicas=3)
    world.run(40)
    assert len(world.ready) == 3
    for name, pod in world.pods.items():
        pod.running = 0 if name.endswith("-1-0") else 9
    world.tick()
    world.service = edited(world.service, replicas=2)
    world.run(30)
    assert sorted(name.rsplit("-", 2)[1] for name in world.pods) == ["0", "2"]
    assert "1→3: spec.replicas" in [event.message for event in world.events]
    world.service = edited(world.service, replicas=0)
    world.run(60)
    assert world.pods == {}
    assert world.condition("Ready").reason == "ScaledToZero"


@pytest.mark.capability("OP-7")
def test_a_quota_stops_creation_and_is_named():
    from slipway_operator.core.observed import Failure

    world = SimulatedCluster(a_service())
    world.reconcile()
    world.pods.clear()
    message = 'pods "chat" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=1'
    world.failures = (Failure(action="CreatePod chat", reason="Forbidden", message=message, at=T0),)
    status = plan(world.observed(), T0).status
    stalled = next(one for one in status.conditions if one.type == "Stalled")
    assert stalled.reason == "QuotaExceeded"
    assert "exceeded quota: gpus" in stalled.message


@pytest.mark.capability("AS-7")
@pytest.mark.parametrize(
    ("spec", "ready", "stalls"),
    [
        ({"replicas": 2}, 1, True),
        ({"replicas": 1}, 1, False),  # a replacement beside it was refused
        ({"replicas": None, "autoscaling": {"minReplicas": 1, "maxReplicas": 3}}, 1, False),
    ],
)
def test_a_quota_is_named_beside_replicas_that_serve_while_others_of_a_fixed_number_are_missing(spec, ready, stalls):
    from slipway_operator.core.observed import Failure

    world = SimulatedCluster(a_service(replicas=ready))
    world.run(60)
    world.service = edited(world.service, **spec)
    message = 'pods "chat" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=1'
    world.failures = (Failure(action="CreatePod chat", reason="Forbidden", message=message, at=T0),)

    made = plan(world.observed(), world.now)
    conditions = {one.type: one for one in made.status.conditions}

    assert (conditions["Ready"].status, "Stalled" in conditions) == ("True", stalls)
    if stalls:
        assert conditions["Ready"].reason == "Degraded"
        assert conditions["Stalled"].reason == "QuotaExceeded"
        assert conditions["Stalled"].message == f"{message}; raise the quota or lower the number of replicas"
        assert [event.message for event in made.events if event.reason == "QuotaExceeded"] == [
            conditions["Stalled"].message
        ]
        world.failures = ()
        world.run(60)
        assert "Stalled" not in {one.type for one in world.service.status.conditions}
