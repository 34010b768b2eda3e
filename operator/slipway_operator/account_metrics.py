"""Prometheus metrics of services: conditions, service levels and cost, as the last pass over each found them.

Only the leader has them. Counters begin with its time as the leader; those of services that are gone are removed.
"""

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from slipway_api.conditions import Condition
from slipway_api.types import ServiceKey
from slipway_operator.core.service.status.accounting import Accounting
from slipway_operator.core.service.status.cost import Cost
from slipway_operator.core.service.status.slo_status import window_name

_SERVICE: Final = ("namespace", "service")
_OBJECTIVE: Final = (*_SERVICE, "objective")
_MONEY: Final = (*_SERVICE, "currency")


class AccountMetrics(Collector):
    """The accountings of all services, read when Prometheus asks."""

    def __init__(self) -> None:
        self._accounts: dict[ServiceKey, Accounting] = {}
        self._conditions: dict[ServiceKey, tuple[Condition, ...]] = {}

    def set(self, service: ServiceKey, accounting: Accounting) -> None:
        """Show this one from now on; nothing of a service that has neither objectives nor a price."""
        if accounting.levels is None and accounting.measured_cost is None:
            self._accounts.pop(service, None)
        else:
            self._accounts[service] = accounting

    def set_conditions(self, service: ServiceKey, conditions: tuple[Condition, ...]) -> None:
        """Show these conditions from now on."""
        self._conditions[service] = conditions

    def remove(self, service: ServiceKey) -> None:
        """The service is gone."""
        self._accounts.pop(service, None)
        self._conditions.pop(service, None)

    def collect(self) -> Iterator[Metric]:
        """All series, service by service."""
        yield self._states()
        yield from self._requests()
        yield from self._objectives()
        yield from self._costs()

    def _states(self) -> Metric:
        states = GaugeMetricFamily(
            "slipway_service_condition",
            "Conditions of services: 1 for the status that holds (True, False or Unknown).",
            labels=(*_SERVICE, "condition", "status", "reason"),
        )
        for service, conditions in self._conditions.items():
            for one in conditions:
                states.add_metric((*service, one.type, one.status.value, one.reason), 1)
        return states

    def _requests(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "slipway_service_requests", "Requests that ended with a success or a 5xx.", labels=_SERVICE
        )
        failed = CounterMetricFamily("slipway_service_failed_requests", "Of these, failed.", labels=_SERVICE)
        good = CounterMetricFamily(
            "slipway_service_good_requests", "Of these, without an error and within the latency limits of spec.slo.",
            labels=_SERVICE,
        )  # fmt: skip
        tokens = CounterMetricFamily(
            "slipway_service_output_tokens", "Output tokens of all answers, unfinished ones included.", labels=_SERVICE
        )
        for service, one in self._accounts.items():
            requests.add_metric(service, one.counted.requests)
            failed.add_metric(service, one.counted.errors)
            good.add_metric(service, one.counted.good)
            tokens.add_metric(service, one.counted.output_tokens)
        yield from (requests, failed, good, tokens)

    def _objectives(self) -> Iterator[Metric]:
        remaining = GaugeMetricFamily(
            "slipway_service_slo_error_budget_remaining_ratio",
            "What is left of the error budget of the window; below 0: more than the budget is spent.",
            labels=_OBJECTIVE,
        )
        burn = GaugeMetricFamily(
            "slipway_service_slo_burn_rate", "How fast the error budget is spent; at 1 it lasts exactly the window.",
            labels=(*_OBJECTIVE, "window"),
        )  # fmt: skip
        for service, one in self._accounts.items():
            if one.levels is None:
                continue
            for level in one.levels.window:
                remaining.add_metric((*service, level.objective.value), level.remaining)
            for window, levels in one.levels.by_time.items():
                for level in levels:
                    burn.add_metric((*service, level.objective.value, window_name(window)), level.burn_rate)
        yield from (remaining, burn)

    def _costs(self) -> Iterator[Metric]:
        gpus = GaugeMetricFamily("slipway_service_gpus", "GPUs that replicas hold.", labels=_SERVICE)
        total = CounterMetricFamily(
            "slipway_service_cost", "Price of all GPU time, idle time included, in units of currency.", labels=_MONEY
        )
        tokens = GaugeMetricFamily(
            "slipway_service_cost_per_million_output_tokens",
            "Price of one million output tokens over the last hour, idle GPU time included.",
            labels=_MONEY,
        )
        good = GaugeMetricFamily(
            "slipway_service_good_requests_per_cost",
            "Goodput per money: good requests of the last hour for one unit of currency.",
            labels=_MONEY,
        )
        for service, one in self._accounts.items():
            if (cost := one.measured_cost) is None:
                continue
            money = (*service, cost.currency)
            gpus.add_metric(service, cost.gpus)
            total.add_metric(money, cost.total)
            if cost.per_million_output_tokens is not None:
                tokens.add_metric(money, cost.per_million_output_tokens)
            if (rate := _good_per_cost(one, cost)) is not None:
                good.add_metric(money, rate)
        yield from (gpus, total, tokens, good)


def _good_per_cost(one: Accounting, cost: Cost) -> float | None:
    """Good requests of the last hour for its price; None: there is no price yet, or no objective."""
    price = cost.hours * cost.gpu_hour_cost
    return one.levels.hour.good / price if one.levels is not None and price > 0 else None
