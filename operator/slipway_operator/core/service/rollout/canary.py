"""Moves a canary from step to step: mirrored requests, weights, pauses, and the analysis that may end it. Pure.

A step is done, and the next one begins, when:

| step          | done when                                                                         |
|---------------|-----------------------------------------------------------------------------------|
| mirrorPercent | one canary is ready; the gateway copies requests until the first setWeight        |
| setWeight     | as many canaries are ready as the weight takes, and the weight is given           |
| pauseSeconds  | so long ago it began, and the canaries are ready                                  |
| analyze       | every metric passes, at the earliest intervalSeconds after it began               |

From the first weight on, a failed comparison counts in every step, at most once in intervalSeconds; after failureLimit
of them the revision has failed. What is not known holds the step: it never goes on without a verdict.

Replicas follow the weight that is asked for, traffic follows the replicas that are ready:

    D=4, setWeight 50:  oooo+n (25 % of the traffic) -> ooo~+n -> ooo+nn (50 %) -> oo~+nn -> oo+nn
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from slipway_api.conditions import ConditionStatus, EventReason, Reason
from slipway_api.inference_status import CanaryMetricStatus, CanaryStatus
from slipway_api.rollout_spec import Canary, CanaryStep
from slipway_operator.core import words
from slipway_operator.core.actions import Event
from slipway_operator.core.observed import Outcomes, OutcomesSince
from slipway_operator.core.service.rollout import analysis
from slipway_operator.core.service.rollout.analysis import Verdict

CanaryCondition = tuple[ConditionStatus, Reason, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a rollout is after this pass."""

    status: CanaryStatus | None = None
    """For status.canary; None: nothing is remembered of this rollout."""
    mirror_percent: int = 0
    condition: CanaryCondition | None = None
    """CanaryHealthy; None: this rollout has none."""
    events: tuple[Event, ...] = ()
    failed_because: str = ""
    """Why the revision has failed in this pass."""
    holds: str = ""
    """What the rollout waits for, where that is not a replica; then time without progress is no failure."""
    again_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """Ready replicas of both revisions, and how many are desired in all."""

    desired: int
    canary: int
    stable: int


def begin(now: datetime) -> CanaryStatus:
    """The status of a canary that begins now."""
    return CanaryStatus(started_time=now.replace(microsecond=0))


def asked_weight(canary: Canary, step: int) -> int:
    """The last weight up to this step; 100 after the last step."""
    if step >= len(canary.steps):
        return 100
    return next((one.set_weight for one in reversed(canary.steps[: step + 1]) if one.set_weight), 0)


def replicas_for(weight: int, desired: int) -> tuple[int, int]:
    """Canary and stable replicas for a weight: together at most one more than desired.

    5 % of 3 → 1 and 3; 50 % of 3 → 2 and 2; 100 % of 3 → 3 and 0; 0 % of 3 → 1 and 3.
    """
    canary = min(desired, max(1, -(-desired * weight // 100)))
    return canary, desired - desired * weight // 100


def given_weight(asked: int, replicas: Replicas) -> int:
    """The weight that the ready canaries can carry: no more than their share of the desired replicas."""
    if not replicas.desired:
        return 0
    return min(asked, 100 * replicas.canary // replicas.desired)


def advance(
    canary: Canary,
    before: CanaryStatus,
    *,
    revision: str,
    stable: str,
    replicas: Replicas,
    outcomes_since: OutcomesSince | None,
    paused_by: str,
    is_promoted: bool,
    now: datetime,
) -> Progress:
    """Take the steps that are done. `revision` and `stable` are the hashes of the new and the old revision; `paused_by`
    says what holds the canary where it is, empty: nothing does."""
    steps, count = canary.steps, len(canary.steps)
    if before.step > count or (is_promoted and before.step < count):
        before = _enter(before, count, now)
        return _finish(canary, before, revision, replicas, [_promoted(revision, "by the annotation")])
    if before.step == count:
        return _finish(canary, before, revision, replicas, [])

    after, verdict, events = _look(canary, before, revision, stable, outcomes_since, now)
    if after.failures >= canary.analysis.failure_limit:
        why = f"step {after.step + 1} of {count}: {analysis.describe(after.metrics, canary.analysis)}"
        return Progress(status=after.model_copy(update={"weight": 0}), events=tuple(events), failed_because=why)
    while not paused_by and after.step < count and _is_done(canary, after, verdict, replicas, now):
        done = f"step {after.step + 1} of {count} of revision {revision} is done: {_describe(steps[after.step])}"
        events.append(Event(reason=EventReason.CANARY_STEP_COMPLETED, action="Rollout", message=done))
        after, verdict = _enter(after, after.step + 1, now), None
    if after.step == count:
        return _finish(canary, after, revision, replicas, [*events, _promoted(revision, f"after {count} steps")])

    weight = given_weight(asked_weight(canary, after.step), replicas)
    after = after.model_copy(update={"weight": weight})
    is_as_asked = weight == asked_weight(canary, after.step) and replicas.canary > 0
    return Progress(
        status=after,
        mirror_percent=_mirror_percent(steps, after.step) if replicas.canary else 0,
        condition=_condition(canary, after, verdict, outcomes_since),
        events=tuple(events),
        holds=_what_holds(canary, after, paused_by) if is_as_asked or paused_by else "",
        again_at=_again_at(canary, after, now),
    )


# --- steps ------------------------------------------------------------------------------------------------------------


def _enter(status: CanaryStatus, step: int, now: datetime) -> CanaryStatus:
    fresh: Mapping[str, object] = {
        "step": step,
        "started_time": now.replace(microsecond=0),
        "failures": 0,
        "failed_time": None,
        "metrics": (),
    }
    return status.model_copy(update=fresh)


def _is_done(canary: Canary, status: CanaryStatus, verdict: Verdict | None, replicas: Replicas, now: datetime) -> bool:
    step, asked = canary.steps[status.step], asked_weight(canary, status.step)
    if not replicas.canary or given_weight(asked, replicas) < asked:
        return False
    if step.pause_seconds is not None:
        return now >= _started(status, now) + timedelta(seconds=step.pause_seconds)
    if step.analyze is not None:
        return verdict is Verdict.PASSED
    return True


def _started(status: CanaryStatus, now: datetime) -> datetime:
    return status.started_time or now


def _mirror_percent(steps: Sequence[CanaryStep], step: int) -> int:
    reached = steps[: step + 1]
    if any(one.set_weight for one in reached):
        return 0
    return next((one.mirror_percent for one in reversed(reached) if one.mirror_percent is not None), 0)


def _describe(step: CanaryStep) -> str:
    if step.mirror_percent is not None:
        return f"mirrorPercent {step.mirror_percent}"
    if step.set_weight is not None:
        return f"setWeight {step.set_weight}"
    return "analyze" if step.analyze is not None else f"pauseSeconds {step.pause_seconds}"


def _finish(canary: Canary, status: CanaryStatus, revision: str, replicas: Replicas, events: list[Event]) -> Progress:
    """All steps are done: all traffic goes to the new revision as far as its replicas carry it."""
    status = status.model_copy(update={"weight": given_weight(100, replicas)})
    message = f"revision {revision} is promoted: all {len(canary.steps)} steps are done or skipped"
    return Progress(status=status, condition=(ConditionStatus.TRUE, Reason.PASSED, message), events=tuple(events))


def _promoted(revision: str, how: str) -> Event:
    message = f"revision {revision} is promoted {how}: it gets all the traffic"
    return Event(reason=EventReason.CANARY_PROMOTED, action="Rollout", message=message)


# --- analysis ---------------------------------------------------------------------------------------------------------


def _look(
    canary: Canary,
    status: CanaryStatus,
    revision: str,
    stable: str,
    outcomes_since: OutcomesSince | None,
    now: datetime,
) -> tuple[CanaryStatus, Verdict | None, list[Event]]:
    """Compare, if it is time. Returns the verdict of an analyze step, None before its first interval is over."""
    rules = canary.analysis
    is_analyze = canary.steps[status.step].analyze is not None
    interval = timedelta(seconds=rules.interval_seconds)
    begun = status.started_time
    if not (status.weight or is_analyze) or not rules.metrics or begun is None or now < begun + interval:
        return status, None, []
    if outcomes_since is None:
        return status, Verdict.INCONCLUSIVE, []
    outcomes = outcomes_since(begun)
    comparisons = analysis.compare(
        rules, stable=outcomes.get(stable, Outcomes()), canary=outcomes.get(revision, Outcomes())
    )
    verdict = analysis.overall(comparisons)
    metrics = tuple(one.to_status() for one in comparisons)
    if verdict is Verdict.FAILED and (status.failed_time is None or now >= status.failed_time + interval):
        failures = status.failures + 1
        numbers = analysis.describe(metrics, rules)
        message = f"analysis of revision {revision} failed ({failures} of {rules.failure_limit}): {numbers}"
        event = Event(reason=EventReason.CANARY_ANALYSIS_FAILED, action="Analyze", message=message)
        counted = {"failures": failures, "failed_time": now.replace(microsecond=0), "metrics": metrics}
        return status.model_copy(update=counted), verdict, [event]
    if is_analyze and not status.failures and _has_moved(status.metrics, metrics):
        status = status.model_copy(update={"metrics": metrics})
    return status, verdict, []


def _has_moved(before: Sequence[CanaryMetricStatus], after: Sequence[CanaryMetricStatus]) -> bool:
    """Whether status is written for these numbers: a verdict is another, or there are twice as many requests."""
    if [(one.type, one.verdict) for one in before] != [(one.type, one.verdict) for one in after]:
        return True
    return any(now.requests >= 2 * max(1, was.requests) for was, now in zip(before, after, strict=True))


def _condition(
    canary: Canary, status: CanaryStatus, verdict: Verdict | None, outcomes_since: OutcomesSince | None
) -> CanaryCondition:
    count, step = len(canary.steps), canary.steps[status.step]
    where = f"step {status.step + 1} of {count} ({_describe(step)})"
    numbers = analysis.describe(status.metrics, canary.analysis)
    if status.failures:
        limit = canary.analysis.failure_limit
        return (
            ConditionStatus.FALSE,
            Reason.FAILED,
            f"{where}: {status.failures} of {words.count(limit, 'failure')}: {numbers}",
        )
    if step.analyze is not None and verdict is Verdict.INCONCLUSIVE:
        why = numbers if outcomes_since and numbers else "no gateway has reported outcomes of requests"
        advice = "it holds until there is a verdict; promote or abort it to end the wait"
        return ConditionStatus.UNKNOWN, Reason.INCONCLUSIVE, f"{where}: {why}; {advice}"
    return ConditionStatus.UNKNOWN, Reason.ANALYZING, f"{where} since {status.started_time:%H:%M:%S} UTC"


def _what_holds(canary: Canary, status: CanaryStatus, paused_by: str) -> str:
    step = canary.steps[status.step]
    where = f"step {status.step + 1} of {len(canary.steps)} ({_describe(step)})"
    if paused_by:
        return f"paused by {paused_by} at {where}"
    if step.pause_seconds is not None or step.analyze is not None:
        return where
    return ""


def _again_at(canary: Canary, status: CanaryStatus, now: datetime) -> datetime | None:
    step, started = canary.steps[status.step], _started(status, now)
    moments = []
    if step.pause_seconds is not None:
        moments.append(started + timedelta(seconds=step.pause_seconds))
    if canary.analysis.metrics and (status.weight or step.analyze is not None):
        interval = timedelta(seconds=canary.analysis.interval_seconds)
        moments.append(max(started, now) + interval if now >= started + interval else started + interval)
    return min((moment for moment in moments if moment > now), default=None)
