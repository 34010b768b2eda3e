"""Chooses the replicas that load an adapter: all of them, or some by rendezvous hashing.

Rendezvous hashing: every replica gets a score from its name and the adapter's, and the highest ones are chosen. A
replica that comes takes only the adapters for which it scores high; one that goes gives away only its own. Scores are
coarse, and among equal ones the replica that has the adapter comes first, then the one with fewer adapters.
"""

import hashlib
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

from slipway_api.lora_adapter import Placement, PlacementMode
from slipway_operator.core.adapter.observed import AdapterPod

UNREADY_FOR: Final = timedelta(seconds=30)
"""A replica that is unready for a shorter time keeps its adapters: moving them costs more than waiting."""
LEVELS: Final = 64


def choose(adapter: str, pods: Sequence[AdapterPod], placement: Placement, now: datetime) -> tuple[AdapterPod, ...]:
    """The replicas that should have the adapter, by name."""
    eligible = [pod for pod in pods if is_eligible(pod, now)]
    if placement.mode is PlacementMode.REPLICAS:
        eligible = sorted(eligible, key=lambda pod: rank(adapter, pod))[: placement.replicas or 1]
    return tuple(sorted(eligible, key=lambda pod: pod.name))


def is_eligible(pod: AdapterPod, now: datetime) -> bool:
    """Whether the replica is ready, or was until a moment ago."""
    return pod.ready or (pod.unready_since is not None and now - pod.unready_since < UNREADY_FOR)


def next_change(pods: Sequence[AdapterPod], now: datetime) -> datetime | None:
    """When time alone makes a replica lose its adapters."""
    ends = [pod.unready_since + UNREADY_FOR for pod in pods if not pod.ready and pod.unready_since]
    return min((end for end in ends if end > now), default=None)


def rank(adapter: str, pod: AdapterPod) -> tuple[bool, int, bool, int, str]:
    """The sort key of the replicas for an adapter, the best first."""
    listing = pod.listing
    holds = pod.routed or (listing is not None and adapter in listing.adapters)
    count = len(listing.adapters) if listing is not None else 0
    # A replica whose memory is full of other adapters would evict one of them: it comes after those with room.
    is_full = not holds and listing is not None and 0 < listing.max_cpu_adapters <= count
    return is_full, -(score(adapter, pod.name) * LEVELS // 2**32), not holds, count, pod.name


def score(adapter: str, pod: str) -> int:
    """32 bits that depend on nothing but the two names: the same in every process."""
    return int.from_bytes(hashlib.blake2b(f"{adapter}\n{pod}".encode(), digest_size=4).digest())
