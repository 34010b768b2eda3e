"""Builds the status of a service that is left as it is: its spec, or its stable revision, cannot be read.

Its replicas continue to serve. Counts follow them; everything that an earlier pass decided stays, so that a corrected
spec continues from there.
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

ADVICE: Final = "correct it; until then its replicas are left as they are"


def invalid_status(observed: Observed, members: Sequence[Member], now: datetime) -> InferenceServiceStatus:
    """The status of a service whose spec cannot be read."""
    return held_status(observed, members, Reason.INVALID_SPEC, f"{observed.fault}; {ADVICE}", now)


def held_status(
    observed: Observed, members: Sequence[Member], why: Reason, sentence: str, now: datetime
) -> InferenceServiceStatus:
    """The previous status with the present counts, and Stalled for this reason.

    Ready is False for the same reason. With a missing revision and ready replicas it stays: their spec is valid.
    """
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

    if why is Reason.INVALID_SPEC or not ready:
        write(ConditionType.READY, False, why, sentence)
    write(ConditionType.STALLED, True, why, sentence)
    write(ConditionType.ROUTE_READY, *route_condition(observed, ready))
    if not ready:
        unserved = f"no replica is ready, and none is started: {sentence}"
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
