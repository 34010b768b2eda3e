"""TTFT and ITL are separate histograms by revision, made of the counters that the operator reads (PF-7)."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from slipway_api.gateway_api import OUTCOME_BUCKETS, OutcomesReport, RevisionOutcomes
from slipway_gateway.fleet import Fleet
from slipway_gateway.metrics import Metrics, cumulated
from slipway_gateway.picker.endpoints import Service


def test_counts_become_cumulated_buckets_up_to_infinity():
    buckets = cumulated((2, 0, 3))

    assert buckets[:4] == [("0.005", 2.0), ("0.01", 2.0), ("0.02", 5.0), ("0.03", 5.0)]
    assert buckets[-1] == ("+Inf", 5.0)
    assert len(buckets) == len(OUTCOME_BUCKETS) + 1


@pytest.mark.capability("PF-7")
def test_each_revision_has_a_histogram_of_ttft_and_one_of_itl():
    fleet = Fleet()
    fleet.set_service("team/chat", Service("team/chat", "chat", weights={"r1": 90, "r2": 10}))
    rows = (
        RevisionOutcomes(service="team/chat", revision="r1", requests=5, ttft=(0, 4, 1), itl=(100,)),
        RevisionOutcomes(service="team/chat", revision="r2", requests=1, ttft=(1,)),
        RevisionOutcomes(service="team/gone", revision="r1", requests=1, ttft=(1,)),
    )
    metrics = Metrics(fleet, open_to_anyone=True)
    metrics.add_outcomes(lambda: OutcomesReport(boot_id="b", revisions=rows))

    families = {family.name: family for family in text_string_to_metric_families(metrics.exposition().decode())}
    totals = {
        (name, sample.labels["revision"]): sample.value
        for name in ("slipway_gateway_time_to_first_token_seconds", "slipway_gateway_inter_token_latency_seconds")
        for sample in families[name].samples
        if sample.labels["le"] == "+Inf"
    }
    assert totals == {
        ("slipway_gateway_time_to_first_token_seconds", "r1"): 5.0,
        ("slipway_gateway_time_to_first_token_seconds", "r2"): 1.0,
        ("slipway_gateway_inter_token_latency_seconds", "r1"): 100.0,
        ("slipway_gateway_inter_token_latency_seconds", "r2"): 0.0,
    }
    assert all(
        sample.labels["model"] == "chat"
        for family in families.values()
        for sample in family.samples
        if sample.labels.get("service") == "team/chat"
    )
