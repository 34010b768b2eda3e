"""In which stage of its life a replica is, judged from the facts of its pod and its node.

| stage         | when (the first that holds)                          | holds its slot | counts as                  |
|---------------|------------------------------------------------------|----------------|----------------------------|
| STUCK         | deleted, and GONE_AFTER past its grace still there   | no             | nothing, not even a GPU    |
| TERMINATING   | its pod is being deleted                             | no             | nothing                    |
| DEAD          | phase Failed or Succeeded: evicted, node shut down … | no             | nothing; it is removed     |
| DRAINING      | the operator drains it                               | no             | nothing                    |
| LOST          | its node has not been ready for NODE_LOST            | no             | nothing; it may come back  |
| READY         | condition Ready, routed, and it does not drain       | yes            | capacity                   |
| GATED         | a scheduling gate holds its pod in a queue           | yes            | coming capacity            |
| UNSEEN        | no scheduler has looked at its pod                   | yes            | coming capacity            |
| UNSCHEDULABLE | no node has room                                     | yes            | coming capacity            |
| UNHEALTHY     | its present run was ready, and is not for too long   | yes            | nothing; it is replaced    |
| UNREADY       | it was ready a moment ago, or its labels are edited  | yes            | coming capacity            |
| OVERDUE       | unready for longer than its startup may take         | yes            | nothing: it blocks nothing |
| IMAGE_ERROR   | the kubelet cannot pull the image                    | yes            | nothing                    |
| CONFIG_ERROR  | the kubelet cannot make a container: environment, …  | yes            | nothing                    |
| CRASHING      | CrashLoopBackOff                                     | yes            | nothing                    |
| LOADING       | otherwise                                            | yes            | coming capacity            |

While most nodes of the cluster look lost at once (`Observed.disrupted`), the fault is more likely between us and them:
nothing is LOST, UNHEALTHY or OVERDUE on such a node. node-lifecycle-controller stops its evictions in the same
case. A pod that is GATED, UNSEEN or UNSCHEDULABLE has no clock.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from typing import Final

from slipway_api.names import ANNOTATION_REPLACE, STATE_DRAINING
from slipway_api.types import rfc3339
from slipway_operator.core.observed import Node, Replica

# Shorter than Kubernetes' own 300 s before it evicts, because a GPU replica takes minutes to replace; longer than a
# kubelet's restart. Losing a replica costs nothing by itself: the old one leaves only when the new one is ready.
NODE_LOST: Final = timedelta(seconds=30)
# Beyond the grace of a deleted pod: its kubelet is not going to finish it, so nothing waits for it any more.
GONE_AFTER: Final = timedelta(seconds=60)
REPLACE_UNHEALTHY_AFTER: Final = timedelta(seconds=120)  # the default of spec.availability.replaceAfterUnhealthySeconds

IMAGE_ERRORS: Final = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"}
    | {"ImageInspectError", "RegistryUnavailable"}
)
STARTING: Final = frozenset({"", "ContainerCreating", "PodInitializing", "CrashLoopBackOff"})  # no error of their own


class Stage(Enum):
    """Where a replica stands between its creation and its end; `core/service/status/problems.py` has the sentences."""

    STUCK = "Stuck"
    TERMINATING = "Terminating"
    DEAD = "Dead"
    DRAINING = "Draining"
    LOST = "Lost"
    READY = "Ready"
    UNREADY = "Unready"
    UNHEALTHY = "Unhealthy"
    OVERDUE = "Overdue"
    IMAGE_ERROR = "ImageError"
    CONFIG_ERROR = "ConfigError"
    CRASHING = "Crashing"
    GATED = "Gated"
    UNSEEN = "Unseen"
    UNSCHEDULABLE = "Unschedulable"
    LOADING = "Loading"

    @property
    def is_live(self) -> bool:
        """Whether it holds its slot: it serves, or may serve one day without a change from outside."""
        return self not in _GONE

    @property
    def is_broken(self) -> bool:
        """Whether nothing should wait for it."""
        return self in _BROKEN

    @property
    def is_queued(self) -> bool:
        """Whether no scheduler considers its pod yet: time in a queue is neither start-up nor a lack of progress."""
        return self in (Stage.GATED, Stage.UNSEEN)

    @property
    def has_served(self) -> bool:
        """Whether it was ready once and may be again without a new start."""
        return self in (Stage.READY, Stage.UNREADY)

    @property
    def severity(self) -> int:
        """Its place among the stages, the worst first; those that are as they should be come last."""
        return _WORST_FIRST.index(self) if self in _WORST_FIRST else len(_WORST_FIRST)


_GONE = frozenset({Stage.STUCK, Stage.TERMINATING, Stage.DEAD, Stage.DRAINING, Stage.LOST})
_BROKEN = frozenset({Stage.OVERDUE, Stage.IMAGE_ERROR, Stage.CONFIG_ERROR, Stage.CRASHING, Stage.UNHEALTHY})
_WORST_FIRST = (
    *(Stage.IMAGE_ERROR, Stage.CONFIG_ERROR, Stage.CRASHING, Stage.OVERDUE, Stage.UNHEALTHY),
    *(Stage.LOST, Stage.UNSCHEDULABLE, Stage.GATED, Stage.UNSEEN, Stage.LOADING, Stage.UNREADY),
)


@dataclass(frozen=True, slots=True)
class Member:
    """A replica of ours with the stage it is judged to be in."""

    replica: Replica
    stage: Stage
    on_lost_node: bool = False  # whatever its stage: it may be draining there
    leaves: str = ""  # why another replica has to take its place although it may serve; "": it may stay
    ends_at: datetime | None = None  # when its node is taken away, by the notice of a spot node

    @property
    def is_live(self) -> bool:
        """Whether it holds its slot."""
        return self.stage.is_live

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests."""
        return self.stage is Stage.READY

    @property
    def is_unrouted(self) -> bool:
        """Whether only its edited labels keep requests from it; the operator restores them."""
        replica = self.replica
        is_cut = replica.ready and not replica.is_routed and not _drains_by_its_own_word(replica)
        return is_cut and self.stage is Stage.UNREADY


def judge(
    replicas: Iterable[Replica],
    nodes: Mapping[str, Node],
    *,
    startup_timeout: timedelta,
    replace_after: timedelta = REPLACE_UNHEALTHY_AFTER,
    disrupted: bool = False,
    restart_at: datetime | None = None,
    gateway_digests: Collection[str] = (),
    internal_tls: bool | None = None,
    now: datetime,
) -> tuple[Member, ...]:
    """All replicas with their stages, oldest first.

    `gateway_digests` are those of the tokens that gateways can send; empty, if the service takes requests without one.
    internal_tls: whether replicas are to speak TLS; None: they stay as they are.
    """
    limits = Limits(startup_timeout=startup_timeout, replace_after=replace_after, disrupted=disrupted)
    ordered = sorted(replicas, key=lambda replica: (replica.created_at, replica.name))
    return tuple(
        Member(
            one,
            stage(one, nodes, limits, now),
            on_lost_node=not disrupted and is_lost(one, nodes, now),
            leaves=_why_it_leaves(one, nodes, restart_at, now)
            or _why_no_gateway_gets_in(one, gateway_digests)
            or _why_transport(one, internal_tls)
            or _why_certificate(one),
            ends_at=_end_of_node(one, nodes, now),
        )
        for one in ordered
    )


def is_needed(member: Member, members: Collection[Member], must_stay: int) -> bool:
    """Whether fewer than `must_stay` of `members` would serve without this one.

    One with edited labels is needed if those with edited labels have to be counted to reach the number.
    """
    ready, unrouted = sum(one.is_ready for one in members), sum(one.is_unrouted for one in members)
    if member.is_ready:
        return ready <= must_stay
    return member.is_unrouted and ready + unrouted <= must_stay


def cheapest_to_lose(member: Member, nodes: Mapping[str, Node]) -> tuple[bool, int, bool, int, float, float, str]:
    """Sort key of victims, the cheapest first.

    A replica that drains already costs nothing more: our cache may lag behind its label. Then come those that serve
    nothing, then those on nodes to be emptied, then those that serve the fewest requests. A ready replica that does
    not answer comes after those that do: how much it serves is not known. Between equals the newest goes, because its
    cache knows the least.
    """
    replica = member.replica
    sample = replica.sample
    requests = sample.requests if sample else 1_000_000
    usage = sample.kv_usage if sample else 1.0
    return (
        not _drains_by_its_own_word(replica),
        member.stage.severity,
        not (member.leaves or is_cordoned(replica, nodes)),
        requests,
        usage,
        -replica.created_at.timestamp(),
        replica.name,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long a replica may stay in a stage that time ends."""

    startup_timeout: timedelta
    replace_after: timedelta = REPLACE_UNHEALTHY_AFTER
    disrupted: bool = False


def stage(replica: Replica, nodes: Mapping[str, Node], limits: Limits, now: datetime) -> Stage:
    """Judge one replica by the table above."""
    if replica.deleted_at is not None:
        return Stage.STUCK if now >= replica.deleted_at + GONE_AFTER else Stage.TERMINATING
    if replica.phase in ("Failed", "Succeeded"):
        return Stage.DEAD
    if replica.state == STATE_DRAINING:
        return Stage.DRAINING
    if not limits.disrupted and is_lost(replica, nodes, now):
        return Stage.LOST
    if replica.ready:
        takes_requests = replica.is_routed and not _drains_by_its_own_word(replica)
        return Stage.READY if takes_requests else Stage.UNREADY
    if replica.held:
        return Stage.GATED if replica.held == "Gated" else Stage.UNSEEN
    if replica.unschedulable:
        return Stage.UNSCHEDULABLE
    if _is_cut_off(replica, nodes):
        return Stage.UNREADY if replica.started else Stage.LOADING
    return _unready_stage(replica, nodes, limits, now)


def _unready_stage(replica: Replica, nodes: Mapping[str, Node], limits: Limits, now: datetime) -> Stage:
    """The stage of a replica that is not ready, on a node that answers."""
    if replica.waiting_reason == "CrashLoopBackOff" and now < _overdue_at(replica, nodes, limits):
        return Stage.CRASHING
    if replica.started:
        return Stage.UNHEALTHY if now >= _unhealthy_at(replica, nodes, limits) else Stage.UNREADY
    if now >= _overdue_at(replica, nodes, limits):
        return Stage.OVERDUE
    if replica.waiting_reason in IMAGE_ERRORS:
        return Stage.IMAGE_ERROR
    if replica.waiting_reason not in STARTING:
        return Stage.CONFIG_ERROR
    return Stage.LOADING


def is_lost(replica: Replica, nodes: Mapping[str, Node], now: datetime) -> bool:
    """Whether the replica's node has been silent for so long that nothing should wait for it."""
    node = nodes.get(replica.node)
    if node is None:
        return False
    return node.is_shut_down or (not node.ready and now >= (node.not_ready_since or now) + NODE_LOST)


def is_cordoned(replica: Replica, nodes: Mapping[str, Node]) -> bool:
    """Whether the replica's node is to be emptied."""
    node = nodes.get(replica.node)
    return node is not None and node.cordoned


def _why_it_leaves(replica: Replica, nodes: Mapping[str, Node], restart_at: datetime | None, now: datetime) -> str:
    """Why another replica has to take its place: `its node a is cordoned`, `it is older than spec.restartAt`."""
    node = nodes.get(replica.node)
    if node is not None and node.cordoned:
        return (
            f"its node {node.name} has the taint {node.leaving}"
            if node.leaving
            else f"its node {node.name} is cordoned"
        )
    # The API server writes whole seconds: within the second of restartAt a replica counts as new.
    if restart_at is not None and restart_at <= now and replica.created_at < restart_at.replace(microsecond=0):
        return f"it is older than spec.restartAt, {rfc3339(restart_at)}"
    if replica.replace_requested is not None and replica.replace_requested <= now:
        return f"its pod has the annotation {ANNOTATION_REPLACE}"
    return ""


def _why_no_gateway_gets_in(replica: Replica, gateway_digests: Collection[str]) -> str:
    """Whether gateways that start from now on can send it no token: the key that it was made with is gone (ADR 172)."""
    accepted = replica.serving_digests
    is_shut = bool(gateway_digests and accepted) and not set(accepted) & set(gateway_digests)
    return "it accepts no token of the present keys in the gateway's Secret" if is_shut else ""


def _why_transport(replica: Replica, internal_tls: bool | None) -> str:
    """Whether it was created before internalTLS.enabled of the chart was changed."""
    if internal_tls is None or replica.speaks_tls == internal_tls:
        return ""
    spoken, value = ("TLS", "false") if replica.speaks_tls else ("plain text", "true")
    return f"it speaks {spoken}, and internalTLS.enabled of the chart is {value}"


def _why_certificate(replica: Replica) -> str:
    """Whether its engine has missed a renewal, as slipway-agent reports: callers refuse it when that one ends."""
    end = replica.sample.outdated_certificate_ends if replica.sample is not None else None
    return f"its engine still serves the certificate that ends at {rfc3339(end)}" if end is not None else ""


def _end_of_node(replica: Replica, nodes: Mapping[str, Node], now: datetime) -> datetime | None:
    node = nodes.get(replica.node)
    if node is None or node.notice is None:
        return None
    return (replica.leaving_since or now) + node.notice


def next_change(replica: Replica, nodes: Mapping[str, Node], limits: Limits) -> list[datetime]:
    """When time alone may move this replica to another stage; a moment in the past means that it has."""
    if replica.deleted_at is not None:
        return [replica.deleted_at + GONE_AFTER]
    moments = []
    node = nodes.get(replica.node)
    if node is not None and not node.ready and node.not_ready_since is not None:
        moments.append(node.not_ready_since + NODE_LOST)
    if not replica.ready and not replica.held:
        moments.append(_overdue_at(replica, nodes, limits))
        if replica.started:
            moments.append(_unhealthy_at(replica, nodes, limits))
    return moments


def _drains_by_its_own_word(replica: Replica) -> bool:
    """Whether the runtime says that it drains: told by us, where the label has not reached our cache, or by SIGTERM."""
    return replica.sample is not None and replica.sample.draining


def _is_cut_off(replica: Replica, nodes: Mapping[str, Node]) -> bool:
    node = nodes.get(replica.node)
    return node is not None and not node.ready


def _unready_since(replica: Replica, nodes: Mapping[str, Node]) -> datetime:
    """Since when the replica itself is not ready. What was lost with its node gets its time again when that returns."""
    node = nodes.get(replica.node)
    # A claimed pod waited before it was a replica: its time begins with the claim, which is its creation to us.
    begun = max(replica.scheduled_at or replica.created_at, replica.claimed_at or replica.created_at)
    moments = (begun, replica.unready_since, node.ready_since if node else None)
    return max(moment for moment in moments if moment is not None)


def _unhealthy_at(replica: Replica, nodes: Mapping[str, Node], limits: Limits) -> datetime:
    """When a replica whose server has started counts as unhealthy, if it is not ready before.

    The kubelet writes Ready some moments after `started`. Until then the condition says since when an earlier run was
    not ready, or the pod is there: a server that loaded for minutes would count as unhealthy when it has just started.
    """
    was_ready = (
        replica.unready_since is None or replica.running_since is None or replica.unready_since > replica.running_since
    )  # in its present run
    return _unready_since(replica, nodes) + limits.replace_after if was_ready else _overdue_at(replica, nodes, limits)


def _overdue_at(replica: Replica, nodes: Mapping[str, Node], limits: Limits) -> datetime:
    """The clock of the start-up begins when a node is found, and again whenever readiness is lost."""
    return _unready_since(replica, nodes) + limits.startup_timeout
