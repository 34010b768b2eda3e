"""Builds the status of an adapter, and finds the events of a pass.

| base, replicas                       | Ready                                                  |
|--------------------------------------|--------------------------------------------------------|
| another object has the name          | False NameConflict (Stalled)                           |
| no such service                      | False BaseNotFound (Stalled, after BASE_MAY_COME)      |
| no room for adapters in its spec     | False CapacityExceeded (Stalled)                       |
| it has and wants no replicas         | True BaseScaledToZero                                  |
| no replica is ready                  | False NoReadyPods                                      |
| mode OnDemand, no replica has it     | True OnDemand                                          |
| all chosen replicas have it          | True Loaded                                            |
| some have it                         | True PartiallyLoaded                                   |
| none has it, and some failed         | False, with the cause; Stalled when nothing is retried |
| none has it yet                      | Unknown Loading                                        |
"""

import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from slipway_api.adapter_conditions import FAILURE_CAUSES, AdapterCondition, AdapterEvent, AdapterReason
from slipway_api.conditions import ConditionStatus, find_condition, remove_condition, set_condition
from slipway_api.lora_adapter import AdapterPodStatus, LoRAAdapter, LoRAAdapterStatus, PlacementMode, PodState
from slipway_api.runtime_api import AdapterInfo
from slipway_operator.core.actions import Event
from slipway_operator.core.adapter.observed import AdapterObserved
from slipway_operator.core.adapter.steps import Step
from slipway_operator.core.service.status.refusals import judge_refusal
from slipway_operator.core.words import count

PODS_SHOWN: Final = 64
LAST_USED_EVERY: Final = timedelta(seconds=60)
SOURCE_FAULTS: Final = frozenset(
    {AdapterReason.DOWNLOAD_FAILED, AdapterReason.DIGEST_MISMATCH, AdapterReason.CREDENTIALS_INVALID}
)

BASE_MAY_COME: Final = timedelta(seconds=10)  # applied together, the adapter may be seen before its base
_FLAG: Final = re.compile(r" \(--[a-z-]+\)")  # of the runtime's command line: users of Kubernetes set fields

Verdict = tuple[ConditionStatus, AdapterReason, str]


def build_status(observed: AdapterObserved, steps: Sequence[Step], now: datetime) -> LoRAAdapterStatus:
    """The status after this pass; `steps` are those of the replicas that should have the adapter."""
    adapter, before = observed.adapter, observed.adapter.status
    info = _first_info(steps)
    loaded = sum(_is_loaded(one) for one in steps)
    conditions = before.conditions
    generation = adapter.metadata.generation

    def write(kind: AdapterCondition, verdict: Verdict | None) -> None:
        nonlocal conditions
        if verdict is None:
            conditions = remove_condition(conditions, kind)
            return
        status, reason, message = verdict
        conditions = set_condition(
            conditions, kind, status, reason.value, message[:4096], generation=generation, now=now
        )

    ready = _ready(observed, steps)
    stalled = _stalled(observed, steps, ready, now)
    write(AdapterCondition.READY, ready)
    write(AdapterCondition.LOADED, _loaded(observed, steps))
    write(AdapterCondition.SOURCE_RESOLVED, _resolved(observed, steps, info is not None))
    write(AdapterCondition.STALLED, stalled)
    is_moving = loaded < len(steps) and stalled is None
    progress = f"{loaded} of {count(len(steps), 'replica has', 'replicas have')} it"
    write(
        AdapterCondition.RECONCILING,
        (ConditionStatus.TRUE, AdapterReason.LOADING, progress) if is_moving else None,
    )
    return LoRAAdapterStatus(
        observed_generation=generation,
        conditions=conditions,
        adapter_name=adapter.adapter_name,
        desired_replicas=len(steps),
        loaded_replicas=loaded,
        loaded=f"{loaded}/{len(steps)}",
        # A new source counts when all replicas have it.
        resolved_digest=info.digest
        if info and (loaded == len(steps) or not before.resolved_digest)
        else before.resolved_digest,
        rank=info.rank or before.rank if info else before.rank,
        size_bytes=info.bytes or before.size_bytes if info else before.size_bytes,
        last_used_time=_last_used(observed, steps),
        pods=_pods(steps),
    )


def find_events(
    observed: AdapterObserved, status: LoRAAdapterStatus, steps: Sequence[Step], failed: Sequence[tuple[str, str]]
) -> Iterator[Event]:
    """The events of a pass: differences between the status before and after, and the failures that it counted."""
    adapter, before = observed.adapter, observed.adapter.status
    name = adapter.adapter_name
    info = _first_info(steps)
    if info is not None and not _is_true(before, AdapterCondition.SOURCE_RESOLVED):
        size = f"{info.bytes or 0:,} bytes, rank {info.rank or 0}, {info.digest}"
        message = f"the first replica has fetched {name} from {adapter.spec.source.uri}: {size}"
        yield Event(reason=AdapterEvent.ADAPTER_DOWNLOADED, action="Download", message=message)
    was = find_condition(before.conditions, AdapterCondition.LOADED)
    has = find_condition(status.conditions, AdapterCondition.LOADED)
    is_complete = has is not None and has.reason == AdapterReason.LOADED and has.status is ConditionStatus.TRUE
    was_complete = was is not None and was.status is ConditionStatus.TRUE
    if is_complete and before.resolved_digest not in ("", status.resolved_digest):
        message = f"{name} answers with {status.resolved_digest} instead of {before.resolved_digest}"
        yield Event(reason=AdapterEvent.ADAPTER_SWAPPED, action="Swap", message=message)
    elif is_complete and (not was_complete or before.desired_replicas != status.desired_replicas):
        took = max((one.entry.load_seconds for one in steps if one.entry.load_seconds is not None), default=None)
        loaded = count(status.loaded_replicas or 0, "replica")
        message = f"{name} is loaded on {loaded}" + (f"; the slowest took {took} s" if took else "")
        yield Event(reason=AdapterEvent.ADAPTER_LOADED, action="Load", message=message)
    for pod, sentence in failed:
        message = f"{pod} could not load {name}: {sentence}"
        yield Event(reason=AdapterEvent.ADAPTER_LOAD_FAILED, action="Load", message=message, pod=pod)
    yield from stalled_events(observed, status)


def stalled_events(observed: AdapterObserved, status: LoRAAdapterStatus) -> Iterator[Event]:
    """The event of a new cause of Stalled; a failed load has its own, with the pod (AdapterLoadFailed)."""
    was_stalled = find_condition(observed.adapter.status.conditions, AdapterCondition.STALLED)
    stalled = find_condition(status.conditions, AdapterCondition.STALLED)
    is_new = stalled is not None and (was_stalled is None or was_stalled.message != stalled.message)
    if stalled is None or not is_new:
        return
    is_load_failure = stalled.reason in FAILURE_CAUSES and any(one.attempts for one in status.pods)
    if not is_load_failure:
        yield Event(reason=AdapterEvent(stalled.reason), action="Report", message=stalled.message)


def unclaimed_status(observed: AdapterObserved, now: datetime) -> LoRAAdapterStatus | None:
    """The status of an adapter whose finalizer the API server refuses, so that nothing loads it; None: it does not."""
    if not _refusal(observed):
        return None
    return build_status(observed, (), now)


def _ready(observed: AdapterObserved, steps: Sequence[Step]) -> Verdict:
    """Condition Ready, by the table in the module's docstring."""
    adapter, base, rival = observed.adapter, observed.base, observed.rival
    if (refusal := _refusal(observed)) and not any(_is_loaded(one) for one in steps):
        return ConditionStatus.FALSE, AdapterReason.REFUSED, refusal
    name = adapter.adapter_name
    if rival is not None:
        message = (
            f"the {rival.kind} {rival.name} is served as {rival.served_name!r} already; "
            "give one of the two another name"
        )
        return ConditionStatus.FALSE, AdapterReason.NAME_CONFLICT, message
    if base is None:
        message = (
            f"there is no InferenceService {adapter.spec.base_ref.name} in this namespace; create it, or correct "
            "spec.baseRef.name"
        )
        return ConditionStatus.FALSE, AdapterReason.BASE_NOT_FOUND, message
    if not base.has_room:
        message = f"the InferenceService {base.name} has no room for adapters: set its spec.runtime.lora"
        return ConditionStatus.FALSE, AdapterReason.CAPACITY_EXCEEDED, message
    if not steps and base.desired == 0:
        message = f"{base.name} has no replicas now; the next ones load {name}"
        return ConditionStatus.TRUE, AdapterReason.BASE_SCALED_TO_ZERO, message
    is_on_demand = adapter.spec.placement.mode is PlacementMode.ON_DEMAND
    if is_on_demand and observed.pods and not any(one.entry.attempts or one.pod.routed for one in steps):
        # Also while the replica that was chosen loads it: that is how this mode serves.
        message = f"no replica of {base.name} has {name} now; a request for it waits until one has loaded it"
        return ConditionStatus.TRUE, AdapterReason.ON_DEMAND, message
    if not steps:
        return ConditionStatus.FALSE, AdapterReason.NO_READY_PODS, f"no replica of {base.name} is ready"
    loaded = sum(_is_loaded(one) for one in steps)
    serving = sum(one.info is not None and one.pod.routed for one in steps)
    if loaded == len(steps):
        return ConditionStatus.TRUE, AdapterReason.LOADED, f"{_of(loaded, steps)} as {name}"
    failed = next((one for one in steps if one.entry.attempts), None)
    why = f"; {failed.entry.name}: {_failure(observed, failed)}" if failed else ""
    if serving:
        message = f"{_of(serving, steps)} as {name}{why}"
        return ConditionStatus.TRUE, AdapterReason.PARTIALLY_LOADED, message
    if failed is not None and failed.entry.state is PodState.UNREACHABLE:
        message = f"no replica of {base.name} answers the operator{why}"
        return ConditionStatus.FALSE, AdapterReason.NO_READY_PODS, message
    if failed is not None:
        return ConditionStatus.FALSE, AdapterReason(_cause(observed, failed)), _failure(observed, failed)
    return ConditionStatus.UNKNOWN, AdapterReason.LOADING, f"{count(len(steps), 'replica loads', 'replicas load')} it"


def _stalled(observed: AdapterObserved, steps: Sequence[Step], ready: Verdict, now: datetime) -> Verdict | None:
    """True when a person has to act: a name, base, right or room is missing, or every replica without it gave up."""
    _, reason, message = ready
    if refusal := _refusal(observed):
        return ConditionStatus.TRUE, AdapterReason.REFUSED, refusal
    if reason is AdapterReason.BASE_NOT_FOUND and now >= base_is_missing_at(observed.adapter):
        return ConditionStatus.TRUE, reason, message
    if reason is AdapterReason.NAME_CONFLICT or (reason is AdapterReason.CAPACITY_EXCEEDED and not steps):
        return ConditionStatus.TRUE, reason, message
    missing = [one for one in steps if not _is_loaded(one)]
    if not missing or any(one.entry.state is not PodState.FAILED for one in missing):
        return None
    first = missing[0]
    base = observed.base.name if observed.base is not None else observed.adapter.spec.base_ref.name
    sentence = (
        f"{len(missing)} of {count(len(steps), 'replica')} gave up; {first.entry.name}: {_failure(observed, first)}; "
        f"it is tried again when the spec of this adapter or of InferenceService {base} changes"
    )
    return ConditionStatus.TRUE, AdapterReason(_cause(observed, first)), sentence


def _loaded(observed: AdapterObserved, steps: Sequence[Step]) -> Verdict:
    loaded, name = sum(_is_loaded(one) for one in steps), observed.adapter.adapter_name
    if not steps and observed.adapter.spec.placement.mode is PlacementMode.ON_DEMAND and observed.pods:
        return ConditionStatus.FALSE, AdapterReason.ON_DEMAND, f"no replica has {name} now"
    if not steps:
        return ConditionStatus.FALSE, AdapterReason.NO_READY_PODS, "no replica should have it now"
    if loaded == len(steps):
        return ConditionStatus.TRUE, AdapterReason.LOADED, f"{count(loaded, 'replica has', 'replicas have')} {name}"
    reason = AdapterReason.PARTIALLY_LOADED if loaded else AdapterReason.LOADING
    return ConditionStatus.FALSE, reason, f"{loaded} of {count(len(steps), 'replica has', 'replicas have')} {name}"


def _resolved(observed: AdapterObserved, steps: Sequence[Step], is_there: bool) -> Verdict:
    before = find_condition(observed.adapter.status.conditions, AdapterCondition.SOURCE_RESOLVED)
    faults = [one for one in steps if one.entry.attempts and _cause(observed, one) in SOURCE_FAULTS]
    if faults and not any(_is_loaded(one) for one in steps):
        return ConditionStatus.FALSE, AdapterReason(_cause(observed, faults[0])), faults[0].entry.message
    if is_there:
        return ConditionStatus.TRUE, AdapterReason.RESOLVED, "the files are where spec.source says"
    if before is not None and before.observed_generation == observed.adapter.metadata.generation:
        return before.status, AdapterReason(before.reason), before.message
    return ConditionStatus.UNKNOWN, AdapterReason.LOADING, "no replica has fetched the files yet"


def base_is_missing_at(adapter: LoRAAdapter) -> datetime:
    """When an adapter without its base is Stalled."""
    created = adapter.metadata.creation_timestamp
    return created + BASE_MAY_COME if created is not None else datetime.min.replace(tzinfo=UTC)


def _refusal(observed: AdapterObserved) -> str:
    """The write for this adapter that the API server refuses, of its finalizer or of a pod's annotation; "": none."""
    judged = (judge_refusal(one) for one in observed.failures)
    if (first := next(filter(None, judged), None)) is not None:
        return first[1]
    refused = next((one for one in observed.pods if one.route_failure and not one.routed), None)
    return f"the API server refuses the annotation of {refused.name}: {refused.route_failure}" if refused else ""


def _failure(observed: AdapterObserved, step: Step) -> str:
    """The sentence of the replica, with the field that a user of Kubernetes sets instead of a flag."""
    message = _FLAG.sub("", step.entry.message)
    cause = FAILURE_CAUSES.get(AdapterReason(_cause(observed, step)))
    if step.entry.state is PodState.UNREACHABLE or cause is None:
        return message
    base = observed.base.name if observed.base is not None else observed.adapter.spec.base_ref.name
    remedy = cause.remedy.replace("the InferenceService.", f"InferenceService {base}.").rstrip(".")
    return f"{message}; {remedy[0].lower()}{remedy[1:]}"


def _of(number: int, steps: Sequence[Step]) -> str:
    """`1 of 1 replica answers`, `1 of 2 replicas answer`."""
    return f"{number} of {count(len(steps), 'replica answers', 'replicas answer')}"


def _cause(observed: AdapterObserved, step: Step) -> str:
    """The cause of a failure; after a takeover, the one that status names."""
    if step.reason:
        return step.reason
    for kind in (AdapterCondition.STALLED, AdapterCondition.READY):
        known = find_condition(observed.adapter.status.conditions, kind)
        if known is not None and known.reason in FAILURE_CAUSES:
            return known.reason
    return AdapterReason.ENGINE_REJECTED


def _first_info(steps: Sequence[Step]) -> AdapterInfo | None:
    """What the first replica that has the adapter says of it."""
    return next((one.info for one in steps if one.info is not None), None)


def _is_true(status: LoRAAdapterStatus, kind: AdapterCondition) -> bool:
    condition = find_condition(status.conditions, kind)
    return condition is not None and condition.status is ConditionStatus.TRUE


def _is_loaded(step: Step) -> bool:
    return step.entry.state is PodState.LOADED


def _pods(steps: Sequence[Step]) -> tuple[AdapterPodStatus, ...]:
    """The replicas that are not done first; those that are only where all fit."""
    entries = [one.entry for one in steps]
    if len(entries) > PODS_SHOWN:
        entries = [one for one in entries if one.state is not PodState.LOADED]
    # Failures first: their backoff must survive the operator.
    kept = sorted(entries, key=lambda one: (not one.attempts, one.name))[:PODS_SHOWN]
    return tuple(sorted(kept, key=lambda one: one.name))


def _last_used(observed: AdapterObserved, steps: Sequence[Step]) -> datetime | None:
    """The newest use that any replica reports; it moves by a minute at least."""
    before = observed.adapter.status.last_used_time
    uses = [
        one.pod.listing.at - timedelta(seconds=one.info.idle_seconds)
        for one in steps
        if one.info is not None and one.info.idle_seconds is not None and one.pod.listing is not None
    ]
    newest = max(uses, default=None)
    if newest is None or (before is not None and newest < before + LAST_USED_EVERY):
        return before
    return newest.replace(microsecond=0)
