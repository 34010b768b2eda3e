"""The `/metrics` of an operator without an API server: its own metrics and decisions, on a simulated cluster."""

from slipway_api.internal_tls import REPLICAS_SECRET
from slipway_operator.core.service.plan import plan
from slipway_operator.metrics import OperatorMetrics
from tests.builders import a_service
from tests.operator.core.simulated_cluster import SimulatedCluster
from tests.operator.core.simulated_traffic import SimulatedTraffic


class OperatorPage:
    """Something happens before each reading, so that counters grow."""

    def __init__(self) -> None:
        self._metrics = OperatorMetrics()
        service = a_service(
            replicas=1,
            slo={"ttftP95Seconds": "1.0", "itlP95Seconds": "0.1"},
            budget={"gpuHourCost": "2.50"},
            resources={"gpu": {"count": 1}},
        )
        self._world = SimulatedCluster(service, load_seconds=5)
        self._world.traffic = SimulatedTraffic(2.0)
        self._world.reconcile()
        self._world.run(400)
        self._metrics.is_leader.set(1)
        self._metrics.gateways.set(2)
        self._metrics.add_refused_lists(dict)
        self._metrics.accounts.set_conditions(self._world.service.key, self._world.service.status.conditions)

    def read(self) -> str:
        """The page, two seconds of the simulated cluster after the last one."""
        metrics = self._metrics
        metrics.decisions.labels("ReplicaUnhealthy").inc()
        metrics.reconcile_errors.labels("Refused").inc()
        metrics.reconcile_seconds.observe(0.01)
        metrics.writes.labels("patch", "inferenceservices/status", "200").inc()
        metrics.watch_age.labels("pods").set(1.5)
        metrics.relists.labels("pods").set(1)
        metrics.signal_age.observe(0.8)
        metrics.signal_errors.labels("Timeout").inc()
        metrics.prometheus_errors.labels("Timeout").inc()
        metrics.cold_start.labels("load").observe(3)
        metrics.warm_pods.labels("demo", "small", "ready").set(2)
        metrics.set_certificate("demo", REPLICAS_SECRET, self._world.now)
        self._world.run(2)
        metrics.accounts.set(self._world.service.key, plan(self._world.observed(), self._world.now).accounting)
        return metrics.exposition().decode()
