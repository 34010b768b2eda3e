"""Decides which drained replicas become waiting pods of their WarmPool again, instead of being deleted.

    claimed ── scale-down, or deletion of the service ──> drained ── ReturnPod: owner and labels change back ──>
    waiting, with the model of the service ── DELETE /model: the process starts over in its container ──>
    waiting, at the level of the pool, if the memory is free again; else the pool replaces it

The return is one JSON patch, guarded by tests of uid, owner, state and version, so a crash leaves the pod with one
owner: the service, which tries again, or the pool, which asks for the model back until it is gone. A pod returns only
where it is of use, and nothing is known against it; else it is deleted as any replica is:

| the pod                                       | the pool                                       |
|-----------------------------------------------|------------------------------------------------|
| was claimed from the pool that the spec names | exists, and has fewer pods than it should      |
| drained without a restart or a deadline       | would start pods of the same shape today       |
| is on a node that stays                       | has given up no pod for a replica without node |
| is younger than recycleAfterSeconds           |                                                |
| was claimed less than recycleAfterClaims      |                                                |
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from slipway_api import names
from slipway_api.conditions import EventReason
from slipway_api.warm_pool import WarmPool
from slipway_operator.core.actions import DeletePod, Event, ReturnPod, Steps
from slipway_operator.core.health import is_cordoned, is_lost
from slipway_operator.core.observed import Observed, Replica
from slipway_operator.core.service.replicas.assign import SCALING_DOWN
from slipway_operator.core.warm_pool.autosize import wanted_size
from slipway_operator.core.warm_pool.pod import pool_owner, waiting_metadata
from slipway_operator.core.warm_pool.shape import differing_parts, shape_of_pool

DELETION: Final = "the service is being deleted"  # the reason of such a drain, by which it is recognised


class Returns:
    """The replicas that one pass may still return to the pool of the service."""

    def __init__(self, observed: Observed, now: datetime) -> None:
        self._observed, self._now = observed, now
        supply = observed.warm
        self._pool = supply.resource if supply is not None and supply.pool_uid else None
        waiting = sum(not pod.is_over for pod in supply.pods) if supply is not None else 0
        self._room = 0
        if self._pool is not None and not self._pool.status.yielded_to:
            size = self._pool.status.size
            wanted = wanted_size(self._pool.spec, self._pool.status.uses, now).pods
            self._room = (wanted if size is None else min(size, wanted)) - waiting

    def instead_of_deletion(self, replica: Replica, steps: Steps) -> Steps:
        """The next step of a drain; where it deletes a drained replica that can return, its return."""
        has_drained = any(event.reason is EventReason.REPLICA_DRAINED for event in steps.events)
        if not has_drained or self._pool is None or not self._may_return(replica, self._pool):
            return steps
        self._room -= 1
        actions = tuple(
            self._return(replica, self._pool, one.events) if isinstance(one, DeletePod) else one
            for one in steps.actions
        )
        return Steps(actions=actions, again_at=steps.again_at)

    def _may_return(self, replica: Replica, pool: WarmPool) -> bool:
        spec, observed = pool.spec, self._observed
        leaves_by_choice = replica.drain_reason.startswith((SCALING_DOWN, DELETION))
        if self._room <= 0 or not leaves_by_choice or replica.pool != pool.metadata.name or replica.claimed_at is None:
            return False
        is_well = replica.phase == "Running" and not replica.restarts
        if not is_well or is_cordoned(replica, observed.nodes) or is_lost(replica, observed.nodes, self._now):
            return False
        age = self._now - (replica.pod_created_at or replica.created_at)
        is_old = spec.recycle_after_seconds is not None and age >= timedelta(seconds=spec.recycle_after_seconds)
        if is_old or replica.claims + 1 >= spec.recycle_after_claims:
            return False
        return not differing_parts(replica.warm_shape, shape_of_pool(pool, observed.defaults.runtime_image))

    def _return(self, replica: Replica, pool: WarmPool, events: Sequence[Event]) -> ReturnPod:
        metadata = waiting_metadata(pool)
        template = self._observed.service.spec.template.metadata
        return ReturnPod(
            name=replica.name,
            uid=replica.uid,
            pool_owner=pool_owner(pool),
            labels=metadata["labels"],
            annotations=metadata["annotations"]
            | {
                names.ANNOTATION_RETURNED_AT: self._now.isoformat(),
                names.ANNOTATION_CLAIMS: str(replica.claims + 1),
            },
            dropped=frozenset({*template.labels, *template.annotations, *names.RECOMMENDED_LABELS}),
            reason=f"{replica.name} has drained, and waits in WarmPool {pool.metadata.name} again",
            events=tuple(
                replace(event, action="Return", message=f"{event.message}; it returns to WarmPool {replica.pool}")
                for event in events
            ),
        )
