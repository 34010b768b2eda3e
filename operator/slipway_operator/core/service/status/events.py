"""Finds the events of a pass: the differences between the status before and after, and between the replicas.

The modules that decide to create, drain or replace a replica make those events themselves; this module makes the events
of the whole service. Each follows from a change, so it is posted once, however often the pass repeats. The leader keeps
in memory which replicas were ready in the pass before: a new leader compares counts, and posts nothing about replicas
that failed before it led, except that it replaces them (ReplicaReplaced).
"""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from slipway_api.conditions import Condition, ConditionStatus, ConditionType, EventReason, Reason, find_condition
from slipway_api.inference_status import InferenceServiceStatus
from slipway_api.names import STATE_DRAINING
from slipway_api.stalled_causes import STALLED_CAUSES
from slipway_operator.core.actions import Event
from slipway_operator.core.health import Member
from slipway_operator.core.observed import Observed, Replica
from slipway_operator.core.service.replicas.suspension import find_suspension_events, is_suspended
from slipway_operator.core.service.status.advice import find_advice, find_load_advice
from slipway_operator.core.service.status.conditions import Decided
from slipway_operator.core.service.status.placement import SURGE_REMEDY
from slipway_operator.core.service.status.problems import describe_replica, ended_runs, is_unready_in
from slipway_operator.core.service.status.scaling_status import scaling_events
from slipway_operator.core.templates import template_events


def find_events(observed: Observed, after: InferenceServiceStatus, decided: Decided) -> tuple[Event, ...]:
    """Finds the events of this pass."""
    before = observed.service.status
    return (
        *find_suspension_events(before, after.conditions, decided.members, decided.desired),
        *_scaling_events(observed, after, decided),
        *template_events(before, after),
        *_rollout_events(before, after),
        *_failure_events(observed, decided),
        *_causes_found(observed, decided),
        *_obstacle_events(before, after),
        *_ready_events(before, observed.ready_before, decided),
        *find_warnings(before, after),
        *find_advice(observed.service),
        *find_load_advice(before, after, decided.members),
    )


def _scaling_events(observed: Observed, after: InferenceServiceStatus, decided: Decided) -> Iterable[Event]:
    """Suspension and its end have events of their own."""
    if is_suspended(observed.service.status) != is_suspended(after):
        return ()
    return scaling_events(observed, after, decided.scale, ready=len(ready_names(decided.members)))


def ready_names(members: Iterable[Member]) -> frozenset[str]:
    """The names of the replicas that take requests; the next pass compares with them."""
    return frozenset(member.replica.name for member in members if member.is_ready)


def _rollout_events(before: InferenceServiceStatus, after: InferenceServiceStatus) -> list[Event]:
    events = []
    if before.update_revision and before.update_revision != after.update_revision:
        message = f"revision {after.update_revision} replaces {before.current_revision}"
        images = {one.hash: one.image for one in after.revisions}
        old, new = images.get(before.current_revision), images.get(after.update_revision)
        if old and new and old != new:
            message += f": runtime image {new} instead of {old}"
        events.append(Event(reason=EventReason.ROLLOUT_STARTED, action="Rollout", message=message))
    if before.current_revision and before.current_revision != after.current_revision:
        message = f"revision {after.current_revision} serves alone"
        events.append(Event(reason=EventReason.ROLLOUT_COMPLETED, action="Rollout", message=message))
    return events


def _obstacle_events(before: InferenceServiceStatus, after: InferenceServiceStatus) -> list[Event]:
    """A rollout that waits for a GPU which its own old replicas hold; once, however often the scheduler tries."""
    was, now = (find_condition(status.conditions, ConditionType.RECONCILING) for status in (before, after))
    if now is None or SURGE_REMEDY not in now.message or (was is not None and SURGE_REMEDY in was.message):
        return []
    return [Event(reason=EventReason.WAITING_FOR_GPU, action="Rollout", message=now.message)]


def _failure_events(observed: Observed, decided: Decided) -> list[Event]:
    """Replicas that were ready in the pass before and are not any more, though they were not asked to go.

    A drain and a deletion are such a request, also by `kubectl delete pod` or an eviction; a lost replica that is
    replaced gets ReplicaReplaced as well.
    """
    before = observed.ready_before or frozenset()
    fallen = [one for one in decided.members if one.replica.name in before and not one.is_ready]
    failed = [one for one in fallen if not _was_asked_to_go(one.replica)]
    sentences = {one.replica.name: describe_replica(one, observed, decided.revision) for one in failed}
    gone = before - {one.replica.name for one in decided.members}
    sentences |= {name: f"{name} is gone: its pod was deleted" for name in gone}
    count = len(ready_names(decided.members))
    return [
        Event(
            reason=EventReason.REPLICA_UNHEALTHY,
            action="Observe",
            message=f"{sentence}; {count} of {decided.desired} ready",
            pod=name,
        )
        for name, sentence in sorted(sentences.items())
    ]


def _causes_found(observed: Observed, decided: Decided) -> list[Event]:
    """How a replica ended whose probe had failed before: the kubelet often writes that a moment later.

    The status before still says that the replica is unready, so each end is reported once.
    """
    was = find_condition(observed.service.status.conditions, ConditionType.WORKLOAD_AVAILABLE)
    return [
        Event(
            reason=EventReason.REPLICA_UNHEALTHY,
            action="Observe",
            message=describe_replica(one, observed, decided.revision),
            pod=one.replica.name,
        )
        for one in decided.members
        if was is not None and ended_runs(one.replica) and one.replica.last_exit and not one.is_ready
        if is_unready_in(was.message, one.replica) and not _was_asked_to_go(one.replica)
    ]


def _was_asked_to_go(replica: Replica) -> bool:
    drains = replica.state == STATE_DRAINING or (replica.sample is not None and replica.sample.draining)
    return drains or replica.deleted_at is not None


def _ready_events(
    before: InferenceServiceStatus, ready_before: AbstractSet[str] | None, decided: Decided
) -> list[Event]:
    ready = [member.replica for member in decided.members if member.is_ready]
    ready.sort(key=lambda one: (one.ready_since or one.created_at, one.name))
    if ready_before is not None:
        fresh = [one for one in ready if one.name not in ready_before]
    else:
        fresh = ready[min(len(ready), before.ready_replicas or 0) :]
    return [
        Event(
            reason=EventReason.REPLICA_READY,
            action="Start",
            message=f"{one.name} is ready{_since_claim(one)}: {len(ready)} of {decided.desired}",
            pod=one.name,
        )
        for one in fresh
    ]


def _since_claim(replica: Replica) -> str:
    """` 3s after it was claimed`, of a pod of a WarmPool; of others nothing."""
    if replica.claimed_at is None or replica.ready_since is None:
        return ""
    return f" {max(0, round((replica.ready_since - replica.claimed_at).total_seconds()))}s after it was claimed"


_WARNINGS = {
    **{(ConditionType.STALLED, reason): EventReason(reason.value) for reason in STALLED_CAUSES},
    (ConditionType.ROUTE_READY, Reason.NAME_CONFLICT): EventReason.NAME_CONFLICT,
    (ConditionType.ROUTE_READY, Reason.NO_GATEWAY): EventReason.NO_GATEWAY,
    (ConditionType.ROUTE_READY, Reason.FALLBACK_NOT_FOUND): EventReason.FALLBACK_NOT_FOUND,
    (ConditionType.READY, Reason.WAITING_FOR_GPU): EventReason.WAITING_FOR_GPU,
    (ConditionType.READY, Reason.UNSCHEDULABLE): EventReason.UNSCHEDULABLE,
    (ConditionType.READY, Reason.MOUNT_FAILED): EventReason.MOUNT_FAILED,
    (ConditionType.CANARY_HEALTHY, Reason.INCONCLUSIVE): EventReason.CANARY_INCONCLUSIVE,
    (ConditionType.CANARY_HEALTHY, Reason.ROLLED_BACK): EventReason.CANARY_ROLLED_BACK,
    (ConditionType.ROLLOUT_HEALTHY, Reason.ROLLED_BACK): EventReason.ROLLOUT_ROLLED_BACK,
    (ConditionType.SCALING_ACTIVE, Reason.METRICS_STALE): EventReason.METRICS_STALE,
    (ConditionType.SCALING_ACTIVE, Reason.KEY_REFUSED): EventReason.KEY_REFUSED,
    (ConditionType.SCALING_ACTIVE, Reason.METRICS_MISSING): EventReason.SCALING_HELD,
    (ConditionType.SCALING_ACTIVE, Reason.LIMITED_BY_MAX): EventReason.SCALING_LIMITED,
    (ConditionType.SCALING_ACTIVE, Reason.LIMITED_BY_BUDGET): EventReason.BUDGET_EXCEEDED,
    (ConditionType.SCALING_ACTIVE, Reason.LIMITED_BY_CAPACITY): EventReason.SCALING_LIMITED,
    (ConditionType.GATEWAY_ONLY, Reason.OPEN_TO_DIRECT_CALLERS): EventReason.ADVICE,
    (ConditionType.OUTPUT_VALID, Reason.INVALID_LOGITS): EventReason.INVALID_LOGITS,
    (ConditionType.ADAPTERS_READY, Reason.ADAPTERS_FAILED): EventReason.ADAPTERS_FAILED,
    (ConditionType.WITHIN_SLO, Reason.LIMIT_EXCEEDED): EventReason.SLO_EXCEEDED,
    (ConditionType.WITHIN_SLO, Reason.ERROR_BUDGET_BURNING): EventReason.ERROR_BUDGET_BURNING,
    (ConditionType.WITHIN_SLO, Reason.ERROR_BUDGET_EXHAUSTED): EventReason.ERROR_BUDGET_EXHAUSTED,
}


def find_warnings(before: InferenceServiceStatus, after: InferenceServiceStatus) -> list[Event]:
    """Finds the conditions that take a reason which deserves a warning."""
    events = []
    for (type, reason), warning in _WARNINGS.items():
        condition = find_condition(after.conditions, type)
        if condition is None or condition.reason != reason or _was_reported(before, condition):
            continue
        if reason is Reason.METRICS_MISSING and condition.status is ConditionStatus.UNKNOWN:
            continue  # nothing is ready yet: there is nothing to measure, and nothing wrong
        if type is ConditionType.READY and condition.status is ConditionStatus.FALSE:
            continue  # Stalled has the same reason, and its event
        events.append(Event(reason=warning, action="Report", message=condition.message))
    return events


def _was_reported(before: InferenceServiceStatus, condition: Condition) -> bool:
    was = find_condition(before.conditions, condition.type)
    return was is not None and was.reason == condition.reason and was.status == condition.status
