"""What a million output tokens cost: the price of all GPU time of a service, divided by the tokens that it gave. Pure.

GPUs cost while replicas hold them, whether they load, idle, serve or drain. 2 GPUs at 2.50 for an hour that gave 4
million output tokens: 5.00 / 4 = 1.25 for a million. The same at half the load: 2.50. Input tokens are in the price,
because their work is done by the same GPUs, and never in the divisor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Final

from slipway_api.inference_service import InferenceService
from slipway_api.slo import CostStatus
from slipway_operator.core.health import Member
from slipway_operator.core.observed import CostMark

MEASURED_OVER: Final = timedelta(hours=1)
LEAST_MEASURED: Final = timedelta(minutes=5)
MARK_EVERY: Final = timedelta(seconds=60)
REFRESH_AFTER: Final = timedelta(seconds=60)
MOVED: Final = 0.1
MILLION: Final = 1_000_000
_ENDED: Final = frozenset({"Succeeded", "Failed"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a service costs in this pass."""

    gpus: int
    gpu_seconds: float
    """Since this leader began."""
    output_tokens: int
    gpu_hour_cost: float
    currency: str
    per_million_output_tokens: float | None
    """Over the last hour; None: less than five minutes are known, or there were no tokens."""
    hours: float
    """GPU hours of the last hour."""

    @property
    def total(self) -> float:
        """The price of all GPU time since this leader began."""
        return self.gpu_seconds / 3600 * self.gpu_hour_cost


def held_gpus(service: InferenceService, members: Sequence[Member]) -> int:
    """GPUs that the replicas hold: a node gives them to a pod until it ends."""
    holding = [one for one in members if one.replica.node and one.replica.phase not in _ENDED]
    return len(holding) * service.spec.resources.gpu.count


def add_mark(
    marks: tuple[CostMark, ...], *, gpus: int, output_tokens: int, before: datetime | None, now: datetime
) -> tuple[CostMark, ...]:
    """The marks with the sums of now; `gpus` were held since `before`, the last pass."""
    last = marks[-1] if marks else CostMark(at=now)
    seconds = max(0.0, (now - before).total_seconds()) if before is not None else 0.0
    mark = CostMark(
        at=now, gpu_seconds=last.gpu_seconds + gpus * seconds, output_tokens=last.output_tokens + output_tokens
    )
    # The last mark is of the last pass: it stays where it is far enough from the one before.
    kept = marks[:-1] if len(marks) > 1 and marks[-1].at - marks[-2].at < MARK_EVERY else marks
    first = next((index for index, one in enumerate(kept[1:]) if one.at > now - MEASURED_OVER), len(kept[1:]))
    return (*kept[first:], mark)


def measure_cost(service: InferenceService, marks: Sequence[CostMark], gpus: int) -> Cost | None:
    """The cost of now; None where the spec gives no price, or the replicas have no GPUs."""
    budget = service.spec.budget
    if budget is None or budget.gpu_hour_cost is None or not service.spec.resources.gpu.count or not marks:
        return None
    first, last = marks[0], marks[-1]
    price = float(budget.gpu_hour_cost)
    tokens = last.output_tokens - first.output_tokens
    hours = (last.gpu_seconds - first.gpu_seconds) / 3600
    is_known = tokens > 0 and last.at - first.at >= LEAST_MEASURED
    return Cost(
        gpus=gpus,
        gpu_seconds=last.gpu_seconds,
        output_tokens=last.output_tokens,
        gpu_hour_cost=price,
        currency=budget.currency,
        per_million_output_tokens=hours * price / tokens * MILLION if is_known else None,
        hours=hours,
    )


def cost_status(
    before: CostStatus | None, cost: Cost | None, refreshed: datetime | None, now: datetime
) -> CostStatus | None:
    """status.cost after this pass; `refreshed` is when its price of tokens was last written."""
    if cost is None:
        return None
    shown = before.per_million_output_tokens if before is not None and before.currency == cost.currency else None
    value = cost.per_million_output_tokens
    per_million = shown
    if value is not None and (shown is None or _has_moved(float(shown), value, refreshed, now)):
        per_million = _price(value)
    return CostStatus(
        gpus=cost.gpus,
        per_hour=_price(cost.gpus * cost.gpu_hour_cost),
        per_million_output_tokens=per_million,
        currency=cost.currency,
    )


def _has_moved(shown: float, value: float, refreshed: datetime | None, now: datetime) -> bool:
    if refreshed is not None and now < refreshed + REFRESH_AFTER:
        return False
    return abs(value - shown) >= MOVED * max(shown, 1e-6)


def _price(value: float) -> Decimal:
    """Two digits behind the point, more where the price is below one."""
    text = f"{value:.2f}" if value >= 1 else f"{value:.4f}"
    return Decimal(text)
