"""What only a person can change: the reason of Stalled, and the sentence that says what to do.

| seen                                                    | reason             |
|---------------------------------------------------------|--------------------|
| the API server refuses pods: over quota                 | QuotaExceeded      |
| the API server refuses pods: not valid                  | InvalidSpec        |
| the kubelet cannot pull the image                       | ImagePullFailed    |
| the credentials' Secret, or its key, is not there       | CredentialsInvalid |
| another Secret or ConfigMap of the environment is not   | InvalidSpec        |
| the claim of a `pvc://` model is not there              | ModelNotFound      |
| the runtime left a word that begins with the reason     | that reason        |
| a replica crashed again and again for another cause     | CrashLooping       |
"""

from collections.abc import Sequence
from typing import Final

from slipway_api import names
from slipway_api.conditions import Condition, ConditionType, Reason, find_condition
from slipway_operator.core.health import Member, Stage
from slipway_operator.core.observed import Failure, Observed, Replica
from slipway_operator.core.service import model_access
from slipway_operator.core.service.replicas import Assignment
from slipway_operator.core.service.revision import Revision

CRASHES_UNTIL_STALLED: Final = 3  # two restarts may be a slow node; three are a pattern

# How a runtime begins its last word where only a person can help -> the reason, and the sentence around the rest.
_LAST_WORDS: Final = {
    names.WORD_MODEL_NOT_FOUND: (Reason.MODEL_NOT_FOUND, "the model cannot be found: {}; check spec.model.uri"),
    names.WORD_CREDENTIALS_INVALID: (
        Reason.CREDENTIALS_INVALID,
        "the model may not be read: {}; check the Secret of spec.model.credentialsSecretRef",
    ),
    names.WORD_DOES_NOT_FIT: (Reason.DOES_NOT_FIT, "the model does not fit: {}"),
}


def blocker(
    observed: Observed, members: Sequence[Member], revision: Revision, assignment: Assignment
) -> tuple[Reason, str] | None:
    """What keeps the wanted revision from serving until a person acts; asked while no replica of it serves."""
    for failure in observed.failures:
        if is_quota(failure):
            return Reason.QUOTA_EXCEEDED, f"{failure.message}; raise the quota or lower the number of replicas"
        if failure.reason == "Invalid" and failure.action.startswith("CreatePod"):
            return Reason.INVALID_SPEC, f"the API server refuses the pods of this spec: {failure.message}"
    mine = [one for one in members if one.replica.revision == revision.hash]
    for member in mine:
        if (found := _of_replica(member, observed, revision)) is not None:
            return found
    if (any(one.replica.restarts for one in mine) or assignment.attempts) and (was := _still(observed, revision)):
        return Reason(was.reason), was.message
    failing = [status for status in assignment.attempts if status.failures >= CRASHES_UNTIL_STALLED]
    if failing:
        said = f"slot {failing[0].slot} failed {failing[0].failures} times in a row"
        return Reason.CRASH_LOOPING, f"{said}; see the events of the service and the logs of its pods"
    return None


def sentence(member: Member, observed: Observed, revision: Revision) -> str:
    """Why this replica does not serve."""
    replica = member.replica
    match member.stage:
        case Stage.IMAGE_ERROR:
            why = replica.waiting_message or replica.waiting_reason
            advice = "check spec.runtime.image and imagePullSecrets"
            return f"{replica.name} cannot pull image {revision.image}: {why}; {advice}"
        case Stage.CONFIG_ERROR:
            return f"{replica.name} cannot be started: {replica.waiting_message or replica.waiting_reason}"
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


def is_quota(failure: Failure) -> bool:
    """Whether a quota stands in the way."""
    return failure.action.startswith("CreatePod") and "exceeded quota" in failure.message


def _of_replica(member: Member, observed: Observed, revision: Revision) -> tuple[Reason, str] | None:
    replica, model = member.replica, observed.service.spec.model
    match member.stage:
        case Stage.IMAGE_ERROR:
            return Reason.IMAGE_PULL_FAILED, sentence(member, observed, revision)
        case Stage.CONFIG_ERROR:
            return _of_environment(replica, observed) or (
                Reason.INVALID_SPEC,
                f"{sentence(member, observed, revision)}; check the env of spec.runtime and spec.template",
            )
        case Stage.UNSCHEDULABLE if (claim := model_access.claim(model)) is not None:
            missing = f'persistentvolumeclaim "{claim}" not found'
            is_missing = missing in replica.unschedulable
            return (Reason.MODEL_NOT_FOUND, f"{missing}; check spec.model.uri") if is_missing else None
        case Stage.CRASHING | Stage.LOADING:
            # Started over at once, it loads again: what it said holds until it has been proved wrong.
            for word, (reason, around) in _LAST_WORDS.items():
                if replica.last_word.startswith(word):
                    return reason, around.format(replica.last_word.removeprefix(word))
            if member.stage is Stage.CRASHING and replica.restarts >= CRASHES_UNTIL_STALLED:
                return Reason.CRASH_LOOPING, sentence(member, observed, revision)
    return None


def _of_environment(replica: Replica, observed: Observed) -> tuple[Reason, str] | None:
    """What the kubelet says of the credentials' Secret: `secret "hf" not found`, or that it lacks a key."""
    service = observed.service
    if service.spec.model.credentials_secret_ref is None:
        return None
    secret, said = service.spec.model.credentials_secret_ref.name, replica.waiting_message
    if f'secret "{secret}"' not in said and f"Secret {service.metadata.namespace}/{secret}" not in said:
        return None
    keys = " and ".join(model_access.required_keys(service.spec.model))
    return (
        Reason.CREDENTIALS_INVALID,
        f"{said}: spec.model.credentialsSecretRef asks for a Secret {secret} with {keys}",
    )


def _still(observed: Observed, revision: Revision) -> Condition | None:
    """What an earlier replica of this revision told; the next one says nothing before it has looked, too."""
    status = observed.service.status
    was = find_condition(status.conditions, ConditionType.STALLED)
    told = {reason for reason, _ in _LAST_WORDS.values()}
    return was if was is not None and was.reason in told and status.update_revision == revision.hash else None
