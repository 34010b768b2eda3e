"""Panels and variables of a dashboard, as Grafana's JSON model has them (schema version 39, Grafana 10 and later)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS, WIDTH, HEIGHT = 3, 8, 8


@dataclass(frozen=True)
class Panel:
    """A graph over time. targets: legend -> PromQL; the legend may have `{{label}}`."""

    title: str
    unit: str  # of Grafana: s, short, percentunit, reqps, watt, …
    targets: Mapping[str, str]
    description: str
    least: float | None = 0  # where the axis starts; None: Grafana chooses


@dataclass(frozen=True)
class Variable:
    """A variable that lists the values of a label; `All` matches everything."""

    name: str
    query: str  # label_values(metric, label)


@dataclass(frozen=True)
class Choice:
    """A variable with fixed values, of which the first is the default."""

    name: str
    label: str
    values: tuple[str, ...]


def dashboard(
    uid: str, title: str, variables: Sequence[Variable | Choice], rows: Mapping[str, Sequence[Panel]]
) -> dict[str, Any]:
    """The JSON model of a dashboard: for each row its heading and then its panels, three side by side."""
    panels: list[dict[str, Any]] = []
    top = 0
    for heading, members in rows.items():
        place = {"h": 1, "w": COLUMNS * WIDTH, "x": 0, "y": top}
        panels.append({"id": len(panels) + 1, "title": heading, "type": "row", "collapsed": False, "gridPos": place})
        panels[-1]["panels"] = []
        for index, panel in enumerate(members):
            x, y = index % COLUMNS * WIDTH, top + 1 + index // COLUMNS * HEIGHT
            panels.append(_panel(len(panels) + 1, panel, {"h": HEIGHT, "w": WIDTH, "x": x, "y": y}))
        top += 1 + -(-len(members) // COLUMNS) * HEIGHT
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    return {
        "uid": uid,
        "title": title,
        "tags": ["slipway"],
        "schemaVersion": 39,
        "timezone": "browser",
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [
            {"type": "dashboards", "title": "Slipway", "tags": ["slipway"], "asDropdown": True, "keepTime": True}
        ],
        "templating": {"list": [source, *map(_variable, variables)]},
        "panels": panels,
    }


def _panel(number: int, panel: Panel, place: Mapping[str, int]) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend, "datasource": DATASOURCE}
        for index, (legend, expression) in enumerate(panel.targets.items())
    ]
    least = {} if panel.least is None else {"min": panel.least}
    return {
        "id": number,
        "title": panel.title,
        "description": panel.description,
        "type": "timeseries",
        "datasource": DATASOURCE,
        "gridPos": dict(place),
        "fieldConfig": {"defaults": {"unit": panel.unit} | least, "overrides": []},
        "targets": targets,
    }


def _variable(variable: Variable | Choice) -> dict[str, Any]:
    if isinstance(variable, Choice):
        first = variable.values[0]
        return {
            "name": variable.name,
            "label": variable.label,
            "type": "custom",
            "query": ",".join(variable.values),
            "options": [{"text": one, "value": one, "selected": one == first} for one in variable.values],
            "current": {"text": first, "value": first},
        }
    return {
        "name": variable.name,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": variable.query, "refId": variable.name},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }
