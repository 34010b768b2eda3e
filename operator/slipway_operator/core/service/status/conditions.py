"""Builds the whole status of a service: counts, revisions, autoscaling and conditions, with what a person can do.

It is written as one, and only when it changed, so no value may change by itself: timestamps but never ages, sentences
of decisions but never live numbers. What it tells of autoscaling is in `scaling_status`.

| ready replicas | desired | otherwise                             | Ready                                |
|----------------|---------|---------------------------------------|--------------------------------------|
| any            | any     | the served name is another object's   | False NameConflict, if otherwise True |
| any            | any     | to tenants it is this service's       | True NameConflict, if Available      |
| any            | 0       |                                       | True ScaledToZero                    |
| all            | > 0     |                                       | True Available                       |
| some           | > 0     |                                       | True Degraded                        |
| none           | > 0     | Stalled                               | False, with the reason of Stalled    |
| none           | > 0     | it was available before               | False NoReadyReplicas                |
| none           | > 0     | no node has a free GPU                | Unknown WaitingForGPU                |
| none           | > 0     | no node takes it for another cause    | Unknown Unschedulable                |
| none           | > 0     | a volume cannot be mounted            | Unknown MountFailed                  |
| none           | > 0     | a replica brings the model            | Unknown DownloadingModel             |
| none           | > 0     | it loads for the first time           | Unknown Loading                      |
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from slipway_api import names
from slipway_api.conditions import (
    Condition,
    ConditionStatus,
    ConditionType,
    Reason,
    find_condition,
    remove_condition,
    set_condition,
)
from slipway_api.inference_service import DirectAccess, InferenceService
from slipway_api.inference_status import (
    Address,
    AttemptStatus,
    AutoscalingStatus,
    CapacityStatus,
    InferenceServiceStatus,
    ModelFacts,
    PendingUpgrade,
    RevisionStatus,
)
from slipway_api.memory import Fits
from slipway_operator.core.actions import Event
from slipway_operator.core.engines import fields_condition
from slipway_operator.core.health import Member
from slipway_operator.core.observed import Observed
from slipway_operator.core.scaling.autoscaling import Recommendation
from slipway_operator.core.scaling.target import ScaleTarget
from slipway_operator.core.service.adapters import adapters_condition, adapters_status
from slipway_operator.core.service.model.fit import check_fit
from slipway_operator.core.service.model.model_cache import CacheDecision
from slipway_operator.core.service.replicas.assign import Assignment
from slipway_operator.core.service.replicas.suspension import SUSPENDED, suspended_condition
from slipway_operator.core.service.rollout.canary import Progress
from slipway_operator.core.service.rollout.reporting import find_verdict, verdict_type, without_verdicts
from slipway_operator.core.service.rollout.revision import Revision
from slipway_operator.core.service.rollout.steps import RolloutStep
from slipway_operator.core.service.rollout.target import Target
from slipway_operator.core.service.route import answers_nobody, name_conflict, route_condition
from slipway_operator.core.service.status.accounting import NOT_ACCOUNTED, Accounting
from slipway_operator.core.service.status.output import output_condition
from slipway_operator.core.service.status.performance import measure_performance
from slipway_operator.core.service.status.problems import Problems, find_problems, find_start_obstacle
from slipway_operator.core.service.status.refusals import is_transient
from slipway_operator.core.service.status.scaling_status import autoscaling_status, scaling_condition
from slipway_operator.core.words import count

MOST_REVISIONS: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """The decisions of this pass, from which status is built."""

    members: Sequence[Member]
    target: Target
    scale: ScaleTarget
    rollout: RolloutStep
    progress: Progress
    failed_revision: str
    assignment: Assignment  # of the revision that replicas are rolled to
    stable_assignment: Assignment
    accounting: Accounting = NOT_ACCOUNTED
    facts: ModelFacts | None = None
    cache: CacheDecision = field(default_factory=CacheDecision)
    pending_upgrade: PendingUpgrade | None = None
    reference_fault: tuple[Reason, str] | None = None
    """Why an Engine or a ServiceTemplate cannot be followed, while the service runs on without it."""
    pool_wait: str = ""  # why replicas wait for a pod of a WarmPool; empty: none does

    @property
    def desired(self) -> int:
        """The desired number of replicas."""
        return self.scale.desired

    @property
    def scaling(self) -> Recommendation | None:
        """The autoscaler's recommendation; None where the spec fixes the number."""
        return self.scale.recommendation

    @property
    def revision(self) -> Revision:
        """The revision that replicas are rolled to: the spec's, or the one that it is rolled back to."""
        return self.target.revision

    @property
    def stable(self) -> Revision | None:
        """The revision that replicas are rebuilt of meanwhile."""
        return self.target.stable

    @property
    def attempts(self) -> tuple[AttemptStatus, ...]:
        """The status entries of the slots of both revisions."""
        return self.assignment.attempts + self.stable_assignment.attempts

    @property
    def must_record(self) -> bool:
        """Whether a replica waits until status carries its attempt."""
        return self.assignment.must_record or self.stable_assignment.must_record

    @property
    def assignment_events(self) -> tuple[Event, ...]:
        """The events of single slots."""
        return self.assignment.events + self.stable_assignment.events

    def ready_of(self, revision: str) -> int:
        """Ready replicas of one revision."""
        return sum(one.is_ready and one.replica.revision == revision for one in self.members)


def build_status(observed: Observed, decided: Decided, now: datetime) -> InferenceServiceStatus:
    """The status after this pass."""
    service, before = observed.service, observed.service.status
    ready = sum(member.is_ready for member in decided.members)
    is_complete = not decided.rollout.is_rolling and decided.rollout.serves_instead
    current = decided.revision.hash if is_complete or not before.current_revision else before.current_revision
    updated = [one for one in decided.members if one.is_live and one.replica.revision == decided.revision.hash]
    name = service.metadata.name
    url = f"{observed.defaults.gateway_url.rstrip('/')}/v1"
    autoscaling = autoscaling_status(service, decided.scale, now)
    return InferenceServiceStatus(
        observed_generation=service.metadata.generation,
        conditions=_conditions(observed, decided, ready, autoscaling, now),
        url=url,
        addresses=_addresses(observed, url),
        replicas=len(decided.members),
        ready_replicas=ready,
        updated_replicas=len(updated),
        draining_replicas=sum(one.replica.state == names.STATE_DRAINING for one in decided.members),
        desired_replicas=decided.desired,
        selector=f"{names.LABEL_SERVICE}={name}",
        served_name=_served_name(service, decided),
        current_revision=current,
        update_revision=decided.target.asked.hash,
        failed_revision=decided.failed_revision,
        revisions=_revisions(observed, decided, current),
        canary=None if is_complete else decided.progress.status,
        attempts=decided.attempts,
        autoscaling=autoscaling,
        capacity=_capacity(decided) or before.capacity or _planned_capacity(service, decided),
        adapters=adapters_status(observed.adapters),
        direct_access=service.direct_access.value,
        performance=measure_performance(decided.members) or before.performance,
        slo=decided.accounting.slo,
        cost=decided.accounting.cost,
        model_cache=decided.cache.status,
        model=decided.facts,
        templates=observed.inheritance.templates,
        inherited=None if observed.inheritance.blocks is None else dict(observed.inheritance.blocks),
        pending_upgrade=decided.pending_upgrade,
    )


RUNS_ON: Final = "until then the service runs on as its stored revision says"
OPEN_MESSAGE: Final = (
    "Tenants are configured, but any pod that reaches the replicas can call them directly, without an API key and "
    "beside all limits. Set spec.routing.directAccess to GatewayOnly; this replaces the replicas in a rollout. "
    "Set it to Open to keep direct callers."
)


def _addresses(observed: Observed, gateway: str) -> tuple[Address, ...]:
    """The gateway's URL, and the Kubernetes Service's if replicas accept requests without a serving token.

    A Service of that name which another owner made, or which the API server refused, is not an address of this object.
    """
    service = observed.service
    through_gateway = Address(name="gateway", url=gateway)
    name, namespace = service.metadata.name, service.metadata.namespace
    is_missing = any(one.action == f"ApplyChild Service/{name}" for one in observed.failures)
    if service.direct_access is DirectAccess.GATEWAY_ONLY or is_missing:
        return (through_gateway,)
    scheme = "https" if observed.defaults.internal_tls else "http"
    url = f"{scheme}://{name}.{namespace}.svc.{observed.defaults.cluster_domain}/v1"
    return through_gateway, Address(name="service", url=url)


# --- revisions --------------------------------------------------------------------------------------------------------


def _revisions(observed: Observed, decided: Decided, current: str) -> tuple[RevisionStatus, ...]:
    """Newest first: the one that the spec asks for, those with replicas, and as many older ones as are remembered."""
    service = observed.service
    update, target = decided.target.asked, decided.revision
    populated = {member.replica.revision for member in decided.members}
    older = [one for one in service.status.revisions if one.hash != update.hash]
    needed = [one for one in older if one.hash in {*populated, current, target.hash}]
    room = max(0, service.spec.rollout.revision_history_limit - len(needed))
    spare = [one for one in older if one not in needed][:room]
    kept = [one for one in older if one in needed or one in spare][: MOST_REVISIONS - 1]

    images = {update.hash: update.image} | {one.hash: one.image for one in kept}
    served = {one.hash for one in service.status.revisions if one.served}
    if decided.desired and decided.rollout.serves_instead:
        served.add(target.hash)
    return tuple(
        RevisionStatus(
            name=f"{service.metadata.name}-{hash[:5]}",
            hash=hash,
            image=image,
            weight=decided.rollout.weights.get(hash, 0),
            mirror_percent=decided.progress.mirror_percent if hash == target.hash else 0,
            ready=decided.ready_of(hash),
            served=hash in served,
        )
        for hash, image in images.items()
    )


def _served_name(service: InferenceService, decided: Decided) -> str:
    """What clients send as `model`: a changed name is valid from the first request on that it may get."""
    update, stable = decided.revision, decided.stable
    if decided.target.held and service.status.served_name:
        return service.status.served_name  # the stable revision's name is in the missing record
    gets_traffic = decided.ready_of(update.hash) and decided.rollout.weights.get(update.hash, 0)
    if stable and decided.ready_of(stable.hash) and not gets_traffic:
        return stable.apply_to(service).served_name
    return update.apply_to(service).served_name if decided.target.is_rollback else service.served_name


def _capacity(decided: Decided) -> CapacityStatus | None:
    """The capacity of a replica of the wanted revision, else of any; the smallest, where nodes differ."""
    known = [(one.replica.revision, one.replica.sample) for one in decided.members if one.is_ready]
    capacities = [(revision, sample.capacity) for revision, sample in known if sample and sample.capacity]
    wanted = [capacity for revision, capacity in capacities if revision == decided.revision.hash]
    chosen = wanted or [capacity for _, capacity in capacities]
    if not chosen:
        return None
    least = min(chosen, key=lambda capacity: (capacity.max_sequences, capacity.kv_blocks))
    return CapacityStatus(
        max_sequences=least.max_sequences, kv_blocks=least.kv_blocks, bytes_per_token=least.bytes_per_token
    )


def _planned_capacity(service: InferenceService, decided: Decided) -> CapacityStatus | None:
    """The capacity by arithmetic, until a replica reports its own."""
    fit = check_fit(decided.revision.apply_to(service).spec)
    if not isinstance(fit, Fits):
        return None
    return CapacityStatus(max_sequences=fit.max_sequences, kv_blocks=fit.kv_blocks, bytes_per_token=fit.bytes_per_token)


# --- conditions -------------------------------------------------------------------------------------------------------


def _conditions(
    observed: Observed, decided: Decided, ready: int, autoscaling: AutoscalingStatus | None, now: datetime
) -> tuple[Condition, ...]:
    service = observed.service
    generation = service.metadata.generation
    conditions = service.status.conditions
    if service.status.update_revision != decided.target.asked.hash:
        conditions = remove_condition(conditions, ConditionType.RECONCILING)  # another rollout: a new deadline
    problems = find_problems(observed, decided.members, decided.revision, decided.assignment.attempts, now=now)
    held = (Reason.REVISION_MISSING, decided.target.held) if decided.target.held else None
    lost = decided.reference_fault and (decided.reference_fault[0], f"{decided.reference_fault[1]}; {RUNS_ON}")
    stalled = held or lost or problems.stalled or _past_deadline(observed, decided, problems, now)

    def write(type: ConditionType, status: ConditionStatus | bool, reason: Reason, message: str) -> None:
        nonlocal conditions
        conditions = set_condition(
            conditions, type, status, reason.value, message[:4096], generation=generation, now=now
        )

    status, reason, message = _readiness(
        service.status.conditions, decided, ready, problems, stalled, is_suspended=service.spec.suspend
    )
    is_taken = answers_nobody(observed) and status is ConditionStatus.TRUE and not service.spec.suspend
    if is_taken:
        status, reason, message = ConditionStatus.FALSE, Reason.NAME_CONFLICT, name_conflict(observed)
    elif reason is Reason.AVAILABLE and (sentence := name_conflict(observed)):
        reason, message = Reason.NAME_CONFLICT, sentence
    write(ConditionType.READY, status, reason, message)
    enough = ready >= decided.desired
    write(
        ConditionType.WORKLOAD_AVAILABLE,
        enough,
        Reason.AVAILABLE if enough else (Reason.DEGRADED if ready else Reason.NO_READY_REPLICAS),
        problems.summarize(ready, decided.desired),
    )
    cause = stalled[1] if stalled and _cannot_start(observed, decided) else ""
    write(ConditionType.ROUTE_READY, *route_condition(observed, ready, cause))

    if stalled:
        write(ConditionType.STALLED, True, *stalled)
    elif is_taken:
        write(ConditionType.STALLED, True, reason, message)  # no pass changes it: a person has to
    else:
        conditions = remove_condition(conditions, ConditionType.STALLED)
    if not stalled and (progress := _progress(observed, decided, problems, enough)):
        write(ConditionType.RECONCILING, True, *progress)
    else:
        conditions = remove_condition(conditions, ConditionType.RECONCILING)

    if suspended := suspended_condition(service):
        write(ConditionType.SUSPENDED, *suspended)
    else:
        conditions = remove_condition(conditions, ConditionType.SUSPENDED)

    if decided.progress.condition:
        verdict = verdict_type(service.spec.rollout.strategy)
        conditions = without_verdicts(conditions, but=verdict)
        write(verdict, *decided.progress.condition)
    elif not _keeps_verdict(service, decided):
        conditions = without_verdicts(conditions)

    scaling = None if suspended else scaling_condition(service, decided.scale, autoscaling, decided.members)
    if scaling:
        write(ConditionType.SCALING_ACTIVE, *scaling)
    else:
        conditions = remove_condition(conditions, ConditionType.SCALING_ACTIVE)
    present = [one for one in decided.members if one.replica.revision == decided.revision.hash]
    if adapters := adapters_condition(observed.adapters, present, decided.revision.apply_to(service)):
        write(ConditionType.ADAPTERS_READY, *adapters)
    else:
        conditions = remove_condition(conditions, ConditionType.ADAPTERS_READY)
    if decided.accounting.condition:
        write(ConditionType.WITHIN_SLO, *decided.accounting.condition)
    else:
        conditions = remove_condition(conditions, ConditionType.WITHIN_SLO)
    if decided.cache.condition:
        write(ConditionType.MODEL_CACHED, *decided.cache.condition)
    else:
        conditions = remove_condition(conditions, ConditionType.MODEL_CACHED)
    if fields := fields_condition(decided.revision.apply_to(service).spec, decided.revision.engine):
        write(ConditionType.ENGINE_FIELDS_HONOURED, *fields)
    else:
        conditions = remove_condition(conditions, ConditionType.ENGINE_FIELDS_HONOURED)
    if output := output_condition(decided.members):
        write(ConditionType.OUTPUT_VALID, *output)
    else:
        conditions = remove_condition(conditions, ConditionType.OUTPUT_VALID)
    defaults = observed.defaults
    should_be_closed = defaults.has_tenants or defaults.direct_access is DirectAccess.GATEWAY_ONLY
    if should_be_closed and service.direct_access is DirectAccess.OPEN:
        write(ConditionType.GATEWAY_ONLY, False, Reason.OPEN_TO_DIRECT_CALLERS, OPEN_MESSAGE)
    else:
        conditions = remove_condition(conditions, ConditionType.GATEWAY_ONLY)
    return conditions


def _cannot_start(observed: Observed, decided: Decided) -> bool:
    """Whether the cause in Stalled keeps every replica from starting, so that a request would wait in vain.

    Not if a replica of another revision starts, if only a child of another kind is refused, or if nothing was tried at
    zero: then a waiting request makes the operator try.
    """
    others = [one for one in decided.members if one.replica.revision != decided.revision.hash]
    if decided.stable_assignment.creations or any(one.is_live and not one.stage.is_broken for one in others):
        return False
    if not decided.desired:
        return decided.target.held != "" or find_start_obstacle(observed, decided.revision) is not None
    refused = [one for one in observed.failures if not is_transient(one)]
    starts = any(one.is_live and not one.stage.is_broken for one in decided.members)
    is_replica = any(one.action.startswith(("CreatePod", "ClaimPod", "CreateRevision")) for one in refused)
    return (is_replica and not starts) or not refused


def _keeps_verdict(service: InferenceService, decided: Decided) -> bool:
    """Whether the verdict about the last rollout still tells something: it passed, and nothing has changed since."""
    was = find_verdict(service.status.conditions)
    is_same = service.status.update_revision == decided.target.asked.hash
    return was is not None and is_same and was.reason == Reason.PASSED


def _readiness(
    before: tuple[Condition, ...],
    decided: Decided,
    ready: int,
    problems: Problems,
    stalled: tuple[Reason, str] | None,
    *,
    is_suspended: bool,
) -> tuple[ConditionStatus, Reason, str]:
    """Condition Ready, by the table in the module's docstring."""
    sentence = problems.summarize(ready, decided.desired)
    if decided.pool_wait and ready < decided.desired:
        sentence += f"; {decided.pool_wait}"
    if decided.desired == 0:
        return ConditionStatus.TRUE, Reason.SCALED_TO_ZERO, SUSPENDED if is_suspended else _why_none(decided)
    if ready >= decided.desired:
        return ConditionStatus.TRUE, Reason.AVAILABLE, sentence
    if ready:
        return ConditionStatus.TRUE, Reason.DEGRADED, sentence
    if stalled:
        return ConditionStatus.FALSE, *stalled
    was = find_condition(before, ConditionType.READY)
    served = was is not None and was.status is ConditionStatus.TRUE and was.reason != Reason.SCALED_TO_ZERO
    if served or (was is not None and was.reason in (Reason.NO_READY_REPLICAS, Reason.NAME_CONFLICT)):
        return ConditionStatus.FALSE, Reason.NO_READY_REPLICAS, sentence
    if problems.waits_for is not None:
        return ConditionStatus.UNKNOWN, problems.waits_for, sentence
    return ConditionStatus.UNKNOWN, Reason.DOWNLOADING_MODEL if problems.downloads else Reason.LOADING, sentence


def _why_none(decided: Decided) -> str:
    if decided.scaling is None or decided.scaling.desired:
        return "no replicas are requested"
    return "no requests come: the first one starts a replica, and is held by the gateway until then"


def _progress(observed: Observed, decided: Decided, problems: Problems, enough: bool) -> tuple[Reason, str] | None:
    """The reason and message of Reconciling; None if nothing is under way."""
    before = observed.service.status
    causes = "".join(f"; {cause}" for cause in (*problems.refusals, *problems.obstacles))
    if decided.rollout.is_rolling:
        waits = f": {decided.progress.holds}" if decided.progress.holds else ""
        if decided.target.is_rollback:
            return (
                Reason.ROLLING_OUT,
                f"revision {decided.revision.hash} takes the place of {decided.target.asked.hash}{causes}",
            )
        return Reason.ROLLING_OUT, f"revision {decided.revision.hash} replaces {before.current_revision}{waits}{causes}"
    if not enough:
        wait = f"; {decided.pool_wait}" if decided.pool_wait else ""
        return Reason.SCALING_UP, f"{count(decided.desired, 'replica is', 'replicas are')} wanted{wait}{causes}"
    return None


def progress_deadline(observed: Observed, decided: Decided) -> datetime | None:
    """When the rollout, or the first start, will have made no progress for too long; None when it is done."""
    if _is_settled(decided) or observed.service.status.update_revision != decided.target.asked.hash:
        return None  # done, or begun this very moment
    if any(one.stage.is_queued and one.replica.revision == decided.revision.hash for one in decided.members):
        return None  # who holds the queue decides when the time begins
    new = [one.replica for one in decided.members if one.replica.revision == decided.revision.hash]
    old = [one.replica for one in decided.members if one.replica.revision != decided.revision.hash]
    # Only steps that no retry repeats are progress: a first attempt, a replica that became ready, one that ended.
    moments = [one.created_at for one in new if one.attempt == 0]
    moments += [one.scheduled_at for one in new if one.attempt == 0 and one.scheduled_at]
    moments += [one.ready_since for one in new if one.ready and one.ready_since]
    moments += [one.drain_started for one in old if one.drain_started]
    reconciling = find_condition(observed.service.status.conditions, ConditionType.RECONCILING)
    if reconciling:
        moments.append(reconciling.last_transition_time)
    deadline = timedelta(seconds=observed.service.spec.rollout.progress_deadline_seconds)
    return max(moments) + deadline if moments else None


def _past_deadline(
    observed: Observed, decided: Decided, problems: Problems, now: datetime
) -> tuple[Reason, str] | None:
    """No progress for progressDeadlineSeconds; stays so until there is progress or another revision is asked for."""
    if _is_settled(decided):
        return None
    before = observed.service.status
    deadline = progress_deadline(observed, decided)
    was = find_condition(before.conditions, ConditionType.STALLED)
    if was and (was.reason != Reason.PROGRESS_DEADLINE_EXCEEDED or before.update_revision != decided.target.asked.hash):
        was = None
    # Attempts begin and end while it is stalled, so an old deadline may no longer follow from them: it still holds.
    is_queued = any(one.stage.is_queued for one in decided.members)
    still = was is not None and not is_queued and (deadline is None or deadline <= was.last_transition_time)
    if not still and (deadline is None or now < deadline):
        return None
    seconds = observed.service.spec.rollout.progress_deadline_seconds
    new = decided.ready_of(decided.revision.hash)
    sentence = problems.summarize(new, decided.desired, decided.revision.hash)
    return (
        Reason.PROGRESS_DEADLINE_EXCEEDED,
        f"no progress for {seconds}s: {sentence}; fix the spec, or set it back to the revision before",
    )


def _is_settled(decided: Decided) -> bool:
    """Whether no rollout and no first start is under way; scaling may take as long as it takes."""
    serves = any(member.is_ready for member in decided.members)
    is_waiting = not decided.rollout.is_rolling or bool(decided.progress.holds)  # for time, a verdict or a person
    return decided.desired == 0 or (serves and is_waiting)
