"""Compares a canary with the stable revision, from the outcomes of requests that the gateways counted. Pure.

| metric    | Failed, by a sequential test                                       | Passed                        |
|-----------|--------------------------------------------------------------------|-------------------------------|
| ErrorRate | its rate is above `max`, and above that of the stable revision     | its rate is not above both    |
| TTFTP95   | more of its requests exceed the stable P95 plus maxRegressionPercent | its P95 is not above that   |
| ITLP95    | than requests of the stable revision exceed their own P95          |                               |

Inconclusive is everything else: fewer than minRequests of either revision, nothing measured, or a difference that may
be chance. Only gateways count, because a replica that died cannot report its errors. The gateways' histograms have
buckets, so a regression is certain only where it reaches the next bucket. Tokens of one stream are slow together, so
the times between tokens count as one observation a request, not one a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from typing import Final

from slipway_api.gateway_api import OUTCOME_BUCKETS
from slipway_api.inference_status import CanaryMetricStatus
from slipway_api.rollout_spec import Analysis, AnalysisMetric, AnalysisMetricType
from slipway_api.words import count
from slipway_operator.core.observed import Outcomes
from slipway_operator.core.service.rollout.sequential import Share, is_above, is_above_other

FALSE_ALARMS: Final = 0.05  # of one step, over all its metrics and looks
P95: Final = 0.95


class Verdict(StrEnum):
    """The result of a comparison."""

    PASSED = "Passed"
    FAILED = "Failed"
    INCONCLUSIVE = "Inconclusive"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One metric of both revisions, and what follows."""

    type: AnalysisMetricType
    stable: float | None = None
    canary: float | None = None
    requests: int = 0
    verdict: Verdict

    def to_status(self) -> CanaryMetricStatus:
        """The entry in status."""
        return CanaryMetricStatus(
            type=self.type.value,
            stable=_decimal(self.stable),
            canary=_decimal(self.canary),
            requests=self.requests,
            verdict=self.verdict.value,
        )


def compare(analysis: Analysis, *, stable: Outcomes, canary: Outcomes) -> tuple[Comparison, ...]:
    """Compare every metric."""
    alpha = FALSE_ALARMS / max(1, len(analysis.metrics))
    return tuple(_compare(metric, stable, canary, analysis.min_requests, alpha) for metric in analysis.metrics)


def overall(comparisons: Sequence[Comparison]) -> Verdict:
    """Failed where one metric failed, Passed where all passed."""
    verdicts = {one.verdict for one in comparisons}
    if Verdict.FAILED in verdicts:
        return Verdict.FAILED
    return Verdict.PASSED if verdicts == {Verdict.PASSED} else Verdict.INCONCLUSIVE


def describe(metrics: Sequence[CanaryMetricStatus], analysis: Analysis) -> str:
    """The numbers in one sentence, those of the worst verdict only: `TTFTP95 0.92 s against 0.2 s of the stable …`."""
    by_type: dict[str, AnalysisMetric] = {metric.type.value: metric for metric in analysis.metrics}
    worst = next((v for v in (Verdict.FAILED, Verdict.INCONCLUSIVE) if any(one.verdict == v for one in metrics)), None)
    shown = [one for one in metrics if worst is None or one.verdict == worst]
    return "; ".join(_sentence(one, by_type[one.type], analysis) for one in shown if one.type in by_type)


def quantile(counts: Sequence[int], share: float) -> float | None:
    """The quantile of a histogram over OUTCOME_BUCKETS, by a straight line within its bucket; None: it is empty."""
    total = sum(counts)
    if not total:
        return None
    rank, below = share * total, 0
    for index, many in enumerate(counts):
        if many and below + many >= rank:
            lower, upper = _edge(index - 1), _edge(index)
            return lower + (upper - lower) * (rank - below) / many
        below += many
    return _edge(len(counts) - 1)


def _compare(metric: AnalysisMetric, stable: Outcomes, canary: Outcomes, least: int, alpha: float) -> Comparison:
    if metric.type is AnalysisMetricType.ERROR_RATE:
        return _compare_errors(metric, stable, canary, least, alpha)
    return _compare_latency(metric, stable, canary, least, alpha)


def _compare_errors(metric: AnalysisMetric, stable: Outcomes, canary: Outcomes, least: int, alpha: float) -> Comparison:
    limit = float(metric.max or 0)
    ours, theirs = Share(canary.errors, canary.requests), Share(stable.errors, stable.requests)
    has_other = stable.requests >= least
    if canary.requests < least:
        verdict = Verdict.INCONCLUSIVE
    elif is_above(ours, limit, alpha=alpha) and (not has_other or is_above_other(ours, theirs, alpha=alpha)):
        verdict = Verdict.FAILED
    elif ours.rate <= limit or (has_other and ours.rate <= theirs.rate):
        verdict = Verdict.PASSED
    else:
        verdict = Verdict.INCONCLUSIVE
    return Comparison(
        type=metric.type,
        stable=theirs.rate if stable.requests else None,
        canary=ours.rate if canary.requests else None,
        requests=canary.requests,
        verdict=verdict,
    )


def _compare_latency(
    metric: AnalysisMetric, stable: Outcomes, canary: Outcomes, least: int, alpha: float
) -> Comparison:
    ours, theirs = _histogram(metric.type, canary), _histogram(metric.type, stable)
    our_p95, their_p95 = quantile(ours, P95), quantile(theirs, P95)
    factor = 1 + (metric.max_regression_percent or 0) / 100
    is_enough = min(canary.requests, stable.requests, sum(ours), sum(theirs)) >= least
    if our_p95 is None or their_p95 is None or not is_enough:
        verdict = Verdict.INCONCLUSIVE
    elif our_p95 <= their_p95 * factor:
        verdict = Verdict.PASSED
    else:
        own = _bucket_of(their_p95)
        # Slower by the whole regression: of equal revisions, as many would exceed this as exceed their own P95.
        limit = _bucket_of(_edge(own) * factor)
        slow = _share_above(ours, limit, canary.requests)
        usual = _share_above(theirs, own, stable.requests)
        is_slow = limit < len(OUTCOME_BUCKETS) and is_above_other(slow, usual, alpha=alpha)
        verdict = Verdict.FAILED if is_slow else Verdict.INCONCLUSIVE
    return Comparison(type=metric.type, stable=their_p95, canary=our_p95, requests=canary.requests, verdict=verdict)


def _histogram(type: AnalysisMetricType, outcomes: Outcomes) -> tuple[int, ...]:
    return outcomes.ttft if type is AnalysisMetricType.TTFT_P95 else outcomes.itl


def _share_above(counts: Sequence[int], bucket: int, requests: int) -> Share:
    """The share above a bucket, counted as at most one observation a request."""
    total = sum(counts)
    observations = min(total, requests)
    return Share(sum(counts[bucket + 1 :]) * observations / total, observations)


def _bucket_of(seconds: float) -> int:
    return next((index for index, edge in enumerate(OUTCOME_BUCKETS) if seconds <= edge), len(OUTCOME_BUCKETS))


def _edge(index: int) -> float:
    """The upper bound of a bucket; what is above the last one counts as twice that."""
    if index < 0:
        return 0.0
    return OUTCOME_BUCKETS[index] if index < len(OUTCOME_BUCKETS) else 2 * OUTCOME_BUCKETS[-1]


def _decimal(value: float | None) -> Decimal | None:
    return None if value is None else Decimal(f"{value:.4f}")


def _sentence(one: CanaryMetricStatus, metric: AnalysisMetric, analysis: Analysis) -> str:
    if one.canary is None or one.stable is None or one.requests < analysis.min_requests:
        requests = count(one.requests, "request")
        return f"{one.type}: {requests} of the canary, at least {analysis.min_requests} needed"
    is_rate = metric.type is AnalysisMetricType.ERROR_RATE
    numbers = (
        f"{100 * float(one.canary):.3g} % against {100 * float(one.stable):.3g} %"
        if is_rate
        else f"{float(one.canary):.3g} s against {float(one.stable):.3g} s"
    )
    limit = (
        f"at most {100 * float(metric.max or 0):.3g} %" if is_rate else f"at most +{metric.max_regression_percent} %"
    )
    return f"{one.type} {numbers} of the stable revision, {limit} ({count(one.requests, 'request')})"
