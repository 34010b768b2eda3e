"""Reads what replicas report of their load beside their answers, as ORCA headers: no second poll. Pure.

The gateway asks with `endpoint-load-metrics-format: TEXT`, as the Gateway API Inference Extension and Envoy do. vLLM
and our runtime answer in the header `endpoint-load-metrics`:

    TEXT named_metrics.kv_cache_usage_perc=0.42, named_metrics.num_requests_waiting=3
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from slipway_gateway.picker.scorers import ReplicaLoad

LOAD_FORMAT_HEADER: Final = "endpoint-load-metrics-format"
LOAD_HEADER: Final = "endpoint-load-metrics"
LOAD_FORMAT: Final = "TEXT"
FRESH_SECONDS: Final = 5.0  # an older report says nothing of now: the endpoint counts as unknown, never as full
MAX_REPORT_CHARACTERS: Final = 2048

_METRIC: Final = re.compile(r"(?:named_metrics\.)?([a-z_]{1,64})\s*=\s*([0-9.eE+-]{1,32})")


@dataclass(frozen=True, slots=True)
class Report:
    """The load that a replica reported, and when."""

    load: ReplicaLoad
    at: float


def parse_report(text: str, *, own_waiting: int) -> ReplicaLoad | None:
    """The load that this header states, or None where it is no report.

    `own_waiting`: how many requests of this gateway are there and have no first byte yet.

    >>> parse_report("TEXT named_metrics.kv_cache_usage_perc=0.5, named_metrics.num_requests_waiting=7", own_waiting=4)
    ReplicaLoad(kv_usage=0.5, foreign_waiting=3)
    """
    if not text.startswith(LOAD_FORMAT) or len(text) > MAX_REPORT_CHARACTERS:
        return None
    values: dict[str, float] = {}
    for name, number in _METRIC.findall(text):
        try:
            value = float(number)
        except ValueError:
            continue
        if math.isfinite(value) and value >= 0:
            values[name] = value
    if not values:
        return None
    return ReplicaLoad(
        kv_usage=min(1.0, values.get("kv_cache_usage_perc", 0.0)),
        foreign_waiting=max(0, int(values.get("num_requests_waiting", 0.0)) - own_waiting),
    )


class LoadReports:
    """The newest report of each endpoint of one service."""

    def __init__(self) -> None:
        self._reports: dict[str, Report] = {}

    def record(self, endpoint: str, text: str, *, own_waiting: int, now: float) -> None:
        """Record the report beside an answer of this endpoint."""
        load = parse_report(text, own_waiting=own_waiting)
        if load is not None:
            self._reports[endpoint] = Report(load, now)

    def fresh(self, now: float) -> Mapping[str, ReplicaLoad]:
        """The reports that still say something of now."""
        return {name: one.load for name, one in self._reports.items() if now - one.at <= FRESH_SECONDS}

    def remove(self, endpoint: str) -> None:
        """The endpoint is gone."""
        self._reports.pop(endpoint, None)
