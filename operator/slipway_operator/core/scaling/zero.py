"""Decides when a service has no replicas, and when it has again. Pure.

To zero needs evidence of idleness from all sides, for all of idleSeconds, seen by this leader: every gateway reports,
none holds or has open requests, every ready replica answers that it has none. After a change of leader the count begins
anew, as a window of recommendations does. Where a report is late, the count stands still; where there is none at all,
nothing is ended, and the condition says so.

From zero needs one waiting request at one gateway, or the annotation slipway.dev/wake. No window, no tolerance and no
rate applies: a person waits.

| at         | gateways                         | number             | ScalingActive           |
|------------|----------------------------------|--------------------|-------------------------|
| 1 or more  | idle for idleSeconds             | 0                  | True MetricsFresh       |
| 1 or more  | not heard for UNHEARD_AFTER      | what metrics say   | True MetricsStale       |
| 0          | a request waits, or woken        | 1                  | True MetricsFresh       |
| 0          | nothing waits                    | 0                  | True MetricsFresh       |
| 0          | not heard for UNHEARD_AFTER      | 0                  | False MetricsMissing    |
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from slipway_api import names
from slipway_api.autoscaling import ScaleToZero
from slipway_api.conditions import Reason
from slipway_api.words import count
from slipway_operator.core.actions import earliest
from slipway_operator.core.health import Member
from slipway_operator.core.observed import Demand, PastRecommendation, ScalingMemory
from slipway_operator.core.scaling.autoscaling import Past, Recommendation
from slipway_operator.core.scaling.limits import Bounds
from slipway_operator.core.scaling.signals import Readings

UNHEARD_AFTER: Final = timedelta(seconds=60)  # a gateway that restarts is heard again before
OLDEST_REPORT: Final = timedelta(seconds=90)  # three long polls: whatever it says, a report that old is none


def is_heard(demand: Demand | None, now: datetime) -> bool:
    """Whether every gateway has said lately what is asked of the service."""
    return demand is not None and demand.complete and abs(now - demand.at) <= OLDEST_REPORT


def remember(demand: Demand | None, members: Sequence[Member], before: ScalingMemory, now: datetime) -> ScalingMemory:
    """What this pass adds to the evidence of idleness, and to what is known of the gateways."""
    heard = is_heard(demand, now)
    return replace(
        before,
        quiet_since=_quiet_since(demand, members, before, now),
        unheard_since=None if heard else before.unheard_since or now,
        waiting=demand.waiting_requests if demand is not None else before.waiting,
        refused=demand.refused_requests if demand is not None else before.refused,
    )


def _quiet_since(
    demand: Demand | None, members: Sequence[Member], before: ScalingMemory, now: datetime
) -> datetime | None:
    """Since when this leader knows of no request, and a replica is ready; None: there are some, or nothing is known.

    A replica that was started for requests that gave up meanwhile gets its time too: they are likely to come again.
    """
    samples = [one.replica.sample for one in members if one.is_live and one.replica.sample is not None]
    ready_since = [one.replica.ready_since for one in members if one.is_ready and one.replica.ready_since]
    if (
        not ready_since
        or demand is None
        or demand.open_requests
        or demand.waiting_requests
        or any(one.requests for one in samples)
    ):
        return None
    if not is_heard(demand, now):
        return before.quiet_since
    since = max(before.quiet_since or now, demand.idle_since or min(ready_since), min(ready_since))
    return min(now, since)  # a clock that was set back must not leave a moment ahead of now


def at_zero(
    demand: Demand | None,
    bounds: Bounds,
    past: Past,
    memory: ScalingMemory,
    now: datetime,
    *,
    woken: datetime | None = None,
) -> Recommendation:
    """Decides for a service without replicas; `woken`: since when the annotation slipway.dev/wake asks for one."""
    if demand is not None and demand.waiting_requests:
        requests = count(demand.waiting_requests, "request waits", "requests wait")
        waited = int(demand.longest_wait.total_seconds())
        return Recommendation(
            desired=bounds.floor,
            reason=f"0→{bounds.floor}: {requests} at the gateways, the first for {waited}s",
            recommended=bounds.floor,
            is_activation=True,
            recommendations=(PastRecommendation(now, bounds.floor),),
        )
    if woken is not None:
        return Recommendation(
            desired=bounds.floor,
            reason=f"0→{bounds.floor}: the annotation {names.ANNOTATION_WAKE} asks for it since {woken:%H:%M:%S} UTC",
            recommended=bounds.floor,
            is_activation=True,
            recommendations=(PastRecommendation(now, bounds.floor),),
        )
    hold = Recommendation(desired=0, reason="holding 0: no request waits at a gateway", recommended=0)
    if is_heard(demand, now):
        return hold
    if _is_unheard(past, memory, now):
        reason = "gateways do not report what they hold, so no request can start a replica: holding 0"
        return replace(hold, reason=reason, verdict=Reason.METRICS_MISSING, is_active=False)
    return replace(hold, keeps_condition=True, again_at=_unheard_at(memory))


def down_to_zero(
    rules: ScaleToZero,
    recommendation: Recommendation,
    readings: Readings,
    past: Past,
    memory: ScalingMemory,
    now: datetime,
    *,
    woken: datetime | None = None,
) -> Recommendation:
    """Replaces a recommendation for a service with replicas by zero where nothing has been asked for long enough."""
    if memory.unheard_since is not None:
        if recommendation.verdict is not Reason.METRICS_FRESH:
            return recommendation
        if not _is_unheard(past, memory, now):
            return replace(recommendation, again_at=earliest(recommendation.again_at, _unheard_at(memory)))
        reason = f"gateways do not report what they hold: not scaled to zero; {recommendation.reason}"
        return replace(recommendation, verdict=Reason.METRICS_STALE, reason=reason)
    is_idle = bool(readings.ready) and not readings.unmetered and not any(one.requests for one in readings.metered)
    if memory.quiet_since is None or not is_idle or recommendation.desired > past.current:
        return recommendation
    idle_at = max(memory.quiet_since, woken or memory.quiet_since) + timedelta(seconds=rules.idle_seconds)
    if now < idle_at:
        return replace(recommendation, again_at=earliest(recommendation.again_at, idle_at))
    reason = (
        f"{past.current}→0: no request at the gateways since {memory.quiet_since:%H:%M:%S} UTC, "
        f"{rules.idle_seconds}s ago or more, and none at {readings.ready} of {count(readings.ready, 'pod')}"
    )
    return Recommendation(desired=0, reason=reason, recommended=0, values=recommendation.values, recommendations=())


def _is_unheard(past: Past, memory: ScalingMemory, now: datetime) -> bool:
    """Whether the silence of gateways is to be told: it lasts, or the leader before told it already."""
    was_told = past.verdict in (Reason.METRICS_STALE, Reason.METRICS_MISSING)
    return was_told or (memory.unheard_since is not None and now >= memory.unheard_since + UNHEARD_AFTER)


def _unheard_at(memory: ScalingMemory) -> datetime | None:
    return memory.unheard_since + UNHEARD_AFTER if memory.unheard_since else None
