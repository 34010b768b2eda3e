"""Takes replicas back that drain for a scale-down, where their number is wanted again. Pure.

A replica that drains has its model and its cache; a new one takes minutes to get there. So the victims of a scale-down
serve again when the load returns:

    label draining ── UndrainPod ──> POST /undrain: the runtime accepts again ──> label serving ──> ready, routed

The order is that of a drain turned around: the gateway sends nothing before the runtime has said that it accepts. Until
then the replica counts as coming capacity that holds its slot, so no other is created for it. Should the number fall
again before it serves, its drain goes on.

A replica comes back only while all of this holds; else a new one is created, and the drain goes on to its end:
- it drains for a scale-down, and has answered since;
- it is the wanted revision's, no rollout is under way, and its node stays;
- it began to drain less than TAKE_BACK_WITHIN ago, and so lately that it does not count as unhealthy when its label is
  back before its readiness;
- it has not been asked in vain for PATIENCE. A new leader asks anew.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from slipway_api.names import STATE_DRAINING
from slipway_api.words import count
from slipway_operator.core.actions import Steps, UndrainPod
from slipway_operator.core.health import Limits, Member, Stage, is_cordoned
from slipway_operator.core.observed import Node, Replica
from slipway_operator.core.service.replicas.assign import SCALING_DOWN

TAKE_BACK_WITHIN: Final = timedelta(seconds=60)
PATIENCE: Final = timedelta(seconds=10)
ASK_AGAIN: Final = timedelta(seconds=2)
FRESH: Final = timedelta(seconds=10)  # a draining replica is asked every 1.5 s
TIME_TO_BE_READY: Final = timedelta(seconds=10)  # for the kubelet's next probe


@dataclass(frozen=True, slots=True)
class TakenBack:
    """The replicas with those that come back as live ones, and what brings them back."""

    members: tuple[Member, ...]
    steps: Steps
    asked_back: Mapping[str, datetime]  # an argument of the next pass


def take_back(
    members: Sequence[Member],
    *,
    revision: str,
    desired: int,
    limits: Limits,
    nodes: Mapping[str, Node],
    asked_back: Mapping[str, datetime],
    now: datetime,
) -> TakenBack:
    """Takes back as many draining replicas of the revision as are missing, those with the most requests first."""
    live = [one for one in members if one.is_live]
    missing = desired - len(live)
    if missing <= 0 or any(one.replica.revision != revision for one in live):
        return TakenBack(tuple(members), Steps(), {})
    able = [
        one
        for one in members
        if one.replica.revision == revision and _may_come_back(one, limits, nodes, asked_back, now)
    ]
    able.sort(key=lambda one: (-_requests(one.replica), one.replica.name))
    chosen = {one.replica.uid: one.replica for one in able[:missing]}
    reason = f"{count(desired, 'replica is', 'replicas are')} wanted again"
    return TakenBack(
        members=tuple(replace(one, stage=Stage.UNREADY) if one.replica.uid in chosen else one for one in members),
        steps=Steps(
            actions=tuple(UndrainPod(name=one.name, uid=uid, reason=reason) for uid, one in chosen.items()),
            again_at=now + ASK_AGAIN if chosen else None,
        ),
        # One that was asked in vain stays in the list: it is not asked again.
        asked_back={
            one.replica.uid: asked_back[one.replica.uid]
            for one in members
            if one.stage is Stage.DRAINING and one.replica.uid in asked_back
        }
        | {uid: asked_back.get(uid, now) for uid in chosen},
    )


def _may_come_back(
    member: Member, limits: Limits, nodes: Mapping[str, Node], asked_back: Mapping[str, datetime], now: datetime
) -> bool:
    replica = member.replica
    drains = member.stage is Stage.DRAINING and replica.state == STATE_DRAINING
    if not drains or replica.drain_started is None or not replica.drain_reason.startswith(SCALING_DOWN):
        return False
    if replica.phase != "Running" or member.on_lost_node or is_cordoned(replica, nodes):
        return False
    if replica.sample is None or abs(now - replica.sample.at) > FRESH:
        return False
    within = min(TAKE_BACK_WITHIN, limits.replace_after - TIME_TO_BE_READY)
    was_asked_in_vain = now - asked_back.get(replica.uid, now) >= PATIENCE
    return timedelta() <= now - replica.drain_started < within and not was_asked_in_vain


def _requests(replica: Replica) -> int:
    return replica.sample.requests if replica.sample else 0
