"""The actions of a plan, as data: create, drain and delete pods, apply children, store revisions, set finalizers.

Each carries its `reason`, the sentence that the executor logs. Each is safe to repeat: a crash between two of them
costs a pass, never a pod.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from slipway_api.adapter_conditions import AdapterEvent
from slipway_api.conditions import EventReason
from slipway_api.runtime_api import LoadModelRequest
from slipway_api.warm_pool_conditions import PoolEvent
from slipway_operator.core.adapter.calls import AdapterCall

ABSENT: Final = "absent"  # in place of a digest: the child does not exist


@dataclass(frozen=True, slots=True, kw_only=True)
class AddFinalizer:
    """Put our finalizer on the service, before its first child."""

    finalizer: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetReplicas:
    """Write the absent spec.replicas, so that an HPA or KEDA can read /scale. A number that is set by now stays."""

    replicas: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveFinalizer:
    """Remove our finalizer: the service has no replica left to drain. After this the plan writes no status."""

    finalizer: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatePod:
    """POST the manifest. A 409 by a pod of the same owner is success; by another owner it is a name to avoid:
    the executor adds it to `Observed.taken_names`."""

    name: str
    manifest: dict[str, Any]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimPod:
    """Make a waiting pod of a WarmPool a replica: one JSON patch with tests, then POST /model with `request`.

    A failed test, or a pod that is gone, is a lost race: the executor adds the uid to `Observed.lost_claims`.
    """

    name: str
    uid: str
    pool_uid: str  # the owner before
    owner: Mapping[str, Any]  # the owner reference after
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    request: LoadModelRequest
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnPod:
    """Make a drained replica a waiting pod of its WarmPool again: one JSON patch with tests, the reverse of a claim.

    Labels and annotations of ours that are not named here go, and those in `dropped`; the pool then asks the runtime to
    give its model back. A failed test means that the pod has changed: the pass is repeated.
    """

    name: str
    uid: str
    pool_owner: Mapping[str, Any]  # the owner reference after
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    dropped: frozenset[str]  # labels and annotations of the service's template
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveModelBack:
    """DELETE /model to a waiting pod that still has a service's model, in the background; the plan repeats it."""

    name: str
    uid: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadModel:
    """POST /model to a claimed pod that has no model, in the background; best effort, the plan repeats it."""

    name: str
    uid: str
    request: LoadModelRequest
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainPod:
    """Label `state=draining` with the two annotations (field manager for metadata), then POST /drain.

    The label must succeed; the POST is best effort, and the plan repeats it with `marked=True`
    (POST only, no write) until a sample says that the replica drains.
    """

    name: str
    uid: str
    started: datetime  # annotation slipway.dev/drain-started
    timeout_seconds: int  # what is left of the drain; body of POST /drain
    reason: str  # annotation slipway.dev/drain-reason
    refuse_after_seconds: int = 0  # what is left of the propagation; until then the replica takes new requests
    marked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UndrainPod:
    """POST /undrain; once the runtime accepts requests again, label `state=serving` and remove the two annotations.

    Both in the background. The plan repeats it until the label is seen, or does without this replica.
    """

    name: str
    uid: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletePod:
    """DELETE with `preconditions.uid` and an explicit grace. NotFound and a wrong uid are success."""

    name: str
    uid: str
    grace_seconds: int
    reason: str
    resource_version: str = ""  # where set, a pod that changed since it was read is left alone: it may be claimed now


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotatePod:
    """Merge annotations into the pod of that uid; None removes one. NotFound and a wrong uid are success."""

    name: str
    uid: str
    annotations: dict[str, str | None]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreLabels:
    """Merge labels into the Pod or ControllerRevision of that uid; None removes one. NotFound and a wrong uid are
    success."""

    kind: str
    name: str
    uid: str
    labels: Mapping[str, str | None]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteChild:
    """DELETE a child that is not a pod, where Slipway made it; `Observed.applied[key]` is then `ABSENT`."""

    key: str  # "PodDisruptionBudget/chat"
    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyChild:
    """Server-side apply of a child that is not a pod; the plan leaves it out when `Observed.applied[key] == digest`."""

    key: str  # "Service/chat"
    manifest: dict[str, Any]
    digest: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateRevision:
    """POST a ControllerRevision. A 409 by one of the same owner is success: its name is a hash of its content."""

    name: str
    manifest: dict[str, Any]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteRevision:
    """DELETE a ControllerRevision with `preconditions.uid`. NotFound and a wrong uid are success."""

    name: str
    uid: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenTest:
    """Where the golden prompts are, how much worse their answers may be, and the replica to compare with."""

    uri: str
    config_map: str
    key: str
    max_drop: float  # points
    max_disagreement: float  # percent
    beside: str = ""  # name of a ready pod of the stable revision; empty: none
    beside_uid: str = ""
    beside_model: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskSmokeTests:
    """Ask a replica the prompts of its gates, in the background; the next pass sees the `SmokeResult`."""

    name: str
    uid: str
    model: str  # the served name of the replica's runtime
    tests: tuple[tuple[str, str], ...] = field(repr=False)  # prompt, and the text that the answer must contain
    errors: int  # times that it did not answer before
    reason: str
    golden: GoldenTest | None = None  # asked after the tests


@dataclass(frozen=True, slots=True, kw_only=True)
class AskHub:
    """Ask a hub for the sizes of a model, in the background; the next pass sees the `HubAnswer`."""

    uri: str
    endpoint: str  # of the spec; "": the installation's first
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeResult:
    """What came of asking one replica; without prompts and answers."""

    at: datetime
    is_passed: bool = False
    wrong: int = 0  # number of the first test whose answer did not match, from 1
    errors: int = 0  # times in a row that it did not answer
    error: str = ""  # the last of them
    is_golden: bool = False  # the error is one of the golden prompts
    golden: str = ""  # the verdict on the golden prompts, in one sentence; where it failed, the revision has failed


Action = (
    AddFinalizer
    | RemoveFinalizer
    | SetReplicas
    | CreatePod
    | ClaimPod
    | ReturnPod
    | GiveModelBack
    | LoadModel
    | DrainPod
    | UndrainPod
    | DeletePod
    | AnnotatePod
    | RestoreLabels
    | ApplyChild
    | DeleteChild
    | CreateRevision
    | DeleteRevision
    | AskSmokeTests
    | AskHub
    | AdapterCall
)


NO_ANSWER: Final = "NoAnswer"  # the reason of a Failure: the API server broke the connection, or sent nothing in time


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A refused action of the last pass: by the API server, or by us because of another owner; becomes a condition."""

    action: str  # "CreatePod chat-x7k2p-0-0"
    reason: str  # the API server's: Forbidden, Invalid, InternalError ...; ours: NameConflict
    message: str
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A Kubernetes event about the service, posted after the status write; the recorder aggregates repetitions."""

    reason: EventReason | AdapterEvent | PoolEvent  # its `type` says Normal or Warning
    action: str  # what was done, in one CamelCase verb: Create, Drain, Delete, Scale, Rollout
    message: str
    pod: str = ""  # `related`, where the event is about one pod


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The actions, events and next wake-up that one part of the plan contributes."""

    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    again_at: datetime | None = None  # when time alone changes the answer

    def __add__(self, other: "Steps") -> "Steps":
        return Steps(
            actions=self.actions + other.actions,
            events=self.events + other.events,
            again_at=earliest(self.again_at, other.again_at),
        )


def earliest(*moments: datetime | None) -> datetime | None:
    """The first of the moments that are set."""
    return min((moment for moment in moments if moment is not None), default=None)
