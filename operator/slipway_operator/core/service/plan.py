"""Plans one pass over one service: computes actions, status and events from an `Observed` and the time.

Read `plan` from top to bottom; each line is a module of its own. Three rules hold it together:

- What is decided is recorded before pods follow from it. A number of replicas, a revision, an attempt: the pass that
  decides writes the status and stores the revision, and the next one acts. A new leader continues from there.
- One decision asks at most one serving replica to go. The next decision sees that it drains.
- A pass that finds everything as it should be plans nothing, and its status equals the one before.
"""

from collections.abc import Iterable, Sequence
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
    DrainPod,
    Event,
    RemoveFinalizer,
    Steps,
    earliest,
)
from slipway_operator.core.health import GONE_AFTER, Limits, Member, Stage, judge, next_change
from slipway_operator.core.observed import Observed, PastRecommendation
from slipway_operator.core.scaling import autoscaling, signals
from slipway_operator.core.scaling.autoscaling import Recommendation
from slipway_operator.core.service import rollout
from slipway_operator.core.service.access import port_access
from slipway_operator.core.service.children import children
from slipway_operator.core.service.drain import DrainRules, drain_replica
from slipway_operator.core.service.events import find_events, find_warnings, ready_names
from slipway_operator.core.service.invalid import invalid_status
from slipway_operator.core.service.pod import build_pod, pod_name
from slipway_operator.core.service.problems import find_capacity_shortage
from slipway_operator.core.service.replicas import Assignment, assign, unhealthy_to_replace
from slipway_operator.core.service.revision import (
    Revision,
    create_revision,
    delete_revisions,
    load_revisions,
    resolve,
)
from slipway_operator.core.service.rollout import Revisions, RolloutStep
from slipway_operator.core.service.status import Decided, build_status, deletion_status, progress_deadline

LOOK_AT_SIGNALS: Final = timedelta(seconds=15)  # an idle replica causes no event: look whether it still answers
NEXT_VICTIM_AFTER: Final = timedelta(seconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The result of planning, in this order: actions (the first failure stops the list), status, events."""

    actions: tuple[Action, ...] = ()
    status: InferenceServiceStatus | None  # the whole status; None: write none (the service is deleted)
    events: tuple[Event, ...] = ()
    requeue_after: float | None = None  # seconds until something changes by time alone; None: sleep until woken
    recommendations: tuple[PastRecommendation, ...] = ()  # input of the next pass
    ready: frozenset[str] | None = None  # input of the next pass; None: not compared in this pass


def plan(observed: Observed, now: datetime) -> Plan:
    """Decide everything about one service. `now` is timezone-aware UTC."""
    service = observed.service
    members = _our_replicas(observed, now)
    if service.is_being_deleted:
        return _drain_all(observed, members, now)
    if observed.fault:
        return _leave_alone(observed, members, now)

    stored = load_revisions(service, observed.revisions)
    revision = resolve(service, observed.defaults.runtime_image, stored)
    stable = _stable_revision(service, revision, stored)
    scaling = _autoscale(observed, members, now)
    desired = scaling.desired if scaling else service.fixed_replicas or 0
    rolling = rollout.step(
        members,
        revisions=Revisions(
            update=revision.hash, stable=service.status.current_revision or revision.hash, is_stored=stable is not None
        ),
        desired=desired,
        limits=service.spec.rollout.rolling_update,
        nodes=observed.nodes,
    )
    assigned = {revision.hash, stable.hash if stable else revision.hash}
    unhealthy = unhealthy_to_replace(
        [one for one in members if one.replica.revision in assigned], service.status.attempts
    )
    rebuilt = _assign_stable(observed, members, stable, rolling, unhealthy, now) if stable else Assignment()
    decided = Decided(
        members=members,
        revision=revision,
        desired=desired,
        scaling=scaling,
        rollout=rolling,
        assignment=_assign_update(observed, members, revision, rolling, desired, unhealthy, now),
        stable=stable,
        stable_assignment=rebuilt,
    )
    may_act = _is_recorded(service, revision, desired)

    steps = _add_finalizer(service)
    steps += _remove(observed, decided, now, may_begin=may_act)
    if may_act and revision.spec is not None:
        steps += _create(observed, decided)
    # After what is urgent, and before the children: a name that is taken there must not keep it from being stored.
    steps += Steps(actions=create_revision(service, revision, observed.revisions))
    steps += Steps(
        actions=children(
            service,
            desired=desired,
            applied=observed.applied,
            network=observed.defaults.network,
            adapters=observed.adapters,
        )
    )
    if may_act:
        populated = {one.replica.revision for one in members}
        steps += Steps(actions=delete_revisions(service, observed.revisions, populated=populated))

    status = build_status(observed, decided, now)
    must_act_again = not may_act or decided.must_record
    return Plan(
        actions=steps.actions,
        status=status,
        events=(*steps.events, *decided.assignment_events, *find_events(observed, status, decided)),
        requeue_after=0.0 if must_act_again else _seconds_until(_wake_at(observed, decided, steps, now), now),
        recommendations=scaling.recommendations if scaling else (),
        ready=ready_names(members),
    )


def _stable_revision(service: InferenceService, update: Revision, stored: Sequence[Revision]) -> Revision | None:
    """The revision that replicas are rebuilt of while another one rolls out: the last that served completely.

    None while nothing rolls out, or where it is not stored: it never served, or is older than the store.
    """
    current = service.status.current_revision
    has_served = any(known.hash == current and known.served for known in service.status.revisions)
    if current == update.hash or not has_served:
        return None
    return next((one for one in stored if one.hash == current), None)


def _assign_update(
    observed: Observed,
    members: Sequence[Member],
    revision: Revision,
    rolling: RolloutStep,
    desired: int,
    unhealthy: str,
    now: datetime,
) -> Assignment:
    """Assign the slots of the revision that the spec asks for."""
    service = observed.service
    return assign(
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
        unhealthy=unhealthy,
    )


def _assign_stable(
    observed: Observed, members: Sequence[Member], stable: Revision, rolling: RolloutStep, unhealthy: str, now: datetime
) -> Assignment:
    """Assign the stable revision's slots during a rollout: rebuild lost replicas; the rollout decides which drain."""
    service = observed.service
    return assign(
        [member for member in members if member.replica.revision == stable.hash],
        service=service.metadata.name,
        revision=stable,
        create_up_to=rolling.stable_up_to,
        keep_at_most=rolling.stable_wanted,
        moves=0,
        attempts=service.status.attempts,
        taken_names=observed.taken_names | _names_of_others(observed),
        nodes=observed.nodes,
        now=now,
        unhealthy=unhealthy,
        replace_broken=rolling.replace_broken_stable,
    )


def _our_replicas(observed: Observed, now: datetime) -> tuple[Member, ...]:
    """The replicas that this service's uid controls, without those of a deleted service of the same name."""
    service = observed.service
    ours = [replica for replica in observed.replicas if replica.owner_uid == service.metadata.uid]
    limits = _limits(observed)
    return judge(
        ours,
        observed.nodes,
        startup_timeout=limits.startup_timeout,
        replace_after=limits.replace_after,
        disrupted=limits.disrupted,
        now=now,
    )


def _names_of_others(observed: Observed) -> frozenset[str]:
    uid = observed.service.metadata.uid
    return frozenset(replica.name for replica in observed.replicas if replica.owner_uid != uid)


def _autoscale(observed: Observed, members: Sequence[Member], now: datetime) -> Recommendation | None:
    """The autoscaler's recommendation; None where the spec fixes the number of replicas."""
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
        asking_since=observed.asking_since,
        now=now,
    )
    condition = find_condition(service.status.conditions, ConditionType.SCALING_ACTIVE)
    past = autoscaling.Past(
        current=current,
        history=(service.status.autoscaling or AutoscalingStatus()).history,
        recommendations=observed.recommendations,
        silent_since=_silent_since(service),
        verdict=condition.reason if condition else "",
    )
    return autoscaling.decide(
        policy,
        readings,
        past,
        max_num_seqs=service.spec.runtime.max_num_seqs,
        capacity_shortage=find_capacity_shortage(observed, members),
        now=now,
    )


def _silent_since(service: InferenceService) -> datetime | None:
    condition = find_condition(service.status.conditions, ConditionType.SCALING_ACTIVE)
    if condition is None or condition.status is not ConditionStatus.FALSE:
        return None
    return condition.last_transition_time if condition.reason == Reason.METRICS_MISSING else None


def _is_recorded(service: InferenceService, revision: Revision, desired: int) -> bool:
    """Whether status already contains what this pass is about to do."""
    status = service.status
    knows_revision = any(known.hash == revision.hash and known.image for known in status.revisions)
    return status.desired_replicas == desired and status.update_revision == revision.hash and knows_revision


def _add_finalizer(service: InferenceService) -> Steps:
    """Add our finalizer before the first child is created, so that replicas drain before a deletion completes."""
    if names.FINALIZER in service.metadata.finalizers:
        return Steps()
    return Steps(actions=(AddFinalizer(finalizer=names.FINALIZER, reason="its replicas drain before it goes"),))


def _remove(observed: Observed, decided: Decided, now: datetime, *, may_begin: bool) -> Steps:
    """Drain and delete before anything is created: a removed replica may free the GPU for a new one."""
    assigned = {decided.revision.hash, *((decided.stable.hash,) if decided.stable else ())}
    leaving = dict[str, tuple[Member, str]]()
    for member in decided.members:
        is_unwanted = member.replica.revision not in assigned
        if member.stage is Stage.DRAINING or (member.stage is Stage.DEAD and is_unwanted):
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
            *decided.stable_assignment.leaving,
            *((member, f"its node {member.replica.node} is cordoned") for member in empty_nodes),
        ]
        for member, reason in new:
            leaving.setdefault(member.replica.uid, (member, reason))
    return _one_victim_at_a_time(observed, decided, leaving.values(), now)


def _one_victim_at_a_time(
    observed: Observed, decided: Decided, leaving: Iterable[tuple[Member, str]], now: datetime
) -> Steps:
    """Drain the replicas to be removed; of serving ones only one at a time, and only while enough others are ready.

    The caches may lag behind our writes, so the next one is chosen when the caches show that the last one drains.
    """
    rules, limits = _drain_rules(observed.service), observed.service.spec.rollout.rolling_update
    steps, has_victim = Steps(), False
    spare = sum(one.is_ready for one in decided.members) - max(0, decided.desired - limits.max_unavailable)
    for member, reason in leaving:
        next_step = drain_replica(member.replica, rules, now, reason=reason)
        if any(isinstance(action, DrainPod) and not action.marked for action in next_step.actions):
            if has_victim:
                next_step = Steps(again_at=now + NEXT_VICTIM_AFTER)
            elif member.is_ready and spare <= 0:
                continue
            has_victim = True
        steps += next_step
    return steps


def _create(observed: Observed, decided: Decided) -> Steps:
    """Create missing replicas; those of the stable revision first, because it is known to serve."""
    steps = Steps()
    if decided.stable:
        steps += _create_of(observed, decided.stable, decided.stable_assignment, decided.rollout.stable_wanted)
    return steps + _create_of(observed, decided.revision, decided.assignment, decided.desired)


def _create_of(observed: Observed, revision: Revision, assignment: Assignment, wanted: int) -> Steps:
    service = revision.apply_to(observed.service)
    steps = Steps()
    for creation in assignment.creations:
        name = pod_name(service.metadata.name, revision, creation.slot, creation.attempt)
        manifest = build_pod(
            service,
            revision,
            slot=creation.slot,
            attempt=creation.attempt,
            access=port_access(observed, service, name),
        )
        reason = f"{creation.reason}; {wanted} wanted of revision {revision.hash}"
        steps += Steps(
            actions=(CreatePod(name=name, manifest=manifest, reason=reason),), events=(_created(name, reason),)
        )
    return steps


def _created(name: str, reason: str) -> Event:
    return Event(reason=EventReason.REPLICA_CREATED, action="Create", message=f"created {name}: {reason}", pod=name)


def _drain_all(observed: Observed, members: tuple[Member, ...], now: datetime) -> Plan:
    """Drain every replica of a service that is being deleted, then release our finalizer."""
    service = observed.service
    if names.FINALIZER not in service.metadata.finalizers:
        return Plan(status=None)  # our finalizer is removed; the garbage collector deletes the children
    holding = [one for one in members if one.stage is not Stage.STUCK]
    if not holding:
        release = RemoveFinalizer(finalizer=names.FINALIZER, reason="no replica is left to drain")
        return Plan(actions=(release,), status=None)
    steps = Steps()
    for member in holding:
        steps += drain_replica(member.replica, _drain_rules(service), now, reason="the service is being deleted")
    ends = [one.replica.deleted_at + GONE_AFTER for one in holding if one.replica.deleted_at]
    return Plan(
        actions=steps.actions,
        status=deletion_status(observed, members),
        events=steps.events,
        requeue_after=_seconds_until(earliest(steps.again_at, *ends), now),
    )


def _leave_alone(observed: Observed, members: tuple[Member, ...], now: datetime) -> Plan:
    """Change nothing of a service whose spec cannot be read; only write a status that says why."""
    status = invalid_status(observed, members, now)
    return Plan(status=status, events=tuple(find_warnings(observed.service.status, status)))


def _wake_at(observed: Observed, decided: Decided, steps: Steps, now: datetime) -> datetime | None:
    """The first moment at which time alone may change the plan."""
    limits = _limits(observed)
    moments = [
        *(moment for one in decided.members for moment in next_change(one.replica, observed.nodes, limits)),
        decided.assignment.again_at,
        decided.stable_assignment.again_at,
        progress_deadline(observed, decided),
    ]
    if decided.scaling:
        moments += [decided.scaling.again_at, now + LOOK_AT_SIGNALS]
    coming = [moment for moment in moments if moment is not None and moment > now]
    return earliest(steps.again_at, *coming)


def _seconds_until(moment: datetime | None, now: datetime) -> float | None:
    return None if moment is None else max(0.0, (moment - now).total_seconds())


def _limits(observed: Observed) -> Limits:
    spec = observed.service.spec
    return Limits(
        startup_timeout=timedelta(seconds=spec.runtime.startup_timeout_seconds),
        replace_after=timedelta(seconds=spec.availability.replace_after_unhealthy_seconds),
        disrupted=observed.disrupted,
    )


def _drain_rules(service: InferenceService) -> DrainRules:
    drain = service.spec.drain
    return DrainRules(
        timeout=timedelta(seconds=drain.timeout_seconds),
        propagation=timedelta(seconds=drain.endpoint_propagation_seconds),
    )
