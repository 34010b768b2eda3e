"""Which condition and events report a rollout: only those of strategy Canary contain the word canary. Pure."""

from collections.abc import Iterable
from typing import Final

from slipway_api.conditions import Condition, ConditionType, EventReason, find_condition, remove_condition
from slipway_api.rollout_spec import RolloutStrategy

VERDICTS: Final = (ConditionType.CANARY_HEALTHY, ConditionType.ROLLOUT_HEALTHY)


def verdict_type(strategy: RolloutStrategy) -> ConditionType:
    """The condition with the verdict about the new revision."""
    return ConditionType.CANARY_HEALTHY if strategy is RolloutStrategy.CANARY else ConditionType.ROLLOUT_HEALTHY


def find_verdict(conditions: Iterable[Condition]) -> Condition | None:
    """The condition with the last verdict, whatever the strategy was when it was written."""
    known = tuple(conditions)
    return next(filter(None, (find_condition(known, type) for type in VERDICTS)), None)


def without_verdicts(conditions: tuple[Condition, ...], *, but: ConditionType | None = None) -> tuple[Condition, ...]:
    """The conditions without any verdict, except that of type `but`."""
    for type in VERDICTS:
        if type is not but:
            conditions = remove_condition(conditions, type)
    return conditions


def gates_passed_event(strategy: RolloutStrategy) -> EventReason:
    """The reason of the event when the gates are passed."""
    return EventReason.CANARY_STEP_COMPLETED if strategy is RolloutStrategy.CANARY else EventReason.GATES_PASSED
