"""What the end of a node means for its replicas: since when it is known, how long evictions wait, when streams end.

A node is to be emptied while it is cordoned or has a taint of `core.node_taints`. A replica there is replaced within
the surge, and drains when its replacement is ready; the PodDisruptionBudget holds evictions until then.

| the node                     | replacement                 | the replica drains                                      |
|------------------------------|-----------------------------|---------------------------------------------------------|
| is cordoned, or tainted      | within maxSurge             | when its replacement is ready                           |
| goes at the end of a notice  | at once, beside any surge   | then, or as late as leaves `drain.timeoutSeconds`       |
| ... the last ready replica   | at once, beside any surge   | then, or for the last third of the notice               |

What has to outlive the operator is in annotations of the pod: since when its node is to be emptied, and since when
evictions are no longer held up. In the same patch go the annotations that node scalers read; each is written when it
changes, so a fleet at rest causes no write.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from slipway_api import names
from slipway_api.conditions import EventReason
from slipway_api.inference_service import InferenceService
from slipway_api.types import rfc3339
from slipway_operator.core.actions import AnnotatePod, Event, Steps
from slipway_operator.core.health import Member, Stage
from slipway_operator.core.observed import Node, Replica
from slipway_operator.core.service.replicas.drain import DrainRules

FOR_THE_ENDS_OF_STREAMS: Final = timedelta(seconds=3)  # between the drain's deadline and the end of the node
PROTECTED: Final = "false"  # value of safe-to-evict on a pod that starts


def startup_annotations(service: InferenceService) -> dict[str, str]:
    """The annotations of a new pod for node scalers: while it starts, they leave its node alone."""
    if not service.spec.availability.protect_startup:
        return {names.ANNOTATION_SAFE_TO_EVICT: "true"}
    return {names.ANNOTATION_SAFE_TO_EVICT: PROTECTED, names.ANNOTATION_DO_NOT_DISRUPT: "true"}


def annotate(members: Sequence[Member], service: InferenceService, nodes: Mapping[str, Node], now: datetime) -> Steps:
    """Bring the annotations of all pods up to date, and say once that a node's drain waits no longer."""
    steps = Steps()
    for member in members:
        if not member.is_live:
            continue
        replica = member.replica
        changes = _scaler_changes(member, service) | _departure_changes(replica, nodes, now)
        if changes:
            reason = ", ".join(f"{name}={value}" for name, value in changes.items())
            steps += Steps(
                actions=(AnnotatePod(name=replica.name, uid=replica.uid, annotations=changes, reason=reason),)
            )
        if _is_forced_now(replica, service, nodes, now):
            steps += Steps(actions=(_note_forced(replica, service, now),))
    waiting = [_forced_at(one.replica, service) for one in members if one.is_live]
    coming = [moment for moment in waiting if moment is not None and moment > now]
    return steps + Steps(again_at=min(coming, default=None))


def allows_evictions(
    members: Sequence[Member], service: InferenceService, nodes: Mapping[str, Node], now: datetime
) -> bool:
    """Whether a replica is on a node whose drain was held up for maxNodeDrainBlockSeconds."""
    return any(
        one.is_live
        and (
            (one.replica.drain_forced is not None and _is_leaving(one.replica, nodes) is not False)
            or _is_forced_now(one.replica, service, nodes, now)
        )
        for one in members
    )


def replaced_at_once(members: Sequence[Member]) -> int:
    """How many replicas need a replacement that waits for no surge, because their nodes go at a fixed time."""
    return sum(one.is_live and one.ends_at is not None for one in members)


def ending_with_node(members: Sequence[Member], rules: DrainRules, now: datetime) -> list[tuple[Member, str]]:
    """The replicas that have to drain now, because their nodes go at a fixed time, each with the reason."""
    others_serve = any(one.is_ready and one.ends_at is None for one in members)
    ending = []
    for member in members:
        begins = drain_begins_at(member, rules, others_serve=others_serve)
        if member.is_live and begins is not None and now >= begins and member.ends_at is not None:
            seconds = max(0, int((member.ends_at - now).total_seconds()))
            ending.append((member, f"{member.leaves} and goes in {seconds}s"))
    return ending


def drain_moments(members: Sequence[Member], rules: DrainRules) -> list[datetime]:
    """When replicas whose nodes go at a fixed time will have to drain."""
    others_serve = any(one.is_ready and one.ends_at is None for one in members)
    moments = [drain_begins_at(one, rules, others_serve=others_serve) for one in members if one.is_live]
    return [moment for moment in moments if moment is not None]


def drain_begins_at(member: Member, rules: DrainRules, *, others_serve: bool) -> datetime | None:
    """When a replica whose node goes at a fixed time has to drain, ready replacement or not.

    Notice 120 s, drain.timeoutSeconds 30, propagation 5: after 82 s, and as the last ready replica after 80 s.
    Notice 30 s, drain.timeoutSeconds 300: at once, and as the last ready replica after 20 s.
    """
    if member.ends_at is None:
        return None
    since = member.replica.leaving_since
    notice = member.ends_at - since if since is not None else timedelta()
    needed = rules.propagation + rules.timeout + FOR_THE_ENDS_OF_STREAMS
    return member.ends_at - (needed if others_serve else min(needed, notice / 3))


def rules_of(member: Member, rules: DrainRules, now: datetime) -> DrainRules:
    """The drain of this replica: on a node that goes at a fixed time its requests end before that."""
    if member.ends_at is None:
        return rules
    started = member.replica.drain_started or now
    left = max(member.ends_at - FOR_THE_ENDS_OF_STREAMS - started, timedelta(seconds=1))
    timeout = min(rules.timeout, left)
    return replace(rules, timeout=timeout, propagation=min(rules.propagation, timeout / 2))


def _scaler_changes(member: Member, service: InferenceService) -> dict[str, str | None]:
    """A replica is protected from its creation until it is ready or broken, and never again."""
    replica, users = member.replica, service.spec.template.metadata.annotations
    is_starting = member.stage in (Stage.LOADING, Stage.UNSCHEDULABLE) or member.stage.is_queued
    if is_starting and replica.safe_to_evict == PROTECTED and service.spec.availability.protect_startup:
        return {}
    changes: dict[str, str | None] = {}
    if replica.safe_to_evict != "true" and names.ANNOTATION_SAFE_TO_EVICT not in users:
        changes[names.ANNOTATION_SAFE_TO_EVICT] = "true"
    if replica.do_not_disrupt and names.ANNOTATION_DO_NOT_DISRUPT not in users:
        changes[names.ANNOTATION_DO_NOT_DISRUPT] = None
    return changes


def _departure_changes(replica: Replica, nodes: Mapping[str, Node], now: datetime) -> dict[str, str | None]:
    is_leaving = _is_leaving(replica, nodes)
    if is_leaving is None:
        return {}
    changes: dict[str, str | None] = {}
    if is_leaving and replica.leaving_since is None:
        changes[names.ANNOTATION_NODE_LEAVING_SINCE] = rfc3339(now)
    if not is_leaving and replica.leaving_since is not None:
        changes[names.ANNOTATION_NODE_LEAVING_SINCE] = None
    if not is_leaving and replica.drain_forced is not None:
        changes[names.ANNOTATION_NODE_DRAIN_FORCED] = None
    return changes


def _is_forced_now(replica: Replica, service: InferenceService, nodes: Mapping[str, Node], now: datetime) -> bool:
    """Whether evictions have been held up for long enough, and the pod does not have the annotation yet."""
    forced_at = _forced_at(replica, service)
    return bool(_is_leaving(replica, nodes)) and forced_at is not None and now >= forced_at


def _note_forced(replica: Replica, service: InferenceService, now: datetime) -> AnnotatePod:
    """Record since when evictions are possible, after the disruption budget permits them."""
    return AnnotatePod(
        name=replica.name,
        uid=replica.uid,
        annotations={names.ANNOTATION_NODE_DRAIN_FORCED: rfc3339(now)},
        reason="evictions have been held up for maxNodeDrainBlockSeconds",
        events=(_forced_event(replica, service),),
        after=f"PodDisruptionBudget/{service.metadata.name}",
    )


def _is_leaving(replica: Replica, nodes: Mapping[str, Node]) -> bool | None:
    """Whether its node is to be emptied; None: the node is not known, so what was known of it still holds."""
    node = nodes.get(replica.node)
    return node.cordoned if node is not None else None


def _forced_at(replica: Replica, service: InferenceService) -> datetime | None:
    """When evictions from its node will have been held up for long enough; None: they are not, or that is said."""
    if replica.leaving_since is None or replica.drain_forced is not None or not replica.ready:
        return None
    return replica.leaving_since + timedelta(seconds=service.spec.availability.max_node_drain_block_seconds)


def _forced_event(replica: Replica, service: InferenceService) -> Event:
    seconds = service.spec.availability.max_node_drain_block_seconds
    return Event(
        reason=EventReason.NODE_DRAIN_FORCED,
        action="AllowEvictions",
        message=f"node {replica.node} waits to be emptied for {seconds}s (maxNodeDrainBlockSeconds), and no "
        f"replacement of {replica.name} is ready: the PodDisruptionBudget holds up evictions no longer",
        pod=replica.name,
    )
