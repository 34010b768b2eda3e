"""What replicas report beside their answers: read leniently, forgotten when old."""

import pytest

from slipway_api.runtime_api import Signals
from slipway_gateway.load_reports import FRESH_SECONDS, LOAD_FORMAT, LoadReports, parse_report
from slipway_gateway.picker.scorers import ReplicaLoad
from slipway_runtime.server import middleware


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("TEXT named_metrics.kv_cache_usage_perc=0.4, named_metrics.num_requests_waiting=3", ReplicaLoad(0.4, 2)),
        ("TEXT kv_cache_usage_perc=0.4", ReplicaLoad(0.4, 0)),
        ("TEXT named_metrics.num_requests_running=1", ReplicaLoad(0.0, 0)),
        ("TEXT cpu_utilization=1e999, kv_cache_usage_perc=7", ReplicaLoad(1.0, 0)),
        ("TEXT", None),
        ("TEXT kv_cache_usage_perc=-1", None),
        ("TEXT kv_cache_usage_perc=..", None),
        ("JSON {}", None),
        ("", None),
        ("TEXT kv_cache_usage_perc=0.4" + " " * 4000, None),
    ],
)
def test_a_report_is_read_or_ignored(text, expected):
    assert parse_report(text, own_waiting=1) == expected


@pytest.mark.capability("RG-3")
def test_our_runtimes_report_is_understood():
    fields = {name: 0 for name, field in Signals.model_fields.items() if field.is_required()}
    signals = Signals.model_construct(**fields | {"kv_usage": 0.25, "running": 5, "waiting": 2})

    assert parse_report(middleware.load_report(signals, LOAD_FORMAT), own_waiting=1) == ReplicaLoad(0.25, 1)


def test_an_old_report_says_nothing_of_now():
    reports = LoadReports()
    reports.record("p", "TEXT kv_cache_usage_perc=0.4", own_waiting=0, now=100.0)
    reports.record("p", "nonsense", own_waiting=0, now=105.0)

    assert reports.fresh(100.0 + FRESH_SECONDS) == {"p": ReplicaLoad(0.4, 0)}
    assert reports.fresh(100.1 + FRESH_SECONDS) == {}
