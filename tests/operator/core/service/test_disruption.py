"""Cordoned nodes, evictions, notices of spot nodes, node scalers and GPU faults, as stories."""

from dataclasses import replace
from datetime import timedelta

import pytest

from slipway_api import names
from slipway_operator.core.actions import AnnotatePod, CreatePod, DeleteChild
from slipway_operator.core.node_taints import LEAVING
from slipway_operator.core.observed import Node
from slipway_operator.core.service.plan import plan
from tests.builders import T0, a_pod, a_service, edited, minutes, promised, seconds, seen
from tests.operator.core.simulated_cluster import SimulatedCluster

DRAIN = {"timeoutSeconds": 30, "endpointPropagationSeconds": 2}
SPOT = "aws-node-termination-handler/spot-itn"


def running(replicas=1, *, nodes=4, gpus=100, load_seconds=20, drain=None, **spec):
    """A service whose replicas are all ready."""
    service = a_service(replicas=replicas, drain=drain or DRAIN, **spec)
    world = SimulatedCluster(service, nodes=nodes, gpus=gpus, load_seconds=load_seconds)
    world.reconcile()
    return world.run(load_seconds + 20)


def only(world):
    (pod,) = world.ready
    return pod


# --- kubectl drain ----------------------------------------------------------------------------------------------------


@pytest.mark.capability("PL-2", "RD-5")
def test_one_replica_survives_kubectl_drain_the_eviction_waits_until_its_replacement_is_ready():
    world = running(1)
    old = only(world)
    old.running = 4
    world.cordon(old.replica.node)

    refused = 0
    while not world.evict(old.replica.name):
        refused += 1
        assert len(world.ready) >= 1, "there is always a replica that serves"
        world.tick()
    world.run(60)

    assert refused >= 20, "as long as the replacement loads"
    assert only(world).replica.node != old.replica.node
    assert old.replica.name not in world.pods
    assert "NodeDrainForced" not in world.event_reasons()


@pytest.mark.capability("PL-2")
def test_a_drain_of_a_node_is_held_up_for_at_most_max_node_drain_block_seconds():
    world = running(1, gpus=1, availability={"maxNodeDrainBlockSeconds": 300})
    old = only(world)
    world.cordon(old.replica.node)

    world.run(250)
    assert not world.evict(old.replica.name)
    world.restart_operator()  # the clock is in the pod's metadata
    world.run(60)

    assert world.event_reasons().count("NodeDrainForced") == 1
    (message,) = [one.message for one in world.events if one.reason == "NodeDrainForced"]
    assert "300s" in message
    assert world.evict(old.replica.name)
    world.run(60)
    assert only(world).replica.name != old.replica.name, "the GPU that it freed has its replacement"
    assert world.children["PodDisruptionBudget/chat"]["spec"]["minAvailable"] == 1, "evictions are limited again"


@pytest.mark.capability("PL-2")
def test_a_node_that_is_uncordoned_in_time_forces_nothing_and_leaves_no_trace():
    world = running(1, gpus=1, availability={"maxNodeDrainBlockSeconds": 300})
    world.cordon(only(world).replica.node)
    world.run(200)
    assert only(world).replica.leaving_since is not None
    world.cordon(only(world).replica.node, cordoned=False)
    world.run(200)

    assert only(world).replica.leaving_since is None
    assert "NodeDrainForced" not in world.event_reasons()
    before = world.writes
    world.run(600)
    assert world.writes == before


@pytest.mark.capability("RD-5")
def test_without_a_disruption_budget_there_is_none_and_one_that_exists_is_deleted_once():
    world = running(2)
    assert "PodDisruptionBudget/chat" in world.children
    world.service = edited(world.service, availability={"podDisruptionBudget": "None"})
    world.run(60)

    assert "PodDisruptionBudget/chat" not in world.children
    assert sum("DeleteChild" in line for line in world.log) == 1
    assert not any(isinstance(action, DeleteChild) for action in plan(world.observed(), world.now).actions)


# --- node scalers -----------------------------------------------------------------------------------------------------


@pytest.mark.capability("PL-1")
def test_node_scalers_leave_a_node_alone_while_a_replica_starts_on_it_and_no_longer():
    world = SimulatedCluster(a_service(replicas=1), load_seconds=20)
    world.reconcile()
    world.run(10)
    (pod,) = world.pods.values()
    assert (pod.replica.safe_to_evict, pod.replica.do_not_disrupt) == ("false", "true")

    world.run(20)
    assert (pod.replica.safe_to_evict, pod.replica.do_not_disrupt) == ("true", "")
    assert sum("AnnotatePod" in line for line in world.log) == 1

    world.flap(pod.replica.name, 30)  # a replica that served once is not protected again
    before = sum("AnnotatePod" in line for line in world.log)
    world.run(600)
    assert sum("AnnotatePod" in line for line in world.log) == before


@pytest.mark.capability("PL-1")
@pytest.mark.parametrize(
    "broken", [a_pod("x").cannot_pull(), a_pod("x").crashing(), a_pod("x").loading().but(scheduled_at=T0)]
)
def test_a_replica_that_cannot_start_does_not_protect_its_node(broken):
    service = promised(a_service(replicas=1, runtime={"startupTimeoutSeconds": 60}), 1)
    pod = broken.but(revision=a_pod(service=service).replica.revision).slot(0)

    (action,) = [one for one in plan(seen(service, pod), T0 + minutes(5)).actions if isinstance(one, AnnotatePod)]

    assert action.annotations == {names.ANNOTATION_SAFE_TO_EVICT: "true", names.ANNOTATION_DO_NOT_DISRUPT: None}


@pytest.mark.capability("PL-1")
def test_without_protect_startup_a_replica_never_blocks_a_node():
    world = running(1, availability={"protectStartup": False})
    (manifest,) = world.manifests.values()

    assert manifest["metadata"]["annotations"][names.ANNOTATION_SAFE_TO_EVICT] == "true"
    assert names.ANNOTATION_DO_NOT_DISRUPT not in manifest["metadata"]["annotations"]
    assert not any("AnnotatePod" in line for line in world.log)


@pytest.mark.capability("PL-1")
def test_what_the_template_says_to_a_node_scaler_is_left_as_it_is():
    mine = {names.ANNOTATION_SAFE_TO_EVICT: "false"}
    world = running(1, template={"metadata": {"annotations": mine}})

    assert only(world).replica.safe_to_evict == "false"
    assert only(world).replica.do_not_disrupt == ""


# --- notices ----------------------------------------------------------------------------------------------------------


@pytest.mark.capability("AS-12")
@pytest.mark.parametrize("taint", sorted(LEAVING))
def test_a_replica_leaves_a_node_that_a_provider_or_a_node_scaler_is_about_to_end(taint):
    world = running(2)
    node = world.ready[0].replica.node
    world.announce_end(node, taint=taint)
    world.run(100)

    assert len(world.ready) == 2
    assert node not in {pod.replica.node for pod in world.ready}


@pytest.mark.capability("AS-12")
@pytest.mark.parametrize(("load_seconds", "surge"), [(20, 1), (20, 0), (300, 1)])
def test_within_a_spot_notice_the_streams_end_and_the_replacement_starts_beside_any_surge(load_seconds, surge):
    limits = {"rollingUpdate": {"maxSurge": surge, "maxUnavailable": 1 - surge}}
    world = running(3, load_seconds=load_seconds, rollout=limits)
    old = world.ready[0]
    old.running = 5  # five streams end one every three seconds
    world.announce_end(old.replica.node, taint=SPOT)

    world.run(3)
    assert world.created == 4, "the replacement does not wait"
    for _ in range(117):
        world.tick()
        assert len(world.ready) >= 2
    assert old.replica.name not in world.pods or old.running == 0, "nothing is cut off when the machine goes"
    world.take_away(old.replica.node)
    world.run(load_seconds)
    assert len(world.ready) == 3
    assert "DrainTimedOut" not in world.event_reasons()


@pytest.mark.capability("AS-12")
def test_a_drain_that_takes_longer_than_the_notice_ends_before_the_machine_goes():
    world = running(2, drain={"timeoutSeconds": 3000, "endpointPropagationSeconds": 5}, load_seconds=20)
    old = world.ready[0]
    old.running = 900
    world.announce_end(old.replica.node, taint=SPOT)
    world.run(3)
    assert old.drains, "the notice is shorter than the drain: it begins at once"
    world.run(118)

    assert old.replica.name not in world.pods
    (message,) = [one.message for one in world.events if one.reason == "DrainTimedOut"]
    assert "timed out after 117s" in message  # 120 s without the 3 s in which clients read their error


@pytest.mark.capability("AS-12")
def test_the_last_ready_replica_serves_on_for_two_thirds_of_the_notice():
    world = running(1, drain={"timeoutSeconds": 300, "endpointPropagationSeconds": 5}, load_seconds=300)
    old = only(world)
    world.announce_end(old.replica.node, taint=SPOT)

    world.run(78)
    assert not old.drains
    world.run(5)
    assert old.drains


@pytest.mark.capability("AS-12")
def test_several_replicas_on_a_spot_node_all_leave_in_time():
    world = running(4, nodes=2)
    node = world.ready[0].replica.node
    assert sum(pod.replica.node == node for pod in world.ready) == 2
    world.announce_end(node, taint=SPOT)
    world.run(110)

    assert [pod.replica.node for pod in world.pods.values()] == [next(one for one in world.nodes if one != node)] * 4


@pytest.mark.capability("AS-12")
def test_a_node_that_is_shut_down_counts_as_lost_at_once():
    world = running(2, nodes=4)
    node = world.ready[0].replica.node
    world.faults += 1
    world.nodes[node] = replace(world.nodes[node], ready=False, not_ready_since=world.now, is_shut_down=True)
    world.run(3)

    assert world.created == 3


# --- nodes that are dead ----------------------------------------------------------------------------------------------


@pytest.mark.capability("RD-1", "OP-7")
def test_a_pod_that_stays_terminating_on_a_dead_node_is_waited_for_no_longer_than_its_grace_and_a_minute():
    world = running(1, rollout={"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}})
    old = only(world)
    world.lose_node(old.replica.node)
    world.end(old.replica.name, grace=60)  # taint eviction, five minutes later
    world.service = edited(world.service, runtime={"maxModelLen": 100})

    world.run(110)
    assert world.created == 2, "a deleted pod holds no slot: its replacement does not wait for its end"
    assert old.replica.name in world.pods
    world.ask_for_deletion()
    world.run(200)
    assert world.service is None, "nor does the deletion of the service"


# --- GPU faults -------------------------------------------------------------------------------------------------------


@pytest.mark.capability("RD-7")
def test_a_replica_whose_gpu_failed_is_replaced_and_its_successor_prefers_another_node():
    world = running(1, template={"spec": {"affinity": {"podAffinity": {"x": 1}}}})
    old = only(world)
    node = old.replica.node
    world.crash_loop(old.replica.name, restarts=1, termination_message="GPUFault: CUDA error: uncorrectable ECC error")
    world.run(120)

    new = only(world).replica.name
    assert new != old.replica.name
    affinity = world.manifests[new]["spec"]["affinity"]
    (term,) = affinity["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert term["preference"]["matchFields"] == [{"key": "metadata.name", "operator": "NotIn", "values": [node]}]
    assert affinity["podAffinity"] == {"x": 1}, "the user's own affinity stays"
    (message,) = [one.message for one in world.events if one.reason == "GPUFault"]
    assert message.endswith(f"on node {node} failed: CUDA error: uncorrectable ECC error")


@pytest.mark.capability("RD-7")
def test_the_faulty_node_is_still_avoided_when_the_next_attempt_fails_by_something_else():
    world = running(1)
    node = only(world).replica.node
    world.crash_loop(only(world).replica.name, restarts=1, termination_message="GPUFault: GPU is lost")
    world.run(120)
    world.fail(only(world).replica.name, "Evicted")
    world.run(120)

    affinity = world.manifests[only(world).replica.name]["spec"]["affinity"]["nodeAffinity"]
    assert node in str(affinity)


# --- unhealthy replicas whose replacement does not come ---------------------------------------------------------------


@pytest.mark.capability("RD-9")
def test_a_replacement_that_finds_no_node_does_not_keep_other_hung_replicas_from_being_replaced():
    world = running(3, gpus=3)
    for pod in world.ready:
        world.hang(pod.replica.name)
    world.gpus = 2  # a GPU went out of service with the first hung replica
    world.run(1500)

    assert len(world.ready) == 2, "both GPUs that are left serve again"


@pytest.mark.capability("RD-9")
def test_a_replacement_that_crashes_holds_up_the_replacement_of_other_hung_replicas():
    service = promised(a_service(replicas=2), 2, attempts=[{"revision": "x", "slot": 0, "attempt": 1, "failures": 1}])
    revision = a_pod(service=service).replica.revision
    status = service.status.model_copy(
        update={"attempts": (service.status.attempts[0].model_copy(update={"revision": revision}),)}
    )
    service = service.model_copy(update={"status": status})
    hung = a_pod(service=service).slot(1).unready(since=T0 - minutes(10)).but(created_at=T0 - minutes(60))
    crashing = a_pod(service=service).slot(0, attempt=1).crashing(restarts=2).but(scheduled_at=T0)

    made = plan(seen(service, crashing, hung), T0 + seconds(5))

    assert not any(isinstance(action, CreatePod) for action in made.actions)
    assert [one.slot for one in made.status.attempts] == [0]


def test_the_notice_counts_from_when_the_taint_was_first_seen():
    node = Node(name="node-1", cordoned=True, leaving=SPOT, notice=timedelta(seconds=120))
    service = promised(a_service(replicas=1, drain={"timeoutSeconds": 300}), 1)
    pod = a_pod(service=service).ready().says()

    first = plan(seen(service, pod, nodes=(node,)), T0)
    (action,) = [one for one in first.actions if isinstance(one, AnnotatePod)]

    assert action.annotations == {names.ANNOTATION_NODE_LEAVING_SINCE: "2026-05-01T12:00:00Z"}
