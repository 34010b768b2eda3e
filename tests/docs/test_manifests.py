"""Every whole manifest of Slipway's kinds in the documentation is accepted by the real API server."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster.access import Access
from tests.docs.test_commands import PAGES, ROOT

pytestmark = pytest.mark.capability("UX-3")

BLOCK = re.compile(r"^```yaml\n(.*?)^```|<<-?'?YAML'?\n(.*?)^YAML", re.MULTILINE | re.DOTALL)

# Not whole: the comment in the last line says where the rest comes from.
EXCERPTS = {("docs/engines.md", "vllm-next")}


def manifests() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each whole object of one of our kinds: page and line, and the object."""
    for page in PAGES:
        text = page.read_text()
        for match in BLOCK.finditer(text):
            source = match[1] or match[2]
            if not re.search(r"^apiVersion: slipway\.dev/", source, re.MULTILINE):
                continue
            line = text[: match.start()].count("\n") + 1
            for document in yaml.safe_load_all(source):
                name = document["metadata"]["name"]
                if document["apiVersion"].startswith("slipway.dev/") and (_name(page), name) not in EXCERPTS:
                    yield f"{_name(page)}:{line}", document


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


MANIFESTS = list(manifests())


def test_the_pages_have_manifests():
    pages = {place.partition(":")[0] for place, _ in MANIFESTS}

    assert {"README.md", "docs/quickstart.md", "docs/migration.md", "docs/install.md"} <= pages
    assert len([place for place, _ in MANIFESTS if place.startswith("docs/migration.md")]) == 3


@pytest.mark.apiserver
@pytest.mark.parametrize(("place", "manifest"), MANIFESTS, ids=[place for place, _ in MANIFESTS])
def test_the_api_server_accepts_the_manifest(apiserver: Access, tmp_path: Path, place: str, manifest: dict[str, Any]):
    apiserver.serve_kinds(ROOT / "crds")
    file = tmp_path / "manifest.yaml"
    file.write_text(yaml.safe_dump(manifest))

    printed = apiserver.kubectl("create", "--dry-run=server", "--validate=strict", "-o", "name", "-f", file)

    assert manifest["metadata"]["name"] in printed, place
