"""Builds the status of a WarmPool, and the events that follow from its changes.

| pods that can be claimed | should wait | otherwise                | Ready                      |
|--------------------------|-------------|--------------------------|----------------------------|
| any                      | 0           |                          | True Suspended             |
| all                      | > 0         |                          | True Available             |
| some                     | > 0         |                          | True Warming               |
| none                     | > 0         | Stalled                  | False, reason of Stalled   |
| none                     | > 0         | pods start               | Unknown Warming            |
| none                     | > 0         | a pause, or no capacity  | False NoReadyPods          |
"""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from slipway_api.conditions import Condition, ConditionStatus, find_condition, remove_condition, set_condition
from slipway_api.warm_pool import WarmPoolStatus
from slipway_api.warm_pool_conditions import PoolCondition, PoolEvent, PoolReason
from slipway_operator.core.actions import Event
from slipway_operator.core.certificates import describe_certificate_fault
from slipway_operator.core.service.status.refusals import describe_refusal, judge_refusal
from slipway_operator.core.warm_pool.autosize import Size
from slipway_operator.core.warm_pool.observed import Backoff, ObservedPool
from slipway_operator.core.warm_pool.uses import Uses, claim_seconds
from slipway_operator.core.words import count

FAILURES_UNTIL_STALLED: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The pods after this pass has deleted what it deletes, and before what it creates exists."""

    size: Size
    ready: int
    live: int
    claimed: int
    unschedulable: str = ""
    image_error: str = ""
    mount_failure: str = ""
    backoff: Backoff
    yielded_to: tuple[str, ...] = ()
    returned: frozenset[str] = frozenset()  # names of the pods that a service has had

    @property
    def warming(self) -> int:
        """Pods that start."""
        return self.live - self.ready


def build_status(observed: ObservedPool, counts: Counts, uses: Uses, now: datetime) -> WarmPoolStatus:
    """The status after this pass."""
    before = observed.pool.status
    hits = (before.hits or 0) + sum(use.hit for use in uses.new)
    misses = (before.misses or 0) + sum(not use.hit for use in uses.new)
    return WarmPoolStatus(
        observed_generation=observed.pool.metadata.generation,
        conditions=_conditions(observed, counts, hits, now),
        size=counts.size.pods,
        ready=counts.ready,
        warming=counts.warming,
        claimed=counts.claimed,
        hits=hits,
        misses=misses,
        hit_percent=round(100 * hits / (hits + misses)) if hits + misses else None,
        claim_seconds=claim_seconds(uses.listed),
        failures=counts.backoff.failures or None,
        not_before=counts.backoff.not_before if counts.backoff.failures else None,
        yielded_to=counts.yielded_to,
        uses=uses.listed,
    )


def _conditions(observed: ObservedPool, counts: Counts, hits: int, now: datetime) -> tuple[Condition, ...]:
    conditions = observed.pool.status.conditions
    generation = observed.pool.metadata.generation
    stalled = _stalled(observed, counts)
    wanted: dict[PoolCondition, tuple[ConditionStatus | bool, PoolReason, str] | None] = {
        PoolCondition.READY: _readiness(counts, stalled),
        PoolCondition.STALLED: (True, *stalled) if stalled else None,
        PoolCondition.RECONCILING: _progress(observed, counts) if not stalled else None,
        PoolCondition.EXHAUSTED: _exhaustion(counts, hits),
    }
    for type, value in wanted.items():
        if value is None:
            conditions = remove_condition(conditions, type)
        else:
            status, reason, message = value
            conditions = set_condition(
                conditions, type, status, reason.value, message[:4096], generation=generation, now=now
            )
    return conditions


def _readiness(counts: Counts, stalled: tuple[PoolReason, str] | None) -> tuple[ConditionStatus, PoolReason, str]:
    size, ready = counts.size.pods, counts.ready
    sentence = f"{ready} of {count(size, 'pod')} can be claimed"
    if size == 0:
        return ConditionStatus.TRUE, PoolReason.SUSPENDED, counts.size.reason
    if ready >= size:
        return ConditionStatus.TRUE, PoolReason.AVAILABLE, sentence
    if ready:
        return ConditionStatus.TRUE, PoolReason.WARMING, sentence
    if stalled:
        return ConditionStatus.FALSE, *stalled
    if counts.unschedulable or not counts.live:
        return ConditionStatus.FALSE, PoolReason.NO_READY_PODS, sentence
    return ConditionStatus.UNKNOWN, PoolReason.WARMING, sentence


def _progress(observed: ObservedPool, counts: Counts) -> tuple[bool, PoolReason, str] | None:
    if counts.ready >= counts.size.pods:
        return None
    if counts.unschedulable:
        return True, PoolReason.WAITING_FOR_CAPACITY, counts.unschedulable
    causes = "".join(f"; {describe_refusal(failure)}" for failure in observed.failures)
    return True, PoolReason.WARMING, f"{count(counts.size.pods, 'pod')} should wait for a claim{causes}"


def _exhaustion(counts: Counts, hits: int) -> tuple[bool, PoolReason, str] | None:
    if not hits or counts.ready or not counts.size.pods:
        return None
    return True, PoolReason.NO_READY_PODS, f"none of {count(counts.size.pods, 'pod')} is left to be claimed"


def _stalled(observed: ObservedPool, counts: Counts) -> tuple[PoolReason, str] | None:
    """What only a person can change."""
    if observed.fault:
        return PoolReason.INVALID_SPEC, observed.fault
    if observed.certificate_fault:  # told while pods wait, too
        return PoolReason.CERTIFICATE_UNAVAILABLE, describe_certificate_fault(observed.certificate_fault)
    for failure in observed.failures:
        if (judged := judge_refusal(failure)) is not None:
            return PoolReason(judged[0].value), judged[1]
    if counts.mount_failure and not counts.ready:
        return PoolReason.MOUNT_FAILED, counts.mount_failure
    if counts.image_error and not counts.ready:
        return PoolReason.IMAGE_PULL_FAILED, f"{counts.image_error}; check spec.image and imagePullSecrets"
    if counts.backoff.failures >= FAILURES_UNTIL_STALLED and not counts.ready:
        return PoolReason.WARM_FAILED, f"pods ended {count(counts.backoff.failures, 'time')} in a row; see their events"
    return None


def status_events(
    observed: ObservedPool, after: WarmPoolStatus, counts: Counts, uses: Uses, booted: AbstractSet[str]
) -> tuple[Event, ...]:
    """The events of this pass that follow from the difference between the status before and after."""
    before, size = observed.pool.status, counts.size
    events = []
    for name in sorted(booted - observed.booted_before) if observed.booted_before is not None else ():
        is_back = name in counts.returned
        message = f"{name} can be claimed{' again' if is_back else ''}: {counts.ready} of {size.pods}"
        reason, action = (PoolEvent.POD_RETURNED, "Return") if is_back else (PoolEvent.POD_WARMED, "Start")
        events.append(Event(reason=reason, action=action, message=message, pod=name))
    for use in uses.new:
        if use.hit:
            message = f"{use.pod} is a replica of {use.service}; {count(counts.ready, 'pod is', 'pods are')} left"
            events.append(Event(reason=PoolEvent.POD_CLAIMED, action="Claim", message=message, pod=use.pod))
    exhausted = find_condition(after.conditions, PoolCondition.EXHAUSTED)
    if exhausted is not None and find_condition(before.conditions, PoolCondition.EXHAUSTED) is None:
        events.append(Event(reason=PoolEvent.POOL_EXHAUSTED, action="Report", message=exhausted.message))
    stalled = find_condition(after.conditions, PoolCondition.STALLED)
    was_stalled = find_condition(before.conditions, PoolCondition.STALLED)
    is_new = stalled is not None and (was_stalled is None or was_stalled.reason != stalled.reason)
    if stalled is not None and is_new and stalled.reason != PoolReason.WARM_FAILED:  # each pod has its event
        events.append(Event(reason=PoolEvent(stalled.reason), action="Report", message=stalled.message))
    if observed.pool.spec.autosize is not None and before.size is not None and before.size != size.pods:
        message = f"{before.size}→{size.pods}: {size.reason}"
        events.append(Event(reason=PoolEvent.POOL_RESIZED, action="Scale", message=message))
    return tuple(events)
