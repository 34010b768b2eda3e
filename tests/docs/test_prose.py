"""Pages, chart and API descriptions avoid the phrases that readers stumbled over (CONTRIBUTING, Style)."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GENERATED = {"capabilities.md", "code-map.md", "gpu-ledger.md"}  # from docstrings, and from the output of a tool
CHART = ROOT / "charts" / "slipway"
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "gitops/README.md")),
    *sorted(page for page in (ROOT / "docs").glob("*.md") if page.name not in GENERATED),
    *(CHART / name for name in ("README.md", "values.yaml", "files/alerts.yaml", "files/dashboard.json")),
    *sorted((CHART / "templates").rglob("*.*")),
    *sorted((ROOT / "api" / "slipway_api").glob("*.py")),
]
INSTEAD = {
    "at once": "immediately, or concurrently",
    "for good": "permanently",
    "by hand": "manually",
    "beforehand": "in advance",
    "meanwhile": "in the meantime",
    "(?:is|are) told": "is reported, is sent to",
    "is no [a-z]+ of": "is not a … of",
}


def phrases(text: str) -> list[str]:
    """The phrases found, each with its line and its replacement."""
    return [
        f"line {number}: {found[0]!r}; write {instead}"
        for number, line in enumerate(text.splitlines(), 1)
        for phrase, instead in INSTEAD.items()
        for found in re.finditer(rf"\b{phrase}\b", line, re.IGNORECASE)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_in_plain_english(page):
    assert phrases(page.read_text()) == []


def test_each_phrase_is_found():
    wrong = ["At once", "for good", "by hand", "beforehand", "Meanwhile", "is told", "nopod is no replica of chat"]
    text = "\n".join([*wrong, "goods, offhand, told"])

    assert [entry.split(":")[0] for entry in phrases(text)] == [f"line {number}" for number in range(1, 8)]
