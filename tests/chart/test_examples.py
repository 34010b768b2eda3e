"""The examples are accepted by the real API server as they are."""

import json
from pathlib import Path

import pytest
import yaml

from e2e.cluster.access import Access
from slipway_api.inference_service import InferenceService
from slipway_api.types import parse_quantity
from slipway_operator.core.service.pod import arguments
from slipway_operator.core.service.revision import resolve
from slipway_runtime.command_line import arguments_of, serve_settings

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


def service_in(path: Path) -> InferenceService:
    """The service of an example; some have other kinds after it."""
    first = next(one for one in yaml.safe_load_all(path.read_text()) if one["kind"] == InferenceService.KIND)
    return InferenceService.parse(first)


@pytest.mark.apiserver
@pytest.mark.parametrize("path", EXAMPLES, ids=[path.name for path in EXAMPLES])
def test_the_api_server_accepts_the_example(apiserver: Access, path: Path):
    apiserver.serve_kinds(ROOT / "crds")

    created = apiserver.kubectl("create", "--dry-run=server", "-o", "json", "-f", path)
    answer, _ = json.JSONDecoder().raw_decode(created)  # one object after another
    first = answer["items"][0] if answer["kind"] == "List" else answer

    assert InferenceService.parse(first).metadata.name == path.stem.partition("-")[0]


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.name for path in EXAMPLES])
def test_every_example_fits_a_small_node_and_the_embedded_model(path: Path):
    service = service_in(path)

    assert service.spec.model.uri == "file:///opt/slipway/models/tiny"
    assert parse_quantity(service.spec.resources.requests["cpu"]) <= parse_quantity("100m")
    assert parse_quantity(service.spec.resources.limits["cpu"]) == 1
    assert service.spec.runtime.kv_cache.fixed_bytes is not None


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.name for path in EXAMPLES])
def test_the_runtime_understands_what_every_example_asks_of_it(path: Path):
    service = service_in(path)

    settings = serve_settings(arguments_of(arguments(service, resolve(service, "slipway/runtime:1"))), {})

    assert settings.model_name == service.metadata.name
    assert settings.quantization == service.spec.runtime.quantization.value
    assert len(settings.warm_prompts) == len(service.spec.model.warm_prompts)
