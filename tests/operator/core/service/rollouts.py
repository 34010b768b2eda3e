"""A service under load in the simulated cluster, whose user rolls out a new revision: by canary, or as told."""

from slipway_api import names
from tests.builders import a_service, edited
from tests.operator.core.simulated_cluster import SimulatedCluster
from tests.operator.core.simulated_traffic import SimulatedTraffic

NEW = {"maxModelLen": 1024}
STEPS = [
    {"setWeight": 25},
    {"pauseSeconds": 20},
    {"analyze": {}},
    {"setWeight": 50},
    {"analyze": {}},
    {"setWeight": 100},
]
ANALYSIS = {"intervalSeconds": 10, "minRequests": 50, "failureLimit": 2}


def canary(steps=None, analysis=None, **rollout):
    return {
        "strategy": "Canary",
        "canary": {"steps": steps or STEPS, "analysis": ANALYSIS | (analysis or {})},
        **rollout,
    }


def a_world(replicas=4, rate=20.0, rollout=None, **spec):
    """A service whose first revision serves, under load."""
    service = a_service(
        replicas=replicas,
        finalizers=(),
        rollout=rollout or canary(),
        drain={"timeoutSeconds": 30, "endpointPropagationSeconds": 2},
        **spec,
    )
    world = SimulatedCluster(service, load_seconds=5)
    world.traffic = SimulatedTraffic(rate) if rate else None
    world.reconcile()
    world.run(20)
    return world


def roll(world, behaviour=None, **runtime):
    """The user edits the spec; returns the hashes of the old and of the new revision."""
    old = world.service.status.current_revision
    world.service = edited(world.service, runtime=NEW | runtime)
    world.run(1)
    new = world.service.status.update_revision
    assert new != old
    if world.traffic and behaviour:
        world.traffic.behaviours[new] = behaviour
    return old, new


def annotate(world, **annotations):
    metadata = world.service.metadata.model_copy(
        update={"annotations": {f"{names.GROUP}/{key.replace('_', '-')}": value for key, value in annotations.items()}}
    )
    world.service = world.service.model_copy(update={"metadata": metadata})


def weight(world, hash):
    return next((one.weight for one in world.service.status.revisions if one.hash == hash), 0)


def replicas(world, hash):
    return sum(pod.replica.revision == hash for pod in world.live)


def until(world, what, limit=400):
    for _ in range(limit):
        if what():
            return
        world.run(1)
    raise AssertionError(f"it did not happen within {limit} s: {world.log[-10:]}, {world.service.status.canary}")


def verdict(world):
    """The condition with the verdict about the new revision; its type fits the strategy."""
    strategy = world.service.spec.rollout.strategy
    return world.condition("CanaryHealthy" if strategy == "Canary" else "RolloutHealthy")


def message(world):
    return verdict(world).message


def weights_in_order(weights):
    return [one for position, one in enumerate(weights) if position == 0 or weights[position - 1] != one]
