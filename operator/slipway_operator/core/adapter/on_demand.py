"""Mode OnDemand: which replica loads an adapter that requests wait for, and which idle adapters leave a full replica.

| the adapter                                            | replica                                                |
|--------------------------------------------------------|--------------------------------------------------------|
| no replica has it, no request waits                    | none                                                   |
| no ready replica has it, requests wait                 | the best by rendezvous hashing, those with room first  |
| a replica has it, loads it, or has failed to           | that one, whether requests wait or not                 |
| the same, and the replica has more than fit in memory  | none, once it is idle and the first of those to leave  |

A replica keeps every adapter that it has loaded: those beyond its memory are read from disk again. So a request never
waits for room; room is made afterwards. An adapter that has begun to leave goes, unless requests wait for it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from slipway_api.lora_adapter import NEXT_VERSION, AdapterPodStatus, PodState
from slipway_operator.core.adapter import placement
from slipway_operator.core.adapter.observed import AdapterObserved, AdapterPod, Listing, OnDemandAdapter

IDLE_FOR: Final = timedelta(seconds=30)
"""An adapter that was used a shorter time ago is not dropped."""
FRESH: Final = timedelta(seconds=10)
"""Older lists do not say what was used since: the replica is asked again before it drops an adapter."""
HELD_STATES: Final = frozenset({"disk", "host", "slot", "loading"})
FAILED_STATES: Final = frozenset({PodState.RETRYING, PodState.FAILED})


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDemandChoice:
    """The replica that should have the adapter, and the one that drops it to make room."""

    chosen: tuple[AdapterPod, ...] = ()
    evicted: Mapping[str, str] = field(default_factory=dict)
    """By uid of a replica: why the adapter leaves it; empty where that was said before."""
    ask_again: frozenset[str] = frozenset()
    """uids of replicas whose list is too old to decide by."""
    again_at: datetime | None = None
    """When the adapter may have been idle for long enough."""


def choose(observed: AdapterObserved, entries: Mapping[str, AdapterPodStatus], now: datetime) -> OnDemandChoice:
    """The replica that should have the adapter now."""
    name = observed.adapter.adapter_name
    own = next((one for one in observed.on_demand if one.name == name), OnDemandAdapter(name=name))
    eligible = [pod for pod in observed.pods if placement.is_eligible(pod, now)]
    holders = [pod for pod in eligible if _holds(name, pod, entries.get(pod.name))]
    evicted: dict[str, str] = {}
    stale: set[str] = set()
    moments: list[datetime] = []
    for pod in holders if not own.waiting else ():
        listing = pod.current
        if listing is None:
            continue
        if pod.uid in observed.unrouted:
            evicted[pod.uid] = ""  # said when it began to leave
        elif name in leaving_adapters(observed, listing, now):
            # Once it is off the route, nothing can have used it since.
            if pod.routed and now - listing.at > FRESH:
                stale.add(pod.uid)
            else:
                idle = _idle_for(listing, name, now)
                evicted[pod.uid] = (
                    f"{pod.name} has {_count(listing)} adapters, memory for {listing.max_cpu_adapters}; "
                    f"{name} (priority {own.priority}) was idle for {idle.total_seconds():.0f} s"
                )
        elif _count(listing) > listing.max_cpu_adapters > 0 and not own.pinned and name in listing.adapters:
            moments.append(max(now + FRESH, now + IDLE_FOR - _idle_for(listing, name, now)))
    holders = [pod for pod in holders if pod.uid not in evicted]
    answering = [pod for pod in holders if pod.ready and pod.silent_since is None]
    if own.waiting and not answering:
        holders += [pod for pod in eligible if pod.ready and pod not in holders]
        answering = [pod for pod in holders if pod.ready and pod.silent_since is None]
    candidates = answering or holders
    ranked = sorted(candidates, key=lambda pod: (not pod.routed, not _lists(name, pod), *placement.rank(name, pod)))
    return OnDemandChoice(
        chosen=tuple(ranked[:1]),
        evicted=evicted,
        ask_again=frozenset(stale),
        again_at=min(moments, default=None),
    )


def leaving_adapters(observed: AdapterObserved, listing: Listing, now: datetime) -> tuple[str, ...]:
    """The adapters that a replica with this list should drop, so that the others fit: the same for each of them."""
    excess = _count(listing) - listing.max_cpu_adapters if listing.max_cpu_adapters else 0
    if excess <= 0:
        return ()
    idle = [
        one
        for one in observed.on_demand
        if not one.pinned
        and not one.waiting
        and one.name in listing.adapters
        and listing.adapters[one.name].state in HELD_STATES
        and _idle_for(listing, one.name, now) >= IDLE_FOR
    ]
    idle.sort(key=lambda one: (one.priority, -_idle_for(listing, one.name, now), one.name))
    return tuple(one.name for one in idle[:excess])


def _idle_for(listing: Listing, name: str, now: datetime) -> timedelta:
    """How long the adapter has been idle, if nothing has used it since the list was made."""
    info = listing.adapters[name]
    # Every adapter is probed before it is routed: one that was never used has just been loaded.
    known = 0.0 if info.requests or info.idle_seconds is None else info.idle_seconds
    return now - listing.at + timedelta(seconds=known)


def _count(listing: Listing) -> int:
    """Adapters in the replica's memory or waiting for it; a version that is loaded beside another one is no further."""
    return sum(info.state in HELD_STATES and NEXT_VERSION not in name for name, info in listing.adapters.items())


def _holds(name: str, pod: AdapterPod, entry: AdapterPodStatus | None) -> bool:
    """Whether the replica has the adapter, is about to, or has answered that it cannot load it."""
    has_failed = entry is not None and entry.state in FAILED_STATES
    return pod.routed or pod.busy or _lists(name, pod) or has_failed


def _lists(name: str, pod: AdapterPod) -> bool:
    listing = pod.current
    return listing is not None and name in listing.adapters and listing.adapters[name].state in HELD_STATES
