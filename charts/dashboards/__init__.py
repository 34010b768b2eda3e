"""The Grafana dashboards of the chart, described in Python: `python -m charts.dashboards` writes their JSON files."""

import json
from pathlib import Path
from typing import Any, Final

from charts.dashboards import control, cost, platform, service
from charts.dashboards.grafana import dashboard

FOLDER: Final = Path(__file__).resolve().parents[1] / "slipway" / "files" / "dashboards"
DASHBOARDS: Final = {
    "platform": dashboard("slipway-platform", "Slipway: platform", platform.VARIABLES, platform.ROWS),
    "service": dashboard("slipway-services", "Slipway: service owner", service.VARIABLES, service.ROWS),
    "cost": dashboard("slipway-cost", "Slipway: tenants and cost", cost.VARIABLES, cost.ROWS),
    "control": dashboard("slipway-control", "Slipway: operator and gateway", control.VARIABLES, control.ROWS),
}


def as_json(dashboard: dict[str, Any]) -> str:
    """The text of a dashboard's file."""
    return json.dumps(dashboard, indent=1, ensure_ascii=False) + "\n"
