"""Each cell of the comparison about another project names a source, and each source its date."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.capability("UX-3")

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "comparison.md").read_text()
PEERS = ["KServe", "llm-d", "Dynamo", "AIBrix", "KubeAI", "KAITO", "production-stack"]
SOURCE = re.compile(r"\[([A-Z]\d)\]\(#([\w-]+)\)")


def rows(page: str) -> list[list[str]]:
    """The cells of each row of the tables, without headings."""
    lines = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| |")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def sources(page: str) -> dict[tuple[str, str], str]:
    """Section and label of each source -> its text."""
    found = {}
    for section in re.split(r"^### ", page.partition("## Sources")[2], flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        anchor = title.lower().replace(" ", "-")
        found |= {(anchor, label): line for label, line in re.findall(r"^- ([A-Z]\d): (.+)$", text, re.MULTILINE)}
    return found


def test_the_tables_compare_the_seven_projects():
    headings = re.findall(r"^\| \| Slipway \| (.+) \|$", PAGE, re.MULTILINE)

    assert len(headings) == 5
    assert {tuple(heading.split(" | ")) for heading in headings} == {tuple(PEERS)}
    assert len(rows(PAGE)) >= 25


@pytest.mark.parametrize("row", rows(PAGE), ids=[row[0] for row in rows(PAGE)])
def test_every_cell_names_a_source_that_exists(row):
    _, ours, *cells = row

    assert ours
    assert len(cells) == len(PEERS)
    for peer, cell in zip(PEERS, cells, strict=True):
        named = SOURCE.findall(cell)
        assert len(named) == 1, f"{peer}: {cell!r} needs one source"
        assert cell.split("[")[0].strip(), f"{peer}: a source, and no statement"
        ((label, anchor),) = named
        assert (anchor, label) in sources(PAGE), f"{cell!r}: there is no such source"
        assert anchor.endswith(peer.lower()), f"{cell!r} of {peer} names a source of another project"


def test_every_source_has_a_date_and_is_used():
    dated = re.compile(r"20\d\d-\d\d-\d\d")

    assert [label for (_, label), text in sources(PAGE).items() if not dated.search(text)] == []
    assert {(anchor, label) for label, anchor in SOURCE.findall(PAGE)} == set(sources(PAGE))


def test_a_cell_without_a_source_is_noticed():
    assert rows("| | Slipway | KServe |\n|---|---|---|\n| drain | yes | no |") == [["drain", "yes", "no"]]
    assert SOURCE.findall("no") == []
