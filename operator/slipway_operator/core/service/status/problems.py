"""Finds what keeps a service from serving, and says it in sentences that also name what to do.

The reason of Stalled is a cause that only a person can remove. Refused writes are also reported while replicas serve,
the others only while none does:

| seen                                                    | reason             |
|---------------------------------------------------------|--------------------|
| no certificate can be made or renewed (internal TLS)    | CertificateUnavailable |
| the model does not fit its hardware, by arithmetic      | DoesNotFit         |
| model.cache.policy Node, which is not permitted         | CacheNotPermitted  |
| spec.warmPool.policy Require, and there is no such pool | PoolNotFound       |
| the API server refuses a write                          | see `refusals`     |
| the kubelet cannot pull the image                       | ImagePullFailed    |
| the credentials' Secret, or its key, is not there       | CredentialsInvalid |
| another Secret or ConfigMap of the environment is not   | InvalidSpec        |
| a volume's Secret, ConfigMap or key is not there        | MountFailed        |
| the claim of a `pvc://` model is not there              | ModelNotFound      |
| the runtime's termination message begins with a reason  | that reason        |
| a replica ended again and again for another cause       | CrashLooping       |

The kubelet's states alternate while it retries: ErrImagePull and ImagePullBackOff, CrashLoopBackOff and a container
that runs for a while. One cause is one sentence and one reason all the same: sentences are made from what does not
alternate (the error, how many runs ended, how the last one ended), and CrashLooping holds until a replica is ready.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from slipway_api import names
from slipway_api.conditions import Condition, ConditionType, Reason, find_condition
from slipway_api.inference_status import AttemptStatus
from slipway_api.memory import DoesNotFit
from slipway_api.pod_labels import ROUTING_LABELS
from slipway_api.runtime_api import ReadyReason
from slipway_operator.core.certificates import describe_certificate_fault
from slipway_operator.core.health import STARTING, Member, Stage
from slipway_operator.core.observed import Observed, Replica
from slipway_operator.core.pod_rules import find_service_fault
from slipway_operator.core.service.model import model_access
from slipway_operator.core.service.model.fit import check_fit
from slipway_operator.core.service.model.model_cache import find_refusal
from slipway_operator.core.service.model.pulls import is_pull
from slipway_operator.core.service.rollout.revision import Revision
from slipway_operator.core.service.status.mounts import describe_mount, is_for_author, missing_secret
from slipway_operator.core.service.status.placement import (
    describe_unschedulable,
    find_impossible,
    find_obstacle,
    why_waiting,
)
from slipway_operator.core.service.status.refusals import describe_refusal, find_refusal_cause, is_quota_refusal
from slipway_operator.core.words import count

CRASHES_UNTIL_STALLED: Final = 3  # two restarts may be a slow node; three are a pattern
PROBLEMS_SHOWN: Final = 3
UNREADY: Final = " is not ready any more: "
PROBE_FAILS: Final = "its readiness probe fails"

# What begins the termination message of a runtime that only a person can help -> reason, and the sentence of the rest.
_TERMINATION_MESSAGES: Final = {
    names.WORD_MODEL_NOT_FOUND: (Reason.MODEL_NOT_FOUND, "the model cannot be found: {}; check spec.model.uri"),
    names.WORD_CREDENTIALS_INVALID: (
        Reason.CREDENTIALS_INVALID,
        "the model may not be read: {}; check the Secret of spec.model.credentialsSecretRef",
    ),
    names.WORD_HUB_UNREACHABLE: (
        Reason.HUB_UNREACHABLE,
        "the source of the model cannot be reached: {}; check the network of the nodes, spec.model.network and "
        "spec.model.uri",
    ),
    names.WORD_INVALID_SPEC: (Reason.INVALID_SPEC, "the runtime refuses the spec: {}"),
    names.WORD_DOES_NOT_FIT: (Reason.DOES_NOT_FIT, "the model does not fit: {}"),
}

_STAGE_SENTENCES: Final = {
    Stage.STUCK: "{replica} was deleted, but its node does not end it",
    Stage.TERMINATING: "{replica} is being deleted",
    Stage.DEAD: "{replica} has ended",
    Stage.DRAINING: "{replica} is draining",
    Stage.LOST: "{replica} is on a node that does not answer",
    Stage.READY: "{replica} is ready",
    Stage.UNREADY: "{replica} is not ready at the moment",
    Stage.UNHEALTHY: "{replica} was ready and has not been for too long",
    Stage.OVERDUE: "{replica} did not become ready in time",
    Stage.IMAGE_ERROR: "{replica} cannot pull its image",
    Stage.CONFIG_ERROR: "{replica} lacks a part of its environment",
    Stage.CRASHING: "{replica} keeps crashing",
    Stage.GATED: "{replica} is held in a queue by a scheduling gate",
    Stage.UNSEEN: "{replica} waits for a scheduler",
    Stage.UNSCHEDULABLE: "{replica} waits for a node",
    Stage.LOADING: "{replica} is loading",
}

# What a replica says of itself in its signals.
_WHY_NOT_READY: Final[dict[str, str]] = {
    ReadyReason.STEP_LOOP_STALLED: "its engine hangs: no step was made for too long",
    ReadyReason.ENGINE_DEAD: "its engine has died",
}

# `Back-off pulling image "x": ErrImagePull: not found` -> `not found`
_PULL_RETRY: Final = re.compile(r'^(Back-off pulling image "[^"]*"(: |$))?(ErrImagePull: )?')


@dataclass(frozen=True, slots=True, kw_only=True)
class Problems:
    """What keeps replicas from serving."""

    replicas: tuple[str, ...] = ()  # sentences about replicas that do not serve, worst first
    refusals: tuple[str, ...] = ()  # what the API server refused
    obstacles: tuple[str, ...] = ()  # what keeps a rollout from going on, with the remedy
    stalled: tuple[Reason, str] | None = None  # a person has to act
    waits_for: Reason | None = None  # WaitingForGPU or Unschedulable: a node; MountFailed: a volume
    downloads: bool = False  # a replica brings the model to its node, or failed to and starts over

    def summarize(self, ready: int, desired: int, revision: str = "") -> str:
        """`1 of 3 replicas are ready; chat-x7k2p-2-0 is loading`; of a service with enough replicas only refusals."""
        problems = (*self.refusals, *self.replicas) if ready < desired else self.refusals
        noun, verb = ("replica", "is") if desired == 1 else ("replicas", "are")
        of_revision = f" of revision {revision}" if revision else ""
        details = "".join(f"; {problem}" for problem in problems[:PROBLEMS_SHOWN])
        hidden = len(problems) - PROBLEMS_SHOWN
        more = f"; and {hidden} more" if hidden > 0 else ""
        return f"{min(ready, desired)} of {desired} {noun}{of_revision} {verb} ready{details}{more}"


def find_problems(
    observed: Observed,
    members: Sequence[Member],
    revision: Revision,
    attempts: Sequence[AttemptStatus],
    *,
    now: datetime,
) -> Problems:
    """Finds everything that is wrong, worst first."""
    not_serving = [one for one in members if (one.is_live and not one.is_ready) or one.stage is Stage.LOST]
    not_serving.sort(key=lambda one: (one.stage.severity, one.replica.name))
    waiting = [status for status in attempts if status.not_before and now < status.not_before]
    num_ready = sum(one.is_ready and one.replica.revision == revision.hash for one in members)
    return Problems(
        replicas=(
            *(describe_replica(one, observed, revision) for one in not_serving),
            *(_describe_pause(status) for status in waiting),
        ),
        refusals=tuple(describe_refusal(one) for one in observed.failures if not is_pull(one.action)),
        stalled=_find_certificate_fault(observed)
        or (
            find_refusal_cause(observed, num_ready)
            if num_ready
            else find_stall_cause(observed, members, revision, attempts)
        ),
        obstacles=tuple(filter(None, [find_obstacle(observed, members, revision.hash)])),
        waits_for=why_waiting(observed, members) or _why_mounting(members),
        downloads=any(_is_downloading(one) for one in members),
    )


def _find_certificate_fault(observed: Observed) -> tuple[Reason, str] | None:
    """Told while replicas serve, too: the certificate that they have ends, and no other comes."""
    if not observed.certificate_fault:
        return None
    return Reason.CERTIFICATE_UNAVAILABLE, describe_certificate_fault(observed.certificate_fault)


def find_stall_cause(
    observed: Observed, members: Sequence[Member], revision: Revision, attempts: Sequence[AttemptStatus]
) -> tuple[Reason, str] | None:
    """Finds what keeps the wanted revision from serving until a person acts; asked while no replica of it serves."""
    if (obstacle := find_start_obstacle(observed, revision)) is not None:
        return obstacle
    if (refused := find_refusal_cause(observed, num_ready=0)) is not None:
        return refused
    told = _told_of_revision(observed, revision)
    was_crash_looping = told is not None and told.reason == Reason.CRASH_LOOPING
    mine = [one for one in members if one.replica.revision == revision.hash]
    for member in mine:
        if (found := _stall_cause_of(member, observed, revision, was_crash_looping)) is not None:
            return found
    # The next run, or the next attempt, says nothing before it has looked too.
    by_runtime = {reason for reason, _ in _TERMINATION_MESSAGES.values()}
    has_failed = any(one.replica.restarts for one in mine) or attempts
    if told is not None and told.reason in by_runtime and has_failed:
        return Reason(told.reason), told.message
    until = 1 if was_crash_looping else CRASHES_UNTIL_STALLED
    failing = max(attempts, key=lambda status: status.failures, default=None)
    if failing is not None and failing.failures >= until:
        return Reason.CRASH_LOOPING, _describe_failed_slot(failing)
    return None


def find_start_obstacle(observed: Observed, revision: Revision) -> tuple[Reason, str] | None:
    """Finds why the operator itself starts no replica of this revision, without trying."""
    service = revision.apply_to(observed.service)
    wanted = service.spec
    if fault := find_service_fault(wanted, observed.defaults):
        return Reason.INVALID_SPEC, f"no replica of revision {revision.hash} is started: {fault}"
    if refusal := find_refusal(wanted, observed.defaults):
        return Reason.CACHE_NOT_PERMITTED, f"no replica is started: {refusal}"
    if observed.warm is not None and (missing := observed.warm.why_missing(service)):
        return Reason.POOL_NOT_FOUND, f"no replica is started: {missing}"
    if isinstance(fit := check_fit(wanted), DoesNotFit):
        return Reason.DOES_NOT_FIT, f"no replica is started: {fit.message}"
    return None


def find_capacity_shortage(observed: Observed, members: Sequence[Member]) -> str:
    """Says why further replicas could not be placed; empty when nothing is known against it."""
    waiting = [one for one in members if _is_unschedulable(one)]
    if waiting:
        return describe_unschedulable(observed, waiting[0].replica)
    return next((failure.message for failure in observed.failures if is_quota_refusal(failure)), "")


# --- sentences --------------------------------------------------------------------------------------------------------


def describe_replica(member: Member, observed: Observed, revision: Revision) -> str:
    """Says why this replica does not serve."""
    replica, place = member.replica, f"-n {observed.service.metadata.namespace} {member.replica.name}"
    match member.stage:
        case Stage.IMAGE_ERROR:
            image, field = _image_not_pulled(replica, observed, revision)
            return f"{replica.name} cannot pull {image}: {_pull_error(replica)}; check {field} and imagePullSecrets"
        case Stage.CONFIG_ERROR:
            return f"{_subject(replica)} cannot be started: {replica.waiting_message or replica.waiting_reason}"
        case Stage.DEAD:
            how = replica.phase_reason or replica.last_exit or replica.phase
            return f"{replica.name} has ended: {how}"
        case Stage.UNREADY | Stage.UNHEALTHY:
            return _describe_unready(member, observed)
        case Stage.GATED:
            return (
                f"{replica.name} is held in a queue by a scheduling gate; whoever set the gate decides when it starts"
            )
        case Stage.UNSEEN:
            return f"{replica.name} waits for a scheduler; if this lasts, check schedulerName of spec.template.spec"
        case Stage.UNSCHEDULABLE:
            return describe_unschedulable(observed, replica)
        case Stage.LOST:
            return f"node {replica.node} of {replica.name} does not answer"
        case Stage.CRASHING | Stage.LOADING | Stage.OVERDUE if ended_runs(replica):
            return _describe_restarts(replica, place)
        case Stage.OVERDUE if replica.waiting_reason not in STARTING:
            said = f": {replica.waiting_message}" if replica.waiting_message else ""
            return f"{_subject(replica)} cannot be started: {replica.waiting_reason}{said}"
        case Stage.OVERDUE:
            seconds = observed.service.spec.runtime.startup_timeout_seconds
            late = f"{replica.name} did not become ready within {seconds}s"
            if before := _describe_before_server(replica, place):
                return f"{late}: {before}"
            return f"{late}; see kubectl logs {place}"
        case Stage.LOADING:
            before = _describe_before_server(replica, place)
            return f"{replica.name}: {before}" if before else _describe_start(member, observed)
    return describe_stage(member)


def _describe_before_server(replica: Replica, place: str) -> str:
    """What a pod does whose server has not started; empty: the server has."""
    if replica.mount_failure:
        return describe_mount(replica.mount_failure, place.split()[1], replica.name)
    if replica.initializing:
        name = replica.initializing
        return f"init container {name} has not finished; see kubectl logs {place} -c {name}"
    if replica.is_creating:
        waits = f"node {replica.node} has not started its containers yet (images, volumes)"
        return f"{waits}; see kubectl describe pod {place}"
    return ""


def _subject(replica: Replica) -> str:
    """`chat-x7k2p-0-0`, or `container proxy of chat-x7k2p-0-0`."""
    return f"container {replica.container} of {replica.name}" if replica.container else replica.name


def describe_stage(member: Member) -> str:
    """Says in which stage this replica is, and nothing about the cause."""
    return _describe_edited(member.replica) or _STAGE_SENTENCES[member.stage].format(replica=member.replica.name)


def _describe_edited(replica: Replica) -> str:
    edited = ", ".join(str(one) for one in replica.edited_labels if one.label in ROUTING_LABELS)
    if not edited or not replica.ready or replica.deleted_at is not None:
        return ""
    return f"{replica.name} gets no requests until the operator has restored its labels: {edited}"


def _describe_unready(member: Member, observed: Observed) -> str:
    replica, node = member.replica, observed.nodes.get(member.replica.node)
    if replica.sample is not None and replica.sample.draining:
        return f"{replica.name} is draining"
    if edited := _describe_edited(replica):
        return edited
    why = f"node {replica.node} does not answer" if node is not None and not node.ready else _why_unready(replica)
    consequence = ", and it is being replaced" if member.stage is Stage.UNHEALTHY else ""
    return f"{replica.name}{UNREADY}{why}{consequence}"


def is_unready_in(message: str, replica: Replica) -> bool:
    """Whether a message of a condition says of this replica only that its probe fails."""
    return f"{replica.name}{UNREADY}{PROBE_FAILS}" in message


def _why_unready(replica: Replica) -> str:
    """The cause that the kubelet or the replica itself reports; nothing is asserted that neither has."""
    said = _WHY_NOT_READY.get(replica.sample.not_ready if replica.sample else "", "")
    if said:
        return said
    if replica.container:
        last = f", last with {replica.last_exit}" if replica.last_exit else f": {replica.waiting_reason}"
        return f"container {replica.container} ended {count(ended_runs(replica), 'time')}{last}"
    if replica.is_terminated:
        return f"its server has ended{': ' if replica.last_exit else ''}{replica.last_exit}"
    return f"its pod has {replica.unready_message}" if replica.server_ready else PROBE_FAILS


def _describe_start(member: Member, observed: Observed) -> str:
    """`chat-x7k2p-0-2 is loading (attempt 3); the attempt before it: chat-x7k2p-0-1 crashed 5 times, …`"""
    replica = member.replica
    activity = "is downloading the model" if _is_downloading(member) else "is loading"
    attempts = observed.service.status.attempts
    earlier = next((one for one in attempts if _is_attempt_of(one, replica) and one.last_end), None)
    before = f" (attempt {replica.attempt + 1}); the attempt before it: {earlier.last_end}" if earlier else ""
    return f"{replica.name} {activity}{before}"


def _describe_restarts(replica: Replica, place: str) -> str:
    ended = count(ended_runs(replica), "time")
    last = f", last with {replica.last_exit}" if replica.last_exit else ""
    container = f" -c {replica.container}" if replica.container else ""
    return (
        f"{_subject(replica)} ended {ended} and is started again{last}; see kubectl logs {place}{container} --previous"
    )


def _describe_pause(status: AttemptStatus) -> str:
    last = f": {status.last_end}" if status.last_end else ""
    return (
        f"slot {status.slot} failed {count(status.failures, 'time')} and pauses before attempt {status.attempt}{last}"
    )


def _describe_failed_slot(status: AttemptStatus) -> str:
    last = f"; {status.last_end}" if status.last_end else ""
    return (
        f"slot {status.slot} failed {count(status.failures, 'time')} in a row{last}; "
        "see the events of the service and the logs of its pods"
    )


def _image_not_pulled(replica: Replica, observed: Observed, revision: Revision) -> tuple[str, str]:
    """The image, and the field that names it: the runtime's, an oci:// model's (a volume), or another container's."""
    model = model_access.image(observed.service.spec.model)
    if model is not None and model in replica.waiting_message:
        return f"image {model}", "spec.model.uri"
    if replica.container:
        return f"the image of container {replica.container}", "its image"
    return f"image {revision.image}", "spec.runtime.image"


def _pull_error(replica: Replica) -> str:
    """The error of the pull, without what the kubelet adds between two tries."""
    return _PULL_RETRY.sub("", replica.waiting_message) or replica.waiting_message or replica.waiting_reason


# --- causes -----------------------------------------------------------------------------------------------------------


def _stall_cause_of(
    member: Member, observed: Observed, revision: Revision, was_crash_looping: bool
) -> tuple[Reason, str] | None:
    replica, model = member.replica, observed.service.spec.model
    if is_mounting(member) and is_for_author(replica.mount_failure):
        secret = model.credentials_secret_ref
        is_credentials = secret is not None and missing_secret(replica.mount_failure) == secret.name
        reason = Reason.CREDENTIALS_INVALID if is_credentials else Reason.MOUNT_FAILED
        return reason, describe_replica(member, observed, revision)
    match member.stage:
        case Stage.IMAGE_ERROR:
            return Reason.IMAGE_PULL_FAILED, describe_replica(member, observed, revision)
        case Stage.CONFIG_ERROR if replica.waiting_reason == "CreateContainerConfigError":
            return _credentials_problem(replica, observed) or (
                Reason.INVALID_SPEC,
                f"{describe_replica(member, observed, revision)}; check the env of spec.runtime and spec.template",
            )
        case Stage.UNSCHEDULABLE if (claim := model_access.claim(model)) is not None:
            missing = f'persistentvolumeclaim "{claim}" not found'
            if missing in replica.unschedulable:
                return Reason.MODEL_NOT_FOUND, f"{missing}; check spec.model.uri"
            return find_impossible(observed, replica)
        case Stage.UNSCHEDULABLE:
            return find_impossible(observed, replica)
        case Stage.CRASHING | Stage.LOADING:
            # Started over at once, it loads again: its termination message holds until it is ready.
            for word, (reason, template) in _TERMINATION_MESSAGES.items():
                if replica.termination_message.startswith(word):
                    return reason, template.format(replica.termination_message.removeprefix(word))
            is_crashing = member.stage is Stage.CRASHING or was_crash_looping
            if is_crashing and replica.restarts >= CRASHES_UNTIL_STALLED:
                return Reason.CRASH_LOOPING, describe_replica(member, observed, revision)
    return None


def _credentials_problem(replica: Replica, observed: Observed) -> tuple[Reason, str] | None:
    """What the kubelet says of the credentials' Secret: `secret "hf" not found`, or that it lacks a key."""
    service = observed.service
    if service.spec.model.credentials_secret_ref is None:
        return None
    secret, message = service.spec.model.credentials_secret_ref.name, replica.waiting_message
    if f'secret "{secret}"' not in message and f"Secret {service.metadata.namespace}/{secret}" not in message:
        return None
    keys = " and ".join(model_access.required_keys(service.spec.model, service.spec.runtime))
    return (
        Reason.CREDENTIALS_INVALID,
        f"{message}: spec.model.credentialsSecretRef asks for a Secret {secret} with {keys}",
    )


def _told_of_revision(observed: Observed, revision: Revision) -> Condition | None:
    """What Stalled says of this revision in status."""
    status = observed.service.status
    told = find_condition(status.conditions, ConditionType.STALLED)
    return told if status.update_revision == revision.hash else None


# --- facts ------------------------------------------------------------------------------------------------------------


def ended_runs(replica: Replica) -> int:
    """How many runs of the server have ended: the same number from one end until the next one.

    The kubelet counts a restart when it happens: 2 restarts and CrashLoopBackOff are three ended runs, and so are 3
    restarts with the fourth run on its way.
    """
    return replica.restarts + (replica.is_terminated or replica.waiting_reason == "CrashLoopBackOff")


def _is_unschedulable(member: Member) -> bool:
    return member.is_live and not member.is_ready and bool(member.replica.unschedulable)


def is_mounting(member: Member) -> bool:
    """Whether the kubelet reports that it cannot mount a volume of the replica."""
    return member.stage in (Stage.LOADING, Stage.OVERDUE) and bool(member.replica.mount_failure)


def _why_mounting(members: Sequence[Member]) -> Reason | None:
    """MountFailed, while a volume of a replica cannot be mounted; None: all can."""
    return Reason.MOUNT_FAILED if any(is_mounting(one) for one in members) else None


def _is_downloading(member: Member) -> bool:
    """Whether the replica downloads the model, or ended while it did and is started again."""
    sample = member.replica.sample
    is_starting = member.stage in (Stage.LOADING, Stage.CRASHING)
    return is_starting and sample is not None and sample.starting == ReadyReason.DOWNLOADING


def _is_attempt_of(status: AttemptStatus, replica: Replica) -> bool:
    return (status.revision, status.slot, status.attempt) == (replica.revision, replica.slot, replica.attempt)
