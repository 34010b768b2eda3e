"""The limits within which autoscaling decides: minReplicas or the active schedule, maxReplicas or the budget. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from slipway_api.autoscaling import Autoscaling, Limit
from slipway_api.inference_service import InferenceServiceSpec
from slipway_api.words import count
from slipway_operator.core.scaling.schedules import Scheduled

NOTHING_SCHEDULED = Scheduled(None, None)
LIMIT_NAMES: Final[Mapping[Limit, str]] = {
    Limit.LIMITED_BY_MAX: "maxReplicas",
    Limit.MIN_REPLICAS: "minReplicas",
    Limit.LIMITED_BY_BUDGET: "budget.maxGPUs",
    Limit.LIMITED_BY_CAPACITY: "the cluster's capacity",
    Limit.SCALE_UP_RATE: "behavior.scaleUp.maxPods",
    Limit.SCALE_DOWN_RATE: "behavior.scaleDown.maxPods",
    Limit.STABILIZATION_WINDOW: "the stabilization window",
    Limit.LIVE_DEMAND: "the requests that run now",
}
"""The limits as sentences name them: by the field of the spec where there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The fewest and the most replicas at one moment, and what sets them."""

    floor: int
    """At least 1: metrics alone never end the last replica."""
    ceiling: int
    floor_by: str  # "minReplicas 1", "minReplicas 3 of schedule day"
    ceiling_by: str  # "maxReplicas 4", "a budget of 4 GPUs for 2 replicas"
    ceiling_limit: Limit = Limit.LIMITED_BY_MAX
    may_be_zero: bool = False  # scaleToZero is set, and no schedule is active

    def clamp(self, wanted: int) -> int:
        """The allowed number that is next to the wanted one."""
        return min(max(wanted, self.floor), self.ceiling)

    def __str__(self) -> str:
        return f"{self.floor_by}, {self.ceiling_by}"


def bounds_of(
    policy: Autoscaling, *, scheduled: Scheduled = NOTHING_SCHEDULED, within_budget: int | None = None, gpus: int = 0
) -> Bounds:
    """The limits that hold now. `within_budget` is how many replicas the budget of so many GPUs allows.

    The budget wins over minReplicas and over schedules: it is a promise about money.
    """
    floor, floor_by = policy.min_replicas, f"minReplicas {policy.min_replicas}"
    if scheduled.min_replicas > floor:
        floor, floor_by = scheduled.min_replicas, f"minReplicas {scheduled.min_replicas} of schedule {scheduled.name}"
    ceiling, ceiling_by, limit = policy.max_replicas, f"maxReplicas {policy.max_replicas}", Limit.LIMITED_BY_MAX
    if within_budget is not None and within_budget < ceiling:
        ceiling, limit = within_budget, Limit.LIMITED_BY_BUDGET
        ceiling_by = f"a budget of {count(gpus or 0, 'GPU')} for {count(within_budget, 'replica')}"
    return Bounds(
        floor=min(max(1, floor), ceiling),
        ceiling=ceiling,
        floor_by=floor_by,
        ceiling_by=ceiling_by,
        ceiling_limit=limit,
        may_be_zero=policy.scale_to_zero is not None and scheduled.schedule is None,
    )


def replicas_within_budget(spec: InferenceServiceSpec) -> int | None:
    """How many replicas the budget allows: 16 GPUs at 5 for each are 3; None: it does not limit them.

    One at least: the schema refuses a budget that is too small for one.
    """
    if spec.budget is None or spec.budget.max_gpus is None or not spec.resources.gpu.count:
        return None
    return max(1, spec.budget.max_gpus // spec.resources.gpu.count)
