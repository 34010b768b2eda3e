"""Assigns replicas to the slots of one revision: which slots get a replica, and which replicas leave.

A slot is a number within one revision; its replica is the pod of the highest attempt. An attempt is counted up when
the pod before it ended, was deleted, stays unhealthy, is on a lost or cordoned node, is older than spec.restartAt, or
when a pod of another owner has the name. Before an attempt above 0 is POSTed, status has to carry it: so two operators,
one of them dead, never name two pods alike, and the backoff of a slot survives everything. After every failure a slot
waits: a node that refuses each pod at once would otherwise be offered a new one each second.

A slot may have two live replicas only while one replaces the other. The older drains as soon as the younger is ready;
where the older is well again before that, the younger is cancelled.
"""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from itertools import count
from typing import Final

from slipway_api import names
from slipway_api.conditions import EventReason
from slipway_api.inference_status import AttemptStatus
from slipway_api.names import STATE_DRAINING
from slipway_operator.core import words
from slipway_operator.core.actions import Event, earliest
from slipway_operator.core.health import Member, Stage, cheapest_to_lose
from slipway_operator.core.observed import Node, Replica
from slipway_operator.core.service.replicas.pod import pod_name
from slipway_operator.core.service.rollout.revision import Revision
from slipway_operator.core.service.status.problems import describe_stage

FIRST_BACKOFF: Final = timedelta(seconds=10)
LONGEST_BACKOFF: Final = timedelta(seconds=300)
FORGIVEN_AFTER: Final = timedelta(minutes=10)  # after being ready for this long, earlier failures no longer count
RESTARTS_UNTIL_REPLACED: Final = 5  # the kubelet's own backoff has reached minutes: another node may do better

SCALING_DOWN: Final = "scaling down"  # prefix of the reason of such a drain, by which it is recognised
UNHEALTHY_SINCE: Final = "was ready and has not been since"


@dataclass(frozen=True, slots=True)
class Creation:
    """A replica to start."""

    slot: int
    attempt: int
    reason: str  # why an earlier replica of the slot was not enough; empty: it has had none
    avoid_node: str = ""  # the GPU of this node failed under an earlier attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The changes after which every wanted slot has one working replica."""

    creations: tuple[Creation, ...] = ()
    leaving: tuple[tuple[Member, str], ...] = ()  # each with the reason
    attempts: tuple[AttemptStatus, ...] = ()  # what status has to carry
    events: tuple[Event, ...] = ()
    must_record: bool = False  # a creation waits until status carries its attempt
    again_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class _Next:
    """The attempt that a slot needs next, and what to remember of the ones before."""

    status: AttemptStatus
    is_recorded: bool
    because: str = ""
    events: tuple[Event, ...] = ()


def assign(
    members: Sequence[Member],
    *,
    service: str,
    revision: Revision,
    create_up_to: int,
    keep_at_most: int,
    moves: int,
    attempts: Sequence[AttemptStatus],
    taken_names: AbstractSet[str],
    nodes: Mapping[str, Node],
    now: datetime,
    unhealthy: str = "",
    replace_broken: bool = False,
) -> Assignment:
    """Assign slots to the replicas of one revision. `members` are those of this revision, in any stage.

    `create_up_to` is how many slots may be filled, `keep_at_most` how many may stay filled, `moves` how many
    replicas may be started beside one that has to leave. `unhealthy` is the uid of the one unhealthy replica
    that may be replaced now; with `replace_broken` every broken one is.
    """
    is_over = partial(_is_over, unhealthy=unhealthy, replace_broken=replace_broken)
    slots = _Slots(members, service, revision, attempts, taken_names, now, is_over)
    victims = slots.surplus(keep_at_most, nodes)
    kept = [slot for slot in slots.live if slot not in victims]
    wanted = slots.vacant(keep_at_most - len(kept))
    room = max(0, create_up_to - len(kept))
    vacant, waiting = wanted[:room], wanted[room:]
    moving = sorted((slot for slot in kept if slots.should_move(slot)), key=slots.end_of_node)[: max(0, moves)]
    # A failure counts though its slot has to wait for room: else the slot would begin again without a pause.
    failed = [slot for slot in waiting if slots.has_failed(slot)]

    creations: list[Creation] = []
    events: list[Event] = []
    remembered = [status for slot in kept if slot not in moving and (status := slots.memory_of(slot))]
    waits = [moment for status in remembered if (moment := slots.forgiven_at(status.slot))]
    remembered += [recorded for slot in waiting if slot not in failed and (recorded := slots.recorded(slot))]
    must_record = False
    for slot in [*vacant, *moving, *failed]:
        following = slots.next_attempt(slot)
        status = following.status
        if status.attempt or status.failures:
            remembered.append(status)
        events.extend(following.events)
        if not following.is_recorded:
            must_record = True
        elif status.not_before and now < status.not_before:
            waits.append(status.not_before)
        elif slot not in failed:
            creations.append(Creation(slot, status.attempt, following.because, status.avoid_node))

    return Assignment(
        creations=tuple(creations),
        leaving=(
            *((member, reason) for slot, reason in victims.items() for member in slots.live[slot]),
            *slots.superseded(victims),
            *slots.ended(wanted),
            *slots.lost_and_not_needed(keep_at_most),
        ),
        attempts=tuple(sorted(remembered, key=lambda status: status.slot)),
        events=tuple(events),
        must_record=must_record,
        again_at=earliest(*waits),
    )


def backoff(failures: int) -> timedelta:
    """How long a slot rests after so many failures in a row: 0, 10, 20, 40 … 300 s."""
    if failures <= 0:
        return timedelta()
    return min(FIRST_BACKOFF * (1 << min(failures - 1, 16)), LONGEST_BACKOFF)


class _Slots:
    """One revision's replicas by slot, with what status remembers of each."""

    def __init__(
        self,
        members: Sequence[Member],
        service: str,
        revision: Revision,
        attempts: Sequence[AttemptStatus],
        taken_names: AbstractSet[str],
        now: datetime,
        is_over: Callable[[Member], bool],
    ) -> None:
        self._service, self._revision, self._taken, self._now = service, revision, taken_names, now
        self._is_over = is_over
        self._recorded = {status.slot: status for status in attempts if status.revision == revision.hash}
        self.all: dict[int, list[Member]] = {}
        for member in sorted(members, key=lambda one: (one.replica.slot, one.replica.attempt)):
            self.all.setdefault(member.replica.slot, []).append(member)
        self.live = {
            slot: live
            for slot, group in self.all.items()
            if (live := [one for one in group if one.is_live and not is_over(one)])
        }

    def surplus(self, keep_at_most: int, nodes: Mapping[str, Node]) -> dict[int, str]:
        """The slots to give up, cheapest first, each with the reason."""
        excess = len(self.live) - keep_at_most
        if excess <= 0:
            return {}

        def cost(slot: int) -> tuple[bool, int, bool, int, float, float, str]:
            return max(cheapest_to_lose(member, nodes) for member in self.live[slot])

        ranked = sorted(self.live, key=cost)
        return {slot: f"{SCALING_DOWN}, {_why_cheapest(self.live[slot])}" for slot in ranked[:excess]}

    def vacant(self, wanted: int) -> list[int]:
        """The slots to fill: first those whose replica failed, so that their backoff counts, then free numbers."""
        if wanted <= 0:
            return []
        lost = [
            slot for slot, group in self.all.items() if slot not in self.live and self._is_to_be_refilled(slot, group)
        ]
        recorded = [slot for slot in self._recorded if slot not in self.all]
        first = sorted({*lost, *recorded})
        free = (slot for slot in count() if slot not in self.all and slot not in self._recorded)
        return [*first, *(next(free) for _ in range(wanted - len(first)))][:wanted]

    def _is_to_be_refilled(self, slot: int, group: Sequence[Member]) -> bool:
        """Whether the slot's last replica ended by itself, or is replaced: then the slot's next attempt is created."""
        last, recorded = group[-1].replica, self._recorded.get(slot)
        return last.state != STATE_DRAINING or (recorded is not None and recorded.attempt > last.attempt)

    def recorded(self, slot: int) -> AttemptStatus | None:
        """The slot's entry in status."""
        return self._recorded.get(slot)

    def has_failed(self, slot: int) -> bool:
        """Whether the slot's last replica is over without our asking."""
        group = self.all.get(slot, [])
        return bool(group) and self._is_over(group[-1])

    def should_move(self, slot: int) -> bool:
        """Whether the slot's only replica is to be replaced although it may serve."""
        return len(self.live[slot]) == 1 and bool(self.live[slot][0].leaves)

    def end_of_node(self, slot: int) -> tuple[bool, datetime | None]:
        """Sort key of the replicas to be replaced: those whose nodes go soonest come first."""
        ends_at = self.live[slot][0].ends_at
        return ends_at is None, ends_at

    def next_attempt(self, slot: int) -> _Next:
        """Which attempt this slot needs next; counting it up happens once, because status then carries it."""
        group = self.all.get(slot, [])
        used = max((member.replica.attempt for member in group), default=-1)
        recorded = self._recorded.get(slot)
        events: list[Event] = []
        because = _why_replaced(group)

        if recorded and recorded.attempt > used:
            status = recorded
        else:
            last = [member for member in group if member.replica.attempt == used]
            has_failed = any(self._is_over(member) for member in last)
            failures = (recorded.failures if recorded else 0) + has_failed
            faulty = next((member.replica for member in last if has_gpu_fault(member)), None)
            pause = backoff(failures) if has_failed else timedelta()
            status = AttemptStatus(
                revision=self._revision.hash,
                slot=slot,
                attempt=used + 1,
                failures=failures,
                not_before=(self._now + pause).replace(microsecond=0) if pause else None,
                avoid_node=faulty.node if faulty else recorded.avoid_node if recorded else "",
                last_end=because[:256],
            )
            if faulty is not None:
                message = f"the GPU of {faulty.name} on node {faulty.node} failed: {_gpu_fault_of(faulty)}"
                events.append(Event(reason=EventReason.GPU_FAULT, action="Replace", message=message, pod=faulty.name))
            if because:
                in_how_long = f" in {int(pause.total_seconds())}s" if pause else ""
                counts = f"attempt {used + 1}, failures in a row: {failures}"
                message = f"slot {slot} gets a new replica{in_how_long} ({counts}): {because}"
                events.append(Event(reason=EventReason.REPLICA_REPLACED, action="Replace", message=message))

        attempt = status.attempt
        while (name := pod_name(self._service, self._revision, slot, attempt)) in self._taken:
            message = f"a pod named {name} belongs to somebody else: taking the next name"
            events.append(Event(reason=EventReason.NAME_CONFLICT, action="Create", message=message))
            attempt += 1
        if attempt != status.attempt:
            status = status.model_copy(update={"attempt": attempt})
        # Attempt 0 needs no record: forgetting it gives the same name again.
        is_recorded = attempt == 0 or (recorded is not None and recorded.attempt == attempt)
        return _Next(status, is_recorded, because, () if is_recorded else tuple(events))

    def memory_of(self, slot: int) -> AttemptStatus | None:
        """The status entry of a slot that has its replica: its recent failures.

        A next attempt that was recorded and is not needed any more is taken back, so that the next failure counts.
        """
        recorded = self._recorded.get(slot)
        if recorded is None or not recorded.failures:
            return None
        forgiven_at = self.forgiven_at(slot)
        if forgiven_at and self._now >= forgiven_at:
            return None
        used = max(member.replica.attempt for member in self.all[slot])
        return (
            recorded if recorded.attempt <= used else recorded.model_copy(update={"attempt": used, "not_before": None})
        )

    def forgiven_at(self, slot: int) -> datetime | None:
        """When the slot's replica will have been ready for so long that its earlier failures no longer count."""
        ready_since = [one.replica.ready_since for one in self.live[slot] if one.is_ready and one.replica.ready_since]
        return min(ready_since) + FORGIVEN_AFTER if ready_since else None

    def superseded(self, victims: Mapping[int, str]) -> list[tuple[Member, str]]:
        """Of several replicas in one slot, those that a ready one replaces."""
        leaving = []
        for slot, group in self.all.items():
            if slot in victims or len(group) == 1:
                continue
            staying = next((one for one in group if one.is_ready and not one.leaves), None)
            if staying is None and group[-1].is_ready:
                staying = group[-1]  # it has to leave its node too, and has moved once already
            if staying is None:
                continue
            others = [one for one in group if one is not staying and (one.is_live or one.stage is Stage.LOST)]
            leaving += [(one, f"{staying.replica.name} serves in its slot") for one in others]
        return leaving

    def ended(self, wanted: Sequence[int]) -> list[tuple[Member, str]]:
        """Replicas that ended. One to be replaced is deleted once status has the next attempt, so it counts once."""
        leaving = []
        for slot, group in self.all.items():
            recorded = self._recorded.get(slot)
            for member in group:
                has_successor = recorded is not None and recorded.attempt > member.replica.attempt
                if self._is_over(member) and (has_successor or slot not in wanted):
                    leaving.append((member, _end_of(member)))
        return leaving

    def lost_and_not_needed(self, wanted: int) -> list[tuple[Member, str]]:
        """Replicas on lost nodes, once as many as are wanted serve elsewhere."""
        ready = sum(any(one.is_ready for one in group) for group in self.live.values())
        if ready < wanted:
            return []
        return [
            (member, "its node does not answer, and enough replicas serve elsewhere")
            for slot, group in self.all.items()
            for member in group
            if member.stage is Stage.LOST and not group[-1].is_ready
        ]


def unhealthy_to_replace(members: Sequence[Member], attempts: Sequence[AttemptStatus]) -> str:
    """The uid of the one unhealthy replica that may be replaced now; empty: none.

    One at a time over the whole service: where many are unhealthy at once, the cause is likely not in them. The next
    one waits until the last replacement serves, or has failed by its place and not by the model: it finds no node, its
    node is lost, its image cannot be pulled there, its GPU failed. A replacement that crashes or does not get ready in
    time holds up the others: its fault is likely to be theirs.
    """
    unhealthy = [one.replica for one in members if one.stage is Stage.UNHEALTHY]
    if not unhealthy:
        return ""
    recorded = {(status.revision, status.slot): status.attempt for status in attempts if status.attempt}
    for replica in unhealthy:
        if recorded.get((replica.revision, replica.slot), 0) > replica.attempt:
            return replica.uid  # begun
    there = {(one.replica.revision, one.replica.slot): one.replica.attempt for one in members}
    waits = any(there.get(slot, -1) < attempt for slot, attempt in recorded.items())
    starts = any(
        one.is_live and not one.is_ready and one.replica.attempt > 0 and not _failed_by_its_place(one)
        for one in members
        if one.stage is not Stage.UNHEALTHY
    )
    drains = any(one.stage is Stage.DRAINING and UNHEALTHY_SINCE in one.replica.drain_reason for one in members)
    if waits or starts or drains:
        return ""
    return min(unhealthy, key=lambda one: (one.unready_since or one.created_at, one.name)).uid


def _failed_by_its_place(member: Member) -> bool:
    """Whether a replacement does not start for a reason that another place would not have."""
    return member.stage in (Stage.UNSCHEDULABLE, Stage.IMAGE_ERROR) or has_gpu_fault(member)


def _is_over(member: Member, *, unhealthy: str, replace_broken: bool) -> bool:
    """Ended, or in a state that waiting does not improve: its slot gets another replica."""
    if member.stage is Stage.DEAD:
        return True
    if member.stage is Stage.CRASHING and member.replica.restarts >= RESTARTS_UNTIL_REPLACED:
        return True
    if member.stage is Stage.UNHEALTHY:
        return member.replica.uid == unhealthy
    if has_gpu_fault(member):
        return True
    if member.stage is Stage.OVERDUE and member.replica.claimed_at is not None:
        return True  # the kubelet starts others over; the startup probe of a claimed pod has no end
    return replace_broken and member.stage.is_broken


def has_gpu_fault(member: Member) -> bool:
    """Whether the server ended because its GPU failed, and is not ready again: the same GPU is not tried once more."""
    is_starting_over = member.stage in (Stage.CRASHING, Stage.LOADING)
    return is_starting_over and member.replica.termination_message.startswith(names.WORD_GPU_FAULT)


def _gpu_fault_of(replica: Replica) -> str:
    return replica.termination_message.removeprefix(names.WORD_GPU_FAULT)


def _why_replaced(group: Sequence[Member]) -> str:
    return _end_of(group[-1]) if group else ""


def _end_of(member: Member) -> str:
    replica = member.replica
    if member.stage is Stage.DEAD:
        detail = replica.phase_reason or replica.last_exit or replica.phase
        return f"{replica.name} has ended ({detail})"
    if has_gpu_fault(member):
        return f"the GPU of {replica.name} on node {replica.node} failed: {_gpu_fault_of(replica)}"
    if member.stage is Stage.CRASHING:
        last = f", last with {replica.last_exit}" if replica.last_exit else ""
        return f"{replica.name} crashed {words.count(replica.restarts, 'time')}{last}"
    if member.stage is Stage.UNHEALTHY:
        return f"{replica.name} {UNHEALTHY_SINCE} {replica.unready_since or replica.created_at:%H:%M:%S} UTC"
    if member.is_ready:
        return f"{replica.name} is replaced: {member.leaves}"
    return describe_stage(member)


def _why_cheapest(group: Sequence[Member]) -> str:
    member = group[-1]
    if not member.is_ready:
        return f"because {describe_stage(member)}"
    if member.replica.sample is None:
        return "and it does not say what it serves"
    return f"and it serves the fewest requests ({member.replica.sample.requests})"
