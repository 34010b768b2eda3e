"""The laws that hold at every step of a simulated cluster, whatever happens to it."""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from slipway_api import names
from slipway_api.conditions import ConditionType, Reason, find_condition
from slipway_api.rollout_spec import RolloutStrategy
from slipway_operator.core.actions import DrainPod
from slipway_operator.core.health import GONE_AFTER
from slipway_operator.core.observed import Observed
from slipway_operator.core.service.plan import Plan, plan
from slipway_operator.core.service.replicas.assign import SCALING_DOWN
from slipway_operator.core.service.replicas.drain import GRACE_AFTER_DRAIN_SECONDS
from slipway_operator.core.service.status.invalid import ADVICE
from tests.builders import UID

if TYPE_CHECKING:
    from tests.operator.core.simulated_cluster import SimulatedCluster
    from tests.operator.core.simulated_pod import SimulatedPod


def check_slots(world: "SimulatedCluster") -> None:
    """At most two live replicas on a slot, and one where nothing was taken away or moved.

    A replica on a silent node does not count: its slot gets another one, and that may be lost or moved in its turn.
    """
    if world.service is None:
        return
    slots: dict[tuple[str, int], list[SimulatedPod]] = {}
    for pod in world.live:
        if (node := world.nodes.get(pod.replica.node)) is not None and not node.ready:
            continue
        slots.setdefault((pod.replica.revision, pod.replica.slot), []).append(pod)
    counts = {slot: len(pods) for slot, pods in slots.items()}
    assert all(count <= 2 for count in counts.values()), f"a slot has more than two live replicas: {counts}"
    if not world.faults and not world.was_cordoned:
        assert all(count == 1 for count in counts.values()), f"two live replicas on one slot: {counts}"


def check_doubles_end(world: "SimulatedCluster") -> None:
    """A slot has two live replicas for no longer than one may take to start and the other to drain.

    A replica that started and stands still is told from one that starts after replaceAfterUnhealthySeconds.
    The time of a replica that waits for a node, whose node is silent, or that was disturbed begins again; and while no
    more are ready than the service needs, both may stay.
    """
    if world.service is None:
        return
    spec = world.planned_service.spec
    limit = timedelta(
        seconds=spec.runtime.startup_timeout_seconds
        + spec.availability.replace_after_unhealthy_seconds
        + spec.drain.timeout_seconds
        + GRACE_AFTER_DRAIN_SECONDS
        + 2 * world.cache_lag
    )
    slots: dict[tuple[str, int], list[SimulatedPod]] = {}
    for pod in world.live:
        slots.setdefault((pod.replica.revision, pod.replica.slot), []).append(pod)
    doubled = {slot: pods for slot, pods in slots.items() if len(pods) > 1}
    is_short = len(world.ready) <= world.desired - spec.rollout.rolling_update.max_unavailable
    known = {} if is_short else world.doubled_since
    world.doubled_since = {slot: known.get(slot, world.now) for slot in doubled}
    for slot, pods in doubled.items():
        since = max(world.doubled_since[slot], *(_start_begins(world, pod) for pod in pods))
        assert world.now <= since + limit, f"two live replicas on {slot} since {since}: {world.log[-20:]}"


def _start_begins(world: "SimulatedCluster", pod: "SimulatedPod") -> datetime:
    node = world.nodes.get(pod.replica.node)
    if node is None or not node.ready:
        return world.now
    moments = (pod.replica.scheduled_at, node.ready_since, pod.disturbed_until)
    return max(moment for moment in moments if moment is not None)


def check_victims(made: Plan, observed: Observed) -> None:
    """One decision asks at most one replica to go, while enough others serve; what goes with its node aside."""
    if observed.service.is_being_deleted:
        return
    ending = {one.uid for one in observed.replicas if (node := observed.nodes.get(one.node)) and node.notice}
    victims = [one for one in made.actions if isinstance(one, DrainPod) and not one.marked and one.uid not in ending]
    assert len(victims) <= 1, f"more than one victim: {victims}"
    serving = {
        one.uid
        for one in observed.replicas
        if one.ready and one.state == names.STATE_SERVING and one.deleted_at is None and one.owner_uid == UID
    }
    if observed.service.spec.rollout.strategy is RolloutStrategy.RECREATE:
        return  # it has no spare GPU: all go before the new ones start
    status, strategy = observed.service.status, observed.service.spec.rollout.strategy
    splits = strategy in (RolloutStrategy.CANARY, RolloutStrategy.BLUE_GREEN) and status.canary is not None
    wants_any = bool(made.status.desired_replicas)  # a suspended service lets the last one go too
    if victims and victims[0].uid in serving and splits and wants_any:
        (victim,) = [one for one in observed.replicas if one.uid == victims[0].uid]
        left = [one for one in observed.replicas if one.uid in serving and one.revision == victim.revision]
        weight = next((one.weight for one in status.revisions if one.hash == victim.revision), 0)
        assert len(left) > 1 or not weight, f"{victim.name} is the last of a revision that gets {weight} %"
    if victims and victims[0].uid in serving:
        least = (made.status.desired_replicas or 0) - observed.service.spec.rollout.rolling_update.max_unavailable
        assert len(serving) - 1 >= least, f"{victims[0]} was still needed"


def _is_left_alone(made: Plan) -> bool:
    """Whether the plan changes nothing, because the spec has a fault."""
    stalled = find_condition(made.status.conditions, ConditionType.STALLED) if made.status is not None else None
    return stalled is not None and stalled.message.endswith(ADVICE)


def check_weights(made: Plan, observed: Observed) -> None:
    """The traffic is split whole; nothing goes to a revision without ready replicas while another may serve.

    A revision that failed as canary gets nothing as soon as another one that had traffic is ready.
    """
    if observed.service.is_being_deleted or made.status is None or _is_left_alone(made):
        return
    before = {one.hash: one.weight for one in observed.service.status.revisions}
    after = made.status
    assert sum(one.weight for one in after.revisions) == 100, after.revisions
    ready = {one.hash: one.ready for one in after.revisions}
    current = observed.service.status.current_revision
    for one in after.revisions:
        if one.weight and not one.ready:
            serving = [hash for hash, count in ready.items() if count and (before.get(hash) or hash == current)]
            assert not serving, f"{one.hash} has no ready replica and {one.weight} %, while {serving} could serve"
    failed = after.failed_revision
    strategy = observed.service.spec.rollout.strategy
    if failed and failed != current and strategy in (RolloutStrategy.CANARY, RolloutStrategy.BLUE_GREEN):
        weight = next((one.weight for one in after.revisions if one.hash == failed), 0)
        assert not (weight and ready.get(current)), f"the failed revision {failed} gets {weight} %"
        assert not (weight and not before.get(failed)), f"the failed revision {failed} gets traffic again"
    canary = after.canary
    is_held = any(one.reason == Reason.REVISION_MISSING for one in after.conditions)  # then it keeps the last weight
    if strategy is RolloutStrategy.CANARY and canary and canary.weight and not is_held:
        assert ready.get(after.update_revision), "a weight without a ready canary"


def check_words(made: Plan, observed: Observed) -> None:
    """Conditions and events speak of a canary only if the strategy is Canary; a verdict of before may stay."""
    if made.status is None or observed.service.spec.rollout.strategy is RolloutStrategy.CANARY:
        return
    before = {one.type for one in observed.service.status.conditions}
    new = [one for one in made.status.conditions if one.type not in before or one.reason == Reason.ROLLED_BACK]
    told = [f"{one.type} {one.message}" for one in new]
    told += [f"{event.reason.value} {event.message}" for event in made.events]
    assert not [one for one in told if "canary" in one.lower()], "no canary is rolled out"


def check_records(made: Plan, observed: Observed) -> None:
    """Without the record of the revision that served last, nothing takes its place unless a person promotes it."""
    before = observed.service.status
    if observed.service.is_being_deleted or made.status is None or _is_left_alone(made):
        return
    served = {one.hash for one in before.revisions if one.served}
    stored = {one.hash for one in observed.revisions}
    update = made.status.update_revision
    is_promoted = observed.service.metadata.annotations.get(names.ANNOTATION_PROMOTE) == update
    is_asked_back = bool(observed.service.metadata.annotations.get(names.ANNOTATION_ROLLBACK_TO))
    is_missing = before.current_revision in served and before.current_revision not in stored
    if is_missing and update != before.current_revision and not is_promoted and not is_asked_back:
        assert made.status.current_revision == before.current_revision, "a first start, although a revision has served"
        stalled = [one for one in made.status.conditions if one.type == "Stalled"]
        assert [one.reason for one in stalled] == [Reason.REVISION_MISSING]
        weights = {one.hash: one.weight for one in before.revisions}
        given = [one.hash for one in made.status.revisions if one.weight and not weights.get(one.hash)]
        is_split = observed.service.spec.rollout.strategy in (RolloutStrategy.CANARY, RolloutStrategy.BLUE_GREEN)
        assert not (is_split and update in given and not (before.canary and before.canary.weight)), "a gate opened"


def check_total(world: "SimulatedCluster") -> None:
    """What we start fits into the surge, with those that drain; what is on a lost node is no use to anybody."""
    assert world.service is not None
    here = [
        pod
        for pod in world.pods.values()
        if (node := world.nodes.get(pod.replica.node)) is None or (node.ready and node.notice is None)
    ]
    draining = [
        pod
        for pod in here
        if pod.replica.state == names.STATE_DRAINING
        and pod.replica.phase not in ("Failed", "Succeeded")  # what has ended holds no GPU, drained or not
        and not pod.replica.drain_reason.startswith(SCALING_DOWN)
        and not (pod.replica.deleted_at and world.now >= pod.replica.deleted_at + GONE_AFTER)
    ]
    live = [pod for pod in here if pod.is_live]
    most = world.desired + world.planned_service.spec.rollout.rolling_update.max_surge
    assert len(live) + len(draining) <= most, f"{len(live)} live and {len(draining)} draining: more than {most}"


def check_refusals_change_no_other_decision(made: Plan, observed: Observed, now: datetime) -> None:
    """A refused write is reported, and what a plan does about everything else does not depend on it.

    Except the number of replicas of an autoscaled service, which asks for no more while a pod is refused.
    """
    if not observed.failures or made.status is None:
        return
    unaware = plan(replace(observed, failures=()), now)
    if unaware.status is None or made.status.desired_replicas != unaware.status.desired_replicas:
        assert observed.service.spec.autoscaling is not None, "a refusal changed a number that the spec fixes"
        return
    assert made.actions == unaware.actions, "a refusal changed a decision"
