"""Whatever happens, in whatever order: the planner ends where the spec wants, and breaks no law on the way.

Each example is a random life of one service in a simulated cluster: edits, crashes, evictions, lost and cordoned
nodes, silent replicas, lost status writes, operators that die between two actions. It checks the laws at every step;
when the faults stop, the service must come to rest.
"""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from slipway_api.types import rfc3339
from slipway_operator.core.node_taints import LEAVING
from slipway_operator.core.service.plan import plan
from tests.builders import a_service, edited
from tests.operator.core.simulated_cluster import SimulatedCluster

QUICK = settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)

LIMITS = st.sampled_from([(1, 0), (0, 1), (2, 1), (1, 1)])
AUTOSCALING = {
    "maxReplicas": 4,
    "behavior": {"scaleDown": {"stabilizationWindowSeconds": 10, "maxPods": 2, "periodSeconds": 5}},
}

STARTUP = {"startupTimeoutSeconds": 60}
NUMBERS = st.integers(0, 7)
FAULTS = st.sampled_from(
    [
        "fail",
        "evict",
        "crash",
        "delete",
        "vanish",
        "lose node",
        "recover node",
        "cordon",
        "uncordon",
        "silence",
        "speak",
        "answer late",
        "flap",
        "hang",
        "device plugin refuses",
        "device plugin works",
        "lose zone",
        "recover zone",
        "announce the end of a node",
        "take a node away",
        "GPU fault",
        "restart",
        "suspend",
        "resume",
    ]
)
STEPS = st.one_of(
    st.tuples(st.just("wait"), st.integers(1, 40)),
    st.tuples(st.just("wait"), st.just(400)),  # outlives startupTimeout, drains and the patience with the unhealthy
    st.tuples(st.just("caches lag"), st.integers(0, 6)),
    st.tuples(st.just("edit"), st.integers(1, 3)),
    st.tuples(st.just("load"), NUMBERS),
    st.tuples(st.just("streams"), NUMBERS),
    st.tuples(st.just("kill operator"), st.integers(0, 4)),
    st.tuples(st.just("lose status"), st.integers(1, 3)),
    st.tuples(FAULTS, NUMBERS),
)


def make(limits, *, replicas=None, **spec):
    surge, unavailable = limits
    scaling = {"replicas": replicas} if replicas is not None else {"autoscaling": AUTOSCALING}
    service = a_service(
        finalizers=(),
        rollout={"rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable}},
        drain={"timeoutSeconds": 30, "endpointPropagationSeconds": 3},
        runtime=STARTUP,
        **scaling,
        **spec,
    )
    return SimulatedCluster(service, load_seconds=6)


def live(world, number, what):
    """Do `what` to one of the pods."""
    chosen = [name for name, pod in sorted(world.pods.items()) if pod.replica.deleted_at is None]
    if chosen:
        what(chosen[number % len(chosen)])
        world.due = world.now  # a pod that came and went between two looks was an event, too


def happen(world, kind, number):
    nodes = sorted(world.nodes)
    match kind:
        case "wait":
            world.run(number)
        case "edit":
            world.service = edited(world.service, runtime=STARTUP | {"maxModelLen": 100 * number})
        case "scale" if world.service.spec.autoscaling is None:
            world.service = edited(world.service, replicas=number)
        case "load":
            share(world, number)
        case "streams":
            live(world, number, lambda name: setattr(world.pods[name], "running", number))
        case "kill operator":
            world.reconcile(die_after=number)
        case "lose status":
            world.lose_status_writes = True
            world.run(number)
            world.lose_status_writes = False
        case "fail":
            live(world, number, world.fail)
        case "evict":
            live(world, number, lambda name: world.fail(name, "Evicted"))
        case "crash":
            live(world, number, lambda name: world.crash_loop(name, restarts=number))
        case "delete":
            world.faults += 1
            live(world, number, lambda name: world.end(name, takes=5))
        case "vanish":
            world.faults += 1
            live(world, number, lambda name: world.pods.pop(name))
        case "lose node":
            world.lose_node(nodes[number % len(nodes)])
        case "recover node":
            world.recover_node(nodes[number % len(nodes)])
        case "cordon":
            world.cordon(nodes[number % len(nodes)])
        case "uncordon":
            world.cordon(nodes[number % len(nodes)], cordoned=False)
        case "caches lag":
            world.cache_lag = number
        case "answer late":
            live(world, number, lambda name: setattr(world.pods[name], "late_by", number))
        case "flap":
            live(world, number, lambda name: world.flap(name, 10 * number))
        case "hang":
            live(world, number, world.hang)
        case "device plugin refuses":
            world.refusing.add(nodes[number % len(nodes)])
        case "device plugin works":
            world.refusing.discard(nodes[number % len(nodes)])
        case "lose zone":
            for node in zone(nodes, number):
                world.lose_node(node)
        case "recover zone":
            for node in zone(nodes, number):
                world.recover_node(node)
        case "announce the end of a node":
            node, taint = nodes[number % len(nodes)], sorted(LEAVING)[number]
            world.announce_end(node, taint=taint)
        case "take a node away":
            gone = [node for node in nodes if world.nodes[node].notice is not None]
            if gone:
                world.replace_node(gone[number % len(gone)])
        case "GPU fault":
            live(
                world,
                number,
                lambda name: world.crash_loop(name, restarts=1, termination_message="GPUFault: GPU is lost"),
            )
        case "restart":
            world.was_cordoned = True
            world.service = edited(world.service, restartAt=rfc3339(world.now))
        case "suspend" | "resume":
            world.service = edited(world.service, suspend=kind == "suspend")
        case "silence" | "speak":
            live(world, number, lambda name: setattr(world.pods[name], "answers", kind == "speak"))
    world.tick()


def zone(nodes, number):
    """Every second node, or all."""
    return nodes[number % 2 :: 2] if number < 6 else nodes


def share(world, kv):
    def load(world):
        for pod in world.ready:
            pod.kv = min(1.0, kv / 2 / len(world.ready))

    world.load = load


def calm_down(world):
    """The faults stop; what is broken by itself stays to be replaced."""
    for node in world.nodes:
        world.recover_node(node)
        world.cordon(node, cordoned=False)
    if world.service.spec.suspend:
        world.service = edited(world.service, suspend=False)
    world.cache_lag = 0
    world.refusing = set()
    for pod in world.pods.values():
        pod.answers = True
        pod.is_hung = False
        pod.late_by = 0
        pod.running = 0
        if pod.replica.waiting_reason and pod.replica.restarts < 5:
            pod.replica = replace(pod.replica, waiting_reason="")  # the kubelet's next try succeeds
    world.run(700)


def assert_at_rest(world):
    status = world.service.status
    assert len(world.pods) == len(world.ready) == world.desired == status.ready_replicas, world.log[-30:]
    assert {pod.replica.revision for pod in world.pods.values()} <= {status.update_revision}
    assert status.current_revision == status.update_revision
    assert len({pod.replica.slot for pod in world.pods.values()}) == len(world.pods)
    assert world.condition("Stalled") is None
    assert world.condition("Reconciling") is None
    made = plan(world.observed(), world.now)
    assert made.actions == (), made.actions
    assert made.status == status, "a plan at rest writes nothing"
    assert made.events == ()


@pytest.mark.capability("OP-7", "RD-10")
@QUICK
@example(limits=(0, 1), replicas=3, life=[("wait", 20), ("edit", 3), ("evict", 3)])  # what drains is evicted
@example(limits=(0, 1), replicas=3, life=[("wait", 20), ("edit", 3), ("wait", 10), ("evict", 3), ("wait", 40)])
@given(limits=LIMITS, replicas=st.one_of(st.none(), st.integers(0, 4)), life=st.lists(STEPS, min_size=1, max_size=12))
def test_comes_to_rest_where_the_spec_wants_after_any_life(limits, replicas, life):
    world = make(limits, replicas=replicas)
    world.reconcile()
    for kind, number in life:
        happen(world, kind, number)
    calm_down(world)
    assert_at_rest(world)


@QUICK
@given(
    limits=LIMITS,
    replicas=st.integers(1, 4),
    edits=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 4)), min_size=1, max_size=4),
    streams=st.integers(0, 12),
    lag=st.integers(0, 4),
)
def test_rollouts_keep_enough_replicas_ready_and_never_exceed_the_surge(limits, replicas, edits, streams, lag):
    surge, unavailable = limits
    world = make(limits, replicas=replicas)
    world.cache_lag = lag
    world.reconcile()
    world.run(30)
    for pod in world.pods.values():
        pod.running = streams
    for wait, length in edits:
        world.service = edited(world.service, runtime=STARTUP | {"maxModelLen": 100 * length})
        for _ in range(wait):
            world.tick()
            assert len(world.ready) >= replicas - unavailable
            # Those that drain count too; one that never served and is being deleted is gone in a moment.
            assert len(world.live) + len(world.draining) <= replicas + surge
    calm_down(world)
    assert_at_rest(world)


@pytest.mark.capability("AS-6")
@QUICK
@given(replicas=st.integers(1, 4), streams=st.lists(st.integers(0, 20), min_size=4, max_size=4), kills=st.booleans())
def test_deleting_a_service_drains_everything_and_never_hangs(replicas, streams, kills):
    world = make((1, 0), replicas=replicas)
    world.reconcile()
    world.run(20)
    for pod, running in zip(world.pods.values(), streams, strict=False):
        pod.running = running
    world.ask_for_deletion()
    for second in range(120):
        world.tick(reconcile=False)
        world.reconcile(die_after=second % 3 if kills and second % 2 else None)
    assert world.service is None
    assert world.pods == {}


@QUICK
@given(life=st.lists(STEPS, min_size=1, max_size=12))
# A replica of the old revision that moved off a node was removed as one too many, and started again, for ever.
@example(life=[("wait", 6), ("edit", 1), ("announce the end of a node", 1)])
@example(life=[("wait", 5), ("announce the end of a node", 1), ("edit", 1)])
def test_asked_again_and_again_at_the_same_moment_it_soon_has_nothing_to_do(life):
    world = make((1, 0), replicas=2)
    world.reconcile()
    for kind, number in life:
        happen(world, kind, number)
        for _ in range(4):
            world.reconcile()
        if world.cache_lag:
            continue  # it waits until they show what it wrote
        made = plan(world.observed(), world.now)
        assert [action for action in made.actions if not getattr(action, "marked", False)] == []
        assert made.status == world.service.status
