"""For how long nothing happens in a simulated cluster, so that hours of it take seconds."""

from dataclasses import replace
from datetime import timedelta
from math import ceil
from typing import TYPE_CHECKING, Any

from slipway_api import names
from tests.builders import T0

if TYPE_CHECKING:
    from tests.operator.core.simulated_cluster import SimulatedCluster


def all_that_may_move(world: "SimulatedCluster") -> Any:
    """What an operator may react to, without the clocks."""
    said = [(name, replace(one, at=T0)) for name, pod in world.pods.items() for one in pod.said]
    return world.service, {name: pod.replica for name, pod in world.pods.items()}, dict(world.nodes), said


def seconds_until_due(world: "SimulatedCluster") -> int:
    """The seconds until something is due, in a cluster in which the last second changed nothing."""
    moments = [world.due, *world.cache.moments()]
    for pod in world.pods.values():
        moments += [pod.ends_at, pod.flaps_until, pod.drain_arrives_at]
        if pod.loads_for > 0:
            moments.append(world.now + timedelta(seconds=pod.loads_for))
        if pod.replica.state == names.STATE_DRAINING and pod.ends_at is None:
            return 1  # its requests end one by one
    waits = [ceil((one - world.now) / timedelta(seconds=1)) for one in moments if one is not None and one > world.now]
    return min(waits, default=3600)
