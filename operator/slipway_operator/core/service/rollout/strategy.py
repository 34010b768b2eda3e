"""Decides how far the rollout is, by its strategy, and which replicas and weights follow from that. Pure.

| strategy      | replicas                                               | traffic                            |
|---------------|--------------------------------------------------------|------------------------------------|
| RollingUpdate | one by one, within maxSurge and maxUnavailable         | the share of ready replicas        |
| Canary        | new ones follow the weight, stable ones shrink         | the weight of the step (`canary`)  |
| BlueGreen     | a second full set; the first leaves KEEP_BLUE later    | all at once, when the set is ready |
| Recreate      | all old ones drain, then the new ones start            | whichever has ready replicas       |

Whatever the strategy, a new revision gets no traffic before its gates are passed. Replicas follow the step that status
has recorded, weights the step of this pass: so traffic turns back in the pass that decides, and no stable replica
leaves before the gateways could read that its traffic is elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from slipway_api.conditions import ConditionStatus, EventReason, Reason
from slipway_api.inference_service import InferenceService
from slipway_api.inference_status import CanaryStatus
from slipway_api.rollout_spec import Rollout, RolloutStrategy
from slipway_api.words import count
from slipway_operator.core.actions import AskSmokeTests, Event, earliest
from slipway_operator.core.health import Member
from slipway_operator.core.observed import Observed
from slipway_operator.core.service.rollout import canary
from slipway_operator.core.service.rollout import steps as rollout
from slipway_operator.core.service.rollout.canary import Progress, Replicas
from slipway_operator.core.service.rollout.gates import GATE_PASSED, GateState, check_gates, describe_gates, is_gated
from slipway_operator.core.service.rollout.reporting import find_verdict, gates_passed_event
from slipway_operator.core.service.rollout.steps import Revisions, RolloutStep
from slipway_operator.core.service.rollout.target import Target
from slipway_operator.core.service.status.slo_status import exhausted_budget

KEEP_BLUE: Final = timedelta(seconds=30)  # the old set serves again at once where the new one fails in this time


@dataclass(frozen=True, slots=True, kw_only=True)
class Rolling:
    """The rollout of this pass."""

    step: RolloutStep
    progress: Progress
    failed_revision: str = ""
    """For status.failedRevision."""
    actions: tuple[AskSmokeTests, ...] = ()


def decide_rollout(
    observed: Observed, members: Sequence[Member], target: Target, *, desired: int, now: datetime
) -> Rolling:
    """Decide the rollout of this pass."""
    between = Revisions(
        update=target.revision.hash,
        stable=observed.service.status.current_revision or target.revision.hash,
        is_stored=target.stable is not None,
    )
    if target.held:
        return _hold(observed, members, target, between, desired, now)
    if target.stable is None or target.is_rollback:
        return _roll_without_tests(observed, members, target, between, desired)
    return _roll_with_tests(observed, members, target, between, desired, now)


def _roll_without_tests(
    observed: Observed, members: Sequence[Member], target: Target, between: Revisions, desired: int
) -> Rolling:
    """A first start, the way back to a revision that served, or nothing to roll."""
    step = _common_step(observed, members, between, desired)
    status, strategy = observed.service.status, observed.service.spec.rollout.strategy
    recorded = dict.fromkeys(step.weights, 0) | _recorded_weights(observed)
    had_all = not any(weight for hash, weight in recorded.items() if hash != between.update)
    is_return = status.current_revision == between.update
    if is_return and (strategy in (RolloutStrategy.CANARY, RolloutStrategy.BLUE_GREEN) or had_all):
        step = replace(step, weights=rollout.returned_weights(members, recorded, target=between.update))
    condition = None
    if target.is_rollback:
        was = find_verdict(status.conditions)
        told = was.message if was and was.reason == Reason.ROLLED_BACK and status.failed_revision else ""
        sentence = told or _rolled_back(target, target.revision.hash, target.reason or "it has failed")
        condition = (ConditionStatus.FALSE, Reason.ROLLED_BACK, sentence)
    return Rolling(step=step, progress=Progress(condition=condition), failed_revision=target.failed)


def _roll_with_tests(
    observed: Observed, members: Sequence[Member], target: Target, between: Revisions, desired: int, now: datetime
) -> Rolling:
    """The way to a new revision, which may fail its gates or its analysis."""
    service = observed.service
    spec, status = service.spec.rollout, service.status
    recorded = status.canary if status.update_revision == target.asked.hash else None
    new = [one for one in members if one.replica.revision == between.update]
    pause = "" if target.is_promoted else paused_by(service)
    if recorded is None and pause and not any(one.is_live for one in new):
        return _not_begun(observed, members, target, between, desired, pause)
    before = recorded or canary.begin(now)
    gate = check_gates(
        spec.gates,
        new,
        stable_members=[one for one in members if one.replica.revision == between.stable],
        revision=between.update,
        model=target.revision.apply_to(service).served_name,
        stable_model=target.stable.apply_to(service).served_name if target.stable else "",
        was_passed=before.gate == GATE_PASSED or target.is_promoted,
        results=observed.smoke_results,
        now=now,
    )
    events: tuple[Event, ...] = ()
    if gate.has_just_passed:
        before = before.model_copy(update={"gate": GATE_PASSED, "started_time": now.replace(microsecond=0)})
        message = f"revision {between.update} has passed {describe_gates(spec.gates)}"
        message += f": {gate.verdict}" if gate.verdict else ""
        events = (Event(reason=gates_passed_event(spec.strategy), action="Rollout", message=message),)

    replicas = Replicas(
        desired=desired,
        canary=sum(one.is_ready for one in new),
        stable=sum(one.is_ready and one.replica.revision == between.stable for one in members),
    )
    if not gate.is_passed:
        progress = _waits_for_gates(before, gate, spec, replicas)
    elif spec.strategy is RolloutStrategy.CANARY and spec.canary:
        progress = canary.advance(
            spec.canary,
            before,
            revision=between.update,
            stable=between.stable,
            replicas=replicas,
            outcomes_since=observed.outcomes_since,
            paused_by=paused_by(service),
            is_promoted=target.is_promoted,
            now=now,
        )
    elif spec.strategy is RolloutStrategy.BLUE_GREEN:
        progress = _advance_blue_green(before, between, replicas, held_by=pause, now=now)
    else:
        progress = _passed_gates(before, spec, between, pause)

    step = _step_of(observed, members, target, between, before, progress, desired, gate, now)
    if spec.strategy in (RolloutStrategy.ROLLING_UPDATE, RolloutStrategy.RECREATE) and progress.status:
        weight = step.weights.get(between.update, 0)
        progress = replace(progress, status=progress.status.model_copy(update={"weight": weight}))
    failed = target.failed
    if progress.failed_because:
        failed = target.asked.hash
        sentence = _rolled_back(target, between.stable, progress.failed_because)
        progress = replace(progress, condition=(ConditionStatus.FALSE, Reason.ROLLED_BACK, sentence))
        weights = dict.fromkeys(step.weights, 0) | {one.hash: one.weight for one in status.revisions}
        step = replace(step, weights=rollout.returned_weights(members, weights, target=between.stable))
    elif spec.strategy is RolloutStrategy.ROLLING_UPDATE:
        warm_at = rollout.warm_at(members, between, spec.rolling_update, now)
        if warm_at is not None:
            step = rollout.warming_step(step)
            progress = replace(progress, again_at=earliest(progress.again_at, warm_at))
    progress = replace(progress, events=(*events, *progress.events))
    return Rolling(step=step, progress=progress, failed_revision=failed, actions=gate.actions)


def _hold(
    observed: Observed, members: Sequence[Member], target: Target, between: Revisions, desired: int, now: datetime
) -> Rolling:
    """Keep step, replicas and weights as status has them, and open no gate: a record of a revision is missing.

    Lost replicas of the new revision are started again up to their number at the recorded step. Only a revision that
    has failed, or is not ready, loses its traffic, to the stable replicas that are left.
    """
    spec, status = observed.service.spec.rollout, observed.service.status
    is_same = status.update_revision == target.asked.hash
    recorded = status.canary if is_same else None
    was = find_verdict(status.conditions) if is_same else None
    progress = Progress(
        status=recorded,
        condition=(was.status, Reason(was.reason), was.message) if was else None,
        holds="a record of a revision is missing",
    )
    before = recorded or CanaryStatus()
    gate = GateState(is_passed=not is_gated(spec.gates) or before.gate == GATE_PASSED)
    if between.update == between.stable:
        step = _common_step(observed, members, between, desired)
    else:
        step = _step_of(observed, members, target, between, before, progress, desired, gate, now)
    step = rollout.held_step(step, members, between, has_begun=recorded is not None)
    weights = dict.fromkeys(step.weights, 0) | {one.hash: one.weight for one in status.revisions}
    if target.failed == target.asked.hash:
        step = replace(step, weights=rollout.returned_weights(members, weights, target=between.stable))
    elif not weights.get(between.update):  # also a rolling update gives a new revision no first requests
        trusted = [one for one in members if one.replica.revision != between.update]
        step = replace(step, weights=rollout.weights(trusted, sorted(weights), current=between.stable))
    return Rolling(step=step, progress=progress, failed_revision=target.failed)


def paused_by(service: InferenceService) -> str:
    """What holds new revisions where they are: a person, or an exhausted error budget; empty: nothing does."""
    return service.paused_by or exhausted_budget(service)


# --- replicas and weights ---------------------------------------------------------------------------------------------


def _step_of(
    observed: Observed,
    members: Sequence[Member],
    target: Target,
    between: Revisions,
    before: CanaryStatus,
    progress: Progress,
    desired: int,
    gate: GateState,
    now: datetime,
) -> RolloutStep:
    """Replicas by the recorded step, weights by the step of this pass."""
    spec = observed.service.spec.rollout
    has_split = spec.strategy in (RolloutStrategy.CANARY, RolloutStrategy.BLUE_GREEN)
    if not has_split and (gate.is_passed or spec.strategy is RolloutStrategy.RECREATE):
        step = _common_step(observed, members, between, desired)
        if paused_by(observed.service) and not target.is_promoted:
            step = rollout.paused_step(step, members, between)
        if not gate.is_passed:  # Recreate: nothing else is ready, and still no traffic
            closed = {hash: 100 if hash == between.stable else 0 for hash in step.weights}
            step = replace(step, weights=closed, serves_instead=False)
        return step
    is_finished = False
    if not gate.is_passed:
        has_surge = spec.rolling_update.max_surge > 0
        wanted, stable = min(1, desired), desired if has_surge else max(0, desired - 1)
        if spec.strategy is RolloutStrategy.BLUE_GREEN:
            wanted = desired
    elif spec.strategy is RolloutStrategy.CANARY and spec.canary:
        wanted, stable = canary.replicas_for(canary.asked_weight(spec.canary, before.step), desired)
        is_finished = before.step >= len(spec.canary.steps) and before.weight == 100
    else:
        is_switched = before.step > 0
        is_finished = is_switched and now >= (before.started_time or now) + KEEP_BLUE
        wanted, stable = desired, 0 if is_finished else desired
    if has_split and before.weight < 100:
        stable = max(stable, min(1, desired))  # the last one serves until its traffic is elsewhere
    weight = 0 if progress.failed_because or progress.status is None else progress.status.weight
    return rollout.split_step(
        members,
        revisions=between,
        desired=desired,
        limits=spec.rolling_update,
        nodes=observed.nodes,
        update_wanted=wanted,
        stable_wanted=stable,
        weight=weight,
        recorded=_recorded_weights(observed),
        is_finished=is_finished,
    )


def _recorded_weights(observed: Observed) -> dict[str, int]:
    """Percent of the traffic that each revision had in the status of the previous pass."""
    return {one.hash: one.weight for one in observed.service.status.revisions}


def _common_step(observed: Observed, members: Sequence[Member], between: Revisions, desired: int) -> RolloutStep:
    spec = observed.service.spec.rollout
    has_others = any(one.replica.revision != between.update for one in members)
    if spec.strategy is RolloutStrategy.RECREATE and (has_others or between.stable != between.update):
        return rollout.recreate_step(members, revisions=between, desired=desired, nodes=observed.nodes)
    return rollout.step(members, revisions=between, desired=desired, limits=spec.rolling_update, nodes=observed.nodes)


def _not_begun(
    observed: Observed, members: Sequence[Member], target: Target, between: Revisions, desired: int, pause: str
) -> Rolling:
    """A rollout that is paused before it started: the stable revision serves, and is kept whole."""
    step = rollout.split_step(
        members,
        revisions=between,
        desired=desired,
        limits=observed.service.spec.rollout.rolling_update,
        nodes=observed.nodes,
        update_wanted=0,
        stable_wanted=desired,
        weight=0,
        recorded=_recorded_weights(observed),
        is_finished=False,
    )
    holds = f"paused by {pause} before it started"
    return Rolling(step=step, progress=Progress(holds=holds), failed_revision=target.failed)


# --- progress ---------------------------------------------------------------------------------------------------------


def _waits_for_gates(before: CanaryStatus, gate: GateState, spec: Rollout, replicas: Replicas) -> Progress:
    message = f"{describe_gates(spec.gates)} have to pass before it gets traffic"
    return Progress(
        status=before.model_copy(update={"weight": 0}),
        condition=(ConditionStatus.UNKNOWN, Reason.ANALYZING, message),
        failed_because=gate.failed_because,
        holds="gates" if replicas.canary else "",
        again_at=gate.again_at,
    )


def _passed_gates(before: CanaryStatus, spec: Rollout, between: Revisions, pause: str) -> Progress:
    """RollingUpdate and Recreate after their gates, or without any."""
    has_gates = is_gated(spec.gates)
    message = f"revision {between.update} has passed {describe_gates(spec.gates)}"
    return Progress(
        status=before if has_gates else None,
        condition=(ConditionStatus.TRUE, Reason.PASSED, message) if has_gates else None,
        holds=f"paused by {pause}" if pause else "",
    )


def _advance_blue_green(
    before: CanaryStatus, between: Revisions, replicas: Replicas, *, held_by: str, now: datetime
) -> Progress:
    """Switch all traffic when the second set is ready; `step` counts the switch."""
    is_whole = 0 < replicas.desired <= replicas.canary
    if before.step == 0 and not (is_whole and not held_by):
        ready = count(replicas.desired, "replica of it is", "replicas of it are")
        sentence = f"revision {between.update} gets all traffic in one step when {ready} ready"
        return Progress(
            status=before.model_copy(update={"weight": 0}),
            condition=(ConditionStatus.UNKNOWN, Reason.ANALYZING, sentence),
            holds=f"paused by {held_by} before the switch" if held_by else "",
        )
    events = []
    if before.step == 0:
        before = before.model_copy(update={"step": 1, "started_time": now.replace(microsecond=0)})
        ready = count(replicas.canary, "replica is ready and gets", "replicas are ready and get")
        message = f"revision {between.update} is promoted: {ready} all the traffic"
        events.append(Event(reason=EventReason.ROLLOUT_PROMOTED, action="Rollout", message=message))
    message = f"revision {between.update} is promoted: it has all the traffic"
    return Progress(
        status=before.model_copy(update={"weight": 100 if replicas.canary else 0}),
        condition=(ConditionStatus.TRUE, Reason.PASSED, message),
        events=tuple(events),
        again_at=(before.started_time or now) + KEEP_BLUE,
    )


def _rolled_back(target: Target, to: str, why: str) -> str:
    return f"revision {target.asked.hash} is rolled back to {to}: {why}"
