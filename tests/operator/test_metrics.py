"""The operator's own metrics: after some life, each of them has something to say."""

import re

import pytest

from slipway_operator.generation_metrics import unobserved_generations
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


@pytest.mark.capability("OB-13")
def test_an_object_whose_generation_is_not_observed_has_a_series_until_it_is(tmp_path):
    """review/control-plane.md: nothing showed a status that stopped following its spec."""

    async def story() -> tuple[str, str]:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("chat", replicas=1)
            operator = cluster.start_operator()
            await cluster.until(lambda: len(cluster.serving("chat")) == 1, "a replica")
            cluster.server.fail(method="PATCH", path="/inferenceservices/chat/status$", status=403, times=1000)
            cluster.apply("chat", replicas=2)
            await cluster.quiet(60)
            behind = operator.metrics.exposition().decode()
            cluster.server.faults.clear()
            await cluster.quiet(120)
            return behind, operator.metrics.exposition().decode()

    behind, after = run_in_virtual_time(story())
    series = 'unobserved_generations{kind="InferenceService",name="chat",namespace="team"}'
    assert value_of(behind, series) == 1
    assert "unobserved_generations{" not in after


@pytest.mark.parametrize(
    ("body", "behind"),
    [
        ({"metadata": {"generation": 3}, "status": {"observedGeneration": 3}}, 0),
        ({"metadata": {"generation": 3}, "status": {"observedGeneration": 1}}, 2),
        ({"metadata": {"generation": 1}}, 1),
        ({"metadata": {"generation": 4, "deletionTimestamp": "2026-05-01T12:00:00Z"}}, 0),
    ],
)
def test_unobserved_generations_are_counted_and_a_deletion_is_not(body, behind):
    assert unobserved_generations(body) == behind
