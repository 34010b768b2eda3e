"""Decides the next step of a rollout: which replicas may start, which may drain, and each revision's share of traffic.

RollingUpdate as in a Deployment. Two rules hold at every step, for D desired replicas:

- at least D - maxUnavailable replicas are ready before a ready one is asked to go;
- no more than D + maxSurge replicas exist. Those that drain count, because they hold their GPU until they are gone,
  so a rollout needs no spare GPU beyond maxSurge. What others took away (deleted, evicted, on a lost node) does not
  count: its replacement does not wait for a drain of minutes. Nor does a deleted pod that its node never ends.

    D=3, maxSurge=1, maxUnavailable=0:  ooo -> ooo+n -> (n ready) oo~+n -> (~ gone) oo+nn -> ... -> nnn
    D=3, maxSurge=0, maxUnavailable=1:  ooo -> oo~   -> (~ gone)  oo+n  -> (n ready) o~+n -> ... -> nnn

The stable revision is the last that served completely. Where its inputs are stored, replicas of it that are lost
during the rollout are started again, as far as the new revision does not serve instead:

    D=3, maxSurge=1, maxUnavailable=0, n cannot start:  ooo+n -> (o lost) oo+n -> ooo+n, never ooonn
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from sys import maxsize
from typing import Final

from slipway_api.names import STATE_DRAINING
from slipway_api.rollout_spec import RollingUpdate
from slipway_operator.core.health import Member, Stage, cheapest_to_lose
from slipway_operator.core.observed import Node
from slipway_operator.core.service.replicas.assign import SCALING_DOWN
from slipway_operator.core.service.status.problems import describe_stage

REPLACED: Final = "another revision replaces it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Revisions:
    """The old and the new revision of a rollout, by hash."""

    update: str  # the one that the spec asks for
    stable: str = ""  # the last that served completely; the same as `update` while nothing rolls
    is_stored: bool = False  # replicas of the stable one can be built again


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStep:
    """The replicas that the rollout allows to start and to drain now."""

    is_rolling: bool  # an old revision still holds replicas
    create_up_to: int  # replicas of the new revision that may exist
    moves: int  # replicas of the new revision that may be started beside the one they replace
    leaving: tuple[tuple[Member, str], ...] = ()  # old replicas that may go now, each with the reason
    serves_instead: bool = False  # the new revision alone is all that is desired
    stable_up_to: int = 0  # replicas of the stable revision that may exist
    stable_wanted: int = 0  # ... that should exist
    replace_broken_stable: bool = False  # a new replica waits for a node: a broken stable one makes room for it
    weights: Mapping[str, int] = field(default_factory=dict)  # percent of the traffic by revision, 100 in all
    update_wanted: int | None = None  # replicas of the new revision that should exist; None: all that are desired
    may_empty: bool = False  # the last ready replicas may drain, too (strategy Recreate)
    is_held: bool = False  # a record is missing: no replica leaves for another, or because fewer are desired


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sets:
    """The replicas of a service as every step of a rollout counts them."""

    new: list[Member]  # of the revision that is rolled out
    old: list[Member]  # of all others
    stable_live: list[Member]  # old, live, and of the stable revision
    others_live: list[Member]  # old, live, and of a third revision
    draining: list[Member]  # drain, and still count, because they hold their GPU
    doubles: int  # new ones beside the one that they replace

    @property
    def old_live(self) -> list[Member]:
        return [member for member in self.old if member.is_live]

    @property
    def new_live(self) -> int:
        """Slots of the new revision with a live replica."""
        return sum(member.is_live for member in self.new) - self.doubles

    @property
    def stable_slots(self) -> int:
        """Slots of the stable revision with a live replica; one that is moved off its node has two for a while."""
        return len({member.replica.slot for member in self.stable_live})

    @property
    def new_waits_for_node(self) -> bool:
        return any(member.stage is Stage.UNSCHEDULABLE or member.stage.is_queued for member in self.new)

    @property
    def old_drains(self) -> bool:
        return any(member in self.old for member in self.draining)

    def room(self, desired: int, limits: RollingUpdate) -> int:
        """Places for new replicas: 3 desired + 1 surge - 2 old live - 1 that drains = 1 place."""
        taken = len(self.stable_live) + len(self.others_live) + len(self.draining) + self.doubles
        return desired + limits.max_surge - taken

    def moves(self, desired: int, limits: RollingUpdate) -> int:
        """Replicas that may be started beside the one they replace.

        1 desired + 1 surge, 2 live because the one too many has not left yet: 1 - 1 surplus = 0 may be started.
        """
        surplus = max(0, self.new_live - desired)
        return max(0, limits.max_surge - self.doubles - len(self.draining) - surplus)


def _sets(members: Sequence[Member], revisions: Revisions) -> _Sets:
    new = [member for member in members if member.replica.revision == revisions.update]
    old = [member for member in members if member.replica.revision != revisions.update]
    live = [member for member in old if member.is_live]
    return _Sets(
        new=new,
        old=old,
        stable_live=[member for member in live if member.replica.revision == revisions.stable],
        others_live=[member for member in live if member.replica.revision != revisions.stable],
        draining=[member for member in members if _drains_and_counts(member, revisions.update)],
        doubles=_doubles(new),
    )


def step(
    members: Sequence[Member],
    *,
    revisions: Revisions,
    desired: int,
    limits: RollingUpdate,
    nodes: Mapping[str, Node],
) -> RolloutStep:
    """The next step towards `desired` replicas, all of the update revision."""
    sets = _sets(members, revisions)
    old_live, new_ready, room = sets.old_live, _ready(sets.new), sets.room(desired, limits)
    rebuild = _stable_to_rebuild(old_live, sets.new, revisions=revisions, desired=desired, limits=limits)
    rebuild_now = min(rebuild, max(0, room - sets.new_live))
    stable_is_kept = revisions.is_stored and revisions.stable != revisions.update
    is_rolling = bool(old_live) or rebuild > 0 or sets.old_drains
    serves_instead = new_ready >= desired
    hashes = {revisions.update, revisions.stable or revisions.update, *(one.replica.revision for one in members)}
    return RolloutStep(
        is_rolling=is_rolling,
        create_up_to=max(0, min(desired, room - rebuild_now)),
        # Moving a replica off a cordoned node takes the same surge; while a rollout runs it does the moving itself.
        moves=0 if old_live else sets.moves(desired, limits),
        leaving=_old_that_may_go(
            sets.old,
            new_ready=new_ready,
            desired=desired,
            limits=limits,
            nodes=nodes,
            keeps_broken=lambda member: (
                member.replica.revision == revisions.stable and (stable_is_kept or not sets.new_waits_for_node)
            ),
        ),
        serves_instead=serves_instead,
        stable_up_to=sets.stable_slots + rebuild_now,
        stable_wanted=len(sets.stable_live) + rebuild,
        replace_broken_stable=sets.new_waits_for_node,
        weights=weights(
            members,
            sorted(hashes),
            current=revisions.update if serves_instead and not is_rolling else revisions.stable or revisions.update,
        ),
    )


def split_step(
    members: Sequence[Member],
    *,
    revisions: Revisions,
    desired: int,
    limits: RollingUpdate,
    nodes: Mapping[str, Node],
    update_wanted: int,
    stable_wanted: int,
    weight: int,
    recorded: Mapping[str, int],
    is_finished: bool,
) -> RolloutStep:
    """The next step where both revisions serve side by side, with so many replicas each and `weight` % for the new one.

    A surplus of stable replicas leaves as far as enough others are ready; replicas of any third revision leave. Stable
    replicas that are missing are started before new ones, because they are known to serve.
    """
    sets = _sets(members, revisions)
    stable_live, others, room = sets.stable_live, sets.others_live, sets.room(desired, limits)
    rebuild = max(0, stable_wanted - len(stable_live)) if revisions.is_stored else 0
    rebuild_now = min(rebuild, max(0, room - sets.new_live))
    placed = [one for one in stable_live if one not in _moves_under_way(stable_live)]
    surplus = _cheapest(placed, nodes)[: max(0, len(placed) - stable_wanted)]
    spare = max(0, _ready(members) - max(0, desired - limits.max_unavailable))
    ready_to_go = [one for one in [*_cheapest(others, nodes), *surplus] if one.is_ready][:spare]
    leaving = [(one, REPLACED) for one in [*others, *surplus] if not one.is_ready or one in ready_to_go]
    lost = [
        one for one in sets.old if one.stage is Stage.LOST and (is_finished or one.replica.revision != revisions.stable)
    ]
    if _ready(members) >= desired:
        leaving += [(one, "its node does not answer, and enough replicas serve elsewhere") for one in lost]
    hashes = {revisions.update, revisions.stable, *(one.replica.revision for one in members)}
    is_rolling = bool(stable_live or others) or sets.old_drains or not is_finished
    return RolloutStep(
        is_rolling=is_rolling and desired > 0,
        create_up_to=max(0, min(update_wanted, room - rebuild_now)),
        moves=0,
        leaving=tuple(leaving),
        serves_instead=is_finished and desired > 0 and _ready(sets.new) >= desired,
        stable_up_to=sets.stable_slots + rebuild_now,
        stable_wanted=len(stable_live) + rebuild,
        replace_broken_stable=sets.new_waits_for_node,
        weights=split_weights(members, sorted(hashes), revisions, weight=weight, recorded=recorded),
        update_wanted=update_wanted,
    )


def recreate_step(
    members: Sequence[Member], *, revisions: Revisions, desired: int, nodes: Mapping[str, Node]
) -> RolloutStep:
    """The next step without a spare GPU: every old replica finishes its requests and leaves, then new ones start."""
    sets = _sets(members, revisions)
    serves_instead = _ready(sets.new) >= desired
    is_rolling = bool(sets.old_live) or sets.old_drains
    hashes = {revisions.update, revisions.stable or revisions.update, *(one.replica.revision for one in members)}
    return RolloutStep(
        is_rolling=is_rolling or (desired > 0 and not serves_instead and revisions.stable != revisions.update),
        create_up_to=0 if is_rolling else desired,
        moves=0,
        leaving=tuple(
            (one, REPLACED)
            for one in _cheapest([*sets.old_live, *(one for one in sets.old if one.stage is Stage.LOST)], nodes)
        ),
        serves_instead=serves_instead,
        stable_up_to=0,
        stable_wanted=len(sets.stable_live),
        weights=weights(
            members,
            sorted(hashes),
            current=revisions.update if serves_instead and not is_rolling else revisions.stable or revisions.update,
        ),
        may_empty=True,
    )


def paused_step(step: RolloutStep, members: Sequence[Member], revisions: Revisions) -> RolloutStep:
    """The step of a rollout that does not go on: no further new replica starts, and no old one leaves."""
    new_live = {one.replica.slot for one in members if one.is_live and one.replica.revision == revisions.update}
    limit = min(step.create_up_to, len(new_live))
    return replace(step, create_up_to=limit, update_wanted=len(new_live), leaving=(), may_empty=False)


def held_step(step: RolloutStep, members: Sequence[Member], revisions: Revisions, *, has_begun: bool) -> RolloutStep:
    """The step of a rollout that may not continue: no replica leaves, and none is started that was not there before."""
    live = {one.replica.slot for one in members if one.is_live and one.replica.revision == revisions.update}
    most = max(len(live), step.update_wanted or 0) if has_begun else len(live)
    return replace(
        step,
        is_rolling=True,
        is_held=True,
        create_up_to=min(step.create_up_to, most),
        update_wanted=most,
        moves=0,
        leaving=(),
        serves_instead=False,
        may_empty=False,
    )


def warm_at(members: Sequence[Member], revisions: Revisions, limits: RollingUpdate, now: datetime) -> datetime | None:
    """When the newest replica of the new revision has been ready for minReadySeconds; None: all have been."""
    if not limits.min_ready_seconds:
        return None
    new = [one.replica for one in members if one.is_ready and one.replica.revision == revisions.update]
    moments = [one.ready_since + timedelta(seconds=limits.min_ready_seconds) for one in new if one.ready_since]
    return max((moment for moment in moments if moment > now), default=None)


def warming_step(step: RolloutStep) -> RolloutStep:
    """The step while a new replica fills its prefix cache: no old one that serves leaves."""
    return replace(step, leaving=tuple((one, why) for one, why in step.leaving if not one.is_ready))


def split_weights(
    members: Sequence[Member],
    revisions: Sequence[str],
    between: Revisions,
    *,
    weight: int,
    recorded: Mapping[str, int],
) -> dict[str, int]:
    """Percent of the traffic: `weight` for the new revision, the rest for the stable one, nothing for any other.

    If only the new one has ready replicas, and it has a weight, it takes all; without a weight it has not passed its
    gates, and takes nothing. If neither can serve, third revisions with traffic by the `recorded` weights keep it: the
    spec was edited again while their canary served for a lost stable revision.
    """
    ready_stable = any(one.is_ready and one.replica.revision == between.stable for one in members)
    ready_new = any(one.is_ready and one.replica.revision == between.update for one in members)
    if not ready_stable and not (ready_new and weight):
        pair = {between.stable, between.update}
        others = [one for one in members if one.replica.revision not in pair and recorded.get(one.replica.revision)]
        if any(one.is_ready for one in others):
            return dict.fromkeys(revisions, 0) | weights(others, sorted(recorded), current=between.stable)
    if ready_new and not ready_stable and weight:
        weight = 100
    elif ready_stable and not ready_new:
        weight = 0
    return dict.fromkeys(revisions, 0) | {between.stable: 100 - weight, between.update: weight}


def returned_weights(members: Sequence[Member], recorded: Mapping[str, int], *, target: str) -> dict[str, int]:
    """All traffic for the revision that is rolled back to, as soon as one replica of it is ready.

    Until then those keep it that had it by the `recorded` weights; a revision that had none never gets any.
    """
    if any(one.is_ready and one.replica.revision == target for one in members):
        return {hash: 100 if hash == target else 0 for hash in recorded}
    trusted = [one for one in members if recorded.get(one.replica.revision, 0) > 0]
    return weights(trusted, sorted(recorded), current=target)


def _cheapest(members: Sequence[Member], nodes: Mapping[str, Node]) -> list[Member]:
    return sorted(members, key=lambda member: cheapest_to_lose(member, nodes))


def _stable_to_rebuild(
    old_live: Sequence[Member], new: Sequence[Member], *, revisions: Revisions, desired: int, limits: RollingUpdate
) -> int:
    """How many replicas of the stable revision are missing, because they were lost and no new one serves instead.

    A new replica that was ready a moment ago counts: a readiness probe that fails once starts no replica.
    """
    if not revisions.is_stored or revisions.stable == revisions.update:
        return 0
    new_serving = sum(member.stage.has_served for member in new)
    return max(0, desired - limits.max_unavailable - new_serving - len(old_live))


def _old_that_may_go(
    old: Sequence[Member],
    *,
    new_ready: int,
    desired: int,
    limits: RollingUpdate,
    nodes: Mapping[str, Node],
    keeps_broken: Callable[[Member], bool],
) -> tuple[tuple[Member, str], ...]:
    ranked = sorted((member for member in old if member.is_live), key=lambda member: cheapest_to_lose(member, nodes))
    hopeless = [member for member in ranked if member.stage.is_broken and not keeps_broken(member)]
    serving = [member for member in ranked if member.is_ready]
    must_stay = max(0, desired - limits.max_unavailable)
    replaced = serving[: max(0, len(serving) + new_ready - must_stay)]
    moving = _moves_under_way([member for member in ranked if member not in replaced])
    waiting = [one for one in ranked if not one.is_ready and one not in hopeless and one not in moving]

    # A broken replica is removed at once: the new revision may be waiting for its GPU.
    leaving = [(member, f"another revision replaces it: {describe_stage(member)}") for member in hopeless]
    # 3 desired, 2 old ready + 1 old loading, 1 new ready: 3 + 1 - 3 = 1 may go, and the loading one is cheapest.
    spare = max(0, len(waiting) + len(serving) + new_ready - must_stay)
    leaving += [(member, "another revision replaces it before it was ready") for member in waiting[:spare]]
    leaving += [(member, REPLACED) for member in replaced]
    # A replica on a lost node may still serve streams; it is removed when it is not needed any more.
    lost = [member for member in old if member.stage is Stage.LOST]
    if new_ready >= desired:
        leaving += [(member, "its node does not answer, and another revision serves instead") for member in lost]
    return tuple(leaving)


def _moves_under_way(live: Sequence[Member]) -> list[Member]:
    """Replacements that are not ready yet beside the replica of their slot that has to leave: none is one too many.

    If one were removed as such, its slot would get another in the next pass, and so on.
    """
    leaves = {(one.replica.revision, one.replica.slot): one.replica.attempt for one in live if one.leaves}
    return [
        one
        for one in live
        if not one.is_ready and one.replica.attempt > leaves.get((one.replica.revision, one.replica.slot), maxsize)
    ]


def may_leave_without_surge(
    members: Sequence[Member], *, desired: int, limits: RollingUpdate, nodes: Mapping[str, Node]
) -> tuple[Member, ...]:
    """The replicas to be replaced (cordoned node, spec.restartAt) that may drain first, because there is no surge."""
    if limits.max_surge:
        return ()
    live = [member for member in members if member.is_live]
    spare = max(0, _ready(live) - max(0, desired - limits.max_unavailable))
    leaving = [member for member in live if member.is_ready and member.leaves]
    return tuple(sorted(leaving, key=lambda member: cheapest_to_lose(member, nodes))[:spare])


def weights(members: Sequence[Member], revisions: Sequence[str], *, current: str) -> dict[str, int]:
    """Percent of the traffic for each revision: its share of the ready replicas, 100 in all.

    Without any ready replica the current revision keeps it all, so that the split does not flap during a cold start.
    """
    ready = {hash: _ready([one for one in members if one.replica.revision == hash]) for hash in revisions}
    total = sum(ready.values())
    if total == 0:
        return {hash: 100 if hash == current else 0 for hash in revisions}
    shares = {hash: 100 * count // total for hash, count in ready.items()}
    # Whole percents lose up to one each: 33 + 66 = 99. The largest remainders get them back.
    by_remainder = sorted(revisions, key=lambda hash: (-(100 * ready[hash] % total), hash))
    for hash in by_remainder[: 100 - sum(shares.values())]:
        shares[hash] += 1
    return shares


def _ready(members: Sequence[Member]) -> int:
    return sum(member.is_ready for member in members)


def _doubles(members: Sequence[Member]) -> int:
    """Live replicas beside another one on the same slot: replacements under way."""
    live = [member.replica.slot for member in members if member.is_live]
    return len(live) - len(set(live))


def _drains_and_counts(member: Member, update: str) -> bool:
    """Whether this replica drains for the rollout and still holds its GPU, also after the spec was set back.

    Draining for a scale-down does not count: load that comes back gets its replicas at once. Nor does what drains on
    a lost node, or on one that goes at a fixed time: its GPU is of no use, however long the drain takes.
    """
    replica = member.replica
    if replica.state != STATE_DRAINING or member.stage not in (Stage.DRAINING, Stage.TERMINATING):
        return False
    if member.on_lost_node or member.ends_at is not None:
        return False
    return replica.revision != update or not replica.drain_reason.startswith(SCALING_DOWN)
