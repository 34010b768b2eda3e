"""The operator's own metrics: after some life, each of them has something to say."""

import re

import pytest

from tests.operator.simulated_cluster import simulated_cluster
from tests.operator.virtual_time import run_in_virtual_time


def value_of(exposition: str, series: str) -> float:
    found = re.search(rf"^slipway_operator_{re.escape(series)} (\S+)$", exposition, re.MULTILINE)
    assert found, f"{series} is not in\n{exposition}"
    return float(found[1])


@pytest.mark.capability("OB-3")
def test_passes_decisions_signals_writes_and_the_age_of_the_view_are_counted(tmp_path):
    async def story() -> str:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.server.fail(method="POST", path="/pods$", status=403, times=1)
            cluster.apply("chat", replicas=2)
            operator = cluster.start_operator()
            await cluster.until(lambda: len(cluster.serving("chat")) == 2, "two replicas")
            cluster.runtimes[cluster.serving("chat")[0]].running = 1
            await cluster.quiet(60)
            return operator.metrics.exposition().decode()

    exposition = run_in_virtual_time(story())

    assert value_of(exposition, "reconcile_duration_seconds_count") > 10
    assert value_of(exposition, 'reconcile_errors_total{error="Refused"}') == 1
    assert value_of(exposition, 'decisions_total{reason="ReplicaCreated"}') == 2
    assert value_of(exposition, 'actions_total{action="CreatePod",outcome="refused"}') == 1
    assert value_of(exposition, "signal_age_seconds_count") > 10
    assert value_of(exposition, 'writes_total{code="ok",resource="pods",verb="create"}') == 2
    assert value_of(exposition, 'writes_total{code="Forbidden",resource="pods",verb="create"}') == 1
    assert value_of(exposition, 'lease_transitions_total{change="gained"}') == 1
    assert value_of(exposition, "is_leader") == 1
    assert value_of(exposition, "services") == 1
    assert value_of(exposition, "pods") == 2
    assert value_of(exposition, "queue_depth") == 0
    assert value_of(exposition, 'watch_age_seconds{resource="pods"}') >= 0
    assert value_of(exposition, 'relists{resource="pods"}') >= 1
    assert value_of(exposition, "drift_total") == 0
