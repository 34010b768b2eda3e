"""Plans one pass over one service: computes actions, status and events from an `Observed` and the time.

Read `plan` from top to bottom; each line is a module of its own. Three rules hold it together:

- What is decided is recorded before pods follow from it. A number of replicas, a revision, an attempt: the pass that
  decides writes the status and stores the revision, and the next one acts. A new leader continues from there.
- One decision asks at most one serving replica to go. The next decision sees that it drains.
- A pass that finds everything as it should be plans nothing, and its status equals the one before.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Final

from slipway_api import names
from slipway_api.conditions import EventReason
from slipway_api.inference_service import InferenceService
from slipway_api.inference_status import CanaryStatus, InferenceServiceStatus
from slipway_api.memory import DoesNotFit
from slipway_operator.core.actions import (
    Action,
    AddFinalizer,
    CreatePod,
    DrainPod,
    Event,
    RemoveFinalizer,
    Steps,
    earliest,
    events_of,
)
from slipway_operator.core.health import GONE_AFTER, Limits, Member, Stage, is_needed, judge, next_change
from slipway_operator.core.observed import Observed, PastRecommendation, ScalingMemory
from slipway_operator.core.pod_rules import find_service_fault
from slipway_operator.core.scaling.target import find_target, set_replicas
from slipway_operator.core.service.children import children
from slipway_operator.core.service.model.fit import check_fit
from slipway_operator.core.service.model.hub_facts import ask_hub, hold_until, known_facts, with_known_shape
from slipway_operator.core.service.model.model_cache import decide_cache, find_refusal
from slipway_operator.core.service.replicas import disruption
from slipway_operator.core.service.replicas.access import port_access, serving_digests
from slipway_operator.core.service.replicas.assign import Assignment, assign, unhealthy_to_replace
from slipway_operator.core.service.replicas.drain import DrainRules, drain_replica
from slipway_operator.core.service.replicas.edited import restore_edited
from slipway_operator.core.service.replicas.pod import build_pod, pod_name
from slipway_operator.core.service.replicas.undrain import take_back
from slipway_operator.core.service.rollout import steps as rollout
from slipway_operator.core.service.rollout.engine import choose_engine, find_engine_fault, find_plain_engine
from slipway_operator.core.service.rollout.revision import Revision, create_revision, delete_revisions, load_revisions
from slipway_operator.core.service.rollout.steps import RolloutStep
from slipway_operator.core.service.rollout.strategy import decide_rollout
from slipway_operator.core.service.rollout.target import Target, choose_target
from slipway_operator.core.service.rollout.templates import check_templates
from slipway_operator.core.service.rollout.upgrade import choose_revision
from slipway_operator.core.service.status.accounting import NOT_ACCOUNTED, Accounting, account
from slipway_operator.core.service.status.conditions import Decided, build_status, progress_deadline
from slipway_operator.core.service.status.deletion import deletion_status
from slipway_operator.core.service.status.events import find_events, find_warnings, ready_names
from slipway_operator.core.service.status.invalid import invalid_status
from slipway_operator.core.service.status.problems import find_capacity_shortage
from slipway_operator.core.warm_pool.claim import Claims, describe_wait, load_claimed, wait_events
from slipway_operator.core.warm_pool.give_back import DELETION, Returns

LOOK_AT_SIGNALS: Final = timedelta(seconds=15)  # an idle replica causes no event: look whether it still answers
ORPHAN_FINALIZER: Final = "orphan"  # set by the API server; the garbage collector removes it with the owner references
NEXT_VICTIM_AFTER: Final = timedelta(seconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The result of planning: actions, status, and events."""

    actions: tuple[Action, ...] = ()
    status: InferenceServiceStatus | None  # the whole status; None: write none (the service is deleted)
    notes: tuple[Event, ...] = ()  # events of decisions; those of actions belong to the actions
    requeue_after: float | None = None  # seconds until something changes by time alone; None: sleep until woken
    recommendations: tuple[PastRecommendation, ...] = ()  # input of the next pass
    scaling_memory: ScalingMemory = field(default_factory=ScalingMemory)  # input of the next pass
    ready: frozenset[str] | None = None  # input of the next pass; None: not compared in this pass
    accounting: Accounting = NOT_ACCOUNTED  # its memory is input of the next pass

    @property
    def events(self) -> tuple[Event, ...]:
        """All events, if all actions are carried out."""
        return (*events_of(self.actions), *self.notes)


def plan(observed: Observed, now: datetime) -> Plan:
    """Decide everything about one service. `now` is timezone-aware UTC."""
    facts = known_facts(observed)
    observed = with_known_shape(observed)
    service = observed.service
    members = _our_replicas(observed, now)
    restored = restore_edited(observed, now)
    if service.is_being_deleted:
        return _drain_all(observed, members, restored, now)
    records = load_revisions(service, observed.revisions)
    engine = choose_engine(observed, records.readable)
    templates = check_templates(observed, records.readable, engine.pinned)
    if (
        fault := observed.fault
        or templates.stops
        or find_service_fault(service.spec, observed.defaults)
        or engine.stops
    ):
        reason = templates.reason if fault == templates.stops else engine.reason_of(fault)
        return _leave_alone(replace(observed, fault=fault, fault_reason=reason), members, restored, now)
    asked = choose_revision(service, observed.defaults.runtime_image, records.readable, now, engine.pinned)
    revision = asked.revision
    target = choose_target(service, revision, records.readable, records.unreadable)
    scale = find_target(observed, members, capacity_shortage=find_capacity_shortage(observed, members), now=now)
    desired = scale.desired
    taken_back = take_back(
        members,
        revision=target.revision.hash,
        desired=desired,
        limits=_limits(observed),
        nodes=observed.nodes,
        asked_back=observed.scaling_memory.asked_back,
        now=now,
    )
    members = taken_back.members
    rolling = decide_rollout(observed, members, target, desired=desired, now=now)
    assigned = {target.revision.hash, target.stable.hash if target.stable else target.revision.hash}
    unhealthy = unhealthy_to_replace(
        [one for one in members if one.replica.revision in assigned], service.status.attempts
    )
    assigned_update = _assign_update(observed, members, target.revision, rolling.step, desired, unhealthy, now)
    may_act = _is_recorded(service, target, desired)
    cache = decide_cache(
        observed, members, target.revision, now, may_create=may_act and target.revision.spec is not None
    )
    decided = Decided(
        members=members,
        cache=cache,
        reference_fault=find_engine_fault(engine, target.revision, observed.defaults) or templates.runs_on,
        facts=facts,
        target=target,
        scale=scale,
        pending_upgrade=asked.pending,
        rollout=rolling.step,
        progress=rolling.progress,
        failed_revision=rolling.failed_revision,
        assignment=assigned_update,
        accounting=account(observed, members, now),
        pool_wait=describe_wait(observed, target.revision, assigned_update.creations, now),
        stable_assignment=_assign_stable(observed, members, target, rolling.step, unhealthy, now),
    )

    steps = restored + ask_hub(observed) + _add_finalizer(service) + set_replicas(service, scale)
    steps += _remove(observed, decided, now, may_begin=may_act)
    if may_act and target.revision.spec is not None:
        steps += taken_back.steps
        steps += _create(observed, decided, now)
    if may_act:
        steps += Steps(actions=rolling.actions)
    steps += load_claimed(observed, members, records.readable, now)
    steps += Steps(actions=create_revision(service, revision, observed.revisions))
    steps += Steps(
        actions=children(
            service,
            desired=desired,
            applied=observed.applied,
            network=observed.defaults.network,
            allows_evictions=disruption.allows_evictions(members, service, observed.nodes, now),
            draining=[one.replica.name for one in members if one.replica.state == names.STATE_DRAINING],
            adapters=observed.adapters,
        )
    )
    steps += disruption.annotate(members, service, observed.nodes, now)
    if may_act:
        populated = {one.replica.revision for one in members}
        steps += Steps(actions=delete_revisions(service, observed.revisions, populated=populated))
    steps += cache.steps

    status = build_status(observed, decided, now)
    must_act_again = not may_act or decided.must_record or _has_advanced(service, status)
    return Plan(
        actions=steps.actions,
        status=status,
        notes=(
            *wait_events(service.status, status, decided.pool_wait),
            *cache.events,
            *decided.assignment_events,
            *rolling.progress.events,
            *find_events(observed, status, decided),
        ),
        requeue_after=0.0
        if must_act_again
        else _seconds_until(earliest(_wake_at(observed, decided, steps, now), asked.again_at), now),
        recommendations=scale.recommendation.recommendations if scale.recommendation else (),
        scaling_memory=replace(scale.memory, asked_back=taken_back.asked_back if may_act else {}),
        ready=ready_names(members),
        accounting=decided.accounting,
    )


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
    mine = [member for member in members if member.replica.revision == revision.hash]
    return assign(
        mine,
        service=service.metadata.name,
        revision=revision,
        create_up_to=rolling.create_up_to if _may_start(observed, members, revision, now) else 0,
        keep_at_most=_most_to_keep(observed.service, rolling, desired),
        moves=max(rolling.moves, disruption.replaced_at_once(mine)),
        attempts=service.status.attempts,
        taken_names=observed.taken_names | _names_of_others(observed),
        nodes=observed.nodes,
        now=now,
        unhealthy=unhealthy,
    )


def _most_to_keep(service: InferenceService, rolling: RolloutStep, desired: int) -> int:
    """How many replicas of the new revision may stay. While the rollout is held, only a person removes any."""
    if rolling.is_held and not _is_stopped(service):
        return max(desired, rolling.update_wanted or 0)
    return desired if rolling.update_wanted is None else min(desired, rolling.update_wanted)


def _is_stopped(service: InferenceService) -> bool:
    """Whether a person has set the number of replicas to 0."""
    return service.spec.suspend or service.fixed_replicas == 0


def _may_start(observed: Observed, members: Sequence[Member], revision: Revision, now: datetime) -> bool:
    """Whether a replica of this revision could serve, as far as that is known before its pod."""
    spec = revision.apply_to(observed.service).spec
    if find_service_fault(spec, observed.defaults) or find_refusal(spec, observed.defaults):
        return False
    if find_plain_engine(revision.engine, observed.defaults):
        return False
    return hold_until(observed, members, now) is None and not isinstance(check_fit(spec), DoesNotFit)


def _assign_stable(
    observed: Observed,
    members: Sequence[Member],
    target: Target,
    rolling: RolloutStep,
    unhealthy: str,
    now: datetime,
) -> Assignment:
    """Assign the stable revision's slots during a rollout: rebuild lost replicas; the rollout decides which drain."""
    service, stable = observed.service, target.stable
    if target.held:  # no replica can be built; the attempts are remembered until one can
        current = service.status.current_revision
        attempts = [one for one in service.status.attempts if current == one.revision != target.revision.hash]
        return Assignment(attempts=tuple(attempts))
    if stable is None:
        return Assignment()
    mine = [member for member in members if member.replica.revision == stable.hash]
    # The list of the installation may be shorter than when this revision was rolled out.
    not_allowed = find_plain_engine(stable.engine, observed.defaults)
    not_allowed = not_allowed or find_service_fault(stable.apply_to(service).spec, observed.defaults)
    return assign(
        mine,
        service=service.metadata.name,
        revision=stable,
        create_up_to=0 if not_allowed else rolling.stable_up_to,
        keep_at_most=rolling.stable_wanted,
        moves=disruption.replaced_at_once(mine),
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
        restart_at=service.restart_moment,
        gateway_digests=serving_digests(observed, service),
        internal_tls=observed.defaults.internal_tls if observed.tls_is_settled else None,
        now=now,
    )


def _names_of_others(observed: Observed) -> frozenset[str]:
    return frozenset(one.name for one in observed.replicas if one.owner_uid != observed.service.metadata.uid)


def _is_recorded(service: InferenceService, target: Target, desired: int) -> bool:
    """Whether status already contains what this pass is about to do."""
    status, revision = service.status, target.asked
    is_target = status.failed_revision == target.failed and status.update_revision == revision.hash
    knows_revision = any(known.hash == revision.hash and known.image for known in status.revisions)
    return status.desired_replicas == desired and is_target and knows_revision


def _has_advanced(service: InferenceService, after: InferenceServiceStatus) -> bool:
    """Whether the rollout took a step in this pass: replicas follow it in the next one, when status has it."""
    before = service.status
    was, now = before.canary or CanaryStatus(), after.canary or CanaryStatus()
    if before.current_revision != after.current_revision:
        return True  # an upgrade may have waited for that
    return (was.step, was.weight) != (now.step, now.weight) or before.failed_revision != after.failed_revision


def _add_finalizer(service: InferenceService) -> Steps:
    """Add our finalizer before the first child is created, so that replicas drain before a deletion completes."""
    if names.FINALIZER in service.metadata.finalizers:
        return Steps()
    return Steps(actions=(AddFinalizer(finalizer=names.FINALIZER, reason="its replicas drain before it goes"),))


def _remove(observed: Observed, decided: Decided, now: datetime, *, may_begin: bool) -> Steps:
    """Drain and delete replicas; those that are end with their nodes."""
    target = decided.target
    assigned = {target.revision.hash, *((target.stable.hash,) if target.stable else ())}
    leaving = dict[str, tuple[Member, str]]()
    for member in decided.members:
        is_unwanted = member.replica.revision not in assigned
        if member.stage is Stage.DRAINING or (member.stage is Stage.DEAD and is_unwanted):
            leaving[member.replica.uid] = (member, member.replica.drain_reason or "its revision is not wanted any more")
    if decided.target.held:
        if _is_stopped(observed.service):
            for member in decided.members:
                leaving.setdefault(member.replica.uid, (member, "the service is scaled to zero"))
        for member, reason in disruption.ending_with_node(decided.members, DrainRules.of(observed.service), now):
            leaving.setdefault(member.replica.uid, (member, reason))
    elif may_begin:
        without_surge = rollout.may_leave_without_surge(
            decided.members,
            desired=decided.desired,
            limits=observed.service.spec.rollout.rolling_update,
            nodes=observed.nodes,
        )
        new = [
            *decided.rollout.leaving,
            *decided.assignment.leaving,
            *decided.stable_assignment.leaving,
            *((member, member.leaves) for member in without_surge),
            *disruption.ending_with_node(decided.members, DrainRules.of(observed.service), now),
        ]
        for member, reason in new:
            leaving.setdefault(member.replica.uid, (member, reason))
    return _one_victim_at_a_time(observed, decided, leaving.values(), now)


def _one_victim_at_a_time(
    observed: Observed, decided: Decided, leaving: Iterable[tuple[Member, str]], now: datetime
) -> Steps:
    """Drain the replicas to be removed; of serving ones only one at a time, and only while enough others are ready.

    The caches may lag behind our writes, so the next one is chosen when the caches show that the last one drains. What
    goes with its node is not chosen by us, so it is not counted.
    """
    rules, limits = DrainRules.of(observed.service), observed.service.spec.rollout.rolling_update
    steps, has_victim, returns = Steps(), False, Returns(observed, now)
    must_stay = 0 if decided.rollout.may_empty else max(0, decided.desired - limits.max_unavailable)
    for member, reason in leaving:
        next_step = drain_replica(member.replica, disruption.rules_of(member, rules, now), now, reason=reason)
        if member.ends_at is None and any(
            isinstance(action, DrainPod) and not action.marked for action in next_step.actions
        ):
            if has_victim:
                next_step = Steps(again_at=now + NEXT_VICTIM_AFTER)
            elif is_needed(member, decided.members, must_stay):
                continue
            has_victim = True
        steps += returns.instead_of_deletion(member.replica, next_step)
    return steps


def _create(observed: Observed, decided: Decided, now: datetime) -> Steps:
    """Create missing replicas; those of the stable revision first, because it is known to serve."""
    steps, target, rolling, claims = Steps(), decided.target, decided.rollout, Claims(observed, now)
    if target.stable:
        steps += _create_of(observed, target.stable, decided.stable_assignment, rolling.stable_wanted, claims)
    wanted = decided.desired if rolling.update_wanted is None else rolling.update_wanted
    return steps + _create_of(observed, target.revision, decided.assignment, wanted, claims)


def _create_of(observed: Observed, revision: Revision, assignment: Assignment, wanted: int, claims: Claims) -> Steps:
    service, steps = revision.apply_to(observed.service), Steps()
    for creation in assignment.creations:
        name = pod_name(service.metadata.name, revision, creation.slot, creation.attempt)
        manifest = build_pod(
            service,
            revision,
            slot=creation.slot,
            attempt=creation.attempt,
            access=port_access(observed, service, name),
            kernels_key=observed.kernels_key(service.metadata.namespace, service.metadata.name),
            avoid_node=creation.avoid_node,
            # A replica that tolerates the taint of a cordoned node would have to leave it again.
            closed_nodes=sorted(node.name for node in observed.nodes.values() if node.cordoned),
            node_cache=observed.defaults.node_cache,
            user=observed.defaults.pod_user,
            placement=observed.defaults.placement,
            tracing=observed.defaults.tracing,
        )
        place = f"slot {creation.slot} of {wanted}, revision {revision.hash}"
        reason = f"created replica {name} ({place}){f': {creation.reason}' if creation.reason else ''}"
        create = CreatePod(name=name, manifest=manifest, reason=reason, events=(_created(name, reason),))
        steps += claims.start_replica(service, revision, creation, create)
    return steps


def _created(name: str, reason: str) -> Event:
    return Event(reason=EventReason.REPLICA_CREATED, action="Create", message=reason, pod=name)


def _drain_all(observed: Observed, members: tuple[Member, ...], restored: Steps, now: datetime) -> Plan:
    """Drain every replica of a service that is being deleted, then release our finalizer."""
    service = observed.service
    if names.FINALIZER not in service.metadata.finalizers:
        # Our finalizer is removed; the garbage collector deletes the children. Others' finalizers may hold the object.
        is_held = bool(service.metadata.finalizers)
        return Plan(status=deletion_status(observed, (), now) if is_held else None)
    if ORPHAN_FINALIZER in service.metadata.finalizers:
        reason = "kubectl delete --cascade=orphan leaves the replicas as they are"
        return Plan(actions=(RemoveFinalizer(finalizer=names.FINALIZER, reason=reason),), status=None)
    holding = [one for one in members if one.stage is not Stage.STUCK]
    if not holding:
        release = RemoveFinalizer(finalizer=names.FINALIZER, reason="no replica is left to drain")
        return Plan(actions=(release,), status=None)
    steps, returns = restored, Returns(observed, now)
    for member in holding:
        next_step = drain_replica(member.replica, DrainRules.of(service), now, reason=DELETION)
        steps += returns.instead_of_deletion(member.replica, next_step)
    ends = [one.replica.deleted_at + GONE_AFTER for one in holding if one.replica.deleted_at]
    return Plan(
        actions=steps.actions,
        status=deletion_status(observed, members, now),
        requeue_after=_seconds_until(earliest(steps.again_at, *ends), now),
    )


def _leave_alone(observed: Observed, members: tuple[Member, ...], restored: Steps, now: datetime) -> Plan:
    """Change nothing but labels of a service whose spec has a fault; write a status that says why."""
    status = invalid_status(observed, members, now)
    return Plan(
        actions=restored.actions,
        status=status,
        notes=tuple(find_warnings(observed.service.status, status)),
        requeue_after=_seconds_until(restored.again_at, now),
    )


def _wake_at(observed: Observed, decided: Decided, steps: Steps, now: datetime) -> datetime | None:
    """The first moment at which time alone may change the plan."""
    limits = _limits(observed)
    moments = [
        *(moment for one in decided.members for moment in next_change(one.replica, observed.nodes, limits)),
        hold_until(observed, decided.members, now),
        decided.assignment.again_at,
        decided.stable_assignment.again_at,
        decided.progress.again_at,
        decided.accounting.again_at,
        progress_deadline(observed, decided),
        observed.service.restart_moment,
        *disruption.drain_moments(decided.members, DrainRules.of(observed.service)),
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
