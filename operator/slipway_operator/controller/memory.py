"""What the leader remembers of one service between two passes.

All of it may be lost: a new leader starts with an empty memory and comes to the same end, only a little later. What
must survive stands in the service's status or in the pods' metadata.
"""

from dataclasses import dataclass, field

from slipway_operator.core.observed import Failure, PastRecommendation


@dataclass(slots=True)
class Memory:
    """The losable facts about one service; one worker at a time holds its key, so nobody races for it."""

    recommendations: tuple[PastRecommendation, ...] = ()
    """What the stabilisation windows look back over."""
    ready: frozenset[str] | None = None
    """Names of the replicas that were ready in the last pass; None before the first one."""
    taken_names: frozenset[str] = frozenset()
    """Pod names that belong to somebody else."""
    applied: dict[str, str] = field(default_factory=dict)
    """Digest of each child as last applied; emptied by the resync, which so heals drift."""
    failures: tuple[Failure, ...] = ()
    """What the API server refused in the last pass."""
