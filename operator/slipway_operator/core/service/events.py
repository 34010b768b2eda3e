"""What is worth an event: the differences between the status before and the status after.

Replicas created, drained and replaced are told where that is decided; here is what only the whole shows. Each event
follows from a change of status, so it is told once, however often the pass repeats.
"""

from slipway_api.conditions import Condition, ConditionStatus, ConditionType, EventReason, Reason, find_condition
from slipway_api.inference_status import InferenceServiceStatus
from slipway_operator.core.actions import Event
from slipway_operator.core.service.status import Decided


def news(before: InferenceServiceStatus, after: InferenceServiceStatus, decided: Decided) -> tuple[Event, ...]:
    """The events of this pass that are about the service as a whole."""
    return (
        *_scaled(before, decided),
        *_rolled(before, after),
        *_became_ready(before, decided),
        *warnings(before, after),
    )


def _scaled(before: InferenceServiceStatus, decided: Decided) -> list[Event]:
    was = before.desired_replicas
    if was is None or was == decided.desired:
        return []
    reason = EventReason.SCALED_UP if decided.desired > was else EventReason.SCALED_DOWN
    sentence = decided.scaling.reason if decided.scaling else f"{was}→{decided.desired}: spec.replicas"
    return [Event(reason=reason, action="Scale", message=sentence)]


def _rolled(before: InferenceServiceStatus, after: InferenceServiceStatus) -> list[Event]:
    events = []
    if before.update_revision and before.update_revision != after.update_revision:
        message = f"revision {after.update_revision} replaces {before.current_revision}"
        events.append(Event(reason=EventReason.ROLLOUT_STARTED, action="Rollout", message=message))
    if before.current_revision and before.current_revision != after.current_revision:
        message = f"revision {after.current_revision} serves alone"
        events.append(Event(reason=EventReason.ROLLOUT_COMPLETED, action="Rollout", message=message))
    return events


def _became_ready(before: InferenceServiceStatus, decided: Decided) -> list[Event]:
    ready = [member.replica for member in decided.members if member.is_ready]
    fresh = len(ready) - (before.ready_replicas or 0)
    if fresh <= 0:
        return []
    ready.sort(key=lambda one: (one.ready_since or one.created_at, one.name))
    return [
        Event(
            reason=EventReason.REPLICA_READY,
            action="Start",
            message=f"{one.name} is ready: {len(ready)} of {decided.desired}",
            pod=one.name,
        )
        for one in ready[-fresh:]
    ]


_WARNINGS = {
    (ConditionType.STALLED, Reason.PROGRESS_DEADLINE_EXCEEDED): EventReason.PROGRESS_DEADLINE_EXCEEDED,
    (ConditionType.STALLED, Reason.INVALID_SPEC): EventReason.INVALID_SPEC,
    (ConditionType.STALLED, Reason.IMAGE_PULL_FAILED): EventReason.REPLICA_UNHEALTHY,
    (ConditionType.STALLED, Reason.MODEL_NOT_FOUND): EventReason.MODEL_DOWNLOAD_FAILED,
    (ConditionType.STALLED, Reason.CREDENTIALS_INVALID): EventReason.MODEL_DOWNLOAD_FAILED,
    (ConditionType.STALLED, Reason.DOES_NOT_FIT): EventReason.REPLICA_UNHEALTHY,
    (ConditionType.STALLED, Reason.CRASH_LOOPING): EventReason.REPLICA_UNHEALTHY,
    (ConditionType.STALLED, Reason.QUOTA_EXCEEDED): EventReason.SCALING_LIMITED,
    (ConditionType.ROUTE_READY, Reason.NAME_CONFLICT): EventReason.NAME_CONFLICT,
    (ConditionType.READY, Reason.WAITING_FOR_GPU): EventReason.WAITING_FOR_GPU,
    (ConditionType.SCALING_ACTIVE, Reason.METRICS_STALE): EventReason.METRICS_STALE,
    (ConditionType.SCALING_ACTIVE, Reason.METRICS_MISSING): EventReason.SCALING_HELD,
    (ConditionType.SCALING_ACTIVE, Reason.LIMITED_BY_MAX): EventReason.SCALING_LIMITED,
    (ConditionType.SCALING_ACTIVE, Reason.LIMITED_BY_CAPACITY): EventReason.SCALING_LIMITED,
}


def warnings(before: InferenceServiceStatus, after: InferenceServiceStatus) -> list[Event]:
    """A condition that takes a reason which deserves a warning."""
    events = []
    for (type, reason), warning in _WARNINGS.items():
        condition = find_condition(after.conditions, type)
        if condition is None or condition.reason != reason or _said(before, condition):
            continue
        if reason is Reason.METRICS_MISSING and condition.status is ConditionStatus.UNKNOWN:
            continue  # nothing is ready yet: there is nothing to measure, and nothing wrong
        events.append(Event(reason=warning, action="Report", message=condition.message))
    return events


def _said(before: InferenceServiceStatus, condition: Condition) -> bool:
    was = find_condition(before.conditions, condition.type)
    return was is not None and was.reason == condition.reason and was.status == condition.status
