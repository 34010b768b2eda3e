"""The dashboards: a real Prometheus evaluates every expression of every panel over a story, and it returns data.

No package registry has a current Grafana, so no Grafana has read these files (ADR 143).
"""

import json
import re
import time
from collections.abc import Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from charts.dashboards import DASHBOARDS, FOLDER, as_json
from charts.dashboards.__main__ import main
from tests.chart.story_of_metrics import DCGM, NAMESPACE, SERVICE, a_story
from tests.prometheus_server import Target, a_prometheus, promtool

DOCS = Path(__file__).resolve().parents[2] / "docs"
NAME = re.compile(r"\b(?:vllm:|slipway:|slipway_|DCGM_)[a-zA-Z0-9_:]+")
VARIABLES = {
    "$namespace": NAMESPACE, "$service": SERVICE, "$tenant": ".*", "$reference": "7d", "$__rate_interval": "1m",
}  # fmt: skip
# Targets without data in the story, by a metric in them, and why.
NO_DATA = {
    "slipway_gateway_list_refused": "the API server refuses no list",
    "slipway_operator_list_refused": "the API server refuses no list",
    "slipway_gateway_connections_timed_out_total": "no client is too slow",
    "slipway:num_requests_waiting_by_tenant": "no request waits in the replica's queue",
}


def targets() -> Iterator[tuple[str, str, str]]:
    """(dashboard, panel, expression) of all files."""
    for path in sorted(FOLDER.glob("*.json")):
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for target in panel.get("targets", ()):
                yield path.stem, panel["title"], target["expr"]


def filled_in(expression: str) -> str:
    """As Grafana sends it, for one service."""
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    assert "$" not in expression, expression
    return expression


@pytest.mark.capability("OB-4")
def test_the_files_are_those_of_the_description(capsys):
    assert main(["--check"]) == 0, capsys.readouterr().err
    assert (
        {path.stem for path in FOLDER.glob("*.json")} == {"platform", "service", "cost", "control"} == set(DASHBOARDS)
    )


def test_the_check_finds_a_changed_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("charts.dashboards.__main__.FOLDER", tmp_path)
    assert main([]) == 0
    assert main(["--check"]) == 0
    (tmp_path / "cost.json").write_text("{}")
    (tmp_path / "old.json").write_text("{}")

    assert main(["--check"]) == 1
    assert "cost.json, old.json" in capsys.readouterr().err


@pytest.mark.capability("OB-4")
def test_every_dashboard_is_one_that_grafana_can_draw():
    """Ids are unique, panels do not overlap, and each variable that is used exists."""
    for name, model in DASHBOARDS.items():
        panels = model["panels"]
        cells = [
            (x, y)
            for place in (panel["gridPos"] for panel in panels)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ]
        used = set(re.findall(r"\$(?!__)\{?(\w+)", as_json(model)))

        assert len({panel["id"] for panel in panels}) == len(panels)
        assert len(set(cells)) == len(cells), f"{name}: panels overlap"
        assert max(x for x, _ in cells) < 24
        assert used == {variable["name"] for variable in model["templating"]["list"]}, name
        assert all(panel["description"] for panel in panels if panel["type"] != "row")
    assert len({model["uid"] for model in DASHBOARDS.values()}) == len(DASHBOARDS)


@pytest.mark.capability("OB-4", "OB-11", "CO-1")
def test_the_dashboards_have_the_panels_of_their_topics():
    titles = {name: {title for dashboard, title, _ in targets() if dashboard == name} for name in DASHBOARDS}

    assert titles["platform"] >= {
        "GPU utilization", "GPU memory bandwidth", "KV cache occupancy", "Prefix cache hit rate", "Preemptions",
        "Requests running and waiting", "Tokens per second", "Batch: tokens per step", "Speculation acceptance",
    }  # fmt: skip
    assert titles["service"] >= {
        "Time to first token", "Inter-token latency", "Inter-token jitter", "Prompt length", "Output length",
        "Shift of the distribution", "Error budget left", "Goodput", "Errors by class", "Errors by revision",
    }  # fmt: skip
    assert titles["cost"] >= {"Cost of a million output tokens", "Price of an hour by tenant", "Refused by a limit"}
    assert titles["control"] >= {"Leader and gateways", "Duration of a pass", "Latency that the gateway adds"}


# --- a real Prometheus ----------------------------------------------------------------------------------------------

WEEK = 7 * 24 * 3600


async def page_of(target: Target) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"http://{target.address}") as response:
        assert response.status == 200
        return await response.text()


def store_last_week(page: str, labels: Mapping[str, str], folder: Path) -> None:
    """Store the page of a replica in Prometheus' blocks as if it was scraped a week ago, growing for an hour.

    The lengths of prompts move up by one bucket, so that something differs between then and now.
    """
    own = ",".join(f'{name}="{value}"' for name, value in labels.items())
    lines = []
    for line in page.splitlines():
        if not line or line.startswith("#"):
            continue
        series, value = line.rsplit(" ", 1)
        name, _, rest = series.partition("{")
        joined = f"{name}{{{rest.removesuffix('}')}{',' if rest.strip('}') else ''}{own}}}"
        lines += [
            (f"{joined} {float(value) * (7 - back)} {int(time.time()) - WEEK - back * 600}", joined, back)
            for back in range(6, -1, -1)
        ]
    text = "\n".join(line for line, *_ in sorted(lines, key=lambda one: (one[1], -one[2])))
    (folder / "last-week.txt").write_text(f"{text}\n# EOF\n", encoding="utf-8")
    promtool("tsdb", "create-blocks-from", "openmetrics", folder / "last-week.txt", folder / "data")


@pytest.mark.timeout(600)
@pytest.mark.capability("OB-4", "OB-9", "OB-11", "CO-1")
async def test_every_panel_has_data_in_a_real_prometheus_that_scraped_a_story(tmp_path: Path):
    answers: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    async with a_story(tmp_path) as scraped:
        pages = {name: await page_of(target) for name, target in scraped.items()}
        store_last_week(pages["replicas"], scraped["replicas"].labels, tmp_path)
        async with a_prometheus(tmp_path, scraped) as prometheus:
            await prometheus.until_scraped()
            for one in targets():
                answers[one] = await prometheus.ask(filled_in(one[2]))
    exported = {name for page in pages.values() for name in re.findall(r"^(?:# TYPE )?([a-zA-Z_:]+)", page, re.M)}
    exported |= set(NAME.findall((DOCS / "metrics.md").read_text(encoding="utf-8")))  # held against the replica's page
    used = {name for *_, expression in answers for name in NAME.findall(expression)}
    silent = {one for one, series in answers.items() if not any(isfinite(float(s["value"][1])) for s in series)}
    excused = {one for one in answers if set(NAME.findall(one[2])) & set(NO_DATA)}

    assert used - exported == set(), "exported by none of our processes"
    assert {name for name in used if name.startswith("DCGM")} == set(DCGM)
    assert not silent - excused, "without data:\n" + "\n".join(map(str, sorted(silent - excused)))
    assert used >= set(NO_DATA), "excused, and in no expression"
    joined = next(s for one, s in answers.items() if one[1] == "GPU utilization")
    assert [(s["metric"]["service"], s["metric"]["pod"]) for s in joined] == [("chat", "chat-0")], "joined to its pod"
