"""The gateway's Prometheus metrics. Label values are existing services and revisions, never text of a client."""

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from slipway_api.gateway_api import OUTCOME_BUCKETS, OutcomesReport
from slipway_api.served_certificate import Certificate
from slipway_api.trust import TrustFile
from slipway_gateway.fleet import Fleet
from slipway_gateway.listener import Connections

UNKNOWN_MODEL: Final = ""  # a client's text never becomes a label

# The metrics that canary analysis compares; series of a revision that its service no longer has are removed.
_REVISION: Final = ("model", "service", "revision")
_SERVICE: Final = ("model", "service")
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_OVERHEAD = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


class Metrics:
    """One process's counters, with the fleet read when Prometheus asks."""

    def __init__(self, fleet: Fleet, *, open_to_anyone: bool) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "slipway_gateway_requests", "Requests by status; 499: the client left", [*_REVISION, "code"],
            registry=registry,
        )  # fmt: skip
        self.first_byte = Histogram(
            "slipway_gateway_time_to_first_byte_seconds", "From the request's last byte to the answer's first",
            _REVISION, buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.duration = Histogram(
            "slipway_gateway_request_duration_seconds", "From the request's last byte to the answer's last",
            _REVISION, buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.added_latency = Histogram(
            "slipway_gateway_added_latency_seconds", "The part of the time to first byte that no replica spent",
            buckets=_OVERHEAD, registry=registry,
        )  # fmt: skip
        self.retries = Counter(
            "slipway_gateway_retries", "Attempts after the first one, by what went wrong before", ["service", "reason"],
            registry=registry,
        )  # fmt: skip
        self.retries_denied = Counter(
            "slipway_gateway_retries_denied", "Retries that the service's budget did not allow", ["service"],
            registry=registry,
        )  # fmt: skip
        self.hedges = Counter(
            "slipway_gateway_hedges", "Requests sent to a second replica because the first was late, by outcome",
            ["service", "outcome"], registry=registry,
        )  # fmt: skip
        self.refused = Counter(
            "slipway_gateway_refused", "Requests refused because their service holds its share of a resource",
            ["service", "resource"], registry=registry,
        )  # fmt: skip
        self.fallbacks = Counter(
            "slipway_gateway_fallbacks", "Requests that went to another service, by what kept their own from answering",
            ["service", "fallback", "reason"], registry=registry,
        )  # fmt: skip
        self.degraded = Counter(
            "slipway_gateway_degraded", "Requests of an overloaded service: shed, capped, fallback",
            ["service", "step"], registry=registry,
        )  # fmt: skip
        self.mirrored = Counter(
            "slipway_gateway_mirrored",
            "Copies of requests by outcome: answered, same or different as the user's answer, failed, skipped",
            ["service", "revision", "outcome"], registry=registry,
        )  # fmt: skip
        self.upstream_errors = Counter(
            "slipway_gateway_upstream_errors", "Attempts that gave no usable answer", [*_REVISION, "reason"],
            registry=registry,
        )  # fmt: skip
        self.broken_streams = Counter(
            "slipway_gateway_broken_streams", "Streams that ended with our error event", _REVISION, registry=registry
        )
        self.handovers = Counter(
            "slipway_gateway_handovers", "Streams that another replica continued; lost, hung, drained: why",
            [*_REVISION, "reason"], registry=registry,
        )  # fmt: skip
        self.handovers_failed = Counter(
            "slipway_gateway_handovers_failed", "Streams that no other replica continued", [*_REVISION, "reason"],
            registry=registry,
        )  # fmt: skip
        self.handover_disabled = Counter(
            "slipway_gateway_handover_disabled", "Streams that need too much memory to be handed over",
            ["service", "reason"], registry=registry,
        )  # fmt: skip
        self.handover_bytes = Gauge(
            "slipway_gateway_handover_bytes", "Memory of requests and tokens kept for a handover", registry=registry
        )
        self.kv_feeds = Gauge(
            "slipway_gateway_kv_feeds", "Replicas whose KV events are being followed now", registry=registry
        )
        self.kv_events = Counter(
            "slipway_gateway_kv_events", "Blocks of prompts that replicas said were stored or removed; resets of feeds",
            ["event"], registry=registry,
        )  # fmt: skip
        self.snapshot_writes = Counter(
            "slipway_gateway_snapshot_writes", "Writes of the routing table to its file: written, failed", ["outcome"],
            registry=registry,
        )  # fmt: skip
        self.open_streams = Gauge(
            "slipway_gateway_open_streams", "Answers being forwarded now", _REVISION, registry=registry
        )
        self.open_requests = Gauge("slipway_gateway_open_requests", "Requests inside the gateway", registry=registry)
        self.loop_lag = Gauge(
            "slipway_gateway_event_loop_lag_seconds", "How late the event loop woke the last time", registry=registry
        )
        Gauge(
            "slipway_gateway_open_to_anyone", "1 while no keys are configured, so that anyone may call",
            registry=registry,
        ).set(int(open_to_anyone))  # fmt: skip
        self._fleet = fleet
        self._labelled = (
            self.requests, self.first_byte, self.duration, self.retries, self.retries_denied, self.refused,
            self.upstream_errors, self.broken_streams, self.open_streams, self.mirrored, self.handovers,
            self.handovers_failed, self.handover_disabled, self.fallbacks, self.degraded,
            self.hedges,
        )  # fmt: skip
        self.before_exposition: list[Callable[[], None]] = []
        registry.register(_FleetCollector(fleet))
        self._listeners = _ListenerCollector()
        registry.register(self._listeners)

    @property
    def registry(self) -> CollectorRegistry:
        """Where other parts of the gateway register their metrics."""
        return self._registry

    def add_outcomes(self, report: Callable[[], OutcomesReport]) -> None:
        """Show TTFT and ITL of each revision, from the counters that the operator reads too."""
        self._registry.register(_OutcomesCollector(self._fleet, report))

    def add_certificate(self, certificate: Certificate | None) -> None:
        """Show whether the files of the TLS certificate are in use; nothing without TLS."""
        if certificate is not None:
            valid = Gauge(
                "slipway_gateway_certificate_valid", "0 while the mounted TLS certificate cannot be used",
                registry=self._registry,
            )  # fmt: skip
            valid.set_function(lambda: float(not certificate.fault))

    def add_internal_tls(self, certificate: Certificate | None, trust: TrustFile) -> None:
        """Show whether the files of internal TLS are in use: its own certificate, and the authorities of replicas."""
        valid = Gauge(
            "slipway_gateway_internal_tls_valid",
            "0 while the mounted internal certificate or its authorities cannot be used",
            registry=self._registry,
        )
        valid.set_function(lambda: float(not (trust.fault or (certificate is not None and certificate.fault))))

    def add_listener(self, port: str, connections: Connections) -> None:
        """Count the connections of one more port, by the name it has in the labels."""
        self._listeners.ports[port] = connections

    def exposition(self) -> bytes:
        """The body of `/metrics`."""
        self._remove_stale_series()
        for update in self.before_exposition:
            update()
        return generate_latest(self._registry)

    def _remove_stale_series(self) -> None:
        """Remove the series of deleted revisions and services, so that the number of series stays bounded."""
        table = self._fleet.table
        for metric in self._labelled:
            names = metric._labelnames  # prometheus_client has no public list of what it counts
            for values in list(metric._metrics):
                labels = dict(zip(names, values, strict=True))
                service, revision = labels.get("service", ""), labels.get("revision", "")
                if not service:
                    continue  # requests for names that no service has
                if service not in table.services or (revision and revision not in table.route(service).revisions):
                    metric.remove(*values)


class _ListenerCollector(Collector):
    """The connections of the ports, read when Prometheus asks."""

    def __init__(self) -> None:
        self.ports: dict[str, Connections] = {}

    def collect(self) -> Iterator[Metric]:
        open_now = GaugeMetricFamily("slipway_gateway_connections", "Connections open now", labels=["port"])
        refused = CounterMetricFamily(
            "slipway_gateway_connections_refused", "Connections beyond the limits", labels=["port"]
        )
        timed_out = CounterMetricFamily(
            "slipway_gateway_connections_timed_out", "Connections closed because the client was too slow",
            labels=["port", "phase"],
        )  # fmt: skip
        for port, connections in self.ports.items():
            open_now.add_metric([port], len(connections))
            refused.add_metric([port], connections.refused)
            for phase, count in connections.timed_out.items():
                timed_out.add_metric([port, phase], count)
        yield from (open_now, refused, timed_out)


class _OutcomesCollector(Collector):
    """Requests of each service; of each revision, time to first token and between tokens, as separate histograms.

    They have no sums: an average of latencies is nothing to act on, and `histogram_quantile` needs none.
    """

    def __init__(self, fleet: Fleet, report: Callable[[], OutcomesReport]) -> None:
        self._fleet = fleet
        self._report = report

    def collect(self) -> Iterator[Metric]:
        ttft = HistogramMetricFamily(
            "slipway_gateway_time_to_first_token_seconds", "Of streams: until the first token, by the revision",
            labels=_REVISION,
        )  # fmt: skip
        itl = HistogramMetricFamily(
            "slipway_gateway_inter_token_latency_seconds", "Of streams: between two tokens, by the revision",
            labels=_REVISION,
        )  # fmt: skip
        requests = CounterMetricFamily(
            "slipway_gateway_service_requests", "Requests that ended with a success or a 5xx, as clients saw them",
            labels=_SERVICE,
        )  # fmt: skip
        errors = CounterMetricFamily(
            "slipway_gateway_service_errors", "Of these, answered with a 5xx or broken off", labels=_SERVICE
        )
        good = CounterMetricFamily(
            "slipway_gateway_service_good_requests", "Of these, without an error and within the limits of spec.slo",
            labels=_SERVICE,
        )  # fmt: skip
        tokens = CounterMetricFamily(
            "slipway_gateway_service_output_tokens", "Tokens of all answers, unfinished ones included", labels=_SERVICE
        )
        table, report = self._fleet.table, self._report()
        for whole in report.services:
            if whole.service in table.services:
                names = (table.services[whole.service].served_name, whole.service)
                requests.add_metric(names, whole.requests)
                errors.add_metric(names, whole.errors)
                good.add_metric(names, whole.good)
                tokens.add_metric(names, whole.output_tokens)
        yield from (requests, errors, good, tokens)
        for one in report.revisions:
            if table.has_revision(one.service, one.revision):
                labels = (table.services[one.service].served_name, one.service, one.revision)
                ttft.add_metric(labels, cumulated(one.ttft), sum_value=None)
                itl.add_metric(labels, cumulated(one.itl), sum_value=None)
        yield from (ttft, itl)


def cumulated(counts: Sequence[int]) -> list[tuple[str, float]]:
    """Counts by bucket, of which the last ones may be absent, as Prometheus writes a histogram."""
    total, buckets = 0, []
    bounds = [*(str(bound) for bound in OUTCOME_BUCKETS), "+Inf"]
    for bound, count in zip_longest(bounds, counts, fillvalue=0):
        total += int(count)
        buckets.append((str(bound), float(total)))
    return buckets


class _FleetCollector(Collector):
    """Reads the fleet at scrape time, so that a replica that went leaves no series behind."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        ready = GaugeMetricFamily(
            "slipway_gateway_endpoints_ready", "Replicas that may be sent requests", labels=_REVISION
        )
        ejected = GaugeMetricFamily(
            "slipway_gateway_endpoints_ejected", "Of these, left out after failures or for latency", labels=_REVISION
        )
        outstanding = GaugeMetricFamily(
            "slipway_gateway_outstanding_tokens", "Tokens sent or asked for and not answered yet", labels=_REVISION
        )
        for model, route in self._fleet.table.served_models():
            for revision in sorted(route.revisions):
                endpoints = [endpoint for endpoint in route.ready if endpoint.revision == revision]
                labels = (model, route.service.key, revision)
                ready.add_metric(labels, len(endpoints))
                ejected.add_metric(labels, sum(self._fleet.is_ejected(endpoint) for endpoint in endpoints))
                outstanding.add_metric(labels, sum(self._fleet.load(endpoint).tokens for endpoint in endpoints))
        yield from (ready, ejected, outstanding)
        waiting = GaugeMetricFamily(
            "slipway_gateway_waiting_requests", "Requests held because no replica is ready", labels=["service"]
        )
        for service, count in self._fleet.demand.waiting_by_service().items():
            waiting.add_metric([service], count)
        yield waiting
        view = self._fleet.view()
        yield GaugeMetricFamily(
            "slipway_gateway_view_age_seconds", "Since the API server last gave a sign of life", value=view.age_seconds
        )
        refused = GaugeMetricFamily(
            "slipway_gateway_list_refused", "1 while the API server refuses to list a resource in a namespace",
            labels=["resource", "namespace"],
        )  # fmt: skip
        for place in view.refused:
            refused.add_metric(place, 1)
        yield refused
        yield GaugeMetricFamily(
            "slipway_gateway_routes_from_snapshot", "1 while the routing table is that of the last process",
            value=int(view.from_snapshot),
        )  # fmt: skip
