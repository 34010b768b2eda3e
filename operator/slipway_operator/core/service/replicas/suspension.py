"""spec.suspend: all replicas drain, none is started, and status says that this is intended.

Ready stays True with reason ScaledToZero, as for any service of which no replicas are asked for; the condition
Suspended tells Argo CD, Kueue and people the difference. What the autoscaler last decided stays in status.
"""

from collections.abc import Sequence
from typing import Final

from slipway_api.conditions import (
    Condition,
    ConditionType,
    EventReason,
    Reason,
    find_condition,
)
from slipway_api.inference_service import InferenceService
from slipway_api.inference_status import InferenceServiceStatus
from slipway_operator.core.actions import Event
from slipway_operator.core.health import Member

SUSPENDED: Final = "spec.suspend is true: no replica is started, and serving replicas drain"


def is_suspended(status: InferenceServiceStatus) -> bool:
    """Whether status says that the service is suspended."""
    return find_condition(status.conditions, ConditionType.SUSPENDED) is not None


def suspended_condition(service: InferenceService) -> tuple[bool, Reason, str] | None:
    """Condition Suspended; None: it is absent."""
    return (True, Reason.SUSPENDED, SUSPENDED) if service.spec.suspend else None


def find_suspension_events(
    before: InferenceServiceStatus, conditions: Sequence[Condition], members: Sequence[Member], desired: int
) -> list[Event]:
    """Suspended and Resumed, each once."""
    was, is_now = is_suspended(before), find_condition(conditions, ConditionType.SUSPENDED) is not None
    if was == is_now:
        return []
    if is_now:
        count = sum(member.is_live for member in members)
        message = f"{count}→0: {SUSPENDED}"
        return [Event(reason=EventReason.SUSPENDED, action="Suspend", message=message)]
    message = f"0→{desired}: spec.suspend is false again"
    return [Event(reason=EventReason.RESUMED, action="Resume", message=message)]
