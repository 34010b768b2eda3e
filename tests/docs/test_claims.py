"""Pages claim only what a command measured: each section of figures names it, and the README says what never ran."""

import re
from pathlib import Path

import pytest

from bench.__main__ import BENCHMARKS

pytestmark = pytest.mark.capability("REL-2")

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PERFORMANCE = (ROOT / "docs" / "performance.md").read_text()
LEDGER = (ROOT / "docs" / "gpu-ledger.md").read_text()
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CHANGELOG.md"]
NOTHING_ON_A_GPU = "Nothing has run on a GPU yet."
COMMAND = re.compile(r"python -m bench ([a-z_]+)")
# A rate of tokens, or a comparison.
FIGURE = re.compile(r"\d (?:tok/s|tokens a second)|\d(?:\.\d+)? ?× (?:faster|slower)")


def sections(page: str) -> list[tuple[str, str]]:
    """Title and text of each section of the second level, with the sections inside of it."""
    parts = re.split(r"^## (.*)$", page, flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize(("title", "text"), sections(PERFORMANCE), ids=[title for title, _ in sections(PERFORMANCE)])
def test_each_section_of_figures_names_the_command_that_printed_them(title: str, text: str):
    assert COMMAND.search(text) or "`make " in text, f"no command is named under {title!r}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_benchmark_exists(page: Path):
    unknown = set(COMMAND.findall(page.read_text())) - set(BENCHMARKS)
    assert not unknown, f"{page.name} names benchmarks that do not exist: {sorted(unknown)}"


def test_figures_have_a_machine_class_and_a_date():
    head = PERFORMANCE.split("## ", maxsplit=1)[0]
    assert re.search(r"Machine class: .*cores", head)
    assert re.search(r"20\d\d-\d\d-\d\d", head)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_rates_and_ratios_stand_where_their_command_is_named(page: Path):
    """Elsewhere a line with such a figure leads to the page that has its command."""
    if page.name in {"performance.md", "gpu-ledger.md"}:
        return
    orphans = [
        line for line in page.read_text().splitlines()
        if FIGURE.search(line) and not COMMAND.search(line) and "performance.md" not in line
    ]  # fmt: skip
    assert not orphans, "\n".join(orphans)


def test_the_readme_says_near_its_top_that_nothing_has_run_on_a_gpu_until_something_has():
    has_measured = "Nothing here was timed" not in LEDGER
    assert (NOTHING_ON_A_GPU in README[:1500]) == (not has_measured)
