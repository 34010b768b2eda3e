"""What the controller knows of a kind: how to observe one object of it, and what to do about it.

    kind.observe(stored, memory) -> anything frozen        reads caches, no I/O
    kind.plan(observed, now)     -> Decision               pure

Everything around that exists once, for all kinds: queue, store, reconciler, executor, resync, isolation. A kind is
registered in `manager.KINDS`, and heard by one `on.event` in `handlers`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple, Protocol

from slipway_kube.resources import Resource
from slipway_operator.core.actions import Action, Event, Failure


class Key(NamedTuple):
    """One object of one kind of ours."""

    kind: str  # "InferenceService"
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


def key_of(kind: str, body: Mapping[str, Any]) -> Key:
    """The key of an object from the wire."""
    return Key(kind, body["metadata"]["namespace"], body["metadata"]["name"])


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object of ours as it came from the API server, and how new it is."""

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
        text = self.body["metadata"].get("creationTimestamp")
        return datetime.fromisoformat(text) if text else None


@dataclass(slots=True)
class Memory:
    """What the leader remembers of one object between two passes; one worker at a time holds its key.

    All of it may be lost: a new leader starts with an empty memory and comes to the same end, only a little later.
    What must survive stands in the object's status or in the pods' metadata.
    """

    carried: Any = None
    """`Decision.carried` of the last pass."""
    taken_names: frozenset[str] = frozenset()
    """Pod names that belong to somebody else."""
    applied: dict[str, str] = field(default_factory=dict)
    """Digest of each child as last applied; emptied by the resync, which so heals drift."""
    failures: tuple[Failure, ...] = ()
    """What the API server refused in the last pass that tried it."""
    refusal: "Refusal | None" = None
    """The action that was refused last, until it succeeds."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """An action that the API server refused: it is not tried again before `retry_at`, unless the spec changes."""

    action: str
    generation: int
    retry_at: float  # by the monotonic clock

    def holds(self, action: str, generation: int, now: float) -> bool:
        """Whether that action must not be tried yet."""
        return self.action == action and self.generation == generation and now < self.retry_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do about one object, in this order: actions (the first refusal stops the list), status, events."""

    actions: tuple[Action, ...] = ()
    status: Mapping[str, Any] | None = None
    """The whole status; None: write none (the object is gone)."""
    status_before: Mapping[str, Any] | None = None
    """The status that stands there, written in the same way: an equal one is not written again."""
    events: tuple[Event, ...] = ()
    pod_uids: Mapping[str, str] = field(default_factory=dict)
    """By name, for events that are about one pod."""
    requeue_after: float | None = None
    """Seconds until something changes by time alone; None: sleep until woken."""
    carried: Any = None
    """Handed back in `Memory.carried` to the next pass."""


class Kind(Protocol):
    """One kind of object that the controller reconciles."""

    @property
    def name(self) -> str:
        """Its `kind`, as in a manifest."""

    @property
    def resource(self) -> Resource:
        """Where the API server keeps it."""

    def observe(self, key: Key, stored: StoredObject, memory: Memory) -> Any:
        """Everything that a decision may know, frozen, read from caches without I/O."""

    def with_memory(self, observed: Any, memory: Memory) -> Any:
        """The same observation with what the executor has just learnt: refusals, and names that are taken."""

    def plan(self, observed: Any, now: datetime) -> Decision:
        """Decide. Pure: the same input gives the same decision."""
