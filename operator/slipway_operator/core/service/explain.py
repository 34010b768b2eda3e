"""Why a service is not all it should be, in sentences that also say what to do.

What only a person can change is in `blockers`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from slipway_api.conditions import Reason
from slipway_api.runtime_api import ReadyReason
from slipway_operator.core.health import Member, Stage
from slipway_operator.core.observed import Failure, Observed
from slipway_operator.core.service.blockers import blocker, is_quota, sentence
from slipway_operator.core.service.replicas import Assignment
from slipway_operator.core.service.revision import Revision

SENTENCES_SHOWN: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """What keeps replicas from serving."""

    replicas: tuple[str, ...] = ()  # sentences about replicas that do not serve, worst first
    refusals: tuple[str, ...] = ()  # what the API server refused
    stalled: tuple[Reason, str] | None = None  # a person has to act
    waits_for_gpu: bool = False
    downloads: bool = False  # a replica brings the model to its node

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
    troubled.sort(key=lambda one: (one.stage.severity, one.replica.name))
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
        stalled=None if serves else blocker(observed, members, revision, assignment),
        waits_for_gpu=bool(observed.service.spec.resources.gpu.count)
        and any(one.stage is Stage.UNSCHEDULABLE for one in members),
        downloads=any(_is_downloading(one) for one in members),
    )


def no_room(observed: Observed, members: Sequence[Member]) -> str:
    """Why further replicas could not be placed; empty: nothing is known against it."""
    waiting = [one.replica for one in members if one.stage is Stage.UNSCHEDULABLE]
    if waiting:
        return f"{waiting[0].name} waits for a node: {waiting[0].unschedulable}"
    return next((failure.message for failure in observed.failures if is_quota(failure)), "")


def _sentence(member: Member, observed: Observed, revision: Revision) -> str:
    if _is_downloading(member):
        return f"{member.replica.name} is downloading the model"
    return sentence(member, observed, revision)


def _is_downloading(member: Member) -> bool:
    sample = member.replica.sample
    return member.stage is Stage.LOADING and sample is not None and sample.starting == ReadyReason.DOWNLOADING


def _refusal(failure: Failure) -> str:
    # What belongs to somebody else we left alone ourselves; its message is a whole sentence.
    is_ours = failure.reason == Reason.NAME_CONFLICT
    return failure.message if is_ours else f"the API server refused {failure.action}: {failure.message}"
