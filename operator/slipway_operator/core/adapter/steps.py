"""Decides the next step of one adapter on one replica: list, load, probe, route; or unroute, wait, unload.

A replica that should have the adapter, by what its own list says:

| the list has                   | next step                                                                     |
|--------------------------------|-------------------------------------------------------------------------------|
| nothing, or a failed load      | load it; after a failure not before the backoff has passed                    |
| the wanted version, not routed | probe it with one token, then route it                                        |
| the wanted version, routed     | none                                                                          |
| another version that serves    | load the wanted one beside it under the name of the next version, probe that, |
|                                | load it under the adapter's name, which takes over, and unload the other name |
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, Final

from slipway_api.adapter_conditions import FINAL_REASONS
from slipway_api.lora_adapter import NEXT_VERSION, AdapterPodStatus, LoRAAdapter, PodState
from slipway_api.runtime_api import AdapterInfo
from slipway_operator.core.adapter.calls import (
    AdapterCall,
    ListAdapters,
    LoadAdapter,
    ProbeAdapter,
    RouteAdapter,
    UnloadAdapter,
    UnrouteAdapter,
)
from slipway_operator.core.adapter.observed import AdapterObserved, AdapterPod, Listing, Outcome

LOADED_STATES: Final = frozenset({"disk", "host", "slot"})
LIST_EVERY: Final = timedelta(seconds=120)
LOOK_AGAIN: Final = timedelta(seconds=0.5)  # while a replica loads or drains the adapter
RECHECK: Final = timedelta(seconds=5)  # when a result is late
FIRST_BACKOFF: Final = timedelta(seconds=5)
LONGEST_BACKOFF: Final = timedelta(seconds=300)
MOST_ATTEMPTS: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The adapter on one replica: how far it is, and what to do next."""

    pod: AdapterPod
    entry: AdapterPodStatus
    call: AdapterCall | None = None
    again_at: datetime | None = None
    info: AdapterInfo | None = None
    """The adapter as the replica lists it, where it answers requests for it."""
    reason: str = ""
    """Of a failure: an AdapterReason."""


def wanted_step(observed: AdapterObserved, pod: AdapterPod, entry: AdapterPodStatus, now: datetime) -> Step:
    """The next step of a replica that should have the adapter; `entry` already counts its last failure."""
    adapter, name = observed.adapter, observed.adapter.adapter_name
    listing, outcome = pod.current, pod.outcome
    if not pod.ready:
        return Step(pod=pod, entry=_entry(pod, PodState.LOADING, "the replica is not ready"))
    if listing is None:
        return _ask(observed, pod, entry, now)
    found = listing.adapters.get(name)
    serves = found is not None and found.state in LOADED_STATES
    if serves and found is not None and is_wanted(found, adapter):
        return _serve(observed, pod, entry, listing, found, now)
    if found is not None and not serves and pod.routed:
        return _call(observed, pod, entry, UnrouteAdapter, now, reason="the replica does not have it any more")
    if found is None and pod.routed:
        return _call(observed, pod, entry, UnrouteAdapter, now, reason="the replica does not have it any more")
    if found is not None and found.state in ("loading", "draining"):
        return _wait(observed, pod, entry, listing, now)
    if entry.state is PodState.FAILED:
        return Step(pod=pod, entry=entry, info=found if serves else None, reason=_cause(outcome))
    if entry.not_before is not None and now < entry.not_before:
        info = found if serves else None
        return Step(pod=pod, entry=entry, again_at=entry.not_before, info=info, reason=_cause(outcome))
    if serves and found is not None:
        return _replace(observed, pod, entry, listing, found, now)
    return _load(observed, pod, entry, name, now, reason=f"{name} is not loaded there")


def unwanted_step(observed: AdapterObserved, pod: AdapterPod, now: datetime) -> Step | None:
    """The next step of a replica that should not have the adapter; None: it does not have it."""
    adapter, name = observed.adapter, observed.adapter.adapter_name
    entry = _entry(pod, PodState.UNLOADING)
    if pod.routed:
        return _call(observed, pod, entry, UnrouteAdapter, now, reason="the replica is to drop it")
    listing = pod.current
    if listing is None:
        if not pod.ready:
            return Step(pod=pod, entry=_entry(pod, PodState.UNREACHABLE, "the replica is not ready"))
        return _ask(observed, pod, entry, now)
    ours = [info for key, info in listing.adapters.items() if key == name or is_next_version(key, name)]
    left = [info for info in ours if not (info.state == "draining" and is_overdue(observed, pod, now))]
    if not left:
        return None
    propagation = timedelta(seconds=observed.base.propagation_seconds if observed.base else 0)
    unrouted_at = observed.unrouted.get(pod.uid, now)
    if now < unrouted_at + propagation:
        message = "routers are informed first"
        return Step(pod=pod, entry=_entry(pod, PodState.UNLOADING, message), again_at=unrouted_at + propagation)
    draining = [info for info in left if info.state == "draining"]
    if len(draining) == len(left):
        entry = _entry(pod, PodState.UNLOADING, "its requests finish")
        return _wait(observed, pod, entry, listing, now)
    unloaded = next(info.name for info in left if info.state != "draining")
    return _call(
        observed, pod, entry, UnloadAdapter, now, reason=f"{adapter.metadata.name} leaves it", unloaded_as=unloaded
    )


def list_again(observed: AdapterObserved, pod: AdapterPod, entry: AdapterPodStatus, now: datetime) -> Step:
    """Ask for the replica's list: the last one is too old for what is to be decided."""
    return _ask(observed, pod, entry, now)


def is_overdue(observed: AdapterObserved, pod: AdapterPod, now: datetime) -> bool:
    """Whether the requests of an adapter that leaves the replica have had their time."""
    since = observed.unrouted.get(pod.uid)
    drain = timedelta(seconds=observed.adapter.spec.unload.drain_seconds)
    return since is not None and now >= since + drain


def is_wanted(info: AdapterInfo, adapter: LoRAAdapter) -> bool:
    """Whether the replica has the version that the spec asks for; older runtimes do not report a version."""
    source = adapter.spec.source
    has_version = info.version == adapter.version if info.version else info.uri == source.uri
    return has_version and info.pinned == adapter.spec.placement.pin


def is_next_version(listed: str, adapter: str) -> bool:
    """Whether this name on a replica is a version of the adapter that was loaded beside the one that serves."""
    return listed.startswith(f"{adapter}{NEXT_VERSION}")


def counted(
    entry: AdapterPodStatus | None, pod: AdapterPod, adapter: LoRAAdapter, last: datetime | None
) -> AdapterPodStatus:
    """The replica's entry with its newest outcome; a failure sets the backoff, and the last one the state Failed."""
    entry = entry or _entry(pod, PodState.LOADING)
    outcome = pod.outcome
    if outcome is None or outcome.version != adapter.version or (last is not None and outcome.at <= last):
        return entry
    if outcome.ok:
        seconds = Decimal(f"{outcome.seconds:.2f}") if outcome.seconds else entry.load_seconds
        return AdapterPodStatus(name=pod.name, state=PodState.LOADING, load_seconds=seconds)
    attempts = (entry.attempts or 0) + 1
    answered = bool(outcome.reason)
    is_final = outcome.reason in FINAL_REASONS or (answered and attempts >= MOST_ATTEMPTS)
    if is_final:
        state, not_before = PodState.FAILED, None
    else:
        state = PodState.RETRYING if answered else PodState.UNREACHABLE
        not_before = (outcome.at + backoff(attempts)).replace(microsecond=0) + timedelta(seconds=1)
    return AdapterPodStatus(
        name=pod.name, state=state, attempts=attempts, not_before=not_before, message=outcome.message[:512]
    )


def backoff(attempts: int) -> timedelta:
    """5 s, 10 s, 20 s … 300 s."""
    doublings = min(attempts, 10) - 1
    return min(FIRST_BACKOFF * (1 << doublings), LONGEST_BACKOFF)


def _serve(
    observed: AdapterObserved,
    pod: AdapterPod,
    entry: AdapterPodStatus,
    listing: Listing,
    info: AdapterInfo,
    now: datetime,
) -> Step:
    """The wanted version is loaded under its name: probe it, route it, and drop a name that its load needed."""
    name = observed.adapter.adapter_name
    if not pod.routed:
        if (listing.boot_id, info.digest) in pod.probed:
            return _call(observed, pod, entry, RouteAdapter, now, reason=f"{name} answered its probe")
        if entry.state is PodState.FAILED:
            return Step(pod=pod, entry=entry, reason=_cause(pod.outcome))
        if entry.not_before is not None and now < entry.not_before:
            return Step(pod=pod, entry=entry, again_at=entry.not_before, reason=_cause(pod.outcome))
        return _probe(observed, pod, entry, listing, info, now)
    loaded = AdapterPodStatus(name=pod.name, state=PodState.LOADED, load_seconds=entry.load_seconds)
    leftover = next((key for key in listing.adapters if is_next_version(key, name)), None)
    if leftover is not None and listing.adapters[leftover].state != "draining":
        reason = f"{name} has taken over"
        done = _call(observed, pod, loaded, UnloadAdapter, now, reason=reason, unloaded_as=leftover)
        return Step(pod=pod, entry=loaded, call=done.call, again_at=done.again_at, info=info)
    if listing.at + LIST_EVERY <= now:
        again = _ask(observed, pod, loaded, now)
        return Step(pod=pod, entry=loaded, call=again.call, again_at=again.again_at, info=info)
    return Step(pod=pod, entry=loaded, again_at=listing.at + LIST_EVERY, info=info)


def _replace(
    observed: AdapterObserved,
    pod: AdapterPod,
    entry: AdapterPodStatus,
    listing: Listing,
    serving: AdapterInfo,
    now: datetime,
) -> Step:
    """Another version serves: load the wanted one beside it, probe it, and let it take over the name."""
    adapter = observed.adapter
    beside = f"{adapter.adapter_name}{NEXT_VERSION}{adapter.version}"
    staged = listing.adapters.get(beside)
    if (serving.version or serving.uri) == (adapter.version if serving.version else adapter.spec.source.uri):
        # Only `pin` differs: the content is the same.
        step = _load(observed, pod, entry, adapter.adapter_name, now, reason="spec.placement.pin has changed")
    elif staged is None or staged.state == "failed":
        step = _load(observed, pod, entry, beside, now, reason="spec.source has changed")
    elif staged.state not in LOADED_STATES:
        step = _wait(observed, pod, entry, listing, now)
    elif (listing.boot_id, staged.digest) not in pod.probed:
        step = _probe(observed, pod, entry, listing, staged, now)
    else:
        step = _load(observed, pod, entry, adapter.adapter_name, now, reason="the new version answered its probe")
    return Step(pod=pod, entry=step.entry, call=step.call, again_at=step.again_at, info=serving)


def _load(
    observed: AdapterObserved, pod: AdapterPod, entry: AdapterPodStatus, load_as: str, now: datetime, *, reason: str
) -> Step:
    source = observed.adapter.spec.source
    secret = source.credentials_secret_ref
    return _call(
        observed, pod, entry, LoadAdapter, now,
        reason=reason, load_as=load_as, uri=source.uri, digest=source.digest, version=observed.adapter.version,
        pinned=observed.adapter.spec.placement.pin, credentials_secret=secret.name if secret else "",
    )  # fmt: skip


def _probe(
    observed: AdapterObserved,
    pod: AdapterPod,
    entry: AdapterPodStatus,
    listing: Listing,
    info: AdapterInfo,
    now: datetime,
) -> Step:
    return _call(
        observed, pod, entry, ProbeAdapter, now,
        reason="it is routed after it has answered", probed_as=info.name, version=observed.adapter.version,
        digest=info.digest, boot_id=listing.boot_id,
    )  # fmt: skip


def _wait(observed: AdapterObserved, pod: AdapterPod, entry: AdapterPodStatus, listing: Listing, now: datetime) -> Step:
    """Look again in a moment, until it has ended: the replica is busy with the adapter."""
    pause = _pause_between_looks(listing)
    if listing.at + pause > now:
        return Step(pod=pod, entry=entry, again_at=listing.at + pause)
    asked = _ask(observed, pod, entry, now)
    return Step(pod=pod, entry=asked.entry, call=asked.call, again_at=now + pause)


def _pause_between_looks(listing: Listing) -> timedelta:
    """0.5 s while a replica loads up to 8 adapters, 5 s from 80 on: one list tells of all of them."""
    loading = sum(info.state == "loading" for info in listing.adapters.values())
    return min(LOOK_AGAIN * max(1.0, loading / 8), RECHECK)


def _ask(observed: AdapterObserved, pod: AdapterPod, entry: AdapterPodStatus, now: datetime) -> Step:
    """Ask for the replica's list, unless that is under way; a silent replica is asked again after a while."""
    if pod.silent_since is not None:
        message = "the replica does not answer the operator"
        entry = entry.model_copy(update={"state": PodState.UNREACHABLE, "message": message})
    if pod.is_listing:
        return Step(pod=pod, entry=entry, again_at=now + RECHECK)
    call = ListAdapters(**_about(observed, pod, "what it has is not known"))
    return Step(pod=pod, entry=entry, call=call, again_at=now + RECHECK)


def _call(
    observed: AdapterObserved,
    pod: AdapterPod,
    entry: AdapterPodStatus,
    kind: Any,
    now: datetime,
    *,
    reason: str,
    **fields: Any,
) -> Step:
    """The call, unless one about this adapter on this replica is under way."""
    if pod.busy:
        return Step(pod=pod, entry=entry, again_at=now + RECHECK)
    call = kind(**_about(observed, pod, reason), adapter=observed.adapter.adapter_name, **fields)
    return Step(pod=pod, entry=entry, call=call, again_at=now + RECHECK)


def _about(observed: AdapterObserved, pod: AdapterPod, reason: str) -> Mapping[str, Any]:
    assert observed.base is not None, "without its base an adapter has no replicas"
    return {
        "name": pod.name, "uid": pod.uid, "service": observed.base.name, "owner_uid": observed.base.uid,
        "reason": reason,
    }  # fmt: skip


def _entry(pod: AdapterPod, state: PodState, message: str = "") -> AdapterPodStatus:
    return AdapterPodStatus(name=pod.name, state=state, message=message)


def _cause(outcome: Outcome | None) -> str:
    return outcome.reason if outcome is not None else ""
