"""What fails while a service lives, as stories: probes, engines, nodes, device plugins, rollouts that cannot start."""

from dataclasses import replace

import pytest

from tests.builders import a_service, edited, minutes
from tests.operator.core.simulated_cluster import SimulatedCluster

pytestmark = pytest.mark.capability("OP-2")

BROKEN = {"image": "nowhere:1"}


def running(replicas=3, *, nodes=6, gpus=100, **spec):
    """A service whose replicas are all ready."""
    world = SimulatedCluster(a_service(replicas=replicas, **spec), nodes=nodes, gpus=gpus)
    world.reconcile()
    return world.run(40)


def start_broken_rollout(world):
    world.image_is_broken = True
    world.service = edited(world.service, runtime=BROKEN)
    return world.run(30)


@pytest.mark.capability("RD-10")
def test_a_readiness_probe_that_fails_once_during_a_rollout_drains_nothing():
    """Finding 1: the replicas are older than startupTimeout, and not ready for a second."""
    world = running(runtime={"startupTimeoutSeconds": 60})
    world.run(600)
    start_broken_rollout(world)
    originals = {pod.replica.uid for pod in world.ready}
    for name in list(world.pods):
        world.flap(name, seconds=2)
    world.run(30)
    assert {pod.replica.uid for pod in world.ready} == originals


@pytest.mark.capability("OP-13")
@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "all at once"])
def test_replicas_of_the_stable_revision_lost_during_a_rollout_are_replaced_from_the_store(at_once):
    """Finding 2: the new image is broken; what is lost of the old revision comes back as it was."""
    world = running(runtime={"maxModelLen": 2048})
    stable = world.service.status.current_revision
    start_broken_rollout(world)
    for name in [pod.replica.name for pod in world.ready]:
        world.image_is_broken = False  # the old image can still be pulled
        world.broken_revisions = {world.service.status.update_revision}
        world.fail(name)
        if not at_once:
            world.run(60)
            assert len(world.ready) == 3
    world.run(60)
    assert len(world.ready) == 3
    assert {pod.replica.revision for pod in world.ready} == {stable}
    rebuilt = world.manifests[world.ready[0].replica.name]["spec"]["containers"][0]
    assert rebuilt["image"] == "slipway/runtime:test"
    assert "2048" in rebuilt["args"]
    assert [one.weight for one in world.service.status.revisions if one.hash == stable] == [100]


@pytest.mark.capability("OP-13")
def test_a_scale_up_during_a_broken_rollout_gets_replicas_that_serve():
    """Finding 2: of the stable revision."""
    world = running()
    stable = world.service.status.current_revision
    world.broken_revisions = set()
    world.service = edited(world.service, runtime=BROKEN)
    world.tick()
    world.broken_revisions = {world.service.status.update_revision}
    world.run(30)
    world.service = edited(world.service, replicas=5)
    world.run(60)
    assert [pod.replica.revision for pod in world.ready] == [stable] * 5


@pytest.mark.capability("OP-13")
def test_after_a_rollback_of_the_spec_pods_start_from_what_was_stored():
    """OP-13: with the image and the defaults that the revision had."""
    world = running(1, runtime={"maxModelLen": 2048})
    first = world.service.status.current_revision
    world.service = edited(world.service, runtime={"maxModelLen": 1024})
    world.run(120)
    world.default_image = "slipway/runtime:next"
    world.service = edited(world.service, runtime={"maxModelLen": 2048})
    world.run(120)
    assert world.service.status.current_revision == first
    (pod,) = world.ready
    assert world.manifests[pod.replica.name]["spec"]["containers"][0]["image"] == "slipway/runtime:test"


@pytest.mark.capability("OP-13")
def test_the_store_holds_as_many_revisions_as_status_remembers():
    world = running(1, rollout={"revisionHistoryLimit": 1})
    for length in (100, 200, 300):
        world.service = edited(world.service, runtime={"maxModelLen": length})
        world.run(120)
    remembered = {one.hash for one in world.service.status.revisions}
    assert len(remembered) == 2
    assert {one.hash for one in world.revisions.values()} == remembered


@pytest.mark.capability("OP-13")
def test_the_old_name_is_served_until_a_replica_answers_to_the_new_one():
    """Finding 3: each pod says which name it answers to, and status names one that somebody serves."""
    world = running(1, model={"servedName": "old"})
    world.service = edited(world.service, model={"uri": world.service.spec.model.uri, "servedName": "new"})
    world.run(10)
    assert world.service.status.served_name == "old"
    world.run(120)
    assert world.service.status.served_name == "new"
    (pod,) = world.ready
    assert world.manifests[pod.replica.name]["metadata"]["annotations"]["slipway.dev/served-name"] == "new"


@pytest.mark.capability("RD-10")
@pytest.mark.parametrize(("replicas", "unavailable"), [(1, 1), (3, 1)])
def test_a_node_that_dies_while_its_pod_drains_does_not_stop_a_rollout_without_surge(replicas, unavailable):
    """Finding 4: the pod that its node never ends stops counting."""
    limits = {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": unavailable}}
    world = running(replicas, rollout=limits, drain={"timeoutSeconds": 60})
    world.service = edited(world.service, runtime={"maxModelLen": 1024})
    while not world.draining:
        world.tick()
    world.lose_node(world.draining[0].replica.node)
    world.run(900)
    assert len(world.ready) == replicas
    assert {pod.replica.revision for pod in world.ready} == {world.service.status.update_revision}


@pytest.mark.capability("RD-10")
def test_a_partition_from_all_nodes_creates_and_deletes_nothing():
    """Finding 5: all nodes are silent for a minute; afterwards the same replicas serve."""
    world = running(3, nodes=3)
    before = {pod.replica.uid for pod in world.pods.values()}
    for node in list(world.nodes):
        world.lose_node(node)
    world.run(60)
    assert world.created == 3
    for node in world.nodes:
        world.recover_node(node)
    world.run(300)
    assert world.created == 3
    assert {pod.replica.uid for pod in world.pods.values()} == before
    assert len(world.ready) == 3


@pytest.mark.capability("RD-10")
def test_a_replacement_that_is_not_needed_any_more_is_cancelled():
    """Finding 5: without a spare GPU it would wait for ever beside the original."""
    world = running(2, gpus=2)
    before = {pod.replica.uid for pod in world.pods.values()}
    node = next(iter(world.pods.values())).replica.node
    world.lose_node(node)
    world.run(50)
    assert len(world.pods) == 3
    world.recover_node(node)
    world.run(60)
    assert {pod.replica.uid for pod in world.pods.values()} == before
    assert world.service.status.attempts == ()


@pytest.mark.capability("RD-10")
def test_a_device_plugin_that_refuses_is_asked_less_and_less():
    """Finding 6: one GPU node whose device plugin refuses every pod."""
    world = SimulatedCluster(a_service(), nodes=1)
    world.refusing = {"node-0"}
    world.reconcile()
    world.run(600)
    assert world.created <= 7, "after 10, 20, 40, 80, 160 and 300 seconds"
    world.refusing = set()
    world.run(400)
    assert len(world.ready) == 1


def test_replicas_that_find_no_node_limit_the_autoscaler_for_as_long_as_they_wait():
    """Finding 12: their start-up has not begun, so no timeout makes room for two more."""
    world = SimulatedCluster(
        a_service(autoscaling={"minReplicas": 2, "maxReplicas": 8}, runtime={"startupTimeoutSeconds": 300}), gpus=2
    )
    world.load = lambda world: [setattr(pod, "kv", 0.99) for pod in world.ready]
    world.reconcile()
    world.run(300)
    assert len(world.ready) == 2
    wanted = world.desired
    world.run(7200)
    assert world.desired == wanted < 8
    assert "waits for a node" in world.condition("WorkloadAvailable").message


@pytest.mark.capability("RD-9")
def test_a_hung_engine_is_replaced_after_the_stated_time():
    """Chaos C2: within replaceAfterUnhealthySeconds, a backoff and a start."""
    world = running(2, availability={"replaceAfterUnhealthySeconds": 60}, drain={"timeoutSeconds": 30})
    name = next(iter(world.pods))
    world.pods[name].running = 3
    world.hang(name)
    world.run(55)
    assert [pod.replica.name for pod in world.live] == list(world.pods)
    world.run(60)
    assert len(world.ready) == 2
    assert name not in {pod.replica.name for pod in world.ready}
    assert "ReplicaReplaced" in world.event_reasons()
    world.run(60)
    assert len(world.pods) == 2


@pytest.mark.capability("RD-9")
def test_a_server_that_has_loaded_for_minutes_is_not_replaced_when_it_has_just_started():
    """ADR 81: it counted as unhealthy for the moment in which it had started and was not Ready yet."""
    world = SimulatedCluster(a_service(replicas=2), load_seconds=300)
    world.reconcile()
    world.run(330)
    originals = {pod.replica.uid for pod in world.ready}
    assert len(originals) == 2
    name = next(iter(world.pods))
    world.crash_loop(name, restarts=1)
    world.pods[name].replica = replace(world.pods[name].replica, waiting_reason="")  # the kubelet starts it at once
    world.pods[name].loads_for = 300
    world.run(330)
    assert {pod.replica.uid for pod in world.ready} == originals
    assert "ReplicaReplaced" not in world.event_reasons()


@pytest.mark.capability("RD-9")
def test_a_hung_engine_with_streams_does_not_stay_until_the_deadline_of_its_drain():
    """ADR 81: its runtime ends the streams, because none of them can finish."""
    world = running(2, drain={"timeoutSeconds": 3600})
    name = next(iter(world.pods))
    world.pods[name].running = 3
    world.hang(name)
    world.run(240)
    assert name not in world.pods
    assert len(world.ready) == len(world.pods) == 2
    assert "DrainTimedOut" not in world.event_reasons()


@pytest.mark.capability("RD-2", "RD-9")
def test_a_drain_during_a_short_stall_is_not_shortened():
    """ADR 81: the engine goes on, and so do its streams."""
    world = running(2, drain={"timeoutSeconds": 3600})
    for pod in world.pods.values():
        pod.running = 30
    world.service = edited(world.service, replicas=1)
    world.run(5)
    (leaving,) = world.draining
    world.hang(leaving.replica.name)
    world.run(60)
    assert (leaving.running > 0, leaving.replica.deleted_at) == (True, None)
    leaving.is_hung = False
    world.run(120)
    assert leaving.replica.name not in world.pods
    assert "DrainTimedOut" not in world.event_reasons()


@pytest.mark.capability("RD-9", "RD-10")
def test_engines_that_all_hang_are_replaced_one_at_a_time():
    """Chaos C2: a cause outside of them must not empty the service."""
    world = running(3)
    for name in world.pods:
        world.hang(name)
    for _ in range(1200):
        world.tick()
        fresh = [pod for pod in world.live if pod.replica.attempt and not pod.replica.ready]
        assert len(fresh) <= 1
    assert len(world.ready) == len(world.pods) == 3


@pytest.mark.capability("RD-9")
def test_without_surge_a_hung_engine_makes_room_for_its_replacement():
    """Chaos C2: and the replacement waits until the room is there."""
    limits = {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    world = running(2, rollout=limits, gpus=2, drain={"timeoutSeconds": 60})
    name = next(iter(world.pods))
    world.pods[name].running = 3
    world.hang(name)
    world.run(400)
    assert len(world.ready) == len(world.pods) == 2
    assert name not in world.pods, "the slot's next attempt has another name"


@pytest.mark.capability("RD-10")
def test_victims_go_one_by_one_with_caches_that_lag():
    """Finding 11: a sample that reorders the victims drains no second replica."""
    world = running(5)
    world.cache_lag = 5
    for number, pod in enumerate(world.pods.values()):
        pod.running = number
    world.service = edited(world.service, replicas=3)
    for second in range(120):
        for number, pod in enumerate(world.pods.values()):
            pod.running = (second + number) % 4 if not pod.drains else pod.running
        world.tick()
        assert len(world.ready) >= 3
    assert len(world.ready) == len(world.pods) == 3


@pytest.mark.capability("RD-10")
def test_an_hour_of_failures_writes_no_more_than_it_must():
    """Nothing that keeps failing is written about each second."""
    world = running(2)
    world.run(60)
    world.writes = 0
    world.refusing = set(world.nodes)
    world.fail(next(iter(world.pods)))
    world.run(int(minutes(60).total_seconds()))
    assert world.writes < 200
