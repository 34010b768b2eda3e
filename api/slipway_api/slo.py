"""The field `spec.slo` of an InferenceService, and `status.slo`: objectives, limits, and the error budget."""

from typing import Annotated

from pydantic import Field

from slipway_api.types import DecimalString, Struct, Time, bounded_list, cel_rules, decimal, decimal_rule

MOST_PERIODS = 32


class SLO(Struct):
    """Service level objectives, measured by the gateways on the requests of clients.

    A request that fails spends the error budget of objectivePercent. Of first tokens and of times between tokens, five
    percent may be later than their P95 limit; later ones spend a budget too. While one of the budgets of the window is
    spent, no new revision rolls out, unless the annotation slipway.dev/promote names it.
    """

    model_config = cel_rules(
        decimal_rule(
            "objectivePercent",
            "value >= 50.0 && value <= 99.999",
            "objectivePercent must be 50 to 99.999: with 100, no request could ever fail",
        ),
        decimal_rule("ttftP95Seconds", "value > 0.0", "ttftP95Seconds must be above 0"),
        decimal_rule("itlP95Seconds", "value > 0.0", "itlP95Seconds must be above 0"),
        decimal_rule(
            "maxErrorPercent", "value > 0.0 && value <= 100.0", "maxErrorPercent must be above 0, and at most 100"
        ),
    )

    objective_percent: DecimalString = decimal("99.9")
    """Percent of requests that succeed over windowDays: 99.9 allows one failure in 1,000, or 43.2 minutes of outage in
    30 days."""
    window_days: int = Field(default=30, ge=1, le=90)
    """Days over which the error budgets are counted; the window slides."""
    ttft_p95_seconds: DecimalString | None = None
    """95 percent of streams have their first token within this time of the request's arrival. Absent: no limit."""
    itl_p95_seconds: DecimalString | None = None
    """95 percent of tokens follow the previous token within this time. Absent: no limit."""
    max_error_percent: DecimalString | None = None
    """Most percent of requests that may fail within an hour before condition WithinSLO is False. Absent: only the error
    budget and its burn rate count."""


class SLOPeriod(Struct):
    """The requests of one part of the window."""

    start_time: Time
    """When it started."""
    requests: int = Field(default=0, ge=0)
    """Requests that succeeded or failed."""
    failed: int = Field(default=0, ge=0)
    """Requests that failed."""
    streams: int = Field(default=0, ge=0)
    """Streams that had a first token."""
    slow_streams: int = Field(default=0, ge=0)
    """Streams whose first token was later than ttftP95Seconds."""
    tokens: int = Field(default=0, ge=0)
    """Tokens of streams after the first ones."""
    slow_tokens: int = Field(default=0, ge=0)
    """Tokens that were later than itlP95Seconds."""


class SLOStatus(Struct):
    """The measured service levels, and what is left of the error budget."""

    ttft_p95_seconds: DecimalString | None = None
    """P95 of the time to first token over the last hour with requests; absent: not measured."""
    itl_p95_seconds: DecimalString | None = None
    """P95 of the time between two tokens over the last hour with requests; absent: not measured."""
    error_budget_remaining_percent: DecimalString | None = None
    """What is left of the error budget of the window, of the objective that has spent the most; 0: it is exhausted.
    Absent: no request was counted."""
    recorded_time: Time | None = None
    """When these numbers were written: while there are requests at most once a minute, and only when they changed."""
    periods: Annotated[tuple[SLOPeriod, ...], bounded_list(at_most=MOST_PERIODS, key="startTime")] = ()
    """The counts of the window in thirty parts, the newest last: with them the budget outlives the operator."""


class CostStatus(Struct):
    """What the service costs, by budget.gpuHourCost."""

    gpus: int = Field(default=0, ge=0)
    """GPUs that replicas hold, loading and draining replicas included."""
    per_hour: DecimalString | None = None
    """Price of these GPUs for an hour."""
    per_million_output_tokens: DecimalString | None = None
    """Price of one million output tokens over the last hour with requests: the price of all GPU time, idle time
    included, divided by the output tokens that gateways counted. Input tokens are not in the divisor. Absent: not
    measured."""
    currency: str = Field(default="", max_length=3)
    """Currency of these prices."""
