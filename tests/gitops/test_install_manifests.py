"""The manifests with which Argo CD and Flux install Slipway are valid for the definitions of these projects."""

import json
from pathlib import Path

import pytest
import yaml

from e2e.cluster.access import Access
from e2e.definitions import ARGO_CD, FLUX_HELM, FLUX_SOURCES, Module, ModuleNotReachedError, fetch

pytestmark = pytest.mark.apiserver

FOLDER = Path(__file__).resolve().parents[2] / "gitops" / "install"
# kind -> where its definition is
DEFINITIONS: dict[str, tuple[Module, str]] = {
    "Application": (ARGO_CD, "manifests/crds/application-crd.yaml"),
    "HelmRelease": (FLUX_HELM, "config/crd/bases/helm.toolkit.fluxcd.io_helmreleases.yaml"),
    "OCIRepository": (FLUX_SOURCES, "config/crd/bases/source.toolkit.fluxcd.io_ocirepositories.yaml"),
}
MANIFESTS = [
    pytest.param(manifest, id=manifest["kind"])
    for path in sorted(FOLDER.glob("*.yaml"))
    for manifest in yaml.safe_load_all(path.read_text())
]


@pytest.mark.capability("PL-16")
@pytest.mark.parametrize("manifest", MANIFESTS)
def test_the_definition_of_its_project_accepts_the_manifest(apiserver: Access, tmp_path: Path, manifest) -> None:
    module, path = DEFINITIONS[manifest["kind"]]
    try:
        definition = (fetch(module) / path).read_text()
    except ModuleNotReachedError as missing:
        pytest.skip(f"the definition cannot be fetched: {missing}")
    (tmp_path / "crd.yaml").write_text(definition)
    apiserver.serve_kinds(tmp_path)
    body = manifest | {"metadata": manifest["metadata"] | {"namespace": apiserver.create_namespace()}}

    # Strict: a field that the definition does not have is an error.
    options = ("--dry-run=server", "--validate=strict", "-o", "json")
    stored = json.loads(apiserver.kubectl("create", *options, "-f", "-", stdin=json.dumps(body)))

    assert stored["metadata"]["name"] == "slipway"
    assert stored["spec"].items() >= manifest["spec"].items()
