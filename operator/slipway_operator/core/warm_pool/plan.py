"""Plans one pass over one WarmPool: which pods to delete, which to start, and its status.

Only pods that wait for a claim are the pool's; a claimed pod belongs to its service, and the pool does nothing with it
but count it. A deletion names the version of the pod that was read: a pod that was claimed since then has another one,
so it is left alone. At most `refill.maxConcurrent` pods start at a time, not within `refill.delaySeconds` of a claim,
and after pods that ended by themselves not before a pause of 10, 20, 40 … 300 s. A pod that a service has returned
still has its model: it is asked to give it back until it has, and counts as starting meanwhile.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import count, islice
from typing import Any, Final

from slipway_api import names
from slipway_api.warm_pool import WarmPoolStatus
from slipway_api.warm_pool_conditions import PoolEvent
from slipway_operator.core import words
from slipway_operator.core.actions import Action, CreatePod, DeletePod, Event, earliest, events_of
from slipway_operator.core.health import is_cordoned, is_lost
from slipway_operator.core.labels import restore_labels
from slipway_operator.core.pod_rules import find_pool_fault
from slipway_operator.core.service.replicas.access import PortAccess, derive_nonce
from slipway_operator.core.service.replicas.assign import backoff
from slipway_operator.core.service.status.mounts import describe_mount, is_for_author
from slipway_operator.core.warm_pool.autosize import Size, wanted_size
from slipway_operator.core.warm_pool.observed import Backoff, ObservedPool, PoolPod
from slipway_operator.core.warm_pool.pod import build_pool_pod, pool_pod_name
from slipway_operator.core.warm_pool.recycle import (
    Recycled,
    ask_for_models,
    find_aged,
    find_unreturned,
    next_recycling,
)
from slipway_operator.core.warm_pool.shape import Shape, differing_parts, shape_of_pool
from slipway_operator.core.warm_pool.status import Counts, build_status, status_events
from slipway_operator.core.warm_pool.uses import count_uses, last_claim

GRACE_SECONDS: Final = 30  # nothing runs in a pod that waits
RESTARTS_UNTIL_REPLACED: Final = 3
MOST_YIELDS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """The result of planning, in this order: actions, status, events."""

    actions: tuple[Action, ...] = ()
    status: WarmPoolStatus | None  # None: write none (the pool is being deleted)
    notes: tuple[Event, ...] = ()  # events of decisions; those of actions belong to the actions
    requeue_after: float | None = None
    booted: frozenset[str] | None = None  # input of the next pass

    @property
    def events(self) -> tuple[Event, ...]:
        """All events, if all actions are carried out."""
        return (*events_of(self.actions), *self.notes)


@dataclass(frozen=True, slots=True)
class _Removal:
    pod: PoolPod
    reason: str
    event: Event | None = None


def plan(observed: ObservedPool, now: datetime) -> PoolPlan:
    """Decide everything about one pool. `now` is timezone-aware UTC."""
    pool = observed.pool
    if pool.is_being_deleted:
        return PoolPlan(status=None)  # the garbage collector deletes the pods that wait, and spares claimed ones
    observed = replace(observed, fault=observed.fault or find_pool_fault(pool.spec, observed.defaults))
    waiting = [pod for pod in observed.pods if pod.waits_for(pool.metadata.uid)]
    restored = restore_labels((pod.replica for pod in waiting), reason=PoolEvent.LABELS_RESTORED)
    uses = count_uses(pool.status, observed.pods)
    size = wanted_size(pool.spec, uses.listed, now)
    shape = shape_of_pool(pool, observed.defaults.runtime_image)
    live = [pod for pod in waiting if _is_live(pod, observed, now)]

    ended, pause = _replace_ended(observed, live, now)
    left = [pod for pod in live if pod not in [one.pod for one in ended]]
    yielded, yielded_to = _yield(observed, left)
    left = [pod for pod in left if pod not in [one.pod for one in yielded]]
    surplus = _remove_surplus(left, size)
    left = [pod for pod in left if pod not in [one.pod for one in surplus]]
    unreturned = [_recycle(one) for one in find_unreturned(left, pool.spec.level, now)]
    left = [pod for pod in left if pod not in [one.pod for one in unreturned]]
    outdated = _remove_outdated(observed, left, shape)
    left = [pod for pod in left if pod not in [one.pod for one in outdated]]
    aged = _remove_aged(observed, left, size, shape, now) if not outdated else []
    left = [pod for pod in left if pod not in [one.pod for one in aged]]
    removals = (*ended, *yielded, *surplus, *unreturned, *outdated, *aged)

    resume_at = _paused_until(observed, pause, last_claim(uses.listed))
    creations: tuple[CreatePod, ...] = ()
    if not observed.fault and not observed.hungry_for_our_gpus and (resume_at is None or resume_at <= now):
        creations = _refill(observed, left, size, shape)

    counts = Counts(
        size=size,
        ready=sum(_can_be_claimed(pod, observed) for pod in left),
        live=len(left),
        claimed=sum(_is_claimed(pod, observed, now) for pod in observed.pods),
        unschedulable=next((pod.replica.unschedulable for pod in left if pod.replica.unschedulable), ""),
        image_error=next((_image_error(pod) for pod in left if _image_error(pod)), ""),
        mount_failure=next((_mount_failure(pod, pool.metadata.namespace) for pod in left if _lacks_volume(pod)), ""),
        backoff=pause,
        yielded_to=yielded_to,
        returned=frozenset(pod.name for pod in left if pod.returned_at is not None),
    )
    status = build_status(observed, counts, uses, now)
    booted = frozenset(pod.name for pod in left if _can_be_claimed(pod, observed))
    again_at = earliest(
        resume_at if resume_at and resume_at > now else None,
        size.again_at,
        next_recycling(left, pool.spec, now),
    )
    return PoolPlan(
        actions=(*restored.actions, *(_delete(one) for one in removals), *ask_for_models(left), *creations),
        status=status,
        notes=tuple(status_events(observed, status, counts, uses, booted)),
        requeue_after=None if again_at is None else max(0.0, (again_at - now).total_seconds()),
        booted=booted,
    )


# --- pods to delete ---------------------------------------------------------------------------------------------------


def _replace_ended(observed: ObservedPool, live: Sequence[PoolPod], now: datetime) -> tuple[list[_Removal], Backoff]:
    """Pods that ended, or keep crashing; each pass that finds some begins one pause before the next pod."""
    status = observed.pool.status
    before = Backoff(failures=status.failures or 0, not_before=status.not_before)
    failed = [pod for pod in live if pod.has_ended or _keeps_crashing(pod)]
    if not failed:
        is_well = before.failures and live and all(_can_be_claimed(pod, observed) for pod in live)
        return [], Backoff() if is_well else before
    pause = before
    if before.not_before is None or now >= before.not_before:
        rest = backoff(before.failures + 1)
        pause = Backoff(failures=before.failures + 1, not_before=now.replace(microsecond=0) + rest)
    moment = pause.not_before or now
    removals = []
    for pod in failed:
        replica = pod.replica
        how = replica.phase_reason or replica.last_exit or replica.phase
        message = f"{pod.name} ended before it was claimed ({how}); the next pod starts at {moment:%H:%M:%S} UTC"
        event = Event(reason=PoolEvent.WARM_FAILED, action="Replace", message=message, pod=pod.name)
        removals.append(_Removal(pod, message, event))
    return removals, pause


def _yield(observed: ObservedPool, live: Sequence[PoolPod]) -> tuple[list[_Removal], tuple[str, ...]]:
    """As many waiting pods as hold the GPUs of each replica that found no node; the coldest first.

    Once for each replica: where that did not help, something else keeps it from a node. With the names of these.
    """
    told = [one.name for one in observed.hungry_for_our_gpus if one.name in observed.pool.status.yielded_to]
    pods = iter(_coldest_first([pod for pod in live if pod.replica.node], observed))  # others hold no GPU
    removals = []
    for replica in observed.hungry_for_our_gpus:
        if replica.name in told:
            continue
        needed = -(-replica.gpus // max(1, observed.pool.spec.resources.gpu.count))
        given = list(islice(pods, needed))
        told += [replica.name] if given else []
        for pod in given:
            message = f"{pod.name} gives up its GPUs: {replica.name} finds no node"
            event = Event(reason=PoolEvent.YIELDED_TO_WORKLOAD, action="Delete", message=message, pod=pod.name)
            removals.append(_Removal(pod, message, event))
    return removals, tuple(told[:MOST_YIELDS])


def _remove_surplus(live: Sequence[PoolPod], size: Size) -> list[_Removal]:
    excess = len(live) - size.pods
    ordered = sorted(live, key=lambda pod: (pod.is_booted, pod.name))
    should = words.count(size.pods, "pod")
    return [_Removal(pod, f"{should} should wait: {size.reason}") for pod in ordered[: max(0, excess)]]


def _remove_outdated(observed: ObservedPool, live: Sequence[PoolPod], shape: Shape) -> list[_Removal]:
    """Pods that the pool would start otherwise now, as many at a time as it may start."""
    if observed.fault:
        return []
    starting = sum(not pod.is_booted and not differing_parts(pod.shape, shape) for pod in live)
    room = max(0, observed.pool.spec.refill.max_concurrent - starting)
    outdated = [(pod, parts) for pod in _coldest_first(live, observed) if (parts := differing_parts(pod.shape, shape))]
    removals = [
        _recycle(Recycled(pod, f"the pool asks for other pods: {', '.join(parts)}")) for pod, parts in outdated[:room]
    ]
    cordoned = [pod for pod in live if is_cordoned(pod.replica, observed.nodes)]
    known = [one.pod for one in removals]
    removals += [_Removal(pod, f"its node {pod.replica.node} is cordoned") for pod in cordoned if pod not in known]
    return removals


def _remove_aged(
    observed: ObservedPool, live: Sequence[PoolPod], size: Size, shape: Shape, now: datetime
) -> list[_Removal]:
    """At most one pod that is too old, or built by another version of the operator."""
    if observed.fault or not live:
        return []
    claimable = sum(_can_be_claimed(pod, observed) for pod in live)
    access = PortAccess(nonce="", admin_digests=(), tls=observed.defaults.internal_tls)
    template = _build(observed, 0, shape, access)["metadata"]["annotations"][names.ANNOTATION_WARM_TEMPLATE]
    aged = find_aged(live, observed.pool.spec, template, now, claimable=claimable, size=size.pods)
    return [_recycle(one) for one in aged]


def _recycle(recycled: Recycled) -> _Removal:
    pod = recycled.pod
    message = f"{pod.name} is replaced: {recycled.why}"
    return _Removal(pod, message, Event(reason=PoolEvent.POD_RECYCLED, action="Delete", message=message, pod=pod.name))


def _coldest_first(pods: Sequence[PoolPod], observed: ObservedPool) -> list[PoolPod]:
    return sorted(pods, key=lambda pod: (_can_be_claimed(pod, observed), pod.name))


def _delete(removal: _Removal) -> DeletePod:
    return DeletePod(
        name=removal.pod.name,
        uid=removal.pod.replica.uid,
        grace_seconds=GRACE_SECONDS,
        reason=removal.reason,
        resource_version=removal.pod.resource_version,
        events=(removal.event,) if removal.event is not None else (),
    )


# --- pods to start ----------------------------------------------------------------------------------------------------


def _paused_until(observed: ObservedPool, pause: Backoff, claimed_at: datetime | None) -> datetime | None:
    delay = timedelta(seconds=observed.pool.spec.refill.delay_seconds)
    moments = [moment for moment in (pause.not_before, claimed_at + delay if claimed_at else None) if moment]
    return max(moments, default=None)


def _refill(observed: ObservedPool, live: Sequence[PoolPod], size: Size, shape: Shape) -> tuple[CreatePod, ...]:
    """Pods that are missing, with the lowest numbers that no pod of this name has; claimed pods keep their names."""
    pool = observed.pool
    starting = sum(not pod.is_booted for pod in live)
    missing = min(size.pods - len(live), pool.spec.refill.max_concurrent - starting)
    taken = {pod.name for pod in observed.pods} | observed.taken_names
    free = (name for number in count() if (name := pool_pod_name(pool.metadata.name, number)) not in taken)
    creations = []
    for _ in range(max(0, missing)):
        name = next(free)
        nonce = derive_nonce(observed.nonce_seed, pool.metadata.namespace, name)
        digests = observed.token_digests(pool.metadata.namespace, name, nonce)
        access = PortAccess(nonce=nonce, admin_digests=digests, tls=observed.defaults.internal_tls)
        number = int(name.rsplit("-", 1)[1])
        manifest = _build(observed, number, shape, access)
        reason = f"{len(live)} of {words.count(size.pods, 'pod waits', 'pods wait')}: {size.reason}"
        creations.append(CreatePod(name=name, manifest=manifest, reason=reason))
    return tuple(creations)


def _build(observed: ObservedPool, number: int, shape: Shape, access: PortAccess) -> dict[str, Any]:
    return build_pool_pod(
        observed.pool,
        number,
        shape,
        image=observed.pool.spec.image or observed.defaults.runtime_image,
        access=access,
        node_cache=observed.defaults.node_cache,
        user=observed.defaults.pod_user,
        placement=observed.defaults.placement,
        tracing=observed.defaults.tracing,
    )


# --- facts ------------------------------------------------------------------------------------------------------------


def _is_live(pod: PoolPod, observed: ObservedPool, now: datetime) -> bool:
    """Whether it exists and is not going; one on a lost node may return, and counts as gone until then."""
    return pod.replica.deleted_at is None and not is_lost(pod.replica, observed.nodes, now)


def _can_be_claimed(pod: PoolPod, observed: ObservedPool) -> bool:
    node = observed.nodes.get(pod.replica.node)
    is_node_well = node is None or (node.ready and not node.cordoned)
    return pod.is_booted and is_node_well and not pod.has_ended and pod.replica.is_routed


def _is_claimed(pod: PoolPod, observed: ObservedPool, now: datetime) -> bool:
    is_replica = pod.replica.claimed_at is not None and not pod.waits_for(observed.pool.metadata.uid)
    return is_replica and _is_live(pod, observed, now) and not pod.has_ended


def _keeps_crashing(pod: PoolPod) -> bool:
    return pod.replica.restarts >= RESTARTS_UNTIL_REPLACED and not pod.is_booted


def _lacks_volume(pod: PoolPod) -> bool:
    return is_for_author(pod.replica.mount_failure)


def _mount_failure(pod: PoolPod, namespace: str) -> str:
    return f"{pod.name}: {describe_mount(pod.replica.mount_failure, namespace, pod.name)}"


def _image_error(pod: PoolPod) -> str:
    replica = pod.replica
    is_error = replica.waiting_reason in ("ErrImagePull", "ImagePullBackOff", "InvalidImageName")
    return f"{pod.name} cannot pull its image" if is_error else ""
