"""Quantities, decimals and times are read the way Kubernetes reads them."""

from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal

import pytest

from slipway_api.types import ServiceKey, parse_quantity, rfc3339


@pytest.mark.parametrize(
    ("quantity", "number"),
    [
        (2, "2"),
        ("2", "2"),
        ("500m", "0.5"),
        ("1.5", "1.5"),
        ("64Mi", str(64 * 1024**2)),
        ("1Gi", str(1024**3)),
        ("1G", "1000000000"),
        ("2k", "2000"),
        ("1e3", "1000"),
        ("1E3", "1000"),
        ("1E", "1000000000000000000"),
        ("100n", "1e-7"),
    ],
)
def test_a_quantity_is_the_number_that_kubernetes_reads(quantity, number):
    assert parse_quantity(quantity) == Decimal(number)


@pytest.mark.parametrize("text", ["", "two", "64mb", "1 Gi", "-1", "1.2.3"])
def test_what_is_no_quantity_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="such as 2, 500m or 64Mi"):
        parse_quantity(text)


def test_times_are_written_in_utc_and_whole_seconds():
    moment = datetime(2026, 1, 2, 4, 4, 5, 999_999, tzinfo=timezone(timedelta(hours=1)))

    assert rfc3339(moment) == "2026-01-02T03:04:05Z"
    assert rfc3339(datetime(2026, 1, 2, tzinfo=UTC)) == "2026-01-02T00:00:00Z"


def test_a_service_key_reads_like_kubectl_writes_it():
    assert str(ServiceKey("default", "chat")) == "default/chat"
