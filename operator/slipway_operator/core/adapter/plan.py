"""Plans one pass over one adapter: calls to replicas, status and events, from an `AdapterObserved` and the time.

Replicas that should have the adapter get it first; the others drop it only when all of the former have it, or cannot
get it. A deletion takes it off every replica, in this order: off the route, routers told, unloaded, requests finished.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Final

from slipway_api import names
from slipway_api.adapter_conditions import AdapterEvent
from slipway_api.lora_adapter import AdapterPodStatus, LoRAAdapterStatus, PlacementMode, PodState
from slipway_operator.core.actions import Action, AddFinalizer, Event, RemoveFinalizer, earliest, events_of
from slipway_operator.core.adapter import on_demand, placement
from slipway_operator.core.adapter.calls import UnrouteAdapter
from slipway_operator.core.adapter.observed import AdapterObserved
from slipway_operator.core.adapter.on_demand import OnDemandChoice
from slipway_operator.core.adapter.status import (
    base_is_missing_at,
    build_status,
    find_events,
    stalled_events,
    unclaimed_status,
)
from slipway_operator.core.adapter.steps import Step, counted, list_again, unwanted_step, wanted_step
from slipway_operator.core.words import count

CALLS_PER_PASS: Final = 20  # results bring the next pass; so many keep the slots of a service busy
UNREACHABLE_FOR: Final = timedelta(seconds=30)  # a deletion waits no longer for a replica that does not answer
PROGRESS_EVERY: Final = timedelta(seconds=2)  # a status that only counts further is written no more often


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPlan:
    """The result of planning, in this order: actions, status, events; and what the next pass remembers."""

    actions: tuple[Action, ...] = ()
    status: LoRAAdapterStatus | None  # None: write none
    notes: tuple[Event, ...] = ()  # events of decisions; those of actions belong to the actions
    requeue_after: float | None = None
    entries: Mapping[str, AdapterPodStatus] = field(default_factory=dict)
    counted: Mapping[str, datetime] = field(default_factory=dict)
    unrouted: Mapping[str, datetime] = field(default_factory=dict)
    written_at: datetime | None = None

    @property
    def events(self) -> tuple[Event, ...]:
        """All events, if all actions are carried out."""
        return (*events_of(self.actions), *self.notes)


def plan(observed: AdapterObserved, now: datetime) -> AdapterPlan:
    """Decide everything about one adapter. `now` is timezone-aware UTC."""
    adapter = observed.adapter
    if adapter.is_being_deleted:
        return _leave_all(observed, now)
    if names.FINALIZER not in adapter.metadata.finalizers:
        # Before the first load, so that a deletion takes the adapter off its replicas.
        claim = AddFinalizer(finalizer=names.FINALIZER, reason="its replicas drop it before it goes")
        refused = unclaimed_status(observed, now)
        events = tuple(stalled_events(observed, refused)) if refused is not None else ()
        return AdapterPlan(actions=(claim,), status=refused, notes=events, requeue_after=0.0)

    may_load = observed.base is not None and observed.base.has_room and observed.rival is None
    entries = _entries(observed)
    choice = _choose(observed, entries, now) if may_load else OnDemandChoice()
    chosen = choice.chosen
    wanted = [wanted_step(observed, pod, entries[pod.name], now) for pod in chosen]
    wanted = [_with_newer_list(observed, one, choice, now) for one in wanted]
    uids = {pod.uid for pod in chosen}
    # One that is not ready is left alone: it is not routed, and has its adapters when it comes back.
    others = [pod for pod in observed.pods if pod.uid not in uids and pod.ready]
    is_settled = all(one.entry.state in (PodState.LOADED, PodState.FAILED) for one in wanted)
    leaving = [step for pod in others if (step := unwanted_step(observed, pod, now))] if is_settled else []

    newest = build_status(observed, wanted, now)
    status = _slowly(observed, newest, now)
    calls = [*(one.call for one in wanted if one.call is not None), *_unloads(choice, leaving)]
    moments = [*(step.again_at for step in (*wanted, *leaving)), choice.again_at]
    if observed.base is None and (missing_at := base_is_missing_at(adapter)) > now:
        moments.append(missing_at)
    if newest != status:
        moments.append(now + PROGRESS_EVERY)
    held = len(calls) > CALLS_PER_PASS
    moments += [placement.next_change(observed.pods, now), now + timedelta(seconds=1) if held else None]
    return AdapterPlan(
        actions=tuple(calls[:CALLS_PER_PASS]),
        status=status,
        notes=tuple(find_events(observed, status, wanted, _newly_failed(observed))),
        requeue_after=_seconds_until(earliest(*moments), now),
        entries={one.pod.name: one.entry for one in wanted},
        counted={pod.uid: pod.outcome.at for pod in observed.pods if pod.outcome},
        unrouted=_unrouted(observed, [one.pod.uid for one in leaving], now),
        written_at=now if status != adapter.status else observed.written_at,
    )


def _choose(observed: AdapterObserved, entries: Mapping[str, AdapterPodStatus], now: datetime) -> OnDemandChoice:
    """The replicas that should have the adapter."""
    adapter = observed.adapter
    if adapter.spec.placement.mode is PlacementMode.ON_DEMAND:
        return on_demand.choose(observed, entries, now)
    return OnDemandChoice(chosen=placement.choose(adapter.adapter_name, observed.pods, adapter.spec.placement, now))


def _with_newer_list(observed: AdapterObserved, step: Step, choice: OnDemandChoice, now: datetime) -> Step:
    """The same step; where a newer list is needed and nothing else is to be done, that is asked for."""
    if step.pod.uid not in choice.ask_again or step.call is not None:
        return step
    asked = list_again(observed, step.pod, step.entry, now)
    return replace(step, call=asked.call, again_at=asked.again_at)


def _unloads(choice: OnDemandChoice, leaving: Sequence[Step]) -> list[Action]:
    """The calls that drop the adapter; the first one to each replica that makes room has an event."""
    calls: list[Action] = []
    for step in leaving:
        if step.call is None:
            continue
        message = choice.evicted.get(step.pod.uid)
        if not message or not isinstance(step.call, UnrouteAdapter):
            calls.append(step.call)
            continue
        event = Event(reason=AdapterEvent.ADAPTER_EVICTED, action="Evict", message=message, pod=step.pod.name)
        calls.append(replace(step.call, events=(event,)))
    return calls


def _leave_all(observed: AdapterObserved, now: datetime) -> AdapterPlan:
    """Take the adapter off every replica, then release our finalizer; silent replicas are skipped after a while."""
    adapter = observed.adapter
    if names.FINALIZER not in adapter.metadata.finalizers:
        return AdapterPlan(status=None)
    assert adapter.metadata.deletion_timestamp is not None
    waited = now - adapter.metadata.deletion_timestamp
    propagation = timedelta(seconds=observed.base.propagation_seconds if observed.base else 0)
    longest = UNREACHABLE_FOR + propagation + timedelta(seconds=adapter.spec.unload.drain_seconds)
    steps = [step for pod in observed.pods if (step := unwanted_step(observed, pod, now))] if observed.base else []
    left = [one for one in steps if not (one.pod.current is None and waited >= UNREACHABLE_FOR)]
    if not left or waited >= longest:
        skipped = [one.pod.name for one in steps]
        dropped = count(len(observed.pods) - len(skipped), "replica")
        message = f"{adapter.adapter_name} is unloaded from {dropped}"
        if skipped:
            message += f"; {count(len(skipped), 'replica')} did not answer in time, skipped: {', '.join(skipped[:5])}"
        gone = Event(reason=AdapterEvent.ADAPTER_UNLOADED, action="Unload", message=message)
        release = RemoveFinalizer(finalizer=names.FINALIZER, reason=message, events=(gone,))
        return AdapterPlan(actions=(release,), status=None)
    calls = [one.call for one in steps if one.call is not None]
    ends = [adapter.metadata.deletion_timestamp + limit for limit in (UNREACHABLE_FOR, longest)]
    moments = [*(one.again_at for one in steps), *(end for end in ends if end > now)]
    if len(calls) > CALLS_PER_PASS:
        moments.append(now + timedelta(seconds=1))
    return AdapterPlan(
        actions=tuple(calls[:CALLS_PER_PASS]),
        status=None,
        requeue_after=_seconds_until(earliest(*moments), now),
        unrouted=_unrouted(observed, [one.pod.uid for one in steps], now),
    )


def _entries(observed: AdapterObserved) -> dict[str, AdapterPodStatus]:
    """By pod: its entry of the last pass with the outcomes since then; a changed spec begins anew."""
    adapter = observed.adapter
    is_same = adapter.status.observed_generation == adapter.metadata.generation
    before: Mapping[str, AdapterPodStatus] = {}
    if is_same:
        known = observed.entries
        before = {one.name: one for one in adapter.status.pods} if known is None else known
    return {
        pod.name: counted(before.get(pod.name), pod, adapter, observed.counted.get(pod.uid)) for pod in observed.pods
    }


def _newly_failed(observed: AdapterObserved) -> list[tuple[str, str]]:
    """The failures that this pass counts: pod and sentence."""
    version = observed.adapter.version
    return [
        (pod.name, pod.outcome.message)
        for pod in observed.pods
        if pod.outcome is not None
        and not pod.outcome.ok
        and pod.outcome.version == version
        and observed.counted.get(pod.uid) != pod.outcome.at
    ]


def _unrouted(observed: AdapterObserved, leaving: Sequence[str], now: datetime) -> dict[str, datetime]:
    """Since when each replica that drops the adapter is not routed any more."""
    routed = {pod.uid for pod in observed.pods if pod.routed}
    return {uid: observed.unrouted.get(uid, now) for uid in leaving if uid not in routed}


def _slowly(observed: AdapterObserved, status: LoRAAdapterStatus, now: datetime) -> LoRAAdapterStatus:
    """The status, or the present one where it would only count further soon after the last write."""
    before = observed.adapter.status
    if observed.written_at is None or now - observed.written_at >= PROGRESS_EVERY or status == before:
        return status
    verdict = [(one.type, one.status, one.reason, one.observed_generation) for one in status.conditions]
    is_progress = verdict == [(one.type, one.status, one.reason, one.observed_generation) for one in before.conditions]
    has_attempts = any(one.attempts for one in status.pods)
    return before if is_progress and not has_attempts else status


def _seconds_until(moment: datetime | None, now: datetime) -> float | None:
    return None if moment is None else max(0.0, (moment - now).total_seconds())
