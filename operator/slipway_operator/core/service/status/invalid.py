"""Builds the status of a service whose stored spec cannot be read, or may not be followed.

Its replicas stay as they are and serve on. Counts follow them; everything that an earlier pass decided stays, so that
a corrected spec continues from there.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from slipway_api import names
from slipway_api.conditions import ConditionStatus, ConditionType, Reason, remove_condition, set_condition
from slipway_api.inference_status import InferenceServiceStatus
from slipway_operator.core.health import Member
from slipway_operator.core.observed import Observed
from slipway_operator.core.service.route import route_condition

ADVICE: Final = "until it is corrected, the replicas of the service are not changed"


def invalid_status(observed: Observed, members: Sequence[Member], now: datetime) -> InferenceServiceStatus:
    """The status before, with Stalled and Ready=False for the same reason, and with the present counts."""
    service, before = observed.service, observed.service.status
    ready = sum(member.is_ready for member in members)
    conditions = before.conditions
    # What is under way has stopped, and nothing scales.
    for type in (ConditionType.RECONCILING, ConditionType.SCALING_ACTIVE):
        conditions = remove_condition(conditions, type)

    def write(type: ConditionType, status: ConditionStatus | bool, reason: Reason, message: str) -> None:
        nonlocal conditions
        generation = service.metadata.generation
        conditions = set_condition(
            conditions, type, status, reason.value, message[:4096], generation=generation, now=now
        )

    write(ConditionType.READY, False, observed.fault_reason, f"{observed.fault}; {ADVICE}")
    write(ConditionType.STALLED, True, observed.fault_reason, f"{observed.fault}; {ADVICE}")
    write(ConditionType.ROUTE_READY, *route_condition(observed, ready, "" if ready else f"{observed.fault}; {ADVICE}"))
    if not ready:
        unserved = "no replica is ready, and none is started until the spec is valid"
        write(ConditionType.WORKLOAD_AVAILABLE, False, Reason.NO_READY_REPLICAS, unserved)
    return before.model_copy(
        update={
            "observed_generation": service.metadata.generation,
            "conditions": conditions,
            "replicas": len(members),
            "ready_replicas": ready,
            "draining_replicas": sum(one.replica.state == names.STATE_DRAINING for one in members),
        }
    )
