"""The actions of a plan, as data: create, drain and delete pods, apply children, store revisions, set finalizers.

Each carries its `reason`, the sentence that the executor logs, and its `events`, which are posted only if it was
carried out. Each is safe to repeat: a crash between two of them costs a pass, never a pod. `core.lanes` states which
actions depend on each other.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from slipway_api.adapter_conditions import AdapterEvent
from slipway_api.conditions import EventReason
from slipway_api.runtime_api import LoadModelRequest
from slipway_api.warm_pool_conditions import PoolEvent

ABSENT: Final = "absent"  # in place of a digest: the child does not exist


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A Kubernetes event about the object; the recorder aggregates repetitions.

    An event about an action belongs to the action; one about a decision belongs to the plan, and is posted after the
    status write.
    """

    reason: EventReason | AdapterEvent | PoolEvent  # its `type` says Normal or Warning
    action: str  # what was done, in one CamelCase verb: Create, Drain, Delete, Scale, Rollout
    message: str
    pod: str = ""  # `related`, if the event is about one pod


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One step of a plan."""

    reason: str
    events: tuple[Event, ...] = field(default=(), repr=False, compare=False)
    """Posted when the action was carried out, and only then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddFinalizer(Action):
    """Put our finalizer on the service, before its first child."""

    finalizer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetReplicas(Action):
    """Write the absent spec.replicas, so that an HPA or KEDA can read /scale. A number that is set by now stays."""

    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveFinalizer(Action):
    """Remove our finalizer: the service has no replica left to drain. After this the plan writes no status."""

    finalizer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatePod(Action):
    """POST the manifest. A 409 by a pod of the same owner is success; by another owner it is a name to avoid:
    the executor adds it to `Observed.taken_names`."""

    name: str
    manifest: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimPod(Action):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnPod(Action):
    """Make a drained replica a waiting pod of its WarmPool again: one JSON patch with tests, the reverse of a claim.

    Labels and annotations of ours that are not named here go, and those in `dropped`; the pool then asks the runtime to
    give its model back. A failed test means that the pod has changed: the pass is repeated.
    """

    name: str
    uid: str
    pool_owner: Mapping[str, Any]  # the owner reference after
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    dropped: frozenset[str]  # labels and annotations of the service's template, and the recommended labels


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveModelBack(Action):
    """DELETE /model to a waiting pod that still has a service's model, in the background; the plan repeats it."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadModel(Action):
    """POST /model to a claimed pod that has no model, in the background; best effort, the plan repeats it."""

    name: str
    uid: str
    request: LoadModelRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainPod(Action):
    """Label `state=draining` with the two annotations (field manager for metadata), then POST /drain.

    The label must succeed; the POST is best effort, and the plan repeats it with `marked=True`
    (POST only, no write) until a sample says that the replica drains.
    """

    name: str
    uid: str
    started: datetime  # annotation slipway.dev/drain-started
    timeout_seconds: int  # what is left of the drain; body of POST /drain
    refuse_after_seconds: int = 0  # what is left of the propagation; until then the replica takes new requests
    marked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UndrainPod(Action):
    """POST /undrain; once the runtime accepts requests again, label `state=serving` and remove the two annotations.

    Both in the background. The plan repeats it until the label is seen, or does without this replica.
    """

    name: str
    uid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletePod(Action):
    """DELETE with `preconditions.uid` and an explicit grace. NotFound and a wrong uid are success."""

    name: str
    uid: str
    grace_seconds: int
    resource_version: str = ""  # if set, a pod that changed since it was read is left alone: it may be claimed now


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotatePod(Action):
    """Merge annotations into the pod of that uid; None removes one. A pod that is gone needs none."""

    name: str
    uid: str
    annotations: dict[str, str | None]
    after: str = ""
    """Key of the child that has to be applied first, if it is in the same plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreLabels(Action):
    """Merge labels into the Pod or ControllerRevision of that uid; None removes one. NotFound and a wrong uid are
    success."""

    kind: str
    name: str
    uid: str
    labels: Mapping[str, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteChild(Action):
    """DELETE a child that is not a pod, if Slipway made it; `Observed.applied[key]` is then `ABSENT`."""

    key: str  # "PodDisruptionBudget/chat"
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyChild(Action):
    """Server-side apply of a child that is not a pod; the plan leaves it out when `Observed.applied[key] == digest`."""

    key: str  # "Service/chat"
    manifest: dict[str, Any]
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateRevision(Action):
    """POST a ControllerRevision. A 409 by one of the same owner is success: its name is a hash of its content."""

    name: str
    manifest: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteRevision(Action):
    """DELETE a ControllerRevision with `preconditions.uid`. NotFound and a wrong uid are success."""

    name: str
    uid: str


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
class AskSmokeTests(Action):
    """Ask a replica the prompts of its gates, in the background; the next pass sees the `SmokeResult`."""

    name: str
    uid: str
    model: str  # the served name of the replica's runtime
    tests: tuple[tuple[str, str], ...] = field(repr=False)  # prompt, and the text that the answer must contain
    errors: int  # times that it did not answer before
    golden: GoldenTest | None = None  # asked after the tests


@dataclass(frozen=True, slots=True, kw_only=True)
class AskHub(Action):
    """Ask a hub for the sizes of a model, in the background; the next pass sees the `HubAnswer`."""

    uri: str
    endpoint: str  # of the spec; "": the installation's first


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


NO_ANSWER: Final = "NoAnswer"  # the reason of a Failure: the API server broke the connection, or sent nothing in time


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The action that stopped its lane: refused by the API server, or by us because of another owner.

    Becomes a condition.
    """

    action: str  # "CreatePod chat-x7k2p-0-0"
    reason: str  # the API server's: Forbidden, Invalid, InternalError ...; ours: NameConflict
    message: str
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The actions and the next wake-up that one part of the plan contributes."""

    actions: tuple[Action, ...] = ()
    again_at: datetime | None = None  # when time alone changes the answer

    def __add__(self, other: "Steps") -> "Steps":
        return Steps(
            actions=self.actions + other.actions,
            again_at=earliest(self.again_at, other.again_at),
        )

    @property
    def events(self) -> tuple[Event, ...]:
        """The events of the actions."""
        return events_of(self.actions)


def describe(action: Action) -> str:
    """`CreatePod chat-x7k2p-0-0`"""
    return f"{type(action).__name__} {object_of(action)}".rstrip()


def object_of(action: Action) -> str:
    """The name of the object that the action is about; `Service/chat` of a child."""
    return str(getattr(action, "key", "") or getattr(action, "name", ""))


def events_of(actions: Iterable[Action]) -> tuple[Event, ...]:
    """The events of actions, in their order."""
    return tuple(event for action in actions for event in action.events)


def earliest(*moments: datetime | None) -> datetime | None:
    """The first of the moments that are set."""
    return min((moment for moment in moments if moment is not None), default=None)
