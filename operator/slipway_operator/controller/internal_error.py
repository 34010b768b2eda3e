"""The status of an object whose pass fails by a fault of the operator, so that it stops claiming that all is well.

Pure; for any kind.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from slipway_api.conditions import Condition, ConditionStatus, ConditionType, Reason, find_condition, set_condition

_SHOWN: Final = 300  # characters of the error


def internal_error_status(
    status: Mapping[str, Any], error: Exception, *, generation: int, now: datetime
) -> tuple[dict[str, Any], str]:
    """The status with Stalled, and Ready Unknown; and the sentence of the event, empty if it was posted before.

    status: of an object of any kind, as it was last written. Conditions that cannot be read are dropped.
    """
    sentence = (
        f"the operator cannot plan this object: {type(error).__name__}: {str(error)[:_SHOWN]}. Its pods are left as "
        "they are, and it is tried again with growing pauses. This is a fault of Slipway; its log has the details"
    )
    before = tuple(_readable(status.get("conditions")))
    was = find_condition(before, ConditionType.STALLED)
    conditions = before
    for type_, value in ((ConditionType.READY, ConditionStatus.UNKNOWN), (ConditionType.STALLED, ConditionStatus.TRUE)):
        conditions = set_condition(
            conditions, type_, value, Reason.INTERNAL_ERROR.value, sentence, generation=generation, now=now
        )
    written = [one.model_dump(mode="json", by_alias=True) for one in conditions]
    is_new = was is None or was.reason != Reason.INTERNAL_ERROR
    return {**status, "conditions": written}, sentence if is_new else ""


def _readable(conditions: Any) -> list[Condition]:
    found = []
    for one in conditions if isinstance(conditions, list) else ():
        try:
            found.append(Condition.model_validate(one))
        except ValueError:
            continue
    return found
