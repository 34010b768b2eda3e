"""The gateway's own numbers. Labels are bounded: models that nobody serves are counted under one name."""

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from slipway_gateway.fleet import Fleet

UNKNOWN_MODEL: Final = ""  # a client's own word never becomes a label

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_OVERHEAD = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


class Metrics:
    """One process's counters, with the fleet read when Prometheus asks."""

    def __init__(self, fleet: Fleet, *, open_to_anyone: bool) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "slipway_gateway_requests", "Requests by model and status; 499: the client left", ["model", "code"],
            registry=registry,
        )  # fmt: skip
        self.first_byte = Histogram(
            "slipway_gateway_time_to_first_byte_seconds", "From the request's last byte to the answer's first",
            ["model"], buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.duration = Histogram(
            "slipway_gateway_request_duration_seconds", "From the request's last byte to the answer's last",
            ["model"], buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.added_latency = Histogram(
            "slipway_gateway_added_latency_seconds", "The part of the time to first byte that no replica spent",
            buckets=_OVERHEAD, registry=registry,
        )  # fmt: skip
        self.retries = Counter(
            "slipway_gateway_retries", "Attempts after the first one, by what went wrong before", ["reason"],
            registry=registry,
        )  # fmt: skip
        self.retries_denied = Counter(
            "slipway_gateway_retries_denied", "Retries that the budget did not allow", registry=registry
        )
        self.upstream_errors = Counter(
            "slipway_gateway_upstream_errors", "Attempts that gave no usable answer", ["model", "reason"],
            registry=registry,
        )  # fmt: skip
        self.broken_streams = Counter(
            "slipway_gateway_broken_streams", "Streams that ended with our error event", ["model"], registry=registry
        )
        self.open_streams = Gauge(
            "slipway_gateway_open_streams", "Answers being passed on now", ["model"], registry=registry
        )
        self.open_requests = Gauge("slipway_gateway_open_requests", "Requests inside the gateway", registry=registry)
        Gauge(
            "slipway_gateway_open_to_anyone", "1 while no keys are configured, so that anyone may call",
            registry=registry,
        ).set(int(open_to_anyone))  # fmt: skip
        registry.register(_FleetCollector(fleet))

    def exposition(self) -> bytes:
        """What `/metrics` answers."""
        return generate_latest(self._registry)


class _FleetCollector(Collector):
    """Reads the fleet at scrape time, so that a replica that went leaves no series behind."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        ready = GaugeMetricFamily(
            "slipway_gateway_endpoints_ready", "Replicas that may be sent requests", labels=["model"]
        )
        ejected = GaugeMetricFamily(
            "slipway_gateway_endpoints_ejected", "Of these, left out after failures", labels=["model"]
        )
        outstanding = GaugeMetricFamily(
            "slipway_gateway_outstanding_tokens", "Tokens sent or asked for and not answered yet", labels=["model"]
        )
        for model, service in self._fleet.table.served_models():
            endpoints = self._fleet.table.routes[service.key].endpoints
            ready.add_metric([model], len(endpoints))
            ejected.add_metric([model], sum(self._fleet.is_ejected(endpoint) for endpoint in endpoints))
            outstanding.add_metric([model], sum(self._fleet.load(endpoint).tokens for endpoint in endpoints))
        yield from (ready, ejected, outstanding)
        age = self._fleet.view().age_seconds
        yield GaugeMetricFamily(
            "slipway_gateway_view_age_seconds", "Since the API server last gave a sign of life", value=age
        )
