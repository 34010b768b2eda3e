"""The examples are accepted by the real API server as they are."""

from pathlib import Path

import pytest
import yaml

from e2e.cluster.access import Access
from slipway_api.inference_service import InferenceService
from slipway_api.types import parse_quantity
from slipway_cli.templates import read_templates, resolve_templates
from slipway_operator.core.service.replicas.pod import arguments
from slipway_operator.core.service.rollout.revision import resolve
from slipway_runtime.command_line import parse_arguments, serve_settings

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


def service_of(path: Path) -> InferenceService:
    """The InferenceService of an example, which may have other kinds beside it, with what it inherits from those."""
    documents = yaml.safe_load_all(path.read_text())
    service = InferenceService.parse(next(one for one in documents if one["kind"] == "InferenceService"))
    return resolve_templates(service, read_templates([path]))[0]


@pytest.mark.apiserver
@pytest.mark.parametrize("path", EXAMPLES, ids=[path.name for path in EXAMPLES])
def test_the_api_server_accepts_the_example(apiserver: Access, path: Path):
    apiserver.serve_kinds(ROOT / "crds")

    printed = apiserver.kubectl("create", "--dry-run=server", "-o", "name", "-f", path)

    assert f"inferenceservice.slipway.dev/{path.stem.partition('-')[0]}" in printed.split()


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.name for path in EXAMPLES])
def test_every_example_fits_a_small_node_and_the_embedded_model(path: Path):
    service = service_of(path)

    assert service.spec.model.uri in ("file:///opt/slipway/models/tiny", "oci://registry.local/models/tiny:1#tiny")
    assert parse_quantity(service.spec.resources.requests["cpu"]) <= parse_quantity("100m")
    assert parse_quantity(service.spec.resources.limits["cpu"]) == 1
    assert service.spec.runtime.kv_cache.fixed_bytes is not None


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.name for path in EXAMPLES])
def test_the_runtime_understands_what_every_example_asks_of_it(path: Path):
    service = service_of(path)

    settings = serve_settings(parse_arguments(arguments(service, resolve(service, "slipway/runtime:1"))), {})

    assert settings.model_name == service.metadata.name
    assert settings.quantization == service.spec.runtime.quantization.value
    assert len(settings.warm_prompts) == len(service.spec.model.warm_prompts)
