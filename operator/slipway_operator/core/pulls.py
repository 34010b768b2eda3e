"""The snapshot of nodes and pods from which the core decides where image and model are pulled beforehand; frozen."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from slipway_operator.core.labels import EditedLabel


@dataclass(frozen=True, slots=True, kw_only=True)
class PullNode:
    """The facts of a node on which a replica may be placed."""

    name: str
    is_usable: bool = True
    """Ready, and not about to go: a pod would start there now."""
    is_leaving: bool = False
    """Cordoned, or tainted by who will take it away: no replica is placed there any more."""
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[tuple[str, str, str], ...] = ()
    """Key, value and effect."""
    allocatable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PullPod:
    """The facts of one pod that pulls."""

    name: str
    uid: str
    owner_uid: str
    edited_labels: tuple[EditedLabel, ...] = ()
    digest: str  # annotation: what it pulls
    node: str  # annotation: to which node; "": it fills a claim
    created_at: datetime
    deleted_at: datetime | None = None
    phase: str = "Pending"
    phase_reason: str = ""  # status.reason: Evicted, NodeAffinity ...
    unschedulable: str = ""  # the scheduler's message
    waiting_reason: str = ""  # of its container: ErrImagePull, CreateContainerConfigError ...
    waiting_message: str = ""
    result: str = ""  # termination message of the last run that ended
    exit_code: int | None = None  # of that run; None: none has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class PullsSeen:
    """The nodes and the pods that pull, of one service."""

    nodes: tuple[PullNode, ...] = ()
    pods: tuple[PullPod, ...] = ()
