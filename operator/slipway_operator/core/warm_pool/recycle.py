"""Decides which waiting pods of a WarmPool are replaced although they have not ended.

| the pod                                             | is replaced                                                |
|-----------------------------------------------------|------------------------------------------------------------|
| differs from what the spec asks for                 | as many at a time as `refill.maxConcurrent`                |
| has returned, and is not claimable within the limit | at once: it is of no use                                   |
| is built by an operator that built pods otherwise   | one at a time, when all others can be claimed              |
| is older than `recycleAfterSeconds`                 | one at a time, the oldest first, when all others can be …  |

A pod is deleted before the next one starts: its GPU may be the last one. So a pool lacks one pod for the time that a
pod takes to start, and the next one goes only when that pod can be claimed.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from slipway_api.runtime_api import ReadyReason
from slipway_api.warm_pool import WarmLevel, WarmPoolSpec
from slipway_operator.core.actions import GiveModelBack
from slipway_operator.core.warm_pool.observed import PoolPod

GIVE_BACK_WITHIN: Final = timedelta(seconds=60)  # until the process says that the model of the service is gone
BOOT_WITHIN: Final = timedelta(seconds=300)  # from the return until the pod can be claimed again
LOAD_WITHIN: Final = timedelta(seconds=1800)  # the same, at the levels that load a model
ASK_AGAIN: Final = timedelta(seconds=2)


class Recycled(NamedTuple):
    """A pod to replace, and why: `it is older than 3600s`."""

    pod: PoolPod
    why: str


def find_unreturned(pods: Sequence[PoolPod], level: WarmLevel, now: datetime) -> list[Recycled]:
    """Pods that have returned from a service and cannot be claimed again: model or memory is not free, or it hangs."""
    found = []
    for pod in pods:
        if pod.returned_at is None or pod.is_booted:
            continue
        sample, since = pod.replica.sample, now - pod.returned_at
        within = BOOT_WITHIN if level is WarmLevel.BOOTED else LOAD_WITHIN
        if sample is not None and sample.starting == ReadyReason.MEMORY_NOT_FREED:
            found.append(Recycled(pod, "the model of its last service has left memory in use"))
        elif (sample is None or pod.has_service_model) and since >= GIVE_BACK_WITHIN:
            found.append(Recycled(pod, f"it has not given its model back within {_seconds(GIVE_BACK_WITHIN)}"))
        elif since >= within:
            found.append(Recycled(pod, f"it cannot be claimed {_seconds(within)} after its return"))
    return found


def ask_for_models(pods: Sequence[PoolPod]) -> tuple[GiveModelBack, ...]:
    """Asks pods that have returned for the model of their service."""
    return tuple(
        GiveModelBack(
            name=pod.name, uid=pod.replica.uid, reason=f"{pod.name} has returned, and has the model of its last service"
        )
        for pod in pods
        if pod.has_service_model
    )


def find_aged(
    pods: Sequence[PoolPod], spec: WarmPoolSpec, template: str, now: datetime, *, claimable: int, size: int
) -> list[Recycled]:
    """The one pod that is replaced because of its age, or because it was built otherwise; none while one is missing."""
    if claimable < size or claimable < len(pods):
        return []
    limit = spec.recycle_after_seconds
    for pod in sorted(pods, key=lambda one: (one.replica.created_at, one.name)):
        if pod.template != template:
            return [Recycled(pod, "this version of the operator builds other pods")]
        if limit is not None and now - pod.replica.created_at >= timedelta(seconds=limit):
            return [Recycled(pod, f"it is older than {limit}s")]
    return []


def next_recycling(pods: Sequence[PoolPod], spec: WarmPoolSpec, now: datetime) -> datetime | None:
    """When time alone makes a pod old, or ends the time that a returned one has."""
    moments = []
    for pod in pods:
        if spec.recycle_after_seconds is not None:
            moments.append(pod.replica.created_at + timedelta(seconds=spec.recycle_after_seconds))
        if pod.returned_at is not None and not pod.is_booted:
            moments += [pod.returned_at + GIVE_BACK_WITHIN, pod.returned_at + BOOT_WITHIN]
            moments.append(pod.returned_at + LOAD_WITHIN)
        if pod.has_service_model:
            moments.append(now + ASK_AGAIN)
    return min((moment for moment in moments if moment > now), default=None)


def _seconds(duration: timedelta) -> str:
    return f"{duration.total_seconds():.0f}s"
