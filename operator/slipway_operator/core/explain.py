"""Why a service is not all it should be, in sentences that also say what to do."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from slipway_api import names
from slipway_api.conditions import Condition, ConditionType, Reason, find_condition
from slipway_operator.core.health import Member, Stage
from slipway_operator.core.observed import Failure, Observed
from slipway_operator.core.replicas import Assignment
from slipway_operator.core.revision import Revision

SENTENCES_SHOWN: Final = 3
CRASHES_UNTIL_STALLED: Final = 3  # two restarts may be a slow node; three are a pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """What keeps replicas from serving."""

    replicas: tuple[str, ...] = ()  # sentences about replicas that do not serve, worst first
    refusals: tuple[str, ...] = ()  # what the API server refused
    stalled: tuple[Reason, str] | None = None  # a person has to act
    waits_for_gpu: bool = False

    def sentence(self, ready: int, desired: int, whose: str = "") -> str:
        """`1 of 3 replicas are ready; chat-x7k2p-2-0 is loading`; what does not matter to the number is left out."""
        sentences = (*self.refusals, *self.replicas) if ready < desired else self.refusals
        shown, more = sentences[:SENTENCES_SHOWN], len(sentences) - SENTENCES_SHOWN
        noun, verb = ("replica", "is") if desired == 1 else ("replicas", "are")
        parts = [f"{min(ready, desired)} of {desired} {noun}{whose} {verb} ready", *shown]
        if more > 0:
            parts.append(f"and {more} more")
        return "; ".join(parts)


def explain(
    observed: Observed,
    members: Sequence[Member],
    revision: Revision,
    assignment: Assignment,
    *,
    now: datetime,
) -> Trouble:
    """Everything that is wrong, worst first."""
    troubled = [one for one in members if (one.is_live and not one.is_ready) or one.stage is Stage.LOST]
    order = (Stage.IMAGE_ERROR, Stage.CRASHING, Stage.OVERDUE, Stage.UNSCHEDULABLE, Stage.LOST, Stage.LOADING)
    troubled.sort(key=lambda one: (order.index(one.stage), one.replica.name))
    sentences = [_sentence(one, observed, revision) for one in troubled]
    waiting = [status for status in assignment.attempts if status.not_before and now < status.not_before]
    sentences += [
        f"slot {status.slot} failed {status.failures} times and rests before attempt {status.attempt}"
        for status in waiting
    ]
    serves = any(one.is_ready and one.replica.revision == revision.hash for one in members)
    return Trouble(
        replicas=tuple(sentences),
        refusals=tuple(_refusal(one) for one in observed.failures),
        stalled=None if serves else _stalled(observed, members, revision, assignment),
        waits_for_gpu=bool(observed.service.spec.resources.gpu.count)
        and any(one.stage is Stage.UNSCHEDULABLE for one in members),
    )


def no_room(observed: Observed, members: Sequence[Member]) -> str:
    """Why further replicas could not be placed; empty: nothing is known against it."""
    waiting = [one.replica for one in members if one.stage is Stage.UNSCHEDULABLE]
    if waiting:
        return f"{waiting[0].name} waits for a node: {waiting[0].unschedulable}"
    return next((failure.message for failure in observed.failures if _is_quota(failure)), "")


def _sentence(member: Member, observed: Observed, revision: Revision) -> str:
    replica = member.replica
    match member.stage:
        case Stage.IMAGE_ERROR:
            why = replica.waiting_message or replica.waiting_reason
            advice = "check spec.runtime.image and imagePullSecrets"
            return f"{replica.name} cannot pull image {revision.image}: {why}; {advice}"
        case Stage.CRASHING:
            last = f", last with {replica.last_exit}" if replica.last_exit else ""
            return f"{replica.name} keeps crashing{last}; see kubectl logs {replica.name} --previous"
        case Stage.OVERDUE:
            seconds = observed.service.spec.runtime.startup_timeout_seconds
            return f"{replica.name} did not become ready within {seconds}s; see kubectl logs {replica.name}"
        case Stage.UNSCHEDULABLE:
            return f"{replica.name} waits for a node: {replica.unschedulable}"
        case Stage.LOST:
            return f"node {replica.node} of {replica.name} does not answer"
        case _:
            return f"{replica.name} {member.stage.value}"


def _stalled(
    observed: Observed, members: Sequence[Member], revision: Revision, assignment: Assignment
) -> tuple[Reason, str] | None:
    """What only a person can change, while nobody serves the revision that the spec asks for."""
    for failure in observed.failures:
        if _is_quota(failure):
            return Reason.QUOTA_EXCEEDED, f"{failure.message}; raise the quota or lower the number of replicas"
        if failure.reason == "Invalid" and failure.action.startswith("CreatePod"):
            return Reason.INVALID_SPEC, f"the API server refuses the pods of this spec: {failure.message}"
    mine = [one for one in members if one.replica.revision == revision.hash]
    for member in mine:
        if member.stage is Stage.IMAGE_ERROR:
            return Reason.IMAGE_PULL_FAILED, _sentence(member, observed, revision)
        if member.stage is Stage.CRASHING and member.replica.last_word.startswith(names.WORD_MODEL_NOT_FOUND):
            where = member.replica.last_word.removeprefix(names.WORD_MODEL_NOT_FOUND)
            return Reason.MODEL_NOT_FOUND, f"the model cannot be found: {where}; check spec.model.uri"
        if member.stage is Stage.CRASHING and member.replica.restarts >= CRASHES_UNTIL_STALLED:
            return Reason.CRASH_LOOPING, _sentence(member, observed, revision)
    if (mine or assignment.attempts) and (was := _still_missing(observed, revision)):
        return Reason.MODEL_NOT_FOUND, was.message
    failing = [status for status in assignment.attempts if status.failures >= CRASHES_UNTIL_STALLED]
    if failing:
        sentence = f"slot {failing[0].slot} failed {failing[0].failures} times in a row"
        return Reason.CRASH_LOOPING, f"{sentence}; see the events of the service and the logs of its pods"
    return None


def _still_missing(observed: Observed, revision: Revision) -> Condition | None:
    """What an earlier replica of this revision did not find; the next one says nothing before it has looked, too."""
    status = observed.service.status
    was = find_condition(status.conditions, ConditionType.STALLED)
    is_so = was is not None and was.reason == Reason.MODEL_NOT_FOUND and status.update_revision == revision.hash
    return was if is_so else None


def _refusal(failure: Failure) -> str:
    # What belongs to somebody else we left alone ourselves; its message is a whole sentence.
    is_ours = failure.reason == Reason.NAME_CONFLICT
    return failure.message if is_ours else f"the API server refused {failure.action}: {failure.message}"


def _is_quota(failure: Failure) -> bool:
    return failure.action.startswith("CreatePod") and "exceeded quota" in failure.message
