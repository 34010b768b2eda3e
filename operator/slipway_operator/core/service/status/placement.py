"""Why no node takes a replica: no free GPU, GPUs that the cluster does not have, or another cause of the scheduler.

| the scheduler's sentence                     | nodes                    | reason                                   |
|----------------------------------------------|--------------------------|------------------------------------------|
| any                                          | none has so many GPUs,   | Stalled NoSuitableNode; WaitingForGPU if |
|                                              | or not this product      | a node autoscaler may add such a node    |
| `persistentvolumeclaim "x" not found`        |                          | Stalled InvalidSpec                      |
| `Insufficient <resourceName>`                | a node has enough        | WaitingForGPU                            |
| anything else: taints, labels, volumes, CPUs |                          | Unschedulable                            |
"""

import re
from collections.abc import Sequence
from typing import Final

from slipway_api import names
from slipway_api.conditions import Reason
from slipway_operator.core.health import Member, Stage
from slipway_operator.core.observed import Observed, Replica
from slipway_operator.core.words import count

_CLAIM: Final = re.compile(r'persistentvolumeclaim "([^"]+)" not found')
SURGE_REMEDY: Final = (
    "a rollout with maxSurge needs a free GPU; free one, or set rollout.rollingUpdate to maxSurge 0 and "
    "maxUnavailable 1, or rollout.strategy to Recreate"
)


def find_impossible(observed: Observed, replica: Replica) -> tuple[Reason, str] | None:
    """What a person has to change before any node can take this replica; None: a node may."""
    if claim := _CLAIM.search(replica.unschedulable):
        remedy = f"create the PersistentVolumeClaim {claim[1]}, or change the volumes of spec.template"
        return Reason.INVALID_SPEC, f"{describe_unschedulable(observed, replica)}; {remedy}"
    if _missing_gpus(observed) and observed.gpu_supply is not None and not observed.gpu_supply.may_grow:
        return Reason.NO_SUITABLE_NODE, f"{describe_unschedulable(observed, replica)}; {_REMEDY}"
    return None


def why_waiting(observed: Observed, members: Sequence[Member]) -> Reason | None:
    """WaitingForGPU or Unschedulable, while a replica finds no node; None: all have one."""
    waiting = [one.replica for one in members if one.is_live and not one.is_ready and one.replica.unschedulable]
    if not waiting:
        return None
    lacks = any(lacks_gpus(observed, replica) for replica in waiting)
    return Reason.WAITING_FOR_GPU if lacks else Reason.UNSCHEDULABLE


def lacks_gpus(observed: Observed, replica: Replica) -> bool:
    """Whether GPUs are what is missing, by the scheduler or by the nodes."""
    gpu = observed.service.spec.resources.gpu
    if not gpu.count:
        return False
    return f"Insufficient {gpu.resource_name}" in replica.unschedulable or bool(_missing_gpus(observed))


def find_obstacle(observed: Observed, members: Sequence[Member], revision: str) -> str:
    """Why a rollout does not go on while old replicas hold all the GPUs; empty: it does, or there are none."""
    if not any(one.is_ready and one.replica.revision != revision for one in members):
        return ""
    for one in members:
        if one.replica.revision == revision and one.stage is Stage.UNSCHEDULABLE and lacks_gpus(observed, one.replica):
            return f"{describe_unschedulable(observed, one.replica)}; {SURGE_REMEDY}"
    return ""


def describe_unschedulable(observed: Observed, replica: Replica) -> str:
    """Names the GPUs that no node has, else repeats the scheduler's sentence."""
    missing = _missing_gpus(observed)
    return f"{replica.name} waits for a node: {missing or replica.unschedulable}"


_REMEDY: Final = "change spec.resources.gpu, or add such a node"


def _missing_gpus(observed: Observed) -> str:
    """Which GPUs no node of the cluster has, used or free; empty: some node does, or the nodes are not known."""
    gpu, supply = observed.service.spec.resources.gpu, observed.gpu_supply
    if supply is None or not gpu.count:
        return ""
    if not supply.nodes:
        return f"no node has the resource {gpu.resource_name}"
    if gpu.product and not supply.largest_of_product:
        known = f"nodes have {', '.join(supply.products)}" if supply.products else "no node has this label"
        return f"no node has the label {names.GPU_PRODUCT_LABEL}={gpu.product}; {known}"
    if supply.largest_of_product < gpu.count:
        of_product = f" of product {gpu.product}" if gpu.product else ""
        return (
            f"no node has {count(gpu.count, gpu.resource_name, gpu.resource_name)}{of_product}; "
            f"the largest has {supply.largest_of_product}"
        )
    return ""
