"""Each alert leads to its section of the runbook, if the chart knows where people read that page."""

from typing import Any

import pytest
import yaml

from e2e.cluster.access import Access, CommandError
from tests.chart.test_chart import of_kind, render
from tests.chart.test_monitoring import ALERTS

pytestmark = [pytest.mark.apiserver, pytest.mark.capability("OB-13")]

PAGE = "https://docs.example/runbook"


def rule(access: Access, *settings: str) -> dict[str, Any]:
    found = of_kind(render(access, "monitoring.rules=true", *settings), "PrometheusRule")["slipway"]["spec"]
    assert isinstance(found, dict)
    return found


def test_without_an_address_the_rules_are_those_of_the_file(apiserver: Access):
    assert rule(apiserver) == yaml.safe_load(ALERTS.read_text())


def test_with_an_address_each_alert_links_to_its_section(apiserver: Access):
    alerts = [one for group in rule(apiserver, f"monitoring.runbookUrl={PAGE}")["groups"] for one in group["rules"]]

    assert len(alerts) > 20
    for one in alerts:
        # As GitHub and mkdocs name the anchor of a heading of one word.
        assert one["annotations"]["runbook_url"] == f"{PAGE}#{one['alert'].lower()}"


def test_an_address_with_an_anchor_of_its_own_is_refused(apiserver: Access):
    with pytest.raises(CommandError, match="runbookUrl"):
        rule(apiserver, f"monitoring.runbookUrl={PAGE}#top")
