"""Dialects: both built-in documents are read, an unknown field is refused, and a CRD can carry them."""

import json
from importlib import resources
from typing import Any

import pytest

from slipway_api.dialect import BUILT_IN, MOST_BYTES, Dialect, DialectError, built_in, parse
from slipway_api.structural import structural

pytestmark = pytest.mark.capability("OP-11")

MINIMAL: dict[str, Any] = {
    "engine": "any",
    "metrics": {"running": [{"name": "r"}], "waiting": [{"name": "w"}], "kvUsage": {"name": "k"}},
}


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_document_names_its_engine_and_survives_the_wire(name: str) -> None:
    dialect = built_in(name)
    assert dialect.engine == name
    assert parse(json.dumps(dialect.to_json())) == dialect


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_metric_of_a_built_in_document_is_the_engines_own(name: str) -> None:
    raw = json.loads((resources.files("slipway_api") / "dialects" / f"{name}.json").read_text())
    parts = [part for part in raw["metrics"].values() if not isinstance(part, str)]
    metrics = [metric for part in parts for metric in (part if isinstance(part, list) else [part])]
    names = {metric.get("name", metric.get("metric")) for metric in metrics}
    assert {each for each in names if not each.startswith(f"{name}:")} <= {"process_start_time_seconds"}


def test_what_is_left_out_is_refused_and_not_guessed() -> None:
    dialect = parse(json.dumps(MINIMAL))
    assert dialect.adapters is None
    assert dialect.sleep is None
    assert dialect.drain.in_flight is None


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"wake": {}}, "wake"),
        ({"metrics": MINIMAL["metrics"] | {"runing": []}}, "metrics.runing"),
        ({"metrics": MINIMAL["metrics"] | {"running": []}}, "metrics.running"),
        ({"probe": {"path": "health"}}, "probe.path"),
        ({"probe": {"path": "/health?x=1"}}, "probe.path"),
        ({"sleep": {}}, "sleep.levels"),
        ({"adapters": {"load": {"path": "/l"}, "unload": {"path": "/u"}, "sources": ["s3"]}}, "adapters.sources.0"),
        ({"engine": "Two Words"}, "engine"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], place: str) -> None:
    with pytest.raises(DialectError, match=f"invalid: {place}: "):
        parse(json.dumps(MINIMAL | change))


@pytest.mark.parametrize("document", ["", "[]", "{", "null"])
def test_what_is_no_document_is_refused(document: str) -> None:
    with pytest.raises(DialectError, match="the dialect is invalid: the document: "):
        parse(document)


def test_a_huge_document_is_refused_unread() -> None:
    with pytest.raises(DialectError, match=f"the limit is {MOST_BYTES}"):
        parse(" " * (MOST_BYTES + 1))


def test_an_engine_that_is_not_built_in_is_refused_with_those_that_are() -> None:
    with pytest.raises(DialectError, match="there are vllm, sglang"):
        built_in("../names")


def test_a_custom_resource_definition_can_carry_it() -> None:
    schema = structural(Dialect.model_json_schema(by_alias=True))
    assert schema["properties"]["metrics"]["required"] == ["running", "waiting", "kvUsage"]
    assert schema["properties"]["adapters"]["properties"]["sources"]["maxItems"] == 4
