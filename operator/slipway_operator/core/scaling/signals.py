"""Reads the load of a service from the samples of its replicas, with the autoscaler's rules for what is missing.

All metrics are of the requests themselves: the live share of the KV cache (mean over replicas), the waiting requests
with those that gateways hold, the running requests (sum ÷ replicas), and the time to first token that the gateways saw
(`core.scaling.latency`). CPU, GPU and memory utilization are not among them: a replica that decodes at its best looks
busy to all three.

| replica                       | scaling up  | scaling down | why                                               |
|-------------------------------|-------------|--------------|---------------------------------------------------|
| ready, with a fresh sample    | its value   | its value    |                                                   |
| ready, silent                 | 0           | the target   | a missing value never causes a change             |
| ready, not asked yet          | 0           | the target   | the same, but nothing is wrong: no warning        |
| wanted, not ready yet         | 0           | not counted  | it is coming capacity, not load                   |
| crashing, or past its startup | not counted | not counted  | it may never serve                                |

"Not asked yet" is a replica that became ready a moment ago, or every replica after a change of leader: the new leader
has no samples until its first questions are answered. A silent replica is one that had the time to answer.

A sample from the future (the clock was set back) is as good as one of the same age in the past.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from math import ceil

from slipway_api.autoscaling import Metric, MetricType
from slipway_operator.core.health import Member
from slipway_operator.core.observed import Replica, Sample
from slipway_operator.core.scaling.latency import Latency, replicas_for_latency

TIME_TO_ANSWER = timedelta(seconds=10)  # for the first question to a replica: until then it is not silent
ROUNDING = 1e-9  # 0.8 × 3 / 0.8 is a little more than 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """The load of a service at one moment."""

    metered: tuple[Sample, ...] = ()  # of ready replicas, fresh
    silent: int = 0  # ready replicas without a fresh sample
    unasked: int = 0  # ready replicas whose first answer may still be on its way
    pending: int = 0  # replicas that are wanted and not ready yet
    broken: int = 0  # replicas that may never serve
    held_by_gateways: int = 0  # requests that wait at gateways
    ttft_p95: Latency | None = None  # None: too few requests to tell

    @property
    def ready(self) -> int:
        """Replicas that take requests."""
        return len(self.metered) + self.unmetered

    @property
    def unmetered(self) -> int:
        """Ready replicas whose load is not known."""
        return self.silent + self.unasked

    @property
    def oldest(self) -> datetime | None:
        """When the oldest sample in use was taken."""
        return min((sample.at for sample in self.metered), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One metric over all metered replicas, or over the last requests."""

    type: MetricType
    value: float  # mean per replica; of a latency the percentile in seconds
    target: float
    samples: int  # replicas; of a latency, requests

    @property
    def is_latency(self) -> bool:
        """Whether it is a latency of requests, which says nothing about what fewer replicas could do."""
        return self.type is MetricType.TTFT_P95_SECONDS

    @property
    def ratio(self) -> float:
        """Above 1 asks for more replicas, below 1 for fewer."""
        return self.value / self.target

    def __str__(self) -> str:
        sign = ">" if self.ratio > 1 else "<" if self.ratio < 1 else "="
        return f"{self.type.value} {self.value:.2f} {sign} {self.target:.2f}"


def read(
    members: Sequence[Member],
    *,
    wanted: int,
    slots_in_backoff: int,
    stale_after: timedelta,
    asking_since: datetime | None,
    now: datetime,
) -> Readings:
    """Sorts the replicas by what is known of their load.

    `wanted` is the number that there should be; `asking_since` is when this operator began to ask replicas, None for
    "long ago".
    """
    ready = [member.replica for member in members if member.is_ready]
    fresh = [one.sample for one in ready if one.sample is not None and abs(now - one.sample.at) <= stale_after]
    unasked = sum(_is_unasked(replica, asking_since, now) for replica in ready)
    broken = sum(member.stage.is_broken for member in members) + slots_in_backoff
    return Readings(
        metered=tuple(fresh),
        silent=len(ready) - len(fresh) - unasked,
        unasked=unasked,
        # Counted from what is wanted, not from pods: one that was decided on a moment ago has no pod yet.
        pending=max(0, wanted - len(ready) - broken),
        broken=broken,
    )


def _is_unasked(replica: Replica, asking_since: datetime | None, now: datetime) -> bool:
    moments = [moment for moment in (replica.ready_since, asking_since) if moment is not None]
    return replica.sample is None and bool(moments) and now - max(moments) < TIME_TO_ANSWER


def measure(metric: Metric, readings: Readings) -> Value | None:
    """The metric's value, or None where it cannot be known."""
    target = float(metric.target)
    if metric.type is MetricType.TTFT_P95_SECONDS:
        ttft = readings.ttft_p95
        return Value(type=metric.type, value=ttft.seconds, target=target, samples=ttft.requests) if ttft else None
    if not readings.metered:
        return None
    total = sum(_of(metric.type, sample) for sample in readings.metered)
    if metric.type is MetricType.QUEUE_DEPTH:
        total += readings.held_by_gateways
    samples = len(readings.metered)
    return Value(type=metric.type, value=total / samples, target=target, samples=samples)


def replicas_for(value: Value, readings: Readings, *, current: int, tolerance_up: float, tolerance_down: float) -> int:
    """The number of replicas that brings the metric to its target; `current` where nothing should change.

    2 replicas at 0.93, target 0.80: ratio 1.16 → ceil(1.16 × 2) = 3. With a third one loading: (0.93 + 0.93 + 0) ÷ 3
    = 0.62, which is below the target: what is coming is enough, so nothing changes.
    """
    if value.is_latency:
        return replicas_for_latency(
            value.ratio,
            ready=readings.ready,
            pending=readings.pending,
            broken=readings.broken,
            current=current,
            tolerance_up=tolerance_up,
            tolerance_down=tolerance_down,
        )

    def within_tolerance(ratio: float) -> bool:
        return -tolerance_down - ROUNDING <= ratio - 1 <= tolerance_up + ROUNDING

    if within_tolerance(value.ratio):
        return current
    goes_up = value.ratio > 1
    total, counted = value.value * value.samples, value.samples + readings.unmetered
    if goes_up:
        counted += readings.pending
    else:
        total += value.target * readings.unmetered
    ratio = total / counted / value.target
    if within_tolerance(ratio) or (ratio > 1) != goes_up:
        return current
    wanted = ceil(ratio * counted - ROUNDING)
    if not goes_up:
        return min(current, wanted)
    # A broken replica serves no request, so it is not one of those that are needed. At most one stand-in for each
    # replica that works: a revision that breaks everywhere must not fill the cluster.
    return max(current, wanted + min(readings.broken, readings.ready))


def live_demand(values: Sequence[Value], readings: Readings, *, max_num_seqs: int) -> int:
    """The fewest replicas that carry the present load: every request runs, and no value is above its target.

    This is what is left when replicas are removed one by one until the next removal would be one too many. A replica
    whose load is not known counts as full to its target.
    """
    requests = sum(sample.requests for sample in readings.metered)
    fits = [ceil(requests / max_num_seqs)]
    fits += [ceil(value.value * value.samples / value.target - ROUNDING) for value in values if not value.is_latency]
    return max(fits) + readings.unmetered


def _of(type: MetricType, sample: Sample) -> float:
    if type is MetricType.KV_CACHE_UTILIZATION:
        return sample.kv_usage
    return float(sample.waiting if type is MetricType.QUEUE_DEPTH else sample.running)
