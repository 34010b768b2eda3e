"""Counts how often a pool had a pod for a replica, exactly once for each replica.

A claimed pod, and a replica that was started cold because the pool had none, both say so in their annotations. The
status lists the last uses; a pod that is not in the list is counted, unless the list is full and the pod is older than
all of it. So the count survives a restart of the operator, and a pass that is repeated.
"""

from collections.abc import Iterable
from datetime import datetime
from math import ceil
from typing import Final, NamedTuple

from slipway_api.warm_pool import ClaimSeconds, PoolUse, WarmPoolStatus
from slipway_operator.core.warm_pool.observed import PoolPod

MOST_USES: Final = 32


class Uses(NamedTuple):
    """The uses after this pass, newest first, and which of them are new."""

    listed: tuple[PoolUse, ...]
    new: tuple[PoolUse, ...]


def count_uses(before: WarmPoolStatus, pods: Iterable[PoolPod]) -> Uses:
    """The list of uses with new ones, and with the seconds of those that became ready."""
    known = {(use.pod, use.time): use for use in before.uses}
    oldest = min((use.time for use in before.uses), default=None) if len(before.uses) >= MOST_USES else None
    new: list[PoolUse] = []
    for pod in pods:
        replica = pod.replica
        if not pod.service or not (pod.is_miss or replica.claimed_at):
            continue
        time = replica.created_at.replace(microsecond=0)
        use = known.get((pod.name, time))
        if use is None:
            if oldest is not None and time <= oldest:
                continue
            use = PoolUse(time=time, service=pod.service, pod=pod.name, hit=not pod.is_miss)
            new.append(use)
        if use.seconds is None and replica.ready_since is not None and not replica.restarts:
            took = ceil(max(0.0, (replica.ready_since - replica.created_at).total_seconds()))
            use = use.model_copy(update={"seconds": took})
        known[use.pod, use.time] = use
    listed = sorted(known.values(), key=lambda use: (use.time, use.pod), reverse=True)[:MOST_USES]
    return Uses(tuple(listed), tuple(new))


def claim_seconds(uses: Iterable[PoolUse]) -> ClaimSeconds | None:
    """Median and 95th percentile over the listed claims, nearest rank; None while none became ready."""
    seconds = sorted(use.seconds for use in uses if use.hit and use.seconds is not None)
    if not seconds:
        return None
    return ClaimSeconds(p50=_rank(seconds, 0.50), p95=_rank(seconds, 0.95))


def _rank(ordered: list[int], share: float) -> int:
    return ordered[max(0, ceil(share * len(ordered)) - 1)]


def last_claim(uses: Iterable[PoolUse]) -> datetime | None:
    """When a pod was claimed last."""
    return max((use.time for use in uses if use.hit), default=None)
