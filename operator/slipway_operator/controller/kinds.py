"""The interface between the controller and a kind: how to observe an object of the kind, and how to plan for it.

    kind.observe(stored, memory) -> anything frozen        reads caches, no I/O
    kind.plan(observed, now)     -> Decision               pure

Queue, store, reconciler, executor, resync and isolation exist once, for all kinds. A kind is registered in
`manager.KINDS`, and has one `on.event` in `handlers`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple, Protocol

from slipway_api.moments import read_moment
from slipway_kube.resources import Resource
from slipway_operator.core.actions import ABSENT, NO_ANSWER, Action, Event, Failure, SmokeResult


class Key(NamedTuple):
    """The key of one object: kind, namespace and name."""

    kind: str  # "InferenceService"
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


def key_of(kind: str, body: Mapping[str, Any]) -> Key:
    """The key of an object as decoded JSON."""
    return Key(kind, body["metadata"]["namespace"], body["metadata"]["name"])


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One custom resource as the API server returned it, with its version."""

    uid: str
    version: int
    body: Mapping[str, Any]

    @property
    def generation(self) -> int:
        """Grows whenever the spec changes, or the object is marked for deletion."""
        return int(self.body["metadata"].get("generation") or 0)

    @property
    def created_at(self) -> datetime | None:
        """When the API server created it."""
        return read_moment(self.body["metadata"].get("creationTimestamp"))


@dataclass(slots=True)
class Memory:
    """In-memory state of one object between two passes; one worker at a time uses it.

    All of it may be lost: a new leader starts with an empty memory and reaches the same result a little later.
    What must survive stands in the object's status or in the pods' metadata.
    """

    carried: Any = None
    """`Decision.carried` of the last pass."""
    taken_names: frozenset[str] = frozenset()
    """Names of pods that another owner has created."""
    lost_claims: frozenset[str] = frozenset()
    """Uids of pods of a WarmPool whose claim failed: another service has them, or they are going."""
    applied: dict[str, str] = field(default_factory=dict)
    """Digest of each child as last applied; the next pass compares a child that is missing here with the API server."""
    unchecked: set[str] = field(default_factory=set)
    """Children that were applied, and that the next pass compares: if one is gone, somebody has deleted it."""
    smoke_results: dict[str, SmokeResult] = field(default_factory=dict)
    """Results of smoke tests by uid of the pod that was asked."""
    refusals: dict[str, "Refusal"] = field(default_factory=dict)
    """By lane of `core.lanes`: the action that stopped it last, until it succeeds or is not planned any more."""

    def recheck(self, child: str) -> bool:
        """Let the next pass compare this child with the API server; False if this process has not applied it."""
        if self.applied.get(child, ABSENT) == ABSENT:
            return False
        del self.applied[child]
        self.unchecked.add(child)
        return True

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The refusals for the status. One write without an answer may be a coincidence; the second one counts."""
        return tuple(one.failure for one in self.refusals.values() if one.failure.reason != NO_ANSWER or one.times > 1)


@dataclass(frozen=True, slots=True)
class Refusal:
    """An action that stopped its lane: it is not tried again before `retry_at`, unless the spec changes."""

    failure: Failure
    action: str  # the action, with the digest of its manifest if it has one
    generation: int
    times: int  # in a row
    retry_at: float  # by the monotonic clock

    def holds(self, action: str, generation: int, now: float) -> bool:
        """Whether this action must not be tried yet."""
        return self.action == action and self.generation == generation and now < self.retry_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The result of planning one object: actions, which have their own events, status, and events of decisions."""

    actions: tuple[Action, ...] = ()
    status: Mapping[str, Any] | None = None
    """The whole status; None: write none (the object is deleted)."""
    status_before: Mapping[str, Any] | None = None
    """The present status, encoded in the same way: an equal one is not written again."""
    notes: tuple[Event, ...] = ()
    """Events of decisions, posted after the status write."""
    pod_uids: Mapping[str, str] = field(default_factory=dict)
    """By name, for events that are about one pod."""
    requeue_after: float | None = None
    """Seconds until something changes by time alone; None: sleep until woken."""
    carried: Any = None
    """State for the next pass, which finds it in `Memory.carried`."""


class Kind(Protocol):
    """One kind of object that the controller reconciles."""

    @property
    def name(self) -> str:
        """Its `kind`, as in a manifest."""

    @property
    def resource(self) -> Resource:
        """Where the API server keeps it."""

    def observe(self, key: Key, stored: StoredObject, memory: Memory) -> Any:
        """The input of `plan`: a frozen snapshot, read from caches without I/O."""

    def with_memory(self, observed: Any, memory: Memory) -> Any:
        """The same observation with the executor's results: refusals, and names that are taken."""

    def plan(self, observed: Any, now: datetime) -> Decision:
        """Decide. Pure: the same input gives the same decision."""
