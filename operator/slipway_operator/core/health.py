"""In which stage of its life a replica is, judged from the facts of its pod and its node.

| stage         | when (the first that holds)                          | holds its slot | counts as                  |
|---------------|------------------------------------------------------|----------------|----------------------------|
| TERMINATING   | somebody deleted the pod                             | no             | nothing                    |
| DEAD          | phase Failed or Succeeded: evicted, node shut down … | no             | nothing; it is removed     |
| DRAINING      | label state=draining                                 | no             | nothing                    |
| LOST          | its node has not been ready for NODE_LOST            | no             | nothing; it may come back  |
| READY         | condition Ready                                      | yes            | capacity                   |
| OVERDUE       | older than its startup may take                      | yes            | nothing: it blocks nobody  |
| IMAGE_ERROR   | the kubelet cannot pull the image                    | yes            | nothing                    |
| CONFIG_ERROR  | a Secret or ConfigMap of its environment is missing  | yes            | nothing                    |
| CRASHING      | CrashLoopBackOff                                     | yes            | nothing                    |
| UNSCHEDULABLE | no node has room                                     | yes            | coming capacity            |
| LOADING       | otherwise                                            | yes            | coming capacity            |
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from typing import Final

from slipway_api.names import STATE_DRAINING
from slipway_operator.core.observed import Node, Replica

# Shorter than Kubernetes' own 300 s before it evicts, because a GPU replica takes minutes to replace; longer than a
# kubelet's restart. Losing a replica costs nothing by itself: the old one leaves only when the new one is ready.
NODE_LOST: Final = timedelta(seconds=30)

IMAGE_ERRORS: Final = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"}
    | {"ImageInspectError", "RegistryUnavailable"}
)


class Stage(Enum):
    """Where a replica stands between its creation and its end."""

    TERMINATING = "is being deleted"
    DEAD = "has ended"
    DRAINING = "is draining"
    LOST = "is on a node that does not answer"
    READY = "is ready"
    OVERDUE = "did not become ready in time"
    IMAGE_ERROR = "cannot pull its image"
    CONFIG_ERROR = "lacks a part of its environment"
    CRASHING = "keeps crashing"
    UNSCHEDULABLE = "waits for a node"
    LOADING = "is loading"

    @property
    def is_live(self) -> bool:
        """Whether it holds its slot: it serves, or may serve one day without anybody's doing."""
        return self not in _GONE

    @property
    def is_broken(self) -> bool:
        """Whether nobody should wait for it."""
        return self in _BROKEN


_GONE = frozenset({Stage.TERMINATING, Stage.DEAD, Stage.DRAINING, Stage.LOST})
_BROKEN = frozenset({Stage.OVERDUE, Stage.IMAGE_ERROR, Stage.CONFIG_ERROR, Stage.CRASHING})


_WORST_FIRST = (
    Stage.IMAGE_ERROR,
    Stage.CONFIG_ERROR,
    Stage.CRASHING,
    Stage.OVERDUE,
    Stage.LOST,
    Stage.UNSCHEDULABLE,
    Stage.LOADING,
)


@dataclass(frozen=True, slots=True)
class Member:
    """A replica of ours with the stage it is judged to be in."""

    replica: Replica
    stage: Stage

    @property
    def is_live(self) -> bool:
        """Whether it holds its slot."""
        return self.stage.is_live

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests."""
        return self.stage is Stage.READY


def judge(
    replicas: Iterable[Replica], nodes: Mapping[str, Node], *, startup_timeout: timedelta, now: datetime
) -> tuple[Member, ...]:
    """All replicas with their stages, oldest first."""
    ordered = sorted(replicas, key=lambda replica: (replica.created_at, replica.name))
    return tuple(Member(one, stage(one, nodes, startup_timeout=startup_timeout, now=now)) for one in ordered)


def cheapest_to_lose(member: Member, nodes: Mapping[str, Node]) -> tuple[int, bool, int, float, float, str]:
    """Sort key of victims: who serves nobody, then whose node shall be emptied, then who serves the fewest.

    A ready replica that does not answer comes after those that do: how much it serves is not known. Between equals
    the newest goes, because its cache knows the least.
    """
    replica = member.replica
    sample = replica.sample
    requests = sample.requests if sample else 1_000_000
    usage = sample.kv_usage if sample else 1.0
    standing = severity(member.stage)
    return standing, not is_cordoned(replica, nodes), requests, usage, -replica.created_at.timestamp(), replica.name


def severity(stage: Stage) -> int:
    """The position of a stage from worst to best: which replica is named, or removed, first."""
    return _WORST_FIRST.index(stage) if stage in _WORST_FIRST else len(_WORST_FIRST)


def stage(replica: Replica, nodes: Mapping[str, Node], *, startup_timeout: timedelta, now: datetime) -> Stage:
    """The table above."""
    if replica.deleted_at is not None:
        return Stage.TERMINATING
    if replica.phase in ("Failed", "Succeeded"):
        return Stage.DEAD
    if replica.state == STATE_DRAINING:
        return Stage.DRAINING
    if is_lost(replica, nodes, now):
        return Stage.LOST
    if replica.ready:
        return Stage.READY
    if now >= replica.created_at + startup_timeout:
        return Stage.OVERDUE
    if replica.waiting_reason in IMAGE_ERRORS:
        return Stage.IMAGE_ERROR
    if replica.waiting_reason == "CreateContainerConfigError":
        return Stage.CONFIG_ERROR
    if replica.waiting_reason == "CrashLoopBackOff":
        return Stage.CRASHING
    if replica.unschedulable:
        return Stage.UNSCHEDULABLE
    return Stage.LOADING


def is_lost(replica: Replica, nodes: Mapping[str, Node], now: datetime) -> bool:
    """Whether the replica's node has been silent for so long that nobody should wait for it."""
    node = nodes.get(replica.node)
    return node is not None and not node.ready and now >= (node.not_ready_since or now) + NODE_LOST


def is_cordoned(replica: Replica, nodes: Mapping[str, Node]) -> bool:
    """Whether somebody wants the replica's node empty."""
    node = nodes.get(replica.node)
    return node is not None and node.cordoned


def next_change(replica: Replica, nodes: Mapping[str, Node], *, startup_timeout: timedelta) -> datetime | None:
    """When time alone may move this replica to another stage; a moment in the past means that it has."""
    moments = []
    node = nodes.get(replica.node)
    if node is not None and not node.ready and node.not_ready_since is not None:
        moments.append(node.not_ready_since + NODE_LOST)
    if not replica.ready:
        moments.append(replica.created_at + startup_timeout)
    return min(moments, default=None)
