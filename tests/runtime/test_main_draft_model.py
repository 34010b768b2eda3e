"""A replica with a draft model, as the operator starts it: served over HTTP, or refused with the field's name."""

from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from slipway_api import names
from slipway_runtime.command_line import parse_arguments, serve_settings
from slipway_runtime.loading import engine_options, fetch_model
from slipway_runtime.storage.source import FetchError
from slipway_runtime.termination import termination_message
from tests.runtime.processes import TINY, serving

DRAFTING = ("--speculation", "draft", "--draft-model-uri")


@pytest.mark.capability("SD-4", "SD-2")
async def test_a_replica_with_a_draft_model_counts_drafts_by_source():
    async with serving(*DRAFTING, f"file://{TINY}") as replica, httpx.AsyncClient(timeout=60) as http:
        await replica.ready()
        body = {
            "model": "tiny",
            "prompt": "Tell me a story.",
            "max_tokens": 60,
            "temperature": 1.0,
            "seed": 3,
            "ignore_eos": True,
        }
        answer = (await http.post(f"{replica.url}/v1/completions", json=body)).json()
        assert answer["usage"]["completion_tokens"] == 60
        page = (await http.get(f"{replica.admin_url}/metrics")).text

    counts = {
        (sample.name, sample.labels["source"]): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if "source" in sample.labels
    }
    drafted = counts["slipway:draft_tokens_total", "draftModel"]
    assert drafted > 5
    assert counts["slipway:accepted_draft_tokens_total", "draftModel"] > 0.8 * drafted


@pytest.mark.capability("SD-4")
def test_the_draft_model_is_fetched_beside_the_model():
    settings = serve_settings(parse_arguments(["serve", str(TINY), *DRAFTING, f"file://{TINY}"]), {})

    options = engine_options(settings, fetch_model(settings))

    assert options.speculation == "draft"
    assert Path(options.draft_model).samefile(TINY)


@pytest.mark.capability("SD-4", "OP-18")
def test_a_draft_model_that_is_not_there_names_its_field(tmp_path):
    settings = serve_settings(parse_arguments(["serve", str(TINY), *DRAFTING, f"file://{tmp_path}/nothing"]), {})

    with pytest.raises(FetchError) as raised:
        fetch_model(settings)

    said = termination_message(settings.model_uri, raised.value)
    assert said.startswith(f"{names.WORD_INVALID_SPEC}spec.runtime.speculation.draftModel.uri: ")
    assert "nothing" in said


@pytest.mark.parametrize("flags", [("--speculation", "draft"), ("--draft-model-uri", "hf://org/small")])
def test_a_method_without_a_model_and_a_model_without_the_method_are_refused(flags):
    with pytest.raises(ValueError, match="--draft-model-uri is needed for --speculation draft, and only there"):
        serve_settings(parse_arguments(["serve", str(TINY), *flags]), {})
