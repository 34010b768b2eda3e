"""The faults of the matrix: each is a name and a function that injects it and returns when the fault is over.

A new one is a function of the stage and a line in FAULTS.
"""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from e2e import checks
from e2e.chaos import hostile, neighbours, people
from e2e.chaos.stage import AUTO, FIXED, REPLICAS, SPARE, Stage, service
from e2e.slipway import GATEWAY, RELEASE_NAMESPACE, USER_NAMESPACE, wait_for

OUTAGE_SECONDS = 20.0


@dataclass(frozen=True)
class Fault:
    """One row of the matrix."""

    name: str
    inject: Callable[[Stage], None]
    on_node: bool = False  # it hits node-b, which must have a replica, a gateway and an operator then
    may_lose: bool = False  # it breaks connections of a gateway, or no replica is left: requests may fail
    may_wait: bool = False  # no replica is left, or a client's gateway is off the network: first bytes may be late
    prepare: Callable[[Stage], None] = Stage.configure  # before the load begins; without it, the chart's defaults


# Operators


def kill_leader(stage: Stage) -> None:
    stage.kill(stage.operators()[0], RELEASE_NAMESPACE)


def kill_operators(stage: Stage) -> None:
    for pod in stage.operators():
        stage.kill(pod, RELEASE_NAMESPACE)


def hang_leader(stage: Stage) -> None:
    stage.hang(stage.operators()[:1], RELEASE_NAMESPACE, seconds=OUTAGE_SECONDS)


def delete_operators(stage: Stage) -> None:
    stage.kubectl("-n", RELEASE_NAMESPACE, "delete", "pod", "--wait=false", *stage.operators())


def kill_leader_while_scaling(stage: Stage) -> None:
    scaled = service(FIXED)
    scaled["spec"]["replicas"] = REPLICAS + 2
    stage.apply(scaled)
    kill_leader(stage)
    stage.scale(REPLICAS + 2)
    stage.scale(REPLICAS)


# Gateways


def restart_gateways(stage: Stage) -> None:
    stage.kubectl("-n", RELEASE_NAMESPACE, "rollout", "restart", "deployment/slipway-gateway")
    wait_for("every gateway is up", lambda: checks.deployment_is_up(stage.slipway, "slipway-gateway"), timeout=240)


def delete_gateway(stage: Stage) -> None:
    stage.kubectl("-n", RELEASE_NAMESPACE, "delete", "pod", "--wait=false", stage.gateways()[0])


def kill_gateway(stage: Stage) -> None:
    stage.kill(stage.gateways()[0], RELEASE_NAMESPACE)


def hang_gateway(stage: Stage) -> None:
    stage.hang(stage.gateways()[:1], RELEASE_NAMESPACE, seconds=10)


# Replicas


def kill_replica(stage: Stage) -> None:
    stage.kill(stage.replica())


def kill_engine(stage: Stage) -> None:
    stage.kill(stage.replica(), engine_only=True)


def kill_all_replicas(stage: Stage) -> None:
    for pod in stage.replicas():
        stage.kill(pod)


def hang_replica(stage: Stage) -> None:
    stage.hang([stage.replica()], seconds=12)


def hang_all_replicas_briefly(stage: Stage) -> None:
    stage.hang(stage.replicas(), seconds=2)


def hang_engine(seconds: float) -> Callable[[Stage], None]:
    """A fault: the engine's process is stopped for so long; the process of the API answers on."""
    return lambda stage: stage.hang([stage.replica()], seconds=seconds, engine_only=True)


def hang_two_engines_in_turn(stage: Stage) -> None:
    """The second hang must be found as soon as the first: a past hang raises no limit."""
    first, second, *_ = stage.replicas()
    stage.hang([first], seconds=OUTAGE_SECONDS, engine_only=True)
    stage.wait_settled()
    stage.hang([second], seconds=75, engine_only=True)


def hang_engine_for_good(stage: Stage) -> None:
    """The engine is never let go on: the replica must be restarted or replaced."""
    victim = stage.replica()
    stage.signal(victim, signal.SIGSTOP, engine_only=True)
    wait_for(
        f"{victim} counts as unready",
        lambda: victim not in stage.replicas(),
        timeout=120,
    )


def delete_replica(stage: Stage) -> None:
    stage.kubectl("delete", "pod", "--wait=false", stage.replica())


def delete_replica_by_force(stage: Stage) -> None:
    stage.kubectl("delete", "pod", "--wait=false", "--force", "--grace-period=0", stage.replica())


def evict_replica(stage: Stage) -> None:
    stage.evict(stage.replica())


# Nodes


def drain_node(stage: Stage) -> None:
    try:
        stage.kubectl(
            "drain", "node-b", "--force", "--delete-emptydir-data", "--ignore-daemonsets", "--timeout=110s"
        )  # fmt: skip
    finally:
        stage.kubectl("uncordon", "node-b")


def kill_node(stage: Stage) -> None:
    stage.cluster.kill_node("node-b")
    wait_for("node-b counts as lost", lambda: not checks.node_is_ready(stage.slipway, "node-b"), timeout=90)
    time.sleep(OUTAGE_SECONDS)
    stage.cluster.start_node("node-b")


def cut_node(stage: Stage) -> None:
    stage.cluster.cut_node("node-b")
    time.sleep(30)
    stage.cluster.cut_node("node-b", cut=False)


def cut_node_briefly(stage: Stage) -> None:
    stage.cluster.cut_node("node-b")
    time.sleep(4)
    stage.cluster.cut_node("node-b", cut=False)


def stop_kubelet(stage: Stage) -> None:
    stage.cluster.stop_kubelet("node-b")
    time.sleep(OUTAGE_SECONDS)
    stage.cluster.start_kubelet("node-b")


# Control plane


def stop_apiserver(stage: Stage) -> None:
    with stage.slipway.api_server_away(stage.cluster):
        time.sleep(OUTAGE_SECONDS)


def hang_apiserver(stage: Stage) -> None:
    stage.cluster.signal_program("kube-apiserver", signal.SIGSTOP)
    time.sleep(OUTAGE_SECONDS)
    stage.cluster.signal_program("kube-apiserver", signal.SIGCONT)


def stop_etcd(stage: Stage) -> None:
    with stage.slipway.etcd_away(stage.cluster):
        time.sleep(OUTAGE_SECONDS)


def kill_replica_while_scheduler_hangs(stage: Stage) -> None:
    stage.cluster.signal_program("kube-scheduler", signal.SIGSTOP)
    delete_replica_by_force(stage)
    time.sleep(OUTAGE_SECONDS)
    stage.cluster.signal_program("kube-scheduler", signal.SIGCONT)


def restart_gateway_without_apiserver(stage: Stage) -> None:
    processes = stage.cluster.processes_of(RELEASE_NAMESPACE, stage.gateways()[0])
    with stage.slipway.api_server_away(stage.cluster):
        for process in processes:
            os.kill(process, signal.SIGKILL)
        time.sleep(OUTAGE_SECONDS)


# Changes of the services


def roll_out(stage: Stage) -> None:
    stage.apply(service(FIXED, maxNumSeqs=24))
    wait_for("the new revision serves alone", lambda: is_rolled_out(stage), timeout=180)
    stage.apply(service(FIXED))
    wait_for("the old revision serves alone", lambda: is_rolled_out(stage), timeout=180)


def roll_out_with_dying_leader(stage: Stage) -> None:
    stage.apply(service(FIXED, maxNumSeqs=20))
    wait_for("the new revision comes", lambda: len(stage.slipway.pods(FIXED)) > REPLICAS)
    kill_leader(stage)
    wait_for("the new revision serves alone", lambda: is_rolled_out(stage), timeout=180)
    stage.apply(service(FIXED))


def is_rolled_out(stage: Stage) -> bool:
    found = stage.slipway.service(FIXED)
    status = found["status"]
    counts = (status.get("updatedReplicas"), status.get("readyReplicas"), status.get("replicas"))
    return status["observedGeneration"] == found["metadata"]["generation"] and counts == (REPLICAS,) * 3


def roll_to_missing_model(stage: Stage) -> None:
    broken = service(FIXED)
    broken["spec"]["model"]["uri"] = "file:///opt/slipway/models/nowhere"
    stage.apply(broken)
    stage.wait_blocked(FIXED)
    stage.apply(service(FIXED))


def roll_to_missing_image(stage: Stage) -> None:
    stage.apply(service(FIXED, image="slipway/runtime:none"))
    stage.wait_blocked(FIXED)
    stage.apply(service(FIXED))


def kill_replica_of_old_revision(stage: Stage) -> None:
    """The spec names an image that does not exist, and a replica of the revision that serves dies."""
    stage.apply(service(FIXED, image="slipway/runtime:none"))
    stage.wait_blocked(FIXED)
    delete_replica_by_force(stage)
    wait_for("the old revision is rebuilt", lambda: len(stage.replicas()) == REPLICAS, timeout=120)
    stage.apply(service(FIXED))


def scale_in_and_out(stage: Stage) -> None:
    stage.scale(1)
    stage.scale(REPLICAS)


def delete_and_recreate(stage: Stage) -> None:
    for _ in range(2):
        stage.apply(service(SPARE))
        stage.slipway.wait_ready(SPARE, replicas=1)
        stage.slipway.delete(SPARE)


# Clients


def send_burst(stage: Stage) -> None:
    """More than one replica can take, for long enough that the autoscaler adds one."""
    load = stage.slipway.load(AUTO, concurrency=24, seconds=120, max_tokens=96, retry_429=True)
    try:
        wait_for(f"{AUTO} scales out", lambda: len(checks.ready_pods(stage.slipway, AUTO)) > 1, timeout=110)
    finally:
        load.stop()


def send_big_bodies(stage: Stage) -> None:
    statuses = hostile.send_big_bodies(port(stage), FIXED)
    assert all(400 <= status < 500 for status in statuses), f"a prompt of 5 MB does not fit: {statuses}"


def read_nothing(stage: Stage) -> None:
    with hostile.deaf_readers(port(stage), FIXED):
        time.sleep(OUTAGE_SECONDS)


def disconnect(stage: Stage) -> None:
    hostile.disconnect_at_once(port(stage), FIXED)


def dribble_headers(stage: Stage) -> None:
    with hostile.header_dribblers(port(stage)):
        time.sleep(OUTAGE_SECONDS)


def stall_uploads(stage: Stage) -> None:
    with hostile.stalled_uploads(port(stage)):
        time.sleep(OUTAGE_SECONDS)


def port(stage: Stage) -> int:
    return stage.slipway.access.port(GATEWAY)


# Together


def kill_replica_and_leader_without_apiserver(stage: Stage) -> None:
    victims = stage.cluster.processes_of(USER_NAMESPACE, stage.replica())
    victims += stage.cluster.processes_of(RELEASE_NAMESPACE, stage.operators()[0])
    with stage.slipway.api_server_away(stage.cluster):
        for process in victims:
            os.kill(process, signal.SIGKILL)
        time.sleep(OUTAGE_SECONDS)


def roll_out_while_node_is_cut(stage: Stage) -> None:
    stage.apply(service(FIXED, maxNumSeqs=20))
    cut_node(stage)
    wait_for("the new revision serves alone", lambda: is_rolled_out(stage), timeout=180)
    stage.apply(service(FIXED))


FAULTS = (
    Fault("leading operator killed", kill_leader),
    Fault("both operators killed", kill_operators),
    Fault("leading operator hangs 20 s", hang_leader),
    Fault("both operators deleted", delete_operators),
    Fault("leading operator killed while scaling", kill_leader_while_scaling),
    Fault("gateways restarted one by one", restart_gateways),
    Fault("gateway deleted", delete_gateway),
    Fault("gateway killed", kill_gateway, may_lose=True),
    Fault("gateway hangs 10 s", hang_gateway),
    Fault("replica killed", kill_replica),
    Fault("engine of a replica killed", kill_engine),
    Fault("all replicas killed", kill_all_replicas, may_lose=True, may_wait=True),
    Fault("replica hangs 12 s", hang_replica),
    Fault("all replicas hang 2 s", hang_all_replicas_briefly),
    Fault("engine of a replica hangs 12 s", hang_engine(12)),
    Fault("engine of a replica hangs 20 s", hang_engine(20)),
    Fault("engine of a replica hangs 75 s", hang_engine(75)),
    Fault("engine of a replica hangs 20 s, then another one 75 s", hang_two_engines_in_turn),
    Fault("engine of a replica hangs for good", hang_engine_for_good),
    Fault("replica deleted", delete_replica),
    Fault("replica deleted by force", delete_replica_by_force),
    Fault("replica evicted", evict_replica),
    Fault("kubectl drain of a node", drain_node, on_node=True),
    Fault("node loses power, and returns", kill_node, on_node=True, may_lose=True),
    Fault("node off the network 30 s", cut_node, on_node=True, may_lose=True, may_wait=True),
    Fault("node off the network 4 s", cut_node_briefly, on_node=True),
    Fault("kubelet away 20 s", stop_kubelet, on_node=True),
    Fault("API server away 20 s", stop_apiserver),
    Fault("API server hangs 20 s", hang_apiserver),
    Fault("etcd away 20 s", stop_etcd),
    Fault("replica lost while the scheduler hangs", kill_replica_while_scheduler_hangs),
    Fault("gateway killed, API server away", restart_gateway_without_apiserver, may_lose=True),
    Fault("rollout and back", roll_out),
    Fault("rollout, leader killed", roll_out_with_dying_leader),
    Fault("rollout to a missing model and back", roll_to_missing_model),
    Fault("rollout to a missing image and back", roll_to_missing_image),
    Fault("old revision loses a replica, new image missing", kill_replica_of_old_revision),
    Fault("scale 3-1-3", scale_in_and_out),
    Fault("service deleted and created again", delete_and_recreate),
    Fault("burst that scales out", send_burst),
    Fault("bodies of 5 MB", send_big_bodies),
    Fault("readers that never read", read_nothing),
    Fault("2,000 quick disconnects", disconnect),
    Fault("200 header dribblers", dribble_headers),
    Fault("16 stalled uploads", stall_uploads),
    Fault("replica and leader killed, API server away", kill_replica_and_leader_without_apiserver),
    Fault(
        "rollout while a node is off the network",
        roll_out_while_node_is_cut,
        on_node=True,
        may_lose=True,
        may_wait=True,
    ),
    Fault("people: state label of a replica removed", people.remove_state_label),
    Fault("people: service label of a replica changed", people.change_service_label),
    Fault("people: record of the stable revision deleted", people.delete_revision_records),
    Fault("people: Lease of the operator deleted", people.delete_lease),
    Fault("people: status of a service erased", people.erase_status),
    Fault("people: foreign children while a node drains", people.drain_beside_foreign_children, on_node=True),
    Fault("people: full quota while a node drains", people.drain_in_full_quota, on_node=True),
    Fault("people: key of the gateway replaced", people.replace_gateway_key, prepare=people.close_fixed_service),
    Fault("people: watched namespace deleted", people.delete_namespace, prepare=people.watch_doomed_namespace),
    Fault("people: all gateways gone 20 s", people.lose_all_gateways, may_lose=True, may_wait=True),
    Fault("tenants: tenants file broken", neighbours.break_tenants_file, prepare=neighbours.admit_two_tenants),
    Fault("tenants: hostile beside calm", neighbours.be_hostile, prepare=neighbours.admit_two_tenants),
)

# Short ones: in `make test` (e2e/stories/test_chaos.py).
SAMPLE = ("replica killed", "etcd away 20 s")
