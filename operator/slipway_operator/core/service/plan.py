"""The operator's table of contents: what to do about one service, given all that is seen of it and the time.

Read `plan` from top to bottom; each line is a room of its own. Two promises hold it together:

- What is decided is in status before it is in pods. A number of replicas, a revision with its image, an attempt: the
  pass that decides only writes status, and the next one acts. Whoever takes over continues from there.
- A pass that finds everything as it should be plans nothing, and its status equals the one before.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from slipway_api import names
from slipway_api.conditions import ConditionStatus, ConditionType, EventReason, Reason, find_condition
from slipway_api.inference_service import InferenceService
from slipway_api.inference_status import AutoscalingStatus, InferenceServiceStatus
from slipway_operator.core.actions import (
    Action,
    AddFinalizer,
    CreatePod,
    Event,
    RemoveFinalizer,
    Steps,
    earliest,
)
from slipway_operator.core.health import Member, Stage, judge, next_change
from slipway_operator.core.observed import Observed, PastRecommendation
from slipway_operator.core.scaling import autoscaling, signals
from slipway_operator.core.scaling.autoscaling import Recommendation
from slipway_operator.core.service import rollout
from slipway_operator.core.service.access import port_access
from slipway_operator.core.service.children import children
from slipway_operator.core.service.drain import DrainRules, let_go
from slipway_operator.core.service.events import news, warnings
from slipway_operator.core.service.explain import no_room
from slipway_operator.core.service.invalid import invalid_status
from slipway_operator.core.service.pod import build_pod, pod_name
from slipway_operator.core.service.replicas import assign
from slipway_operator.core.service.revision import Revision, resolve
from slipway_operator.core.service.status import Decided, build_status, farewell_status, progress_deadline

LOOK_AT_SIGNALS: Final = timedelta(seconds=15)  # idle replicas are silent news: look whether they still answer
FAREWELL_PATIENCE: Final = timedelta(
    seconds=60
)  # beyond a pod's grace, before a deletion stops waiting for its kubelet


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the shell shall do, in this order: actions (the first failure stops the list), status, events."""

    actions: tuple[Action, ...] = ()
    status: InferenceServiceStatus | None  # the whole status; None: write none (the service is gone). Write on change
    events: tuple[Event, ...] = ()
    requeue_after: float | None = None  # seconds until something changes by time alone; None: sleep until woken
    recommendations: tuple[PastRecommendation, ...] = ()  # hand back in the next `Observed`


def plan(observed: Observed, now: datetime) -> Plan:
    """Decide everything about one service. `now` is timezone-aware UTC."""
    service = observed.service
    members = _our_replicas(observed, now)
    if service.is_being_deleted:
        return _say_farewell(observed, members, now)
    if observed.fault:
        return _leave_alone(observed, members, now)

    revision = resolve(service, observed.defaults.runtime_image)
    scaling = _autoscale(observed, members, now)
    desired = scaling.desired if scaling else service.fixed_replicas or 0
    rolling = rollout.step(
        members,
        revision=revision.hash,
        desired=desired,
        limits=service.spec.rollout.rolling_update,
        nodes=observed.nodes,
    )
    assignment = assign(
        [member for member in members if member.replica.revision == revision.hash],
        service=service.metadata.name,
        revision=revision,
        create_up_to=rolling.create_up_to,
        keep_at_most=desired,
        moves=rolling.moves,
        attempts=service.status.attempts,
        taken_names=observed.taken_names | _names_of_others(observed),
        nodes=observed.nodes,
        now=now,
    )
    decided = Decided(
        members=members,
        revision=revision,
        desired=desired,
        scaling=scaling,
        rollout=rolling,
        assignment=assignment,
    )
    is_promised = _is_promised(service, revision, desired)

    steps = _claim(service)
    steps += _remove(observed, decided, now, may_begin=is_promised)
    if is_promised:
        steps += _create(observed, decided)
    steps += Steps(
        actions=children(service, desired=desired, applied=observed.applied, network=observed.defaults.network)
    )

    status = build_status(observed, decided, now)
    must_act_again = not is_promised or assignment.must_record
    return Plan(
        actions=steps.actions,
        status=status,
        events=(*steps.events, *assignment.events, *news(service.status, status, decided)),
        requeue_after=0.0 if must_act_again else _seconds_until(_wake_at(observed, decided, steps, now), now),
        recommendations=scaling.recommendations if scaling else (),
    )


def _our_replicas(observed: Observed, now: datetime) -> tuple[Member, ...]:
    """The pods that this very service owns, judged. A namesake's pods that are still going are not ours."""
    service = observed.service
    ours = [replica for replica in observed.replicas if replica.owner_uid == service.metadata.uid]
    return judge(ours, observed.nodes, startup_timeout=_startup_timeout(service), now=now)


def _names_of_others(observed: Observed) -> frozenset[str]:
    uid = observed.service.metadata.uid
    return frozenset(replica.name for replica in observed.replicas if replica.owner_uid != uid)


def _autoscale(observed: Observed, members: Sequence[Member], now: datetime) -> Recommendation | None:
    """What the autoscaler says; None where the spec fixes the number of replicas."""
    service = observed.service
    policy = service.spec.autoscaling
    if policy is None or service.fixed_replicas is not None:
        return None
    current = service.status.desired_replicas or 0
    resting = [status for status in service.status.attempts if status.not_before and now < status.not_before]
    readings = signals.read(
        members,
        wanted=current,
        slots_in_backoff=len(resting),
        stale_after=timedelta(seconds=policy.missing_metrics.stale_after_seconds),
        now=now,
    )
    past = autoscaling.Past(
        current=current,
        history=(service.status.autoscaling or AutoscalingStatus()).history,
        recommendations=observed.recommendations,
        silent_since=_silent_since(service),
    )
    return autoscaling.decide(
        policy,
        readings,
        past,
        max_num_seqs=service.spec.runtime.max_num_seqs,
        no_room=no_room(observed, members),
        now=now,
    )


def _silent_since(service: InferenceService) -> datetime | None:
    condition = find_condition(service.status.conditions, ConditionType.SCALING_ACTIVE)
    if condition is None or condition.status is not ConditionStatus.FALSE:
        return None
    return condition.last_transition_time if condition.reason == Reason.METRICS_MISSING else None


def _is_promised(service: InferenceService, revision: Revision, desired: int) -> bool:
    """Whether status already says what this pass is about to do."""
    status = service.status
    knows_revision = any(known.hash == revision.hash and known.image for known in status.revisions)
    return status.desired_replicas == desired and status.update_revision == revision.hash and knows_revision


def _claim(service: InferenceService) -> Steps:
    """Our finalizer comes before the first child, so that no deletion can overtake a drain."""
    if names.FINALIZER in service.metadata.finalizers:
        return Steps()
    return Steps(actions=(AddFinalizer(finalizer=names.FINALIZER, reason="its replicas drain before it goes"),))


def _remove(observed: Observed, decided: Decided, now: datetime, *, may_begin: bool) -> Steps:
    """Drain and delete before anything is created: what goes may make the room that what comes needs."""
    rules = _drain_rules(observed.service)
    leaving = dict[str, tuple[Member, str]]()
    for member in decided.members:
        is_old = member.replica.revision != decided.revision.hash
        if member.stage is Stage.DRAINING or (member.stage is Stage.DEAD and is_old):
            leaving[member.replica.uid] = (member, member.replica.drain_reason or "its revision is not wanted any more")
    if may_begin:
        empty_nodes = rollout.may_empty_cordoned_node(
            decided.members,
            desired=decided.desired,
            limits=observed.service.spec.rollout.rolling_update,
            nodes=observed.nodes,
        )
        new = [
            *decided.rollout.leaving,
            *decided.assignment.leaving,
            *((member, f"its node {member.replica.node} is cordoned") for member in empty_nodes),
        ]
        for member, reason in new:
            leaving.setdefault(member.replica.uid, (member, reason))
    steps = Steps()
    for member, reason in leaving.values():
        steps += let_go(member.replica, rules, now, reason=reason)
    return steps


def _create(observed: Observed, decided: Decided) -> Steps:
    """The replicas that are missing."""
    service, revision = observed.service, decided.revision
    steps = Steps()
    for creation in decided.assignment.creations:
        name = pod_name(service.metadata.name, revision, creation.slot, creation.attempt)
        manifest = build_pod(
            service,
            revision,
            slot=creation.slot,
            attempt=creation.attempt,
            access=port_access(observed, name),
        )
        reason = f"{creation.reason}; {decided.desired} wanted of revision {revision.hash}"
        steps += Steps(
            actions=(CreatePod(name=name, manifest=manifest, reason=reason),), events=(_created(name, reason),)
        )
    return steps


def _created(name: str, reason: str) -> Event:
    return Event(reason=EventReason.REPLICA_CREATED, action="Create", message=f"created {name}: {reason}", pod=name)


def _say_farewell(observed: Observed, members: tuple[Member, ...], now: datetime) -> Plan:
    """The service is being deleted: it wants no replicas. When the last has drained, let it go."""
    service = observed.service
    if names.FINALIZER not in service.metadata.finalizers:
        return Plan(status=None)  # nothing of ours holds it; the garbage collector has the rest
    # A pod whose kubelet does not answer never goes. It was told to; beyond its grace nobody waits for it.
    holding = [one for one in members if not _is_past_its_grace(one, now)]
    if not holding:
        release = RemoveFinalizer(finalizer=names.FINALIZER, reason="no replica is left to drain")
        return Plan(actions=(release,), status=None)
    steps = Steps()
    for member in holding:
        steps += let_go(member.replica, _drain_rules(service), now, reason="the service is being deleted")
    ends = [one.replica.deleted_at + FAREWELL_PATIENCE for one in holding if one.replica.deleted_at]
    return Plan(
        actions=steps.actions,
        status=farewell_status(observed, members),
        events=steps.events,
        requeue_after=_seconds_until(earliest(steps.again_at, *ends), now),
    )


def _leave_alone(observed: Observed, members: tuple[Member, ...], now: datetime) -> Plan:
    """Of a spec that cannot be read nobody knows what it wants: touch nothing, and say what is wrong with it."""
    status = invalid_status(observed, members, now)
    return Plan(status=status, events=tuple(warnings(observed.service.status, status)))


def _is_past_its_grace(member: Member, now: datetime) -> bool:
    """`deletionTimestamp` is when the grace ends, not when somebody asked."""
    deleted_at = member.replica.deleted_at
    return deleted_at is not None and now >= deleted_at + FAREWELL_PATIENCE


def _wake_at(observed: Observed, decided: Decided, steps: Steps, now: datetime) -> datetime | None:
    """The first moment at which time alone may change the plan."""
    startup_timeout = _startup_timeout(observed.service)
    moments = [next_change(one.replica, observed.nodes, startup_timeout=startup_timeout) for one in decided.members]
    moments += [decided.assignment.again_at, progress_deadline(observed, decided)]
    if decided.scaling:
        moments += [decided.scaling.again_at, now + LOOK_AT_SIGNALS]
    coming = [moment for moment in moments if moment is not None and moment > now]
    return earliest(steps.again_at, *coming)


def _seconds_until(moment: datetime | None, now: datetime) -> float | None:
    return None if moment is None else max(0.0, (moment - now).total_seconds())


def _startup_timeout(service: InferenceService) -> timedelta:
    return timedelta(seconds=service.spec.runtime.startup_timeout_seconds)


def _drain_rules(service: InferenceService) -> DrainRules:
    drain = service.spec.drain
    return DrainRules(
        timeout=timedelta(seconds=drain.timeout_seconds),
        propagation=timedelta(seconds=drain.endpoint_propagation_seconds),
    )
