"""The operator's Prometheus metrics: passes, decisions, writes, queue and age of its caches.

One object, created in main and passed to the parts that count; tests create their own, so nothing is global.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from slipway_operator.account_metrics import AccountMetrics
from slipway_operator.generation_metrics import Bodies, GenerationMetrics

RECONCILE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
START_BUCKETS = (0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
AGE_BUCKETS = (0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0)


class OperatorMetrics:
    """All series of one operator process: `slipway_operator_` of its own work, `slipway_service_` of services."""

    content_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"slipway_operator_{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"slipway_operator_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"slipway_operator_{name}", text, buckets=buckets, registry=self.registry)

        self.reconcile_seconds = histogram(
            "reconcile_duration_seconds", "One pass over one object, from taking its key to done.", RECONCILE_BUCKETS
        )
        self.reconcile_errors = counter(
            "reconcile_errors_total", "Passes that failed and will be retried, by the kind of error.", "error"
        )
        self.decisions = counter("decisions_total", "Decisions taken, by the fixed reason of their event.", "reason")
        self.actions = counter("actions_total", "Actions executed, by kind and outcome.", "action", "outcome")
        self.signal_age = histogram(
            "signal_age_seconds", "Age of the newest sample of each running replica when a pass reads it.", AGE_BUCKETS
        )
        self.signal_errors = counter("signal_errors_total", "Replicas that gave no usable signals.", "error")
        self.prometheus_errors = counter("prometheus_errors_total", "Queries that Prometheus did not answer.", "error")
        self.queue_depth = gauge("queue_depth", "Objects waiting for a worker.")
        self.queue_active = gauge("queue_active", "Objects being worked on.")
        self.services = gauge("services", "Objects of our kinds known.")
        self.pods = gauge("pods", "Pods of ours known.")
        self.watch_age = gauge(
            "watch_age_seconds", "Seconds since the watch of a resource last said anything.", "resource"
        )
        self.relists = gauge("relists", "Full lists made by the watch of a resource since the start.", "resource")
        self.drift = counter("drift_total", "Objects that a periodic list found different from what was known.")
        self.gateways = gauge("gateways", "Gateways that answer; only the leader has more than 0.")
        self.is_leader = gauge("is_leader", "1 while this replica holds the Lease.")
        self.lease_transitions = counter("lease_transitions_total", "Leadership gained and lost.", "change")
        self.writes = counter("writes_total", "Writes to the API server.", "verb", "resource", "code")
        self.cold_start = Histogram(
            "slipway_operator_cold_start_seconds",
            "Cold starts of replicas, by phase: schedule, pull, download, load, warmup.",
            ("phase",),
            buckets=START_BUCKETS,
            registry=self.registry,
        )
        self.warm_pods = gauge(
            "warm_pool_pods", "Pods of each WarmPool: ready, warming, claimed.", "namespace", "pool", "state"
        )
        self.certificate_end = gauge(
            "certificate_expiry_timestamp_seconds",
            "When an internal certificate ends, in seconds since 1970; only the leader has them.",
            "namespace", "secret",
        )  # fmt: skip
        self.certificate_faults = gauge("certificate_faults", "Internal certificates that cannot be kept now.")
        self.certificates_issued = counter("certificates_issued_total", "Internal certificates issued.")
        self.accounts = AccountMetrics()
        self.registry.register(self.accounts)
        self.loop_lag = gauge("event_loop_lag_seconds", "By how many seconds the event loop woke too late last time.")

    def watch(self, gauge: Gauge, read: Callable[[], float]) -> None:
        """Read a gauge's value when it is scraped, not when it changes."""
        gauge.set_function(read)

    def set_certificate(self, namespace: str, secret: str, end: datetime) -> None:
        """Show when a certificate ends."""
        self.certificate_end.labels(namespace, secret).set(end.timestamp())

    def forget_certificate(self, namespace: str, secret: str) -> None:
        """Remove the series of a certificate that nobody needs any more."""
        with suppress(KeyError):
            self.certificate_end.remove(namespace, secret)

    def add_refused_lists(self, refused: Callable[[], Mapping[tuple[str, str], str]]) -> None:
        """Show the lists that the API server refuses, by (resource, namespace)."""
        self.registry.register(_RefusedLists(refused))

    def add_generations(self, bodies: Bodies) -> None:
        """Show the objects whose newest generation is not observed."""
        self.registry.register(GenerationMetrics(bodies))

    def exposition(self) -> bytes:
        """The answer to GET /metrics."""
        return generate_latest(self.registry)


class _RefusedLists(Collector):
    """One series for each refused list; none while everything can be read."""

    def __init__(self, refused: Callable[[], Mapping[tuple[str, str], str]]) -> None:
        self._refused = refused

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "slipway_operator_list_refused",
            "1 while the API server refuses to list a resource in a namespace.",
            labels=["resource", "namespace"],
        )
        for labels in sorted(self._refused()):
            family.add_metric(labels, 1)
        yield family
